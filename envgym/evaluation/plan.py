"""Parts of an evaluation: every environment with its settings, resolved as for a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from envgym.config.resolve import resolve, set_sampled_model
from envgym.config.schema import RunConfig, StageConfig
from envgym.config.words import merge
from envgym.engine import SamplingParams
from envgym.errors import ConfigError, DataError, reported_as
from envgym.registry import task_set_of

from .suite import Sampling, Suite, SuiteEnv

GREEDY = "greedy"


class Part(BaseModel):
    """One environment of an evaluation: its entry in the suite and the resolved configuration."""

    name: str
    env: SuiteEnv
    config: RunConfig

    @property
    def stage(self) -> StageConfig:
        return self.config.stages[-1]

    @property
    def samples(self) -> int:
        return self.env.samples or 1

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Sampling parameters of one turn; greedy sampling ignores all but `max_tokens` and the stop tokens."""
        rollout = self.stage.rollout
        if self.env.sampling.temperature == 0:
            rollout = rollout.model_copy(update={"temperature": 0.0})
        return rollout.sampling(stop_token_ids)


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
            set_sampled_model(config, settings)
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
    set_sampled_model(config, settings)
    stage = config.stages[-1]
    greedy = stage.rollout.temperature == 0
    sampled = SuiteEnv(env=stage.env, agent=stage.agent, data=stage.data, tasks=stage.eval.tasks)
    overrides = {"samples": stage.eval.samples} | ({"sampling": Sampling(temperature=0.0)} if greedy else {})
    parts = [Part(name=stage.env.name, env=sampled.model_copy(update=overrides), config=config)]
    if stage.eval.greedy and not greedy:
        greedily = {"samples": 1, "weight": 0.0, "sampling": Sampling(temperature=0.0)}
        parts.append(Part(name=GREEDY, env=sampled.model_copy(update=greedily), config=config))
    return parts
