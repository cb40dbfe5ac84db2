"""Runs from Python: the same settings as on the command line, the same results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config.resolve import resolve
from .config.schema import RunConfig
from .config.words import dotted_keys, nest_keys
from .episodes.record import excerpt
from .errors import ConfigError
from .loading import MAIN, importing, target_of
from .monitoring.display import Display
from .monitoring.report import PICTURE, lines_html, summary_lines
from .monitoring.terminal import open_display
from .run_folder import RunFolder, files_by_step, stage_folders

if TYPE_CHECKING:
    from .evaluation.suite import Suite


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. `to_dict()` is the content of its `summary.json`."""

    folder: Path
    """The run's folder."""
    model: Path | None
    """The trained policy, a Hugging Face folder; None if the last stage trains none."""
    steps: int
    """Training steps of the last stage."""
    initial_score: float | None
    """Mean score on held-out tasks before training; None without an evaluation."""
    score: float | None
    """The same after training."""
    interval: tuple[float, float] | None
    """95% interval of `score`."""
    initial_reward: float | None
    """Mean reward on held-out tasks before training. Rewards outside [0, 1] are no scores."""
    reward: float | None
    """The same after training."""
    summary: Mapping[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.summary)

    @property
    def metrics(self) -> Any:
        """The numbers of the last stage's steps, `metrics.jsonl`, as a data frame of pandas with one row per step or,
        without pandas, a list of dictionaries. The curves are columns: `eval/score`, `reward/mean`, `loss`."""
        return _frame(RunFolder(self.stage_folder).read_metrics())

    def episodes(self, step: int | None = None, *, held_out: bool = False) -> Any:
        """The episodes of the last stage's steps, or of one `step`, as a data frame like `metrics`; with `held_out`
        those of its evaluations. Raises `DataError` if there are none."""
        folder = RunFolder(self.stage_folder)
        files = files_by_step(folder.held_out if held_out else folder.rollouts, ".parquet") or {0: folder.episodes}
        chosen = sorted(files) if step is None else [step]
        return _frame(row for n in chosen for row in _rows(files.get(n, folder.rollout_file(n)), step=n))

    def episode(self, index: int = 0, step: int | None = None) -> Any:
        """An episode of a training step, by default the last; a notebook shows its tokens in color."""
        from .view.notebook import read_episode

        return read_episode(self.stage_folder, "run", step, index)

    @property
    def stage_folder(self) -> Path:
        """The folder of the last stage: the run's own, if there is one stage."""
        return self.folder / self.summary["stages"][-1] if "stages" in self.summary else self.folder

    def _repr_html_(self) -> str:
        return lines_html(summary_lines({**self.summary, "run": str(self.folder)}), self.stage_folder / PICTURE)


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation. `to_dict()` is the content of its `result.json`."""

    folder: Path
    """The evaluation's folder."""
    model: str
    """The policy; the starter policy if the settings name none."""
    score: float | None
    """Mean score over all environments, by their weights; None if one of them has no score."""
    interval: tuple[float, float] | None
    """95% interval of `score`."""
    reward: float | None
    """Mean reward; None if there are several environments."""
    n_tasks: int
    """Number of tasks with a score."""
    n_episodes: int
    """Number of episodes, with the failed ones."""
    failures: Mapping[str, int]
    """Number of failed episodes by kind. They count in no score."""
    environments: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """The result of each environment by its name (`envgym.evaluation.result.result_of`)."""
    result: Mapping[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.result)

    @property
    def metrics(self) -> Any:
        """The numbers of each environment, as in `result.csv`: a data frame of pandas or, without it, a list of
        dictionaries."""
        from .evaluation.table import flat_rows

        return _frame(flat_rows({"envs": self.environments}))

    def episodes(self) -> Any:
        """The episodes, as a data frame like `metrics`."""
        return _frame(_rows(self.folder))

    def episode(self, index: int = 0) -> Any:
        """An episode of the evaluation; a notebook shows its tokens in color."""
        from .view.notebook import read_episode

        return read_episode(self.folder, "evaluation", None, index)

    def _repr_html_(self) -> str:
        from .evaluation.table import evaluation_text

        return f"<pre>{escape(evaluation_text(self.result, self.folder))}</pre>"


