"""The one loop: roll out, score, learn, sync, evaluate, checkpoint.

Every method of the field is this loop with other parts: which environment poses tasks, which agent answers them,
which learner reads the buffer. The loop knows none of them by name. It is synchronous: a step's episodes come from
the weights that the step before it left, so the sampler's log-probabilities are the old ones, no pass is spent on
recomputing them, and comparing them with the trainer's own shows whether the last sync arrived.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .buffer import Buffer
from .config import RunConfig, StageConfig
from .curriculum import Curriculum
from .engines.base import Engine, SamplingParams
from .errors import RolloutFailed, RunError
from .evaluation.held_out import HeldOut
from .learner import Learner, LearnerConfig, LearnRow
from .metrics import check_failures, rollout_metrics
from .rollout import Play, Runner
from .rollout_file import write_rollouts
from .run_folder import RunFolder
from .sync import WeightSync
from .task_cursor import TaskCursor
from .types import Group, Task
from .workers.group import WorkerGroup

if TYPE_CHECKING:
    from .display import Display

T = TypeVar("T")

MAX_REFILLS = 3
"""Times a step rolls out more tasks because too many groups fell short of members."""


class Stopped(Exception):
    """The user asked the run to stop (Ctrl-C)."""


@dataclass(slots=True)
class Parts:
    """What the loop drives. `engine` and `sync` are None where the agent replays; `workers` holds a group of ranks
    for each of the learner's roles."""

    learner: Learner
    runner: Runner
    workers: dict[str, WorkerGroup]
    sampling: SamplingParams
    engine: Engine | None = None
    sync: WeightSync | None = None


@dataclass(slots=True)
class Progress:
    """How far a stage has come: what its summary tells and, beside weights, cursor and buffer, what a resumed run
    must know. `record` is the step's line of metrics, `recorded` whether it is written."""

    step: int = 0
    optimizer_steps: int = 0
    record: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    recorded: bool = False
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"sampled": 0, "trained": 0})
    max_mismatch: float = 0.0


