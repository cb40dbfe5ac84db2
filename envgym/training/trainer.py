"""The one loop: roll out, score, learn, sync, evaluate, checkpoint.

Every method of the field is this loop with other parts: which environment poses tasks, which agent answers them,
which learner reads the buffer. The loop knows none of them by name. It is synchronous: a step's episodes come from
the weights that the step before it left, so the sampler's log-probabilities are the old ones, no pass is spent on
recomputing them, and comparing them with the trainer's own shows whether the last sync arrived. (Groups that a filter
has carried over are a step older; their rows say so.)
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig, StageConfig
from envgym.engines.base import Engine, SamplingParams
from envgym.episodes.parquet import write_rollouts
from envgym.errors import EnvgymError, InvalidOutcome, RolloutFailed, RunError, WorkerError
from envgym.evaluation.held_out import HeldOut
from envgym.learner import Learner, LearnerConfig, LearnRow
from envgym.monitoring.metrics import (
    check_failures,
    computing_metrics,
    held_out_metrics,
    rollout_metrics,
    speed_metrics,
    token_counts,
)
from envgym.monitoring.recorder import Recorder
from envgym.rollout.buffer import Buffer
from envgym.rollout.filling import fill, nothing_kept
from envgym.rollout.runner import Play, Runner
from envgym.tasks.curriculum import Curriculum
from envgym.tasks.cursor import TaskCursor
from envgym.types import Group, Task
from envgym.workers.group import WorkerGroup

from .best_checkpoint import BestMetric
from .optimizer_steps import cut, learning_rate, over_steps
from .pretraining import Pretraining, spread
from .progress import Progress
from .run_folder import RunFolder
from .stop import Stop, Stopped
from .weight_sync import WeightSync

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


@dataclass(slots=True)
class Parts:
    """What the loop drives. `engine` and `sync` are None where the agent replays, `pretraining` where no text is mixed
    in; `workers` holds a group of ranks for each of the learner's roles."""

    learner: Learner
    runner: Runner
    workers: dict[str, WorkerGroup]
    sampling: SamplingParams
    engine: Engine | None = None
    sync: WeightSync | None = None
    pretraining: Pretraining | None = None