def train(
    settings: Mapping[str, Any] | None = None,
    *,
    recipe: str | None = None,
    file: str | Path | None = None,
    resume: str | Path | None = None,
    from_run: str | Path | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> TrainResult:
    """Run a recipe, as `envgym train` does, or `resume` a run, by name or folder. A resumed run has its saved settings;
    the same ones may change as with `envgym train --resume`. `from_run` begins a new run with the weights and
    optimizers of another, or of one of its checkpoints, and with its settings unless they are given.

    `settings` are nested or dotted keys, `{"env": "math_verify", "learner.lr": 1e-4}`, or keyword arguments. `env`,
    `agent` and `learner` are names, classes or functions decorated with `envgym.reward`; `data`, `data.path` and
    `data.test_path` may be lists of dictionaries or data sets of the `datasets` package. Raises `EnvgymError` for
    whatever the user can fix.
    """
    from .training.resume import check_changes, derived_config, resume_config
    from .training.run import train as run_stages

    changes = _plain_settings(settings, overrides)
    if [resume, from_run, recipe or file].count(None) < 2:
        raise ConfigError("give one of resume, from_run, and recipe or file")
    runs_dir = str(changes.get("runs_dir", RunConfig.model_fields["runs_dir"].default))
    if from_run is not None:
        config = derived_config(str(from_run), runs_dir, changes)
    elif resume is not None:
        check_changes(key.removesuffix(".name") for key, _ in dotted_keys(changes))  # a component alone
        changes.pop("runs_dir", None)
        config = resume_config(str(resume), runs_dir, changes)
    else:
        config = resolve(changes, recipe=recipe, file=file)
    for stage in config.stages:
        if stage.learner.name.startswith(f"{MAIN}:") and not config.debug:
            raise ConfigError(
                f"learner {stage.learner.name.removeprefix(f'{MAIN}:')} is defined in a notebook or an interactive "
                "session, where its workers cannot load it: define it in a file, or set debug=True"
            )
    with Display() if quiet else open_display() as display:
        run_stages(config, resume=resume is not None, display=display)
    folder = Path(config.runs_dir, config.name or "")
    summary = RunFolder(folder).read_summary() or {}
    evals, model = summary.get("eval", {}), stage_folders(folder, config.stage_names)[-1].model
    return TrainResult(
        folder=folder,
        model=model if model.is_dir() else None,
        steps=summary["steps"],
        initial_score=evals.get("before", {}).get("score"),
        score=evals.get("after", {}).get("score"),
        interval=_interval(evals.get("after", {})),
        initial_reward=_mean_reward(evals.get("before", {})),
        reward=_mean_reward(evals.get("after", {})),
        summary=summary,
    )


def evaluate(
    settings: Mapping[str, Any] | None = None,
    *,
    suite: str | Suite | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> EvalResult:
    """Evaluate the policy `model` of the settings on a suite or, without one, on the held-out tasks of their `env`, as
    `envgym eval` does. Settings have the same form as in `train`."""
    from .jobs.evaluation import new_evaluation, run_evaluation
    from .training.new_model import make_model

    evaluation = new_evaluation(_plain_settings(settings, overrides), suite=suite)
    with Display() if quiet else open_display() as display:
        result = run_evaluation(evaluation, display, make_model)
    return EvalResult(
        folder=evaluation.path,
        model=result["model"],
        score=result["score"],
        interval=_interval(result),
        reward=_mean_reward(*(env for env in result["envs"].values() if env["weight"])),
        n_tasks=result["n_tasks"],
        n_episodes=result["n_episodes"],
        failures=result["failures"],
        environments=result["envs"],
        result=result,
    )


def _rows(path: Path, **columns: Any) -> Iterator[dict[str, Any]]:
    """The episodes in a file or folder as rows of a data frame, with further `columns`."""
    from .episodes.files import read_episodes

    for episode in read_episodes(path):
        prompt, completion = excerpt((message.role, message.text) for message in episode.messages)
        row = {**columns, "task": episode.task.key, "prompt": prompt, "completion": completion}
        row |= {"answer": episode.answer, "reward": episode.reward, "score": episode.score}
        row |= {"status": episode.outcome.status.value, "reason": episode.outcome.reason}
        yield row | {**episode.metrics, **row}


def _frame(rows: Iterable[dict[str, Any]]) -> Any:
    """A data frame where pandas is installed, else the rows."""
    rows = list(rows)
    return import_module("pandas").DataFrame(rows) if find_spec("pandas") else rows


def _interval(result: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = result.get("ci95") or (None, None)
    return None if low is None or high is None else (low, high)


def _mean_reward(*results: Mapping[str, Any]) -> float | None:
    """The mean reward in the result of a single environment. Where rewards are scores it is the score."""
    reward: float | None = results[0].get("reward", results[0]).get("score") if len(results) == 1 else None
    return reward


def _plain_settings(settings: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with targets in place of classes and functions."""
    if location := importing.get():
        raise ConfigError(
            f'{location} starts a run while it is imported: put the call below `if __name__ == "__main__":`'
        )
    if not isinstance(settings, Mapping | None):
        raise ConfigError(f"settings are a mapping, or keywords such as env=… and model=…, not {settings!r:.60}")
    return nest_keys((key, _plain(value)) for key, value in {**(settings or {}), **overrides}.items())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if callable(value):
        return target_of(value)
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
