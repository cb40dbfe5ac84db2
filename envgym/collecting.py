"""Rolling out into a file: what `envgym rollout` does.

While episodes are played they are kept in the folder `FILE.unfinished`, so that a kill loses none that had ended; the
file itself appears when all have.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .config import Component, RunConfig, StageConfig
from .env import EnvSpec
from .errors import ConfigError, DataError, EnvgymError, RunError, WorkerError
from .evaluation.model_fingerprint import model_fingerprint
from .evaluation.result import result_of
from .fingerprint import task_hash
from .journal import Journal, Place
from .models import fetch_model
from .placement import make_agent, make_runner, prepared, sampling_of, start_sampling
from .rollout import Play
from .run_folder import RunFolder, write_atomically
from .saved_episodes import check_target, write_episodes
from .types import Episode, Group, Task

if TYPE_CHECKING:
    from .display import Display

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
    episodes (played), written, score and ci95 of those played (None: none was scored), truncated, failures (kind ->
    count), empty (tasks of which none was kept), tokens, seconds. Raises `EnvgymError`; Ctrl-C is a `KeyboardInterrupt`
    that says what is kept.
    """
    check_target(out, overwrite=overwrite)
    work = Unfinished(out, overwrite=overwrite)
    with work.held():
        work.begin(_settings(config.stages[-1], config, selection))
        try:
            groups, seconds = asyncio.run(_play(config, selection, work, display))
        except KeyboardInterrupt:
            said = work.kept()
            work.leave()
            raise KeyboardInterrupt(said) from None
        except WorkerError as error:
            raise type(error)(f"{error}; {work.kept()}") from None  # whose log is there
        except EnvgymError:
            work.leave()
            raise
        written = [best for group in groups if (best := best_of(group.episodes))] if selection.best else []
        if not selection.best:
            written = [episode for group in groups for episode in group.episodes]
        write_episodes(out, written)
        work.remove()
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


class Unfinished:
    """The folder beside the target in which a rollout is kept until it is whole: settings, episodes, workers' logs."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.path = out.with_name(out.name + ".unfinished")
        self._overwrite = overwrite
        self.journal = Journal(self.path / "episodes.jsonl")
        self.played: dict[Place, Episode] = {}
        """The episodes that were here at the beginning."""
        self._settings_file = self.path / "settings.yaml"
        self._model_file = self.path / "model"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. Raises `RunError` where somebody does."""
        self.path.mkdir(exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another envgym rollout is writing to {self.path}") from None
            yield

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Go on with what is here where it was made with these settings."""
        self.played = self.journal.played()
        if self.played:
            old = yaml.safe_load(self._settings_file.read_text(encoding="utf-8"))
            if changed := _differences(old, settings):
                self.differs(f"were played with other settings ({'; '.join(changed)})")
        (self.path / "logs").mkdir(exist_ok=True)
        write_atomically(self._settings_file, yaml.safe_dump(dict(settings), sort_keys=False))
        self.journal.open()

    def check_model(self, model: str) -> None:
        """Go on only with the same weights."""
        found = str(model_fingerprint(model))
        if self.played and self._model_file.read_text(encoding="utf-8") != found:
            self.differs("were sampled from other weights, which were the model's then")
        write_atomically(self._model_file, found)

    def differs(self, how: str) -> None:
        """What is here cannot go on: begin anew where it may be overwritten, else raise `RunError`."""
        if not self._overwrite:
            raise RunError(f"{self.path} holds episodes that {how}: name another file, or begin anew with --overwrite")
        self.journal.path.write_bytes(b"")
        self.played = {}

    def leave(self) -> None:
        """What was begun and came to nothing is not worth a folder."""
        if not self.journal.path.stat().st_size:
            self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def kept(self) -> str:
        """What is here, and how to go on."""
        count = len(self.journal.played())
        if not count:
            return "no episode had ended"
        return f"{count} episodes are kept in {self.path}; the same command goes on from there"


def _settings(stage: StageConfig, config: RunConfig, selection: Selection) -> dict[str, Any]:
    """Everything that episodes depend on."""
    kept = {
        "env", "agent", "model", "data", "render", "engine", "max_tokens", "temperature", "top_p", "top_k", "dtype"
    }  # fmt: skip
    settings = stage.model_dump(mode="json")
    flat = {**settings, **settings["rollout"], "dtype": stage.workers.dtype}
    run = {"seed": config.seed, "deterministic": config.deterministic}
    return {**{key: flat[key] for key in flat if key in kept}, **run, **asdict(selection)}


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """`key was 1 and is 2` for what differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        dot = f"{key}." if key else ""
        return [text for name in names for text in _differences(old.get(name), new.get(name), f"{dot}{name}")]
    return [] if old == new else [f"{key} was {old!r:.60} and is {new!r:.60}"]


async def _play(
    config: RunConfig, selection: Selection, work: Unfinished, display: Display
) -> tuple[list[Group], float]:
    stage = config.stages[-1]
    began = time.monotonic()
    display.phase(f"setting up {stage.env.name}")
    async with prepared(config, stage, RunFolder(work.path)) as place:
        tasks = await _tasks(place.spec, selection, display)
        _check_played(work, tasks, place.spec, selection)
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


def _check_played(work: Unfinished, tasks: Sequence[Task], spec: EnvSpec, selection: Selection) -> None:
    """Mix no episodes of an environment or of data that have changed since."""
    places = {f"{selection.purpose}/{index:05d}": task for index, task in enumerate(tasks)}
    codes: dict[int, dict[str, str]] = {}
    for (group, _), episode in work.played.items():
        task = places.get(group)
        if task is None or episode.fingerprints.get("task") != task_hash(task):
            return work.differs(f"posed other tasks (one was {episode.task.key})")
        part = spec.of(task)
        now = codes.get(id(part)) or codes.setdefault(id(part), part.fingerprint())
        if any(episode.fingerprints.get(name) != value for name, value in now.items()):
            return work.differs(f"were played before the code of environment {part.id} changed, or its settings")


def _summary(groups: Sequence[Group]) -> dict[str, Any]:
    result = result_of(groups)
    return {
        "tasks": len(groups),
        "episodes": result["n_episodes"],
        **{name: result[name] for name in ("score", "ci95", "truncated", "failures", "tokens")},
        "empty": sum(all(episode.failed for episode in group.episodes) for group in groups),
    }
