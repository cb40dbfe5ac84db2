"""A stage's progress and its checkpoints: all that it needs to go on as if nothing had happened, which of them is the
best, and what becomes of one that is damaged."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from envgym.config.schema import CheckpointConfig
from envgym.errors import ConfigError, EnvgymError, RunError, WorkerError, did_you_mean
from envgym.rollout.async_buffer import AsyncRollouts
from envgym.rollout.buffer import Buffer
from envgym.run_folder import DAMAGED, RunFolder, state_to_json
from envgym.tasks.cursor import TaskCursor
from envgym.types import Span, timed

from .components import Components


@dataclass(slots=True)
class Progress:
    """`record` is the step's line of metrics, `recorded` whether it is written. `seconds` and `tokens` are those of the
    whole stage so far."""

    step: int = 0
    optimizer_steps: int = 0
    record: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    recorded: bool = False
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"sampled": 0, "trained": 0})
    max_mismatch: float = 0.0
    spans: list[Span] = field(default_factory=list)
    """The phases since those that were written down last."""
    best: dict[str, Any] | None = None
    """The best checkpoint: `metric`, its `value` there, and `step`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`, which `asdict` made. Raises `TypeError` for that of another version."""
        restored = Progress(**state)
        for one in fields(self):
            setattr(self, one.name, getattr(restored, one.name))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time spent inside as the phase's, in this step's record (`seconds/PHASE`) and in the stage's."""
        start = time.monotonic()
        try:
            with timed(self.spans, phase):
                yield
        finally:
            seconds = time.monotonic() - start
            key = f"seconds/{phase}"
            self.record[key] = self.record.get(key, 0.0) + seconds
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class Checkpoints:
    """Keeps and restores the weights and optimizers of the trained roles together with the controller's state."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: RunFolder,
        components: Components,
        progress: Progress,
        cursor: TaskCursor,
        buffer: Buffer,
        supply: AsyncRollouts | None = None,
    ) -> None:
        self.best = BestMetric(config)
        self.began = time.monotonic()  # moved back by a resume, so that times go on from the checkpoint's
        self._keep = config.keep
        self._background = config.background
        self._writing: asyncio.Task[None] | None = None
        self._folder = folder
        self._components = components
        self._progress = progress
        self._cursor = cursor
        self._buffer = buffer
        self._supply = supply
        self._boundary: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The controller's share of a checkpoint, as of now."""
        self._progress.seconds["total"] = time.monotonic() - self.began
        pretraining = self._components.pretraining
        return {
            "progress": asdict(self._progress),
            "cursor": self._cursor.state(),
            "buffer": self._buffer.state(),
            "pretraining": None if pretraining is None else pretraining.state(),
            "learner": self._components.learner.state_dict(),
            "unscored": sorted(self._components.runner.unscored),
            "supply": None if self._supply is None else self._supply.state(),
        }

    async def save(self, state: Mapping[str, Any] | None = None) -> None:
        """Keep a checkpoint with `state`, by default that of now: as the weights are now, but written while the run
        goes on. `written` waits for it. Raises what went wrong with the one before."""
        state = self.state() if state is None else state
        text, best, step = state_to_json(state), state["progress"]["best"], state["progress"]["step"]
        with self._progress.timed("checkpoint"):
            await self.written()
            await self._components.wake_models()
            folder = self._folder.new_checkpoint()
            try:
                for role in self._components.trained_roles:
                    await self._components.workers[role].save_state(str(folder / role), waits=not self._background)
            except (EnvgymError, OSError):
                shutil.rmtree(folder, ignore_errors=True)  # the disk may be full of it
                raise
            self._writing = asyncio.create_task(self._finish(folder, step, text, best))
            if not self._background:
                await self.written()

    async def _finish(self, folder: Path, step: int, state: str, best: dict[str, Any] | None) -> None:
        try:
            for role in self._components.trained_roles:
                await self._components.workers[role].on_all("finish_save")
            # In a thread: until the disk has all of it, others go on (a server of environments, say).
            await asyncio.to_thread(self._folder.keep_checkpoint, folder, step, state, best, self._keep)
        except (EnvgymError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def written(self, *, unless_busy: bool = False) -> None:
        """Return once the disk has the checkpoint that was begun last; with `unless_busy` at once. Raises what went
        wrong with it."""
        writing = self._writing
        if writing is not None and (writing.done() or not unless_busy):
            self._writing = None
            await writing

    async def load(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Go back to where `checkpoint` was made, with the controller's `state` in it. Raises `CheckpointDamaged`, and
        `RunError` for the state of another version, or of a learner that was changed."""
        components, progress = self._components, self._progress
        try:
            progress.restore(state["progress"])
            self.began -= progress.seconds["total"]
            self._cursor.load_state(state["cursor"])
            self._buffer.load_state(state["buffer"])
            if components.pretraining is not None:
                components.pretraining.load_state(state["pretraining"])
            components.learner.load_state_dict(state["learner"])
            components.runner.unscored |= set(state.get("unscored", ()))
            if self._supply is not None:
                self._supply.load_state(state["supply"], progress.step)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"the controller's state in {checkpoint} does not fit this version of envgym and of the learner "
                f"({type(error).__name__}: {error})"
            ) from error
        progress.best = self._folder.mark_best(progress.best)
        for role in components.trained_roles:
            await components.workers[role].load_state(str(checkpoint / role))

    # -- the last whole step ------------------------------------------------------------------------------

    def snapshot_step(self) -> None:
        """Note that the weights are those of a whole step: what `save_snapshot` keeps."""
        self._boundary = self.state()

    def discard_snapshot(self) -> None:
        """Note that the weights are on their way to the next step's."""
        self._boundary = None

    async def save_snapshot(self, error: Exception) -> None:
        """Keep a checkpoint of the last whole step, if the weights are still its own, before `error` ends the run."""
        await self.written()
        if self._boundary is None:
            return
        step, best = self._boundary["progress"]["step"], self._boundary["progress"]["best"]
        if best is not None and best["step"] == step:  # it is kept already, and linked to
            return
        if step or not isinstance(error, WorkerError):
            await self.save(self._boundary)
            await self.written()


def set_aside(folder: RunFolder, damaged: Path) -> Path | None:
    """Let the newest checkpoint, which cannot be read, count no longer; returns the one before it. Where there is
    none, it stays what it is."""
    kept = folder.kept_checkpoints()
    if damaged not in kept or len(kept) < 2:
        return None
    aside = damaged.with_name(damaged.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(damaged, aside)
    return folder.last_checkpoint()


class BestMetric:
    """The metric whose greatest value marks the best checkpoint: `checkpoint.best`. Behind a minus, and where its name
    ends in `loss`, the least value does."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.name = config.metric
        self._needs_evaluation = config.needs_evaluation
        self._sign = -1.0 if config.best and (config.best.startswith("-") or config.best.endswith("loss")) else 1.0
        self._numbers: set[str] = set()

    def improves(self, progress: Progress) -> bool:
        """True if a step's record has the best value so far, which `progress.best` then is. Of equal ones it is the
        first. What is measured before the first step does not count: there is no checkpoint of it.

        Raises `ConfigError` for a metric that neither the first evaluation nor the first step has.
        """
        if not self.name:
            return False
        record, step = progress.record, progress.step
        self._numbers |= {key for key, value in record.items() if isinstance(value, int | float)}
        value = record.get(self.name)
        expected = step == (0 if self._needs_evaluation else 1)
        if (expected and self.name not in record) or (value is not None and not isinstance(value, int | float)):
            raise ConfigError(
                f"checkpoint.best: this run has no metric {self.name!r} that is a number."
                f"{did_you_mean(self.name, self._numbers)}"
            )
        if expected and value is None and "eval/reward" in record:
            raise ConfigError(
                f"checkpoint.best: {self.name} is not known, as no held-out episode has a score (the environment gives "
                "none, and its rewards are not all in [0, 1]): name eval/reward"
            )
        if not step or value is None or not math.isfinite(value):
            return False
        best = progress.best
        if best and best["metric"] == self.name and self._sign * value <= self._sign * best["value"]:
            return False
        progress.best = {"metric": self.name, "value": value, "step": step}
        return True
