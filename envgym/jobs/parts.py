"""Parts of a job: environments with their settings, resolved as for a run, and the tasks of them to roll out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig, StageConfig
from envgym.config.words import merge
from envgym.engine import SamplingParams
from envgym.env import EnvSpec
from envgym.errors import ConfigError, DataError, did_you_mean, reported_as
from envgym.evaluation.suite import Sampling, Suite, SuiteEnv
from envgym.registry import task_set_of
from envgym.tasks.task_set import tasks_at
from envgym.types import Task

GREEDY = "greedy"
DEFAULT_TASKS = 512
"""Default number of tasks of a rollout into a file."""
MAX_SEARCHED = 100_000
"""Tasks of an endless split that are searched for a key."""
OF_STAGE = {"env", "agent", "model", "data", "render", "engine"}
OF_ROLLOUT = {"max_tokens", "temperature", "top_p", "top_k", "seed_scope", "failed_reward", "policy_timeout"}


class Part(BaseModel):
    """One environment of a job: its entry in the suite and the resolved configuration."""

    name: str
    """The first part of its groups' ids."""
    env: SuiteEnv
    config: RunConfig
    first: int = 0
    """Index of the first task in the split."""
    key: str | None = None
    """Key of the only task."""
    recordings: str | None = None
    """Hash of the recorded answers that are replayed in place of a policy's."""

    @property
    def stage(self) -> StageConfig:
        return self.config.stages[-1]

    @property
    def samples(self) -> int:
        return self.env.samples or 1

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting on which the part's episodes depend."""
        return {
            **self.stage.model_dump(
                mode="json", include={**dict.fromkeys(OF_STAGE, True), "rollout": OF_ROLLOUT, "workers": {"dtype"}}
            ),
            **self.env.model_dump(include={"split", "tasks", "samples"}),
            **self.model_dump(include={"first", "key", "recordings"}),
            **self.config.model_dump(include={"seed", "deterministic"}),
        }

    @property
    def branches(self) -> int:
        """Branches per task."""
        return 0

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Sampling parameters of one turn; greedy sampling ignores all but `max_tokens` and the stop tokens."""
        rollout = self.stage.rollout
        if self.env.sampling.temperature == 0:
            rollout = rollout.model_copy(update={"temperature": 0.0})
        return rollout.sampling(stop_token_ids)

    async def tasks(self, spec: EnvSpec) -> list[Task]:
        """The tasks to roll out. Raises `EnvgymError` if there are none, or no end to them."""
        split, first = self.env.split, self.first
        tasks = spec.tasks(split)
        if self.key is not None:
            for index in range(MAX_SEARCHED if tasks.size is None else tasks.size):
                [task] = await tasks_at(tasks, [index])
                if task.key == self.key:
                    return [task]
            raise DataError(f"--task: environment {spec.id} has no {split} task {self.key!r}")
        ends = [tasks.size, None if self.env.tasks is None else first + self.env.tasks]
        end = min((end for end in ends if end is not None), default=None)
        if end is None:
            raise ConfigError(
                f"environment {spec.id} has {split} tasks without end: give their number (--tasks FIRST:LAST of envgym "
                "rollout, eval.tasks=N of envgym eval, tasks: N of a suite)"
            )
        if end <= first:
            raise DataError(f"environment {spec.id} has {tasks.size or 'no'} {split} tasks, none from {first} on")
        chosen = await tasks_at(tasks, range(first, end))
        field = self.env.cluster
        if field is not None and not any(field in task.fields for task in chosen):
            fields = dict.fromkeys(name for task in chosen for name in task.fields)
            hint = f"their fields are {', '.join(fields)}" if fields else "they have none"
            raise ConfigError(
                f"{self.name}: no task has a field {field!r} to cluster by; {hint}.{did_you_mean(field, fields)}"
            )
        return chosen


def with_last_stage(config: RunConfig, rollout: Mapping[str, Any], **changes: Any) -> RunConfig:
    """The configuration with changes of its last stage, and of that stage's rollout."""
    *earlier, stage = config.stages
    changes["rollout"] = stage.rollout.model_copy(update=rollout)
    return config.model_copy(update={"stages": [*earlier, stage.model_copy(update=changes)]})