class Trainer:
    """Runs one stage. When `run` returns its steps are done; Ctrl-C is `stop.set()`."""

    _writing: asyncio.Future[None] | None = None
    """The step's episodes on their way to the disk."""

    def __init__(self, run: RunConfig, stage: StageConfig, parts: Parts, folder: RunFolder, display: Display) -> None:
        self.stage = stage
        self.parts = parts
        self.folder = folder
        self.display = display
        self.stop = Stop()
        self.progress = Progress()
        self.boundary: dict[str, Any] | None = None
        """The controller's state at the last whole step; None while the weights are on their way to the next."""
        self.recorder = Recorder(folder, display, stage.steps)
        self.began = time.monotonic()  # moved back by a resume, so that times go on from the checkpoint's
        samples = parts.runner.agent.samples
        self.group_size = stage.rollout.group_size if samples else 1
        curriculum = Curriculum(stage.curriculum, run.seed) if stage.curriculum.skip else None
        self.cursor = TaskCursor(parts.runner.spec.tasks("train"), run.seed, curriculum)
        self.buffer = Buffer(
            parts.learner.min_group_size if samples else 1,
            needs_reward=samples,
            filter=stage.rollout.filter if samples else None,
        )
        self.best = BestMetric(stage.checkpoint.best)
        self.held_out = HeldOut(self.play, parts.runner.spec, parts.sampling, stage.eval)

    async def run(self) -> None:
        """Train to the last step. Raises `Stopped` once a stop was asked for and a checkpoint is kept.

        One is kept too before an error that leaves the weights whole: tasks that cannot be read or played any more, an
        engine that died.
        """
        self.boundary = self.state()
        try:
            await self.sync()
            while True:
                if not self.progress.recorded:
                    await self.finish_step()
                    self.boundary = self.state()
                if self.progress.step >= self.stage.steps:
                    return
                if self.stop.is_set():
                    raise Stopped
                await self.take_step()
                self.boundary = self.state()
        except (Stopped, RolloutFailed) as error:
            await self.keep_boundary(error)
            raise
        except InvalidOutcome as error:  # tasks that cannot be read any more
            await self.keep_boundary(error)
            raise RolloutFailed(f"after step {self.progress.step}: {error}") from error
        except WorkerError as error:
            with contextlib.suppress(EnvgymError, OSError):  # it may be the policy's own that died
                await self.keep_boundary(error)
            raise

    async def keep_boundary(self, error: Exception) -> None:
        """Keep a checkpoint of the last whole step, if the weights are still its own, before `error` ends the run."""
        if self.boundary is None:
            return
        step, best = self.boundary["progress"]["step"], self.boundary["progress"]["best"]
        if best is not None and best["step"] == step:  # it is kept already, and linked to
            return
        if step or not isinstance(error, WorkerError):
            await self.checkpoint(self.boundary)

    async def take_step(self) -> None:
        started = time.monotonic()
        self.progress.record = {"step": self.progress.step + 1}
        try:
            groups = await self.roll_out()
            await self.score(groups)
            self.boundary = None
            await self.learn(groups)
        finally:
            if self._writing is not None:  # beside the learning: a step is whole once its episodes are on the disk
                await self._writing
        self.progress.step += 1
        self.progress.recorded = False
        self.boundary = self.state()
        await self.sync()
        self.progress.record |= speed_metrics(self.progress.record, time.monotonic() - started)

    async def finish_step(self) -> None:
        """Evaluate, write the step's metrics down and keep a checkpoint, where each is due."""
        step, stage = self.progress.step, self.stage
        ends = step in (0, stage.steps)
        if stage.eval.every and (ends or step % stage.eval.every == 0):
            await self.evaluate()
        if step or len(self.progress.record) > 1:
            self.recorder.write(self.progress.record)
        self.progress.recorded = True
        due = step == stage.steps or (stage.checkpoint.every and step % stage.checkpoint.every == 0)
        if self.best.improves(self.progress) or (step and due):
            await self.checkpoint(self.state())

    async def roll_out(self) -> list[Group]:
        """Play tasks until the step has its groups. They come from the buffer, which outlives the step."""
        step, config = self.progress.step + 1, self.stage.rollout

        async def play(tasks: Sequence[Task], round: int) -> list[Group]:
            return await self.play(tasks, Play(f"step-{step:06d}-{round}", self.parts.sampling, self.group_size))

        with self.progress.timed("rollout"):
            filling = await fill(self.buffer, self.cursor, config, play)
            groups = self.buffer.take(config.tasks)
            if self.parts.engine is not None:  # a replay only copies its data
                episodes = [episode for group in filling.played for episode in group.episodes]
                self._writing = asyncio.ensure_future(
                    asyncio.to_thread(write_rollouts, self.folder.rollout_file(step), episodes)
                )
            check_failures(filling.played, config.max_failed_share)
        if not groups:
            raise RolloutFailed(f"step {step}: {nothing_kept(filling, config)}")
        self.progress.record |= rollout_metrics(filling.played) | self.cursor.metrics()
        if config.filter.on and self.parts.runner.agent.samples:
            self.progress.record |= filling.metrics() | {"filter/filled_share": len(groups) / config.tasks}
            self.progress.record["filter/carried_over"] = len(self.buffer)
        self.progress.tokens["sampled"] += self.progress.record.get("tokens/sampled", 0)
        return groups

    async def score(self, groups: Sequence[Group]) -> None:
        """Let every role that scores (reference, critic) say its numbers about the rows the learner will see."""
        rows = [row for group in groups for episode in group.episodes for row in episode.rows]
        roles = [role for role, spec in self.parts.learner.roles.items() if spec.scored]
        if not roles:
            return
        with self.progress.timed("score"):
            asked = [LearnRow.of(row) for row in rows]  # once, so that what one role says is not sent to the next
            for role in roles:
                outputs = await self.parts.workers[role].forward(asked)
                for row, output in zip(rows, outputs, strict=True):
                    row.outputs[role] = output.tolist()

    async def learn(self, groups: Sequence[Group]) -> None:
        """Prepare rows and take the optimizer steps they make up, each with denominators over all of it."""
        progress, learner = self.progress, self.parts.learner
        with progress.timed("prepare"):
            rows = learner.prepare(groups)
            if not rows:
                raise RunError(f"step {progress.step + 1}: the learner found nothing to learn from")
            progress.record |= learner.metrics(rows)
            text = [] if self.parts.pretraining is None else await self.parts.pretraining.next()
        logged = []
        with progress.timed("learn"):
            for row in rows:
                row.current = row.versions == (progress.step,)
            for _ in range(learner.config.epochs):
                parts = cut(rows, learner.config.minibatches)
                for part, its_text in zip(parts, spread(text, len(parts)), strict=True):
                    logged.append(await self.optimizer_step(part, its_text))
                    for row in rows:
                        row.current = False  # the weights have moved on from those that sampled it
        progress.record |= over_steps(logged) | token_counts(rows, text, learner.config.epochs)
        progress.max_mismatch = max(progress.max_mismatch, progress.record.get("mismatch/max", 0.0))
        progress.tokens["trained"] += progress.record["tokens/trained"]
        learner.observe(progress.record)

    async def optimizer_step(self, rows: Sequence[LearnRow], text: Sequence[LearnRow]) -> dict[str, float]:
        """One step of every trained role; the policy also learns from `text`. Returns what they log: the policy's
        numbers under their own names, another role's behind its name."""
        progress, learner = self.progress, self.parts.learner
        logged: dict[str, float] = {}
        denominators = learner.denominators([*rows, *text])
        for role, spec in learner.roles.items():
            if not spec.trained or progress.step < spec.idle_steps:
                continue
            lr = learning_rate(self.config_of(role), progress.optimizer_steps, self.stage.steps)
            worker, started = self.parts.workers[role], time.monotonic()
            own = [*rows, *text] if role == "actor" else rows
            metrics = await worker.accumulate(own, denominators)
            whole = self.parts.sampling.top_p == 1 and not self.parts.sampling.top_k  # else they differ by the cut
            if role == "actor" and self.parts.sync is not None and whole:
                # Before the first step of an update, sampler and trainer are the same policy, or a sync was lost.
                self.parts.sync.check("this step's episodes", metrics.get("mismatch/mean_abs", 0.0))
            metrics |= await worker.step(lr) | {"lr": lr}
            metrics |= computing_metrics(worker.info, own, worker.settings.ranks, time.monotonic() - started)
            prefix = "" if role == "actor" else f"{role}/"
            logged |= {f"{prefix}{name}": value for name, value in metrics.items()}
        progress.optimizer_steps += 1
        return logged

    def config_of(self, role: str) -> LearnerConfig:
        """The learner's settings as they hold for a role, which may have a learning rate of its own."""
        config, own = self.parts.learner.config, self.stage.roles.get(role)
        return config if own is None or own.lr is None else config.model_copy(update={"lr": own.lr})

    async def sync(self) -> None:
        """Give the engine the actor's weights as policy version `step`, and compare the two."""
        if self.parts.sync is not None:
            with self.progress.timed("sync"):
                self.progress.record["sync/max_abs"] = await self.parts.sync(self.progress.step)

    async def evaluate(self) -> None:
        """Play the held-out tasks. The first result stays as `before`, the latest as `after`."""
        step, when = self.progress.step, "before" if self.progress.step == 0 else "after"
        with self.progress.timed("eval"):
            if self.parts.runner.agent.samples:
                results = {when: await self.held_out.sampled()}
                if self.stage.eval.greedy and step in (0, self.stage.steps):
                    results[f"greedy_{when}"] = await self.held_out.greedily()
            else:
                results = {when: await self.held_out.recorded(self.parts.learner, self.parts.workers["actor"])}
        self.progress.record |= held_out_metrics(results[when])
        self.progress.evals |= results
        for result in results.values():
            self.display.evaluation(step, result)

    async def play(self, tasks: Sequence[Task], play: Play) -> list[Group]:
        """Play tasks, unless the user stops the run first."""
        return await self.stop.unless(self.parts.runner.play(tasks, play, self.display.rollout))

    # -- state --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The controller's share of a checkpoint, as of now."""
        self.progress.seconds["total"] = time.monotonic() - self.began
        return {
            "progress": asdict(self.progress),
            "cursor": self.cursor.state(),
            "buffer": self.buffer.state(),
            "pretraining": None if self.parts.pretraining is None else self.parts.pretraining.state(),
            "learner": self.parts.learner.state(),
            "unscored": sorted(self.parts.runner.unscored),
        }

    async def checkpoint(self, state: dict[str, Any]) -> Path:
        """Keep the trained roles' weights and optimizers together with `state`."""
        with self.progress.timed("checkpoint"):
            written = self.folder.new_checkpoint()
            step, keep = state["progress"]["step"], self.stage.checkpoint.keep
            try:
                for role in (role for role, spec in self.parts.learner.roles.items() if spec.trained):
                    await self.parts.workers[role].save_state(str(written / role))
                # In a thread: until the disk has all of it, others go on (a server of environments, say).
                return await asyncio.to_thread(self.folder.keep_checkpoint, written, step, state, keep)
            except (EnvgymError, OSError):
                shutil.rmtree(written, ignore_errors=True)  # the disk may be full of it
                raise

    async def load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go back to where `checkpoint` was made, with the controller's `state` in it. Raises `CheckpointDamaged`, and
        `RunError` for the state of another version, or of a learner that was changed."""
        self.recorder.resume()
        try:
            self.progress = Progress(**state["progress"])
            self.began -= self.progress.seconds["total"]
            self.cursor.load_state(state["cursor"])
            self.buffer.load_state(state["buffer"])
            if self.parts.pretraining is not None:
                self.parts.pretraining.load_state(state["pretraining"])
            self.parts.learner.load_state(state["learner"])
            self.parts.runner.unscored |= set(state.get("unscored", ()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"the controller's state in {checkpoint} does not fit this version of envgym and of the learner "
                f"({type(error).__name__}: {error})"
            ) from error
        self.progress.best = self.folder.mark_best(self.progress.best)
        for role in (role for role, spec in self.parts.learner.roles.items() if spec.trained):
            await self.parts.workers[role].load_state(str(checkpoint / role))
