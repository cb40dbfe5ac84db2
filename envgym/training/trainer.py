"""The one loop: roll out, score, learn, sync, evaluate, checkpoint.

Every method of the field is this loop with other components: which environment poses tasks, which agent answers them,
which learner reads the buffer. The loop knows none of them by name. It is synchronous: a step's episodes come from
the weights that the step before it left, so the sampler's log-probabilities are the old ones, no pass is spent on
recomputing them, and comparing them with the trainer's own shows whether the last sync arrived. (Groups that a filter
has carried over are a step older; their rows say so.)
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from envgym.config.schema import RunConfig, StageConfig
from envgym.errors import EnvgymError, InvalidOutcome, RolloutFailed, WorkerError
from envgym.evaluation.held_out import HeldOut
from envgym.learner import trajectories
from envgym.monitoring.metrics import held_out_metrics, speed_metrics
from envgym.monitoring.recorder import Recorder
from envgym.run_folder import RunFolder

from .checkpoints import Checkpoints, Progress
from .components import Components
from .step_groups import StepGroups
from .stop import Stop, Stopped
from .update import Update, steps_of

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
        self.steps = steps_of(stage, components.runner.spec.tasks("train").size)
        self.recorder = Recorder(folder, display, self.steps)
        self.uses_policy = components.runner.agent.uses_policy
        self.groups = groups = StepGroups(run, stage, components, folder, self.progress, self.stop, display)
        self.update = Update(components, stage, self.progress, self.steps)
        self.held_out = HeldOut(self.groups.play, components.runner.spec, components.sampling, stage.eval)
        self.checkpoints = Checkpoints(
            stage.checkpoint, folder, components, self.progress, groups.cursor, groups.buffer, groups.supply
        )

    async def run(self) -> None:
        """Train to the last step. Raises `Stopped` once a stop was asked for and a checkpoint is kept.

        One is kept too before an error that leaves the weights whole: tasks that cannot be read or played any more, an
        engine that died.
        """
        self.checkpoints.snapshot_step()
        try:
            async with self.weights_locked():
                await self.sync()
            while True:
                if not self.progress.recorded:
                    await self.finish_step()
                    self.checkpoints.snapshot_step()
                if self.progress.step >= self.steps:
                    await self.checkpoints.written()
                    self.groups.unfinished.clear()
                    if self.uses_policy:
                        self.recorder.finish()
                    return
                if self.stop.is_set():
                    raise Stopped
                await self.take_step()
                self.checkpoints.snapshot_step()
        except (Stopped, RolloutFailed) as error:
            self.groups.unfinished.write()
            await self.checkpoints.save_snapshot(error)
            raise
        except InvalidOutcome as error:  # tasks that cannot be read any more
            await self.checkpoints.save_snapshot(error)
            raise RolloutFailed(f"after step {self.progress.step}: {error}") from error
        except WorkerError as error:
            with contextlib.suppress(EnvgymError, OSError):  # it may be the policy's own that died
                await self.checkpoints.save_snapshot(error)
            raise
        finally:
            await self.groups.close()

    async def take_step(self) -> None:
        started = time.monotonic()
        self.progress.record = {"step": self.progress.step + 1}
        try:
            await self.components.wake_engines()
            groups = trajectories(await self.groups.take())
            await self.components.wake_models(for_new_weights=True)
            await self.update.score(groups)
            async with self.weights_locked():
                self.checkpoints.discard_snapshot()
                await self.update.learn(groups)
                if self.update.first:
                    self.groups.write_learned(groups, self.update)
                await self.groups.written()  # beside the learning: a step is whole once its episodes are on the disk
                self.progress.step, self.progress.recorded = self.progress.step + 1, False
                self.checkpoints.snapshot_step()
                await self.sync()
        finally:
            await self.groups.written()
        self.progress.record |= speed_metrics(self.progress.record, time.monotonic() - started)

    def weights_locked(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Held from one version of the weights to the next, which the engines have at the end: none joins meanwhile."""
        return contextlib.nullcontext() if self.components.sync is None else self.components.sync.weights_lock

    async def sync(self) -> None:
        """Give the engines the actor's weights as policy version `step`, and compare the two."""
        if self.components.sync is not None:
            with self.progress.timed("sync"):
                difference = await self.components.sync(self.progress.step)
            if difference is not None:
                self.progress.record["sync/max_abs"] = difference
            if self.components.sync.receipt is not None:
                self.progress.record["sync/bytes"] = self.components.sync.receipt.n_bytes
        await self.groups.moved_on()

    async def finish_step(self) -> None:
        """Evaluate, write the step's metrics down and keep a checkpoint, where each is due."""
        step, stage = self.progress.step, self.stage
        await self.checkpoints.written(unless_busy=True)
        ends = step in (0, self.steps)
        if stage.eval.every and (ends or step % stage.eval.every == 0):
            await self.evaluate()
        if step or len(self.progress.record) > 1:
            self.recorder.write(self.progress.record)
        if self.progress.spans:
            spans, self.progress.spans = self.progress.spans, []
            self.folder.append_events(step, [{"phases": spans}])
        self.progress.recorded = True
        due = step == self.steps or (stage.checkpoint.every and step % stage.checkpoint.every == 0)
        if self.checkpoints.best.improves(self.progress) or (step and due):
            await self.checkpoints.save()

    async def evaluate(self) -> None:
        """Play the held-out tasks. The first result stays as `before`, the latest as `after`."""
        step, when = self.progress.step, "before" if self.progress.step == 0 else "after"
        with self.progress.timed("eval"):
            await self.stop.unless(self.held_out.tasks())
            if self.uses_policy:
                await self.components.wake_engines()
                results = {when: await self.held_out.evaluate_sampled()}
                if self.stage.eval.greedy and step in (0, self.steps):
                    results[f"greedy_{when}"] = await self.held_out.evaluate_greedily()
            else:
                learner, actor = self.components.learner, self.components.workers["actor"]
                results = {when: await self.held_out.evaluate_recorded(learner, actor, self.update.score)}
        self.progress.record |= held_out_metrics(results[when])
        self.progress.evals |= results
        for result in results.values():
            self.display.evaluation(step, result)
        if step == 0 and self.held_out.warning:
            self.display.note(self.held_out.warning)
