"""Rolling out into a file: what `envgym rollout` does.

While episodes are played they are kept in the folder `FILE.unfinished`, so that a kill loses none that had ended; the
file itself appears when all have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import Component, RunConfig, StageConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError, DataError
from envgym.evaluation.result import result_of
from envgym.isolation import event_loop
from envgym.models.resolve import fetch_model
from envgym.rollout.runner import Play, group_ids
from envgym.training.launch import make_agent, make_runner, prepared, sampling_of, start_sampling
from envgym.training.run_folder import RunFolder
from envgym.types import Episode, Group, Task

from .files import check_target
from .resumable import Unfinished

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

DEFAULT_TASKS = 512
"""Tasks that are played unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tasks are played how often, and what is kept.

    Tasks `first` to before `last` of a split (`last` None: to the end, which there must be; both None: the first
    `DEFAULT_TASKS`), `samples` episodes of each or, with `best`, the best of them.
    """

    split: str = "train"
    first: int | None = None
    last: int | None = None
    samples: int = 1
    best: bool = False

    @property
    def purpose(self) -> str:
        """What the groups are named by: files of other tasks have other groups."""
        return f"rollout-{self.split}-{self.first or 0:05d}"


def collect(
    config: RunConfig, selection: Selection, out: Path, display: Display, *, overwrite: bool = False
) -> dict[str, Any]:
    """Play the last stage's environment with its model, write the episodes to `out` and return what came of it.

    What an earlier call with the same settings has played is not played again. Keys: env, model, split, tasks,
    episodes (played), written, score and ci95 of those played (None: none was scored), reward (where it is not the
    score), truncated, failures (kind -> count), empty (tasks of which none was kept), tokens, seconds. Raises
    `EnvgymError`; Ctrl-C is a `KeyboardInterrupt` that says what is kept.
    """
    check_target(out, overwrite=overwrite)
    work = Unfinished(out, overwrite=overwrite)
    with work.held():
        work.begin(_settings(config.stages[-1], config, selection))
        with work.playing():
            groups, seconds = event_loop.run(_play(config, selection, work, display))
            written = [best for group in groups if (best := best_of(group.episodes))] if selection.best else []
            if not selection.best:
                written = [episode for group in groups for episode in group.episodes]
            work.finish(written)
    stage = config.stages[-1]
    result = {"env": stage.env.name, "model": stage.model, "split": selection.split}
    return {**result, **_summary(groups), "written": len(written), "seconds": seconds}


def best_of(episodes: Sequence[Episode]) -> Episode | None:
    """The episode with the highest score, or reward where none has a score; the first of equals. None where all
    failed."""
    finished = [episode for episode in episodes if not episode.failed]
    by = "reward" if all(episode.score is None for episode in finished) else "score"

    def rank(episode: Episode) -> float:
        value: float | None = getattr(episode, by)
        return -float("inf") if value is None else value

    return max(finished, key=rank, default=None)


def _settings(stage: StageConfig, config: RunConfig, selection: Selection) -> dict[str, Any]:
    """Everything that episodes depend on."""
    kept = {
        "env", "agent", "model", "data", "render", "engine", "max_tokens", "temperature", "top_p", "top_k", "dtype"
    }  # fmt: skip
    settings = stage.model_dump(mode="json")
    flat = {**settings, **settings["rollout"], "dtype": stage.workers.dtype}
    run = {"seed": config.seed, "deterministic": config.deterministic}
    return {**{key: flat[key] for key in flat if key in kept}, **run, **asdict(selection)}


async def _play(
    config: RunConfig, selection: Selection, work: Unfinished, display: Display
) -> tuple[list[Group], float]:
    stage = config.stages[-1]
    began = time.monotonic()
    display.phase(f"setting up {stage.env.name}")
    async with prepared(config, stage, RunFolder(work.path)) as place:
        tasks = await _tasks(place.spec, selection, display)
        work.check_tasks(group_ids(selection.purpose, tasks), place.spec)
        model = await fetch_model(stage.model, config, display)
        work.check_model(model)
        if not stage.agent_config()[0].samples:  # it plays what is recorded, not the policy
            stage.agent = Component(name=place.spec.agent)
        agent = make_agent(stage, model)
        engine, context = await start_sampling(config, stage, [place], agent, model, display)
        runner = make_runner(config, stage, place.spec, agent, engine, context)
        play = Play(selection.purpose, sampling_of(stage, agent.renderer.stop_token_ids), selection.samples)
        if work.played:
            display.note(f"{len(work.played)} episodes are kept from before")
        display.phase("playing")
        groups = await runner.play(tasks, play, display.rollout, kept=work.played, on_episode=work.journal.write)
    return groups, time.monotonic() - began


async def _tasks(spec: EnvSpec, selection: Selection, display: Display) -> list[Task]:
    tasks, first, last = spec.tasks(selection.split), selection.first or 0, selection.last
    size, split = tasks.size, selection.split
    if size is None:
        if last is None and selection.first is not None:
            raise ConfigError(f"--tasks: the {split} tasks of {spec.id} have no end: say where to stop, FIRST:LAST")
    elif first >= size:
        raise DataError(f"--tasks: environment {spec.id} has {size} {split} tasks, none from {first} on")
    if last is None:
        last = DEFAULT_TASKS if selection.first is None else size or 0
        if selection.first is None and (size is None or size > last):
            of = "tasks without end" if size is None else f"{size} tasks"
            display.note(f"playing the first {last} of {split} {of}; others with --tasks FIRST:LAST")
    elif size is not None and last > size:
        display.note(f"there are only {size} {split} tasks")
    stop = last if size is None else min(last, size)
    return [await tasks.get(index) for index in range(first, stop)]


def _summary(groups: Sequence[Group]) -> dict[str, Any]:
    result = result_of(groups)
    return {
        "tasks": len(groups),
        "episodes": result["n_episodes"],
        **{name: result[name] for name in ("score", "ci95", "truncated", "failures", "tokens")},
        **({"reward": result["reward"]} if "reward" in result else {}),
        "empty": sum(all(episode.failed for episode in group.episodes) for group in groups),
    }
