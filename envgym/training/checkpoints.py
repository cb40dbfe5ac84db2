"""A stage's progress and its checkpoints: saving, restoring, choosing the best, setting a damaged one aside."""

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
from envgym.tasks.task_set import TaskCursor
from envgym.types import Span, timed

from .components import Components


@dataclass(slots=True)
class Progress:
    """Progress of a stage. `record` is the step's line of metrics, `recorded` whether it is written; `seconds` and
    `tokens` count since the stage started."""

    step: int = 0
    optimizer_steps: int = 0
    record: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    recorded: bool = False
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"sampled": 0, "trained": 0})
    max_mismatch: float = 0.0
    spans: list[Span] = field(default_factory=list)
    """The phases that are not written yet."""
    best: dict[str, Any] | None = None
    """The best checkpoint: `metric`, its `value` there, and `step`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `asdict` returned. Raises `TypeError` for the state of another version."""
        restored = Progress(**state)
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(restored, attribute.name))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase's, in this step's record (`seconds/PHASE`) and in the stage's."""
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
    """Saves and restores the weights and optimizers of the trained roles together with the controller's state."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: RunFolder,
        components: Components,
        progress: Progress,
        cursor: TaskCursor,
        buffer: Buffer,
        async_rollouts: AsyncRollouts | None = None,
    ) -> None:
        self.best = BestMetric(config)
        self.start_time = time.monotonic()  # a resume subtracts the checkpoint's total
        self._keep = config.keep
        self._background = config.background
        self._writing: asyncio.Task[None] | None = None
        self._folder = folder
        self._components = components
        self._progress = progress
        self._cursor = cursor
        self._buffer = buffer
        self._async_rollouts = async_rollouts
        self._snapshot: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The controller's current state, for a checkpoint."""
        self._progress.seconds["total"] = time.monotonic() - self.start_time
        pretraining = self._components.pretraining
        return {
            "progress": asdict(self._progress),
            "cursor": self._cursor.state(),
            "buffer": self._buffer.state(),
            "pretraining": None if pretraining is None else pretraining.cursor.state(),
            "learner": self._components.learner.state_dict(),
            "unscored": sorted(self._components.runner.envs_without_scores),
            "supply": None if self._async_rollouts is None else self._async_rollouts.state(),
        }

    async def save(self, state: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint of the current weights with `state`, by default the current one.

        Waits for the previous save, and raises its error if it failed. With background writing the last part continues
        after the return, until `wait_for_writes`; else it is complete. A failed save leaves no folder.
        """
        state = self.state() if state is None else state
        text, best, step = state_to_json(state), state["progress"]["best"], state["progress"]["step"]
        with self._progress.timed("checkpoint"):
            await self.wait_for_writes()
            await self._components.timeshare.give_to_models()
            folder = self._folder.new_checkpoint()
            try:
                for role in self._components.trained_roles:
                    path, worker = str(folder / role), self._components.workers[role]
                    await worker.on_all(lambda rank: rank.save_state(path, blocking=not self._background))  # noqa: B023
            except (EnvgymError, OSError):
                shutil.rmtree(folder, ignore_errors=True)  # it may have filled the disk
                raise
            self._writing = asyncio.create_task(self._finish(folder, step, text, best))
            if not self._background:
                await self.wait_for_writes()

    async def _finish(self, folder: Path, step: int, state: str, best: dict[str, Any] | None) -> None:
        """Wait for the workers' files, add `state` and `best` (the best evaluation), and make the checkpoint valid."""
        try:
            for role in self._components.trained_roles:
                await self._components.workers[role].on_all(lambda rank: rank.finish_save())
            # In a thread: flushing to the disk must not block the event loop, which may also serve environments.
            await asyncio.to_thread(self._folder.add_checkpoint, folder, step, state, best, self._keep)
        except (EnvgymError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def wait_for_writes(self, *, unless_busy: bool = False) -> None:
        """Wait until the last checkpoint is on the disk (`unless_busy`: return immediately if it is not). Raises the
        error of its save."""
        writing = self._writing
        if writing is not None and (writing.done() or not unless_busy):
            self._writing = None
            await writing

    async def load(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Restore `checkpoint` and the controller's `state` in it. Raises `CheckpointDamaged`, and `RunError` for the
        state of another version or of a changed learner."""
        components, progress = self._components, self._progress
        try:
            progress.restore(state["progress"])
            self.start_time -= progress.seconds["total"]
            self._cursor.load_state(state["cursor"])
            self._buffer.load_state(state["buffer"])
            if components.pretraining is not None:
                components.pretraining.cursor.load_state(state["pretraining"])
            components.learner.load_state_dict(state["learner"])
            components.runner.envs_without_scores |= set(state.get("unscored", ()))
            if self._async_rollouts is not None:
                self._async_rollouts.load_state(state["supply"], progress.step)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"the controller's state in {checkpoint} does not fit this version of envgym and of the learner "
                f"({type(error).__name__}: {error})"
            ) from error
        progress.best = self._folder.mark_best(progress.best)
        for role in components.trained_roles:
            await self._load_state(role, checkpoint)

    async def load_models(self, checkpoint: Path) -> None:
        """Begin with the weights and optimizers in the checkpoint of another run. Raises `RunError` if it lacks one of
        the trained roles."""
        roles = self._components.trained_roles
        if not checkpoint.is_dir():
            raise RunError(f"checkpoint {checkpoint}, which this run begins from, no longer exists: name another one")
        if missing := [role for role in roles if not (checkpoint / role).is_dir()]:
            raise RunError(f"{checkpoint} holds no {missing[0]}: it must be a checkpoint of a run with the same roles")
        for role in roles:
            await self._load_state(role, checkpoint)

    async def _load_state(self, role: str, checkpoint: Path) -> None:
        await self._components.workers[role].on_all(lambda rank: rank.load_state(str(checkpoint / role)))

    # -- snapshot of the last complete step ---------------------------------------------------------------

    def snapshot_step(self) -> None:
        """Take a snapshot of the controller's state, for `save_snapshot`: a step is complete."""
        self._snapshot = self.state()

    def discard_snapshot(self) -> None:
        """Discard the snapshot: the weights are about to change."""
        self._snapshot = None

    async def save_snapshot(self, error: Exception) -> None:
        """Save a checkpoint of the last complete step before `error` ends the run, unless the weights have changed."""
        await self.wait_for_writes()
        if self._snapshot is None:
            return
        step, best = self._snapshot["progress"]["step"], self._snapshot["progress"]["best"]
        if best is not None and best["step"] == step:  # already saved
            return
        if step or not isinstance(error, WorkerError):
            await self.save(self._snapshot)
            await self.wait_for_writes()


def set_aside(folder: RunFolder, damaged: Path) -> Path | None:
    """Rename the newest checkpoint, which is damaged, so that it is ignored, and return the previous one. If there is
    no other, return None and rename nothing."""
    checkpoints = folder.saved_checkpoints()
    if damaged not in checkpoints or len(checkpoints) < 2:
        return None
    target = damaged.with_name(damaged.name + DAMAGED)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(damaged, target)
    return folder.last_checkpoint()


class BestMetric:
    """The metric of the best checkpoint, `checkpoint.best`: its maximum is best, or its minimum if it is written with a
    minus or its name ends in `loss`."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.name = config.metric
        self._needs_evaluation = config.needs_evaluation
        self._sign = -1.0 if config.best and (config.best.startswith("-") or config.best.endswith("loss")) else 1.0
        self._numbers: set[str] = set()

    def update(self, progress: Progress) -> bool:
        """Set `progress.best` and return True if the step's record has a better value than every earlier step's.

        Measurements before the first step do not count: they have no checkpoint.

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
                f"checkpoint.best: {self.name} has no value, as no held-out episode has a score (the environment gives "
                "none, and its rewards are not all in [0, 1]): name eval/reward"
            )
        if not step or value is None or not math.isfinite(value):
            return False
        best = progress.best
        if best and best["metric"] == self.name and self._sign * value <= self._sign * best["value"]:
            return False
        progress.best = {"metric": self.name, "value": value, "step": step}
        return True