def suite_env(stage: StageConfig, **settings: Any) -> SuiteEnv:
    """The environment of a stage as that of a suite."""
    return SuiteEnv(env=stage.env, agent=stage.agent, data=stage.data, **settings)


def parts_of_suite(
    suite: Suite, size: str | None, settings: Mapping[str, Any], *, file: str | Path | None = None
) -> list[Part]:
    """The parts of an evaluation on a suite. The caller's `settings` take precedence over the suite's, and these over
    the model's, the file's and the recipe's. Raises `EnvgymError` for an invalid name or setting."""
    settings = dict(settings)
    folder = settings.pop("data", {})
    if "env" in settings or (folder and folder.keys() != {"folder"}):
        raise ConfigError(
            "a suite names its environments and their data: give either --suite or --env. Only data.folder=DIR, the "
            "folder of the files of named task sets, goes with a suite"
        )
    parts = []
    environments = suite.sized_environments(size)
    if folder:
        _check_folder(environments, folder)
    for name, item in environments.items():
        if task_set := task_set_of(item.env.name):
            sampling = {**task_set.sampling, **item.sampling.model_dump(exclude_none=True)}
            item = item.model_copy(update={"sampling": Sampling(**sampling), "data": {**item.data, **folder}})
        sampling = item.sampling.model_dump(exclude_none=True)
        suite_settings = {
            "env": item.env.model_dump(),
            "agent": item.agent.model_dump(),
            "data": item.data,
            "rollout": sampling,
        }
        with reported_as(ConfigError, name, cause=ConfigError):
            config = resolve(merge(suite_settings, settings), file=file, samples_only=True)
        eval_settings = settings.get("eval", {})
        overrides = {key: getattr(config.stages[-1].eval, key) for key in ("tasks", "samples") if key in eval_settings}
        if "temperature" in settings.get("rollout", {}):
            overrides["sampling"] = item.sampling.model_copy(update={"temperature": None})
        parts.append(Part(name=name, env=item.model_copy(update=overrides), config=config))
    return parts


def _check_folder(environments: Mapping[str, SuiteEnv], data: Mapping[str, Any]) -> None:
    """Raise `DataError`, with all the files that `data.folder` lacks, if it lacks any."""
    problems = []
    for item in environments.values():
        if task_set := task_set_of(item.env.name):
            try:
                task_set.settings({"data": data})
            except DataError as error:
                problems.append(str(error).removeprefix("data.folder: "))
    if problems:
        hint = "a suite of your own, a YAML file, can name fewer environments"
        raise DataError(f"data.folder: {', '.join(problems)}; {hint}")


def parts_of_env(settings: Mapping[str, Any], *, file: str | Path | None = None) -> list[Part]:
    """The parts of an evaluation on one environment: as in training and, with `eval.greedy`, also greedily."""
    config = resolve(settings, file=file, samples_only=True)
    if (task_set := task_set_of(config.stages[-1].env.name)) and file is None:
        config = resolve(merge({"rollout": task_set.sampling}, settings), samples_only=True)
    stage = config.stages[-1]
    greedily = {"sampling": Sampling(temperature=0.0)}
    is_greedy = stage.rollout.temperature == 0
    sampled = suite_env(stage, tasks=stage.eval.tasks, samples=stage.eval.samples, **(greedily if is_greedy else {}))
    parts = [Part(name=stage.env.name, env=sampled, config=config)]
    if stage.eval.greedy and not is_greedy:
        env = suite_env(stage, tasks=stage.eval.tasks, samples=1, weight=0.0, **greedily)
        parts.append(Part(name=GREEDY, env=env, config=config))
    return parts


def part_of_rollout(
    config: RunConfig,
    split: str = "train",
    *,
    first: int = 0,
    tasks: int | None = DEFAULT_TASKS,
    key: str | None = None,
    samples: int = 1,
) -> Part:
    """The last stage's environment, of which `tasks` tasks from `first` on (None: all), or the one of a `key`, are
    rolled out, `samples` times each."""
    if config.stages[-1].rollout.seed_scope is None:
        # As in training: the best of a task's episodes met the same problem.
        config = with_last_stage(config, {"seed_scope": "group"})
    env = suite_env(config.stages[-1], split=split, tasks=tasks, samples=samples)
    # Files of different tasks have different groups.
    return Part(name=f"rollout-{split}-{first:05d}", env=env, config=config, first=first, key=key)
