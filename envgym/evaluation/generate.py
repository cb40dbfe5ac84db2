"""Rolling out into a file: what `envgym rollout` does."""

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
from envgym.launch.memory import check_room
from envgym.launch.models import MakeModel, made_before
from envgym.processes import event_loop
from envgym.tasks.cursor import tasks_at
from envgym.types import Episode, Group, Task

from .plan import Part
from .play import ready_parts
from .result import result_of
from .resumable import UnfinishedFile
from .suite import SuiteEnv

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

MOST_LOOKED_AT = 100_000
"""Tasks without end among which one is looked for."""
DEFAULT_TASKS = 512
"""Tasks that are played by default."""
SETTINGS = (
    "env", "agent", "model", "data", "render", "engine", "max_tokens", "temperature", "top_p", "top_k", "dtype"
)  # fmt: skip
"""Settings of a stage that episodes depend on."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of tasks, how often each is played, and what is kept.

    Tasks `first` to before `last` of a split (`last` None: to the end, which there must be; both None: the first
    `DEFAULT_TASKS`), `samples` episodes of each or, with `best`, the best of them.
    """

    split: str = "train"
    first: int | None = None
    last: int | None = None
    samples: int = 1
    best: bool = False
    key: str | None = None
    """The key of a task that is played alone."""

    @property
    def purpose(self) -> str:
        """Prefix of the groups' names: files of other tasks have other groups."""
        return f"rollout-{self.split}-{self.first or 0:05d}"

    async def tasks(self, spec: EnvSpec, display: Display) -> list[Task]:
        """The selected tasks of an environment. Raises `EnvgymError` where there are none, or no end to them."""
        tasks, first, last, split = spec.tasks(self.split), self.first or 0, self.last, self.split
        size = tasks.size
        if self.key is not None:
            check_room("a rollout (--samples)", 1, self.samples)
            return [await self._named(tasks, spec)]
        if size is None:
            if last is None and self.first is not None:
                raise ConfigError(f"--tasks: the {split} tasks of {spec.id} have no end: say where to stop, FIRST:LAST")
        elif first >= size:
            raise DataError(f"--tasks: environment {spec.id} has {size} {split} tasks, none from {first} on")
        if last is None:
            last = DEFAULT_TASKS if self.first is None else size or 0
            if self.first is None and (size is None or size > last):
                of = "tasks without end" if size is None else f"{size} tasks"
                display.note(f"playing the first {last} of {split} {of}; others with --tasks FIRST:LAST")
        elif size is not None and last > size:
            display.note(f"there are only {size} {split} tasks")
        stop = last if size is None else min(last, size)
        check_room("a rollout (--tasks, --samples)", stop - first, self.samples)
        return await tasks_at(tasks, range(first, stop))

    async def _named(self, tasks: TaskSet, spec: EnvSpec) -> Task:
        for index in range(MOST_LOOKED_AT if tasks.size is None else tasks.size):
            [task] = await tasks_at(tasks, [index])
            if task.key == self.key:
                return task
        raise DataError(f"--task: environment {spec.id} has no {self.split} task {self.key!r}")


def collect(
    config: RunConfig,
    selection: Selection,
    out: Path,
    display: Display,
    *,
    overwrite: bool = False,
    make_model: MakeModel = made_before,
) -> dict[str, Any]:
    """Play the last stage's environment with its model, write the episodes to `out` and return what came of it.

    What an earlier call with the same settings has played is not played again. Keys: env, model, split, tasks,
    episodes (played), written, score and ci95 of those played (None: none was scored), reward (where it is not the
    score), truncated, failures (kind -> count), empty (tasks of which none was kept), tokens, seconds. Raises
    `EnvgymError`; Ctrl-C is a `KeyboardInterrupt` that says what is kept.
    """
    check_target(out, overwrite=overwrite)
    stage = config.stages[-1]
    env = SuiteEnv(env=stage.env, agent=stage.agent, data=stage.data, split=selection.split, samples=selection.samples)
    part = Part(name=selection.purpose, env=env, config=config)
    folder = UnfinishedFile(out, overwrite=overwrite)
    with folder.begun(_settings(config, selection)):
        began = time.monotonic()
        groups = event_loop.run(_play(part, selection, folder, display, make_model))
        seconds = time.monotonic() - began
        written = [episode for group in groups for episode in group.episodes]
        if selection.best:
            written = [best for group in groups if (best := best_of(group.episodes))]
        folder.finish(written)
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
        "written": len(written),
        "seconds": seconds,
    }


async def _play(
    part: Part, selection: Selection, folder: UnfinishedFile, display: Display, make_model: MakeModel
) -> list[Group]:
    async def choose(part: Part, spec: EnvSpec) -> list[Task]:
        return await selection.tasks(spec, display)

    async with ready_parts([part], choose, folder, display, make_model) as [ready]:
        if folder.kept:
            display.note(f"{len(folder.kept)} episodes are kept from before")
        display.phase("playing")
        return await ready.play(folder, display)


def best_of(episodes: Sequence[Episode]) -> Episode | None:
    """The episode with the highest score, or reward where none has a score; the first of equals. None where all
    failed."""
    finished = [episode for episode in episodes if not episode.failed]
    by = "reward" if all(episode.score is None for episode in finished) else "score"

    def rank(episode: Episode) -> float:
        value: float | None = getattr(episode, by)
        return -float("inf") if value is None else value

    return max(finished, key=rank, default=None)


def _settings(config: RunConfig, selection: Selection) -> dict[str, Any]:
    """Everything that episodes depend on."""
    settings = config.stages[-1].model_dump(mode="json")
    flat = {**settings, **settings["rollout"], "dtype": settings["workers"]["dtype"]}
    run = {"seed": config.seed, "deterministic": config.deterministic}
    return {**{key: flat[key] for key in flat if key in SETTINGS}, **run, **asdict(selection)}
