"""The one loop: roll out, score, learn, sync, evaluate, checkpoint; and the user's request to stop it.

Every method of the field is this loop with another environment, agent or learner; the loop knows none of them by name.
By default it is synchronous: a training step's episodes are sampled from the weights of the previous step. So the
sampler's log-probabilities are the old ones and need no extra log-prob pass, and a difference from the trainer's own
shows that the last sync failed. (Groups that a filter carried over are a step older, as their `versions` show.)
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.record import write_rollouts
from envgym.errors import EnvgymError, InvalidOutcome, RolloutFailed, RunError, WorkerError
from envgym.evaluation.held_out import HeldOut
from envgym.monitoring.metrics import held_out_metrics, speed_metrics
from envgym.monitoring.recorder import Recorder
from envgym.processes.signals import set_handlers
from envgym.processes.watch import end_immediately
from envgym.run_folder import RunFolder, append_lines
from envgym.types import number_rows

from .checkpoints import Checkpoints, Progress
from .components import Components
from .step import StepGroups, Update, evaluation_interval, steps_of

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

T = TypeVar("T")


class Stopped(Exception):
    """The user asked the run to stop (Ctrl-C)."""


class Stop(asyncio.Event):
    """Set when the user has asked the run to stop."""

    async def run_until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the stop is requested first, cancels it and raises `Stopped`."""
        job, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([job, stop], return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise Stopped
            return job.result()
        finally:
            job.cancel()
            stop.cancel()
            await asyncio.gather(job, stop, return_exceptions=True)


class Interrupts:
    """Handlers of Ctrl-C, SIGTERM and a closed terminal (SIGHUP). Before the loop runs, the first signal ends
    everything immediately; then the first requests a stop, and the second ends everything immediately."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._request_stop: Callable[[], None] | None = None
        self._is_handled = True
        self._has_signal = False
        self._is_over = False
        self._signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            self._signals.append(signal.SIGHUP)

    def listen(self, request_stop: Callable[[], None]) -> None:
        """Let the next signal call `request_stop` instead of ending everything."""
        self._request_stop = request_stop

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if self._is_over:
                return
            self._is_handled = True
            request_stop, self._request_stop = self._request_stop, None
            if request_stop is None:
                task.cancel()
            else:
                request_stop()
                self._display.note("stopping after this step's work; once more to stop immediately")

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP and self._has_signal:
                return  # the shell and the kernel both signal a closed terminal
            if self._has_signal:
                end_immediately()
            loop.call_soon_threadsafe(interrupt)
            self._has_signal = True
            if not self._is_handled:  # the previous signal was not handled: something blocks the loop
                self._is_over = True
                task.cancel()  # else a running episode would take the exception for its own failure
                raise KeyboardInterrupt
            self._is_handled = False

        loop = asyncio.get_running_loop()
        self._previous_handlers = set_handlers(dict.fromkeys(self._signals, on_signal))

    def __exit__(self, *exc: object) -> None:
        set_handlers(self._previous_handlers)


class Trainer:
    """Runs one stage: `run` returns after the last training step. Ctrl-C calls `stop.set`."""

    def __init__(
        self, run: RunConfig, stage: StageConfig, components: Components, folder: RunFolder, display: Display
    ) -> None:
        self.stage = stage
        self.components = components
        self.folder = folder
        self.display = display
        self.stop = Stop()
        self.progress = Progress()
        n_tasks = components.runner.spec.tasks("train").epoch_size
        self.steps, self.eval_every = steps_of(stage, n_tasks), evaluation_interval(stage, n_tasks)
        self.recorder = Recorder(folder, display, self.steps)
        self.uses_policy = components.runner.agent.uses_policy
        self.groups = groups = StepGroups(run, stage, components, folder, self.progress, self.stop, display)
        self.update = Update(components, stage, self.progress, self.steps)
        spec, scope = components.runner.spec, stage.rollout.scope_in_evaluation
        self.held_out = HeldOut(self.groups.run_groups, spec, components.sampling, stage.eval, scope)
        self.checkpoints = Checkpoints(
            stage.checkpoint, folder, components, self.progress, groups.cursor, groups.buffer, groups.async_rollouts
        )

    async def run(self) -> None:
        """Train to the last step. Raises `Stopped` once a stop was requested and a checkpoint is saved.

        A checkpoint is also saved before an error that leaves the weights intact: unreadable tasks, too many failed
        episodes, a dead engine.
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
                    await self.checkpoints.wait_for_writes()
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
        except InvalidOutcome as error:  # tasks that can no longer be read
            await self.checkpoints.save_snapshot(error)
            raise RolloutFailed(f"after step {self.progress.step}: {error}") from error
        except WorkerError as error:
            with contextlib.suppress(EnvgymError, OSError):  # the policy's own worker may have died
                await self.checkpoints.save_snapshot(error)
            raise
        finally:
            await self.groups.close()

    async def take_step(self) -> None:
        start = time.monotonic()
        self.progress.record = {"step": self.progress.step + 1}
        try:
            await self.components.timeshare.give_to_engines()
            groups = number_rows(await self.groups.collect())
            await self.components.timeshare.give_to_models(for_new_weights=True)
            await self.update.score(groups)
            async with self.weights_locked():
                self.checkpoints.discard_snapshot()
                await self.update.learn(groups)
                self.groups.write_learned(groups)
                await self.groups.wait_for_writes()  # a step is complete once its episodes are on the disk
                self.progress.step, self.progress.recorded = self.progress.step + 1, False
                self.checkpoints.snapshot_step()
                await self.sync()
        except RunError:  # the step has no record, but what its numbers tell of the cause
            self.recorder.warn(self.progress.record)
            raise
        finally:
            await self.groups.wait_for_writes()
        self.progress.record |= speed_metrics(self.progress.record, time.monotonic() - start)
        if self.components.laws is not None:
            self.progress.record["seconds/laws"] = self.components.laws.take_seconds()

    def weights_locked(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Lock held while weights are updated and synced; a restarted engine cannot join meanwhile."""
        return contextlib.nullcontext() if self.components.sync is None else self.components.sync.weights_lock

    async def sync(self) -> None:
        """Send the actor's weights to the engines as policy version `step`, and compare log-probabilities."""
        if self.components.sync is not None:
            with self.progress.timed("sync"):
                try:
                    difference = await self.components.sync(self.progress.step)
                finally:
                    self.progress.record |= self.components.sync.metrics()
            if difference is not None:
                self.progress.record["sync/max_abs"] = difference
            if self.components.sync.n_bytes is not None:
                self.progress.record["sync/bytes"] = self.components.sync.n_bytes
        await self.groups.advance()

    async def finish_step(self) -> None:
        """Write the step's metrics; evaluate and save a checkpoint when they are due."""
        step, stage = self.progress.step, self.stage
        await self.checkpoints.wait_for_writes(unless_busy=True)
        if self.eval_every and (step % self.eval_every == 0 or step == self.steps):
            await self.evaluate()
        if step or len(self.progress.record) > 1:
            self.recorder.write(self.progress.record)
        self.folder.remove_old_files(stage.keep.model_dump())
        if self.progress.spans:
            spans, self.progress.spans = self.progress.spans, []
            append_lines(self.folder.event_file(step), [{"phases": spans}])
        self.progress.recorded = True
        self.checkpoints.snapshot_step()  # a run that resumes must not write the record again
        is_due = step == self.steps or (stage.checkpoint.every and step % stage.checkpoint.every == 0)
        if self.checkpoints.best.update(self.progress) or (step and is_due):
            await self.checkpoints.save()

    async def evaluate(self) -> None:
        """Evaluate on the held-out tasks: the first result is stored as `before`, the latest as `after`."""
        step, label = self.progress.step, "before" if self.progress.step == 0 else "after"
        with self.progress.timed("eval"):
            await self.stop.run_until_stopped(self.held_out.tasks())
            if self.uses_policy:
                await self.components.timeshare.give_to_engines()
                results = {label: await self.held_out.evaluate_sampled()}
                if self.stage.eval.greedy and step in (0, self.steps):
                    results[f"greedy_{label}"] = await self.held_out.evaluate_greedily()
                episodes, self.held_out.episodes = self.held_out.episodes, []
                self.folder.held_out.mkdir(exist_ok=True)
                await asyncio.to_thread(write_rollouts, self.folder.held_out_file(step), episodes)
            else:
                learner, actor = self.components.learner, self.components.workers["actor"]
                results = {label: await self.held_out.evaluate_recorded(learner, actor, self.update.score)}
        self.progress.record |= held_out_metrics(results[label])
        self.progress.evals |= results
        for result in results.values():
            self.display.evaluation(step, result)
        if step == 0 and self.held_out.warning:
            self.display.note(self.held_out.warning)
