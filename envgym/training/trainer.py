"""The one loop: roll out, score, learn, sync, evaluate, checkpoint.

Every method of the field is this loop with other components: which environment poses tasks, which agent answers them,
which learner reads the buffer. The loop knows none of them by name. It is synchronous: a step's episodes come from
the weights that the step before it left, so the sampler's log-probabilities are the old ones, no pass is spent on
recomputing them, and comparing them with the trainer's own shows whether the last sync arrived. (Groups that a filter
has carried over are a step older; their rows say so.)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.parquet import write_rollouts
from envgym.errors import EnvgymError, InvalidOutcome, RolloutFailed, WorkerError
from envgym.evaluation.held_out import HeldOut
from envgym.learner import trajectories
from envgym.monitoring.metrics import check_failures, held_out_metrics, rollout_metrics, speed_metrics
from envgym.monitoring.recorder import Recorder
from envgym.rollout.buffer import Buffer, RolloutBatch, fill
from envgym.rollout.runner import SamplingPlan
from envgym.rollout.supply import Supply, version_of
from envgym.tasks.curriculum import Curriculum
from envgym.tasks.cursor import TaskCursor
from envgym.types import Group, Task

from .checkpoints import Checkpoints, Progress
from .launch import Components
from .run_folder import RunFolder
from .stop import Stop, Stopped
from .unfinished_step import UnfinishedStep, purpose
from .update import Update

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


class Trainer:
    """Runs one stage. When `run` returns its steps are done; Ctrl-C is `stop.set()`."""

    def __init__(
        self, run: RunConfig, stage: StageConfig, components: Components, folder: RunFolder, display: Display
    ) -> None:
        self.stage = stage
        self.components = components
        self.folder = folder
        self.display = display
        self.stop = Stop()
        self.progress = Progress()
        self.recorder = Recorder(folder, display, stage.steps)
        self.uses_policy = components.runner.agent.uses_policy
        curriculum = Curriculum(stage.curriculum, run.seed) if stage.curriculum.skip else None
        self.cursor = TaskCursor(components.runner.spec.tasks("train"), run.seed, curriculum)
        spec = components.runner.spec
        self.group_size = stage.rollout.group_size if self.uses_policy else spec.recordings
        self.buffer = Buffer(
            components.learner.min_group_size if self.uses_policy else self.group_size,
            needs_reward=self.uses_policy,
            filter=stage.rollout.filter if self.uses_policy else None,
        )
        self.supply = None
        if stage.rollout.max_staleness and self.uses_policy:
            self.supply = Supply(self.buffer, self.cursor, stage.rollout, self.play_alone)
        self.update = Update(components, stage, self.progress)
        self.held_out = HeldOut(self.play, components.runner.spec, components.sampling, stage.eval)
        self.checkpoints = Checkpoints(
            stage.checkpoint, folder, components, self.progress, self.cursor, self.buffer, self.supply
        )
        keeps = self.uses_policy and not run.deterministic and self.supply is None
        self.unfinished = UnfinishedStep(folder.unfinished_step, stage.checkpoint.episodes_every if keeps else None)
        self._writing: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Train to the last step. Raises `Stopped` once a stop was asked for and a checkpoint is kept.

        One is kept too before an error that leaves the weights whole: tasks that cannot be read or played any more, an
        engine that died.
        """
        self.checkpoints.mark_whole_step()
        try:
            async with self.engines_wait():
                await self.sync()
            while True:
                if not self.progress.recorded:
                    await self.finish_step()
                    self.checkpoints.mark_whole_step()
                if self.progress.step >= self.stage.steps:
                    self.unfinished.clear()
                    return
                if self.stop.is_set():
                    raise Stopped
                await self.take_step()
                self.checkpoints.mark_whole_step()
        except (Stopped, RolloutFailed) as error:
            self.unfinished.write()
            await self.checkpoints.save_whole_step(error)
            raise
        except InvalidOutcome as error:  # tasks that cannot be read any more
            await self.checkpoints.save_whole_step(error)
            raise RolloutFailed(f"after step {self.progress.step}: {error}") from error
        except WorkerError as error:
            with contextlib.suppress(EnvgymError, OSError):  # it may be the policy's own that died
                await self.checkpoints.save_whole_step(error)
            raise
        finally:
            if self.supply is not None:
                await self.supply.close()

    async def take_step(self) -> None:
        started = time.monotonic()
        self.progress.record = {"step": self.progress.step + 1}
        try:
            groups = trajectories(await self.roll_out())
            await self.update.score(groups)
            async with self.engines_wait():
                self.checkpoints.weights_change()
                await self.update.learn(groups)
                await self.rollouts_written()  # beside the learning: a step is whole once its episodes are on the disk
                self.progress.step, self.progress.recorded = self.progress.step + 1, False
                self.checkpoints.mark_whole_step()
                await self.sync()
        finally:
            await self.rollouts_written()
        self.progress.record |= speed_metrics(self.progress.record, time.monotonic() - started)

    async def roll_out(self) -> list[Group]:
        """Play tasks until the step has its groups. They come from the buffer, which outlives the step."""
        step, config = self.progress.step + 1, self.stage.rollout

        async def play(tasks: Sequence[Task], round: int) -> list[Group]:
            plan = SamplingPlan(f"{purpose(step)}{round}", self.components.sampling, self.group_size)
            return await self.play(tasks, plan, self.unfinished)

        self.unfinished.begin(step)
        with self.progress.timed("rollout"):
            if self.supply is None:
                batch = await fill(self.buffer, self.cursor, config, play)
                groups = self.buffer.take(config.tasks)
            else:
                batch, groups = await self.stop.unless(self.supply.take())
            if self.components.engine is not None:  # a replay only copies its data
                write = asyncio.to_thread(write_rollouts, self.folder.rollout_file(step), batch.episodes)
                self._writing = asyncio.ensure_future(write)
            check_failures(batch.played, config.max_failed_share)
        if not groups:
            raise RolloutFailed(f"step {step}: {batch.why_nothing_was_kept(config)}")
        self.record_rollout(batch, groups)
        return groups

    def record_rollout(self, batch: RolloutBatch, groups: Sequence[Group]) -> None:
        """Add to the step's record what was played and which groups of it are learned from."""
        record, config = self.progress.record, self.stage.rollout
        record |= rollout_metrics(batch.played) | self.cursor.metrics()
        if config.filter.on and self.uses_policy:
            record |= batch.metrics() | {"filter/filled_share": len(groups) / config.tasks}
            record["filter/carried_over"] = len(self.buffer)
        if self.supply is not None:
            ages = [self.progress.step - version_of(group.id) for group in groups]
            record |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
        self.progress.tokens["sampled"] += record.get("tokens/sampled", 0)

    async def rollouts_written(self) -> None:
        if self._writing is not None:
            await self._writing

    def engines_wait(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Held from one version of the weights to the next, which the engines have at the end: none joins meanwhile."""
        return contextlib.nullcontext() if self.components.sync is None else self.components.sync.whole

    async def sync(self) -> None:
        """Give the engines the actor's weights as policy version `step`, and compare the two."""
        if self.components.sync is not None:
            with self.progress.timed("sync"):
                difference = await self.components.sync(self.progress.step)
            if difference is not None:
                self.progress.record["sync/max_abs"] = difference
        if self.supply is not None:
            await self.supply.moved_on(self.progress.step)

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
        if self.checkpoints.best.improves(self.progress) or (step and due):
            await self.checkpoints.save()

    async def evaluate(self) -> None:
        """Play the held-out tasks. The first result stays as `before`, the latest as `after`."""
        step, when = self.progress.step, "before" if self.progress.step == 0 else "after"
        with self.progress.timed("eval"):
            if self.uses_policy:
                results = {when: await self.held_out.sampled()}
                if self.stage.eval.greedy and step in (0, self.stage.steps):
                    results[f"greedy_{when}"] = await self.held_out.greedily()
            else:
                learner, actor = self.components.learner, self.components.workers["actor"]
                results = {when: await self.held_out.recorded(learner, actor, self.update.score)}
        self.progress.record |= held_out_metrics(results[when])
        self.progress.evals |= results
        for result in results.values():
            self.display.evaluation(step, result)

    async def play_alone(self, task: Task, name: str) -> Group:
        """Play a task as a group of this name."""
        plan = SamplingPlan(name, self.components.sampling, self.group_size)
        [group] = await self.components.runner.play([task], plan)
        return group

    async def play(
        self, tasks: Sequence[Task], plan: SamplingPlan, unfinished: UnfinishedStep | None = None
    ) -> list[Group]:
        """Play tasks, unless the user stops the run first. What `unfinished` has of them is not played again."""
        kept, add = (None, None) if unfinished is None else (unfinished.kept(plan.purpose, tasks), unfinished.add)
        playing = self.components.runner.play(tasks, plan, self.display.rollout, kept=kept, on_episode=add)
        return await self.stop.unless(playing)