class Trainer:
    """Runs one stage. When `run` returns its steps are done; Ctrl-C is `stop.set()`."""

    def __init__(self, run: RunConfig, stage: StageConfig, parts: Parts, folder: RunFolder, display: Display) -> None:
        self.stage = stage
        self.parts = parts
        self.folder = folder
        self.display = display
        self.stop = asyncio.Event()
        self.progress = Progress()
        self.began = time.monotonic()  # moved back by a resume, so that times go on from the checkpoint's
        samples = parts.runner.agent.samples
        self.group_size = stage.rollout.group_size if samples else 1
        curriculum = Curriculum(stage.curriculum, run.seed) if stage.curriculum.skip else None
        self.cursor = TaskCursor(parts.runner.spec.tasks("train"), run.seed, curriculum)
        self.buffer = Buffer(parts.learner.min_group_size if samples else 1, needs_reward=samples)
        self.held_out = HeldOut(self.play, parts.runner.spec, parts.sampling, stage.eval)

    async def run(self) -> None:
        """Train to the last step. Raises `Stopped` once a stop was asked for and a checkpoint is kept."""
        boundary = self.state()
        try:
            await self.sync()
            while True:
                if not self.progress.recorded:
                    await self.finish_step()
                    boundary = self.state()
                if self.progress.step >= self.stage.steps:
                    return
                if self.stop.is_set():
                    raise Stopped
                await self.take_step()
                boundary = self.state()
        except (Stopped, RolloutFailed):
            # Both happen while episodes are in play, so weights are those of the last whole step.
            await self.checkpoint(boundary)
            raise

    async def take_step(self) -> None:
        started = time.monotonic()
        self.progress.record = {"step": self.progress.step + 1}
        groups = await self.roll_out()
        await self.score(groups)
        await self.learn(groups)
        self.progress.step += 1
        self.progress.recorded = False
        await self.sync()
        seconds = time.monotonic() - started
        self.progress.record |= {
            "seconds/step": seconds,
            "tokens/per_second": self.progress.record.get("tokens/sampled", 0) / seconds,
        }

    async def finish_step(self) -> None:
        """Evaluate, write the step's metrics down and keep a checkpoint, where each is due."""
        step, stage = self.progress.step, self.stage
        ends = step in (0, stage.steps)
        if stage.eval.every and (ends or step % stage.eval.every == 0):
            await self.evaluate()
        if step or len(self.progress.record) > 1:
            self.folder.append_metrics(self.progress.record)
            self.display.step(step, stage.steps, self.progress.record)
        self.progress.recorded = True
        if step and (step == stage.steps or (stage.checkpoint.every and step % stage.checkpoint.every == 0)):
            await self.checkpoint(self.state())

    async def roll_out(self) -> list[Group]:
        """Play tasks until the step has its groups. They come from the buffer, which outlives the step."""
        step, wanted = self.progress.step + 1, self.stage.rollout.tasks
        played: list[Group] = []
        with self.timed("rollout"):
            for refill in range(MAX_REFILLS + 1):
                missing = wanted - len(self.buffer)
                if missing <= 0:
                    break
                play = Play(f"step-{step:06d}-{refill}", self.parts.sampling, self.group_size)
                played += (groups := await self.play(await self.cursor.next(missing), play))
                self.cursor.observe(groups)
                self.buffer.add(groups)
            groups = self.buffer.take(wanted)
            if self.parts.engine is not None:  # a replay only copies its data
                episodes = [episode for group in played for episode in group.episodes]
                await asyncio.to_thread(write_rollouts, self.folder.rollout_file(step), episodes)
            check_failures(played, self.stage.rollout.max_failed_share)
        if not groups:
            raise RolloutFailed(f"step {step}: no group of episodes is complete enough to learn from (see rollouts/)")
        self.progress.record |= rollout_metrics(played) | self.cursor.metrics()
        self.progress.tokens["sampled"] += self.progress.record.get("tokens/sampled", 0)
        return groups

    async def score(self, groups: Sequence[Group]) -> None:
        """Let every role that scores (reference, critic) say its numbers about the rows the learner will see."""
        rows = [row for group in groups for episode in group.episodes for row in episode.rows]
        with self.timed("learn"):
            for role in (role for role, spec in self.parts.learner.roles.items() if spec.scored):
                outputs = await self.parts.workers[role].forward([LearnRow.of(row) for row in rows])
                for row, output in zip(rows, outputs, strict=True):
                    row.outputs[role] = output.tolist()

    async def learn(self, groups: Sequence[Group]) -> None:
        """Prepare rows and take the optimizer steps they make up, each with denominators over all of it."""
        learner = self.parts.learner
        with self.timed("learn"):
            rows = learner.prepare(groups)
            if not rows:
                raise RunError(f"step {self.progress.step + 1}: the learner found nothing to learn from")
            self.progress.record |= learner.metrics(rows)
            for row in rows:
                row.current = row.versions == (self.progress.step,)
            for _ in range(learner.config.epochs):
                for part in cut(rows, learner.config.minibatches):
                    await self.optimizer_step(part)
                    for row in rows:
                        row.current = False  # the weights have moved on from those that sampled it
        learner.observe(self.progress.record)
        self.progress.tokens["trained"] += sum(int((row.weights > 0).sum()) for row in rows) * learner.config.epochs

    async def optimizer_step(self, rows: Sequence[LearnRow]) -> None:
        """One step of every trained role. What the first one of an update logs is kept as the step's."""
        progress, learner = self.progress, self.parts.learner
        denominators = learner.denominators(rows)
        for role, spec in learner.roles.items():
            if not spec.trained or progress.step < spec.idle_steps:
                continue
            lr = learning_rate(self.config_of(role), progress.optimizer_steps, self.stage.steps)
            worker = self.parts.workers[role]
            metrics = await worker.accumulate(rows, denominators)
            if role == "actor" and self.parts.sync is not None:
                # Before the first step of an update, sampler and trainer are the same policy, or a sync was lost.
                progress.max_mismatch = max(progress.max_mismatch, metrics.get("mismatch/max", 0.0))
                if self.parts.sampling.top_p == 1 and not self.parts.sampling.top_k:  # else they differ by the cut
                    self.parts.sync.check("this step's episodes", metrics.get("mismatch/mean_abs", 0.0))
            metrics |= await worker.step(lr) | {"lr": lr}
            prefix = "" if role == "actor" else f"{role}/"
            progress.record = {f"{prefix}{name}": value for name, value in metrics.items()} | progress.record
        progress.optimizer_steps += 1

    def config_of(self, role: str) -> LearnerConfig:
        """The learner's settings as they hold for a role, which may have a learning rate of its own."""
        config, own = self.parts.learner.config, self.stage.roles.get(role)
        return config if own is None or own.lr is None else config.model_copy(update={"lr": own.lr})

    async def sync(self) -> None:
        """Give the engine the actor's weights as policy version `step`, and compare the two."""
        if self.parts.sync is not None:
            with self.timed("sync"):
                self.progress.record["sync/max_abs"] = await self.parts.sync(self.progress.step)

    async def evaluate(self) -> None:
        """Play the held-out tasks. The first result stays as `before`, the latest as `after`."""
        step, when = self.progress.step, "before" if self.progress.step == 0 else "after"
        with self.timed("eval"):
            if self.parts.runner.agent.samples:
                results = {when: await self.held_out.sampled()}
                self.progress.record["eval/score"] = results[when]["score"]
                self.progress.record["eval/ci95"] = results[when]["ci95"]
                for name, member in results[when].get("envs", {}).items():
                    self.progress.record |= {f"eval/{name}/{key}": member[key] for key in ("score", "ci95")}
                if self.stage.eval.greedy and step in (0, self.stage.steps):
                    results[f"greedy_{when}"] = await self.held_out.greedily()
            else:
                results = {when: await self.held_out.recorded(self.parts.learner, self.parts.workers["actor"])}
                self.progress.record |= {name: value for name, value in results[when].items() if "/" in name}
        self.progress.evals |= results
        for result in results.values():
            self.display.evaluation(step, result)

    async def play(self, tasks: Sequence[Task], play: Play) -> list[Group]:
        """Play tasks, unless the user stops the run first."""
        return await self.unless_stopped(self.parts.runner.play(tasks, play, self.display.rollout))

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        job, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([job, stop], return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise Stopped
            return job.result()
        finally:
            job.cancel()
            stop.cancel()
            await asyncio.gather(job, stop, return_exceptions=True)

    # -- state --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The controller's share of a checkpoint, as of now."""
        self.progress.seconds["total"] = time.monotonic() - self.began
        return {
            "progress": asdict(self.progress),
            "cursor": self.cursor.state(),
            "buffer": self.buffer.state(),
            "learner": self.parts.learner.state(),
        }

    async def checkpoint(self, state: dict[str, Any]) -> Path:
        """Keep the trained roles' weights and optimizers together with `state`."""
        written = self.folder.new_checkpoint()
        for role in (role for role, spec in self.parts.learner.roles.items() if spec.trained):
            await self.parts.workers[role].save_state(str(written / role))
        step = state["progress"]["step"]
        return self.folder.keep_checkpoint(written, step, state, self.stage.checkpoint.keep)

    async def load(self, checkpoint: Path) -> None:
        """Go back to where `checkpoint` was made."""
        state = self.folder.read_state(checkpoint)
        self.progress = Progress(**state["progress"])
        self.began -= self.progress.seconds["total"]
        self.cursor.load_state(state["cursor"])
        self.buffer.load_state(state["buffer"])
        self.parts.learner.load_state(state["learner"])
        for role in (role for role, spec in self.parts.learner.roles.items() if spec.trained):
            await self.parts.workers[role].load_state(str(checkpoint / role))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            key = f"seconds/{phase}"
            self.progress.record[key] = self.progress.record.get(key, 0.0) + seconds
            self.progress.seconds[phase] = self.progress.seconds.get(phase, 0.0) + seconds


def cut(rows: Sequence[LearnRow], parts: int) -> list[list[LearnRow]]:
    """Rows in `parts` consecutive pieces of about as many units each; a unit is never cut."""
    units = list(dict.fromkeys(row.unit for row in rows))
    parts = min(parts, len(units))
    piece = {unit: index * parts // len(units) for index, unit in enumerate(units)}
    return [[row for row in rows if piece[row.unit] == index] for index in range(parts)]


def learning_rate(config: LearnerConfig, optimizer_step: int, loop_steps: int) -> float:
    """The learning rate of the `optimizer_step`-th step (from 0) of a run of `loop_steps`."""
    if optimizer_step < config.warmup_steps:
        return config.lr * (optimizer_step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    total = loop_steps * config.epochs * config.minibatches
    done = min(1.0, (optimizer_step - config.warmup_steps) / max(1, total - config.warmup_steps))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)
