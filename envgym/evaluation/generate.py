"""Rollouts into a file, for `envgym rollout`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig
from envgym.env import EnvSpec, TaskSet
from envgym.episodes.files import check_target
from envgym.errors import ConfigError, DataError
from envgym.launch.memory import check_episode_memory
from envgym.launch.models import MakeModel, cached_recipe_model
from envgym.processes import event_loop
from envgym.tasks.cursor import tasks_at
from envgym.types import Episode, Group, Task

from .plan import Part
from .play import running_parts
from .result import result_of
from .resumable import UnfinishedFile
from .suite import SuiteEnv

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

MAX_SEARCHED = 100_000
"""Tasks of an endless split that are searched for a key."""
DEFAULT_TASKS = 512
"""Default number of tasks."""
SETTINGS = (
    "env", "agent", "model", "data", "render", "engine", "max_tokens", "temperature", "top_p", "top_k", "dtype",
    "seed_scope", "failed_reward", "policy_timeout",
)  # fmt: skip
"""Settings of a stage that episodes depend on."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of tasks and of the episodes to save.

    Tasks `first` to `last` - 1 of a split (`last` None: all from `first` on, of a finite split; both None: the first
    `DEFAULT_TASKS`); `samples` episodes per task are run, and all are saved or, with `best`, the best one.
    """

    split: str = "train"
    first: int | None = None
    last: int | None = None
    samples: int = 1
    best: bool = False
    key: str | None = None
    """The key of the only task to run."""

    @property
    def purpose(self) -> str:
        """Prefix of the groups' names, so that files of different tasks have different groups."""
        return f"rollout-{self.split}-{self.first or 0:05d}"

    async def tasks(self, spec: EnvSpec, display: Display) -> list[Task]:
        """The selected tasks of an environment. Raises `EnvgymError` if there are none, or no end to them."""
        tasks, first, last, split = spec.tasks(self.split), self.first or 0, self.last, self.split
        size = tasks.size
        if self.key is not None:
            check_episode_memory("a rollout (--samples)", 1, self.samples)
            return [await self._find_task(tasks, spec)]
        if size is None:
            if last is None and self.first is not None:
                raise ConfigError(f"--tasks: the {split} tasks of {spec.id} have no end: give an end, FIRST:LAST")
        elif first >= size:
            raise DataError(f"--tasks: environment {spec.id} has {size} {split} tasks, none from {first} on")
        if last is None:
            last = DEFAULT_TASKS if self.first is None else size or 0
            if self.first is None and (size is None or size > last):
                label = "tasks without end" if size is None else f"{size} tasks"
                display.note(f"running the first {last} of {split} {label}; choose others with --tasks FIRST:LAST")
        elif size is not None and last > size:
            display.note(f"there are only {size} {split} tasks")
        stop = last if size is None else min(last, size)
        check_episode_memory("a rollout (--tasks, --samples)", stop - first, self.samples)
        return await tasks_at(tasks, range(first, stop))

    async def _find_task(self, tasks: TaskSet, spec: EnvSpec) -> Task:
        for index in range(MAX_SEARCHED if tasks.size is None else tasks.size):
            [task] = await tasks_at(tasks, [index])
            if task.key == self.key:
                return task
        raise DataError(f"--task: environment {spec.id} has no {self.split} task {self.key!r}")


def collect(
    config: RunConfig,
    selection: Selection,
    path: Path,
    display: Display,
    *,
    overwrite: bool = False,
    make_model: MakeModel = cached_recipe_model,
) -> dict[str, Any]:
    """Run the last stage's environment with its model, write the episodes to `path` and return a summary.

    Episodes of an earlier, interrupted call with the same settings are reused. Keys: env, model, split, tasks, episodes
    (run), written, score and ci95 of all that were run (None: none was scored), reward (if it is not the score),
    truncated, failures (kind -> count), empty (tasks whose episodes all failed), tokens, seconds. Raises `EnvgymError`;
    on Ctrl-C a `KeyboardInterrupt` that names the folder of the finished episodes.
    """
    check_target(path, overwrite=overwrite)
    stage = config.stages[-1]
    if stage.rollout.seed_scope is None:  # as in training: the best of a task's episodes met the same problem
        rollout = stage.rollout.model_copy(update={"seed_scope": "group"})
        stage = stage.model_copy(update={"rollout": rollout})
        config = config.model_copy(update={"stages": [*config.stages[:-1], stage]})
    env = SuiteEnv(env=stage.env, agent=stage.agent, data=stage.data, split=selection.split, samples=selection.samples)
    part = Part(name=selection.purpose, env=env, config=config)
    folder = UnfinishedFile(path, overwrite=overwrite)
    with folder.open(_settings(config, selection)):
        start = time.monotonic()
        groups = event_loop.run(_run_selection(part, selection, folder, display, make_model))
        seconds = time.monotonic() - start
        saved = [episode for group in groups for episode in group.episodes]
        if selection.best:
            saved = [episode for group in groups if (episode := best_of(group.episodes))]
        folder.finish(saved)
    result = result_of(groups)
    return {
        "env": stage.env.name,
        "model": stage.model,
        "split": selection.split,
        "tasks": len(groups),
        "episodes": result["n_episodes"],
        **{name: result[name] for name in ("score", "ci95", "truncated", "failures", "tokens")},
        **({"reward": result["reward"]} if "reward" in result else {}),
        "empty": sum(all(episode.failed for episode in group.episodes) for group in groups),
        "written": len(saved),
        "seconds": seconds,
    }


async def _run_selection(
    part: Part, selection: Selection, folder: UnfinishedFile, display: Display, make_model: MakeModel
) -> list[Group]:
    """Run the episodes of the selected tasks; those saved in `folder` are reused."""

    async def choose(part: Part, spec: EnvSpec) -> list[Task]:
        return await selection.tasks(spec, display)

    async with running_parts([part], choose, folder, display, make_model) as [run]:
        if folder.saved:
            display.note(f"{len(folder.saved)} saved episodes are reused")
        display.phase("rolling out")
        return await run.run_episodes(folder, display)


def best_of(episodes: Sequence[Episode]) -> Episode | None:
    """The episode with the highest score, or the highest reward if none has a score; the first of equals. None if all
    failed."""
    finished = [episode for episode in episodes if not episode.failed]
    field = "reward" if all(episode.score is None for episode in finished) else "score"

    def rank(episode: Episode) -> float:
        value: float | None = getattr(episode, field)
        return -float("inf") if value is None else value

    return max(finished, key=rank, default=None)


def _settings(config: RunConfig, selection: Selection) -> dict[str, Any]:
    """Every setting on which episodes depend."""
    settings = config.stages[-1].model_dump(mode="json")
    flat = {**settings, **settings["rollout"], "dtype": settings["workers"]["dtype"]}
    run = {"seed": config.seed, "deterministic": config.deterministic}
    return {**{key: flat[key] for key in flat if key in SETTINGS}, **run, **asdict(selection)}
