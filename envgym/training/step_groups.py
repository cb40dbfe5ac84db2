"""The groups of a training step: tasks are rolled out until there are enough, before training or concurrently; their
episodes are saved as they end, so that a run that is killed in a long step resumes within it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.files import EpisodeKey, Journal
from envgym.episodes.record import write_learned, write_rollouts
from envgym.errors import RolloutFailed
from envgym.hashing import task_hash
from envgym.monitoring.metrics import check_failures, rollout_metrics
from envgym.rollout.async_buffer import AsyncRollouts, version_of
from envgym.rollout.buffer import Buffer, RolloutBatch, fill_buffer
from envgym.rollout.runner import SamplingPlan, group_ids
from envgym.run_folder import RunFolder
from envgym.tasks.curriculum import Curriculum
from envgym.tasks.cursor import TaskCursor
from envgym.types import Episode, Group, Task

from .checkpoints import Progress
from .components import Components
from .stop import Stop

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


@dataclass(eq=False)
class StepGroups:
    """Rolls out a stage's tasks into its buffer, and writes the episodes to the run's folder. Counts and times of a
    step go into `progress`; `stop` ends the running episodes."""

    run: RunConfig
    stage: StageConfig
    components: Components
    folder: RunFolder
    progress: Progress
    stop: Stop
    display: Display

    def __post_init__(self) -> None:
        run, stage, components = self.run, self.stage, self.components
        self.uses_policy = components.runner.agent.uses_policy
        curriculum = Curriculum(stage.curriculum, run.seed) if stage.curriculum.skip else None
        self.cursor = TaskCursor(components.runner.spec.tasks("train"), run.seed, curriculum)
        spec = components.runner.spec
        self.group_size = stage.rollout.group_size if self.uses_policy else spec.recordings_per_task
        self.buffer = Buffer(
            components.learner.min_group_size if self.uses_policy else self.group_size,
            needs_reward=self.uses_policy,
            filter=stage.rollout.filter if self.uses_policy else None,
        )
        self.async_rollouts = None
        if stage.rollout.max_staleness and self.uses_policy:
            self.async_rollouts = AsyncRollouts(self.buffer, self.cursor, stage.rollout, self.run_group)
        saves_episodes = self.uses_policy and not run.deterministic and self.async_rollouts is None
        self.unfinished = UnfinishedStep(
            self.folder.unfinished_step, stage.checkpoint.episodes_every if saves_episodes else None
        )
        self._writing: asyncio.Future[None] | None = None
        self._writing_learned: asyncio.Future[None] | None = None

    async def collect(self) -> list[Group]:
        """Roll out tasks until the buffer has the groups of the next step, and return these."""
        step, config = self.progress.step + 1, self.stage.rollout

        async def roll_out(tasks: Sequence[Task], round_number: int) -> list[Group]:
            return await self._run_groups(tasks, self._plan(f"{purpose_prefix(step)}{round_number}"), self.unfinished)

        self.unfinished.start_step(step)
        with self.progress.timed("rollout"):
            if self.async_rollouts is None:
                filling = fill_buffer(self.buffer, self.cursor, config, roll_out)
                batch = await self.stop.run_until_stopped(filling)
                groups = self.buffer.take(config.tasks_per_step)
            else:
                batch, groups = await self.stop.run_until_stopped(self.async_rollouts.take())
            if self.components.engine is not None:  # a replay's episodes are its data
                writing = asyncio.to_thread(write_rollouts, self.folder.rollout_file(step), batch.episodes)
                self._writing = asyncio.ensure_future(writing)
                spans = [{"episode": episode.id, "spans": episode.spans} for episode in batch.episodes if episode.spans]
                self.folder.append_events(step, spans)
            check_failures(batch.groups, config.max_failed_share)
        if not groups:
            raise RolloutFailed(f"step {step}: {batch.explain_no_groups(config)}")
        self.record_rollout(batch, groups)
        return groups

    def record_rollout(self, batch: RolloutBatch, groups: Sequence[Group]) -> None:
        """Add the metrics of a rollout, and of the groups that are trained on, to the step's record."""
        record, config = self.progress.record, self.stage.rollout
        spells = self.components.runner.agent.renderer.spells
        record |= rollout_metrics(batch.groups, sampled=self.uses_policy, spells=spells) | self.cursor.metrics()
        if config.filter.is_on and self.uses_policy:
            record |= batch.metrics() | {"filter/filled_share": len(groups) / config.tasks_per_step}
            record["filter/carried_over"] = len(self.buffer)
        if self.async_rollouts is not None:
            ages = [self.progress.step - version_of(group.id) for group in groups]
            record |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
        self.progress.tokens["sampled"] += record.get("tokens/sampled", 0)

    def write_learned(self, groups: Sequence[Group]) -> None:
        """Start writing the advantages and the trainer's log-probabilities of a step's rows."""
        writing = asyncio.to_thread(write_learned, self.folder.learned_file(self.progress.step + 1), groups)
        self._writing_learned = asyncio.ensure_future(writing)

    async def wait_for_writes(self) -> None:
        """Wait until the files of the last step are on the disk."""
        for writing in (self._writing, self._writing_learned):
            if writing is not None:
                await writing

    async def advance(self) -> None:
        """Start the asynchronous rollouts that become possible once the engines have the last step's weights."""
        if self.async_rollouts is not None:
            await self.async_rollouts.advance(self.progress.step)

    async def close(self) -> None:
        """Cancel the asynchronous rollouts in flight."""
        if self.async_rollouts is not None:
            await self.async_rollouts.close()

    async def run_group(self, task: Task, purpose: str) -> Group:
        """Roll out a task as one group."""
        [group] = await self.components.runner.roll_out([task], self._plan(purpose))
        return group

    def _plan(self, purpose: str) -> SamplingPlan:
        seed_scope = self.stage.rollout.seed_scope or "group"
        return SamplingPlan(purpose, self.components.sampling, self.group_size, seed_scope)

    async def run_groups(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """Roll out tasks, unless the user stops the run first."""
        return await self.stop.run_until_stopped(self._run_groups(tasks, plan))

    async def _run_groups(
        self, tasks: Sequence[Task], plan: SamplingPlan, unfinished: UnfinishedStep | None = None
    ) -> list[Group]:
        """Roll out tasks; episodes that `unfinished` has are not rolled out again."""
        episodes, add = None, None
        if unfinished is not None:
            episodes, add = unfinished.finished_episodes(plan.purpose, tasks), unfinished.add
        runner, on_progress = self.components.runner, self.display.rollout
        return await runner.roll_out(tasks, plan, on_progress, completed=episodes, on_episode=add)


class UnfinishedStep:
    """Writes a step's finished episodes every `seconds`, so that a shorter step costs nothing.

    A resumed run uses them for the step after its checkpoint, whose weights sampled them, and for no other. With None
    nothing is saved: a deterministic run with part of a lockstep batch would not be the same.
    """

    def __init__(self, path: Path, seconds: float | None) -> None:
        self._journal, self._seconds = Journal(path), seconds
        self._saved: dict[EpisodeKey, Episode] = {}
        self._unwritten: list[Episode] = []
        self._last_write = time.monotonic()
        if seconds is not None and path.exists():
            self._saved = {key: episode for key, episode in self._journal.originals().items() if episode.is_counted}
            self._journal.open()

    def start_step(self, step: int) -> None:
        """Discard the saved episodes of any other step."""
        if not any(group.startswith(purpose_prefix(step)) for group, _ in self._saved):
            self.clear()
        self._last_write = time.monotonic()

    def finished_episodes(self, purpose: str, tasks: Sequence[Task]) -> Mapping[EpisodeKey, Episode]:
        """The saved episodes of these tasks in the sampling plan `purpose`."""
        hashes = {group: task_hash(task) for group, task in group_ids(purpose, tasks).items()} if self._saved else {}
        return {key: old for key, old in self._saved.items() if old.fingerprints["task"] == hashes.get(key[0])}

    def add(self, episode: Episode) -> None:
        """Add a finished episode; write all if it is time."""
        if self._seconds is None:
            return
        self._unwritten.append(episode)
        if time.monotonic() - self._last_write >= self._seconds:
            self.write()

    def write(self) -> None:
        """Write the episodes that were added since the last write."""
        for episode in self._unwritten:
            self._journal.write(episode)
        self._unwritten, self._last_write = [], time.monotonic()

    def clear(self) -> None:
        """Discard all episodes and the file."""
        self._saved, self._unwritten = {}, []
        self._journal.path.unlink(missing_ok=True)


def purpose_prefix(step: int) -> str:
    """Prefix of the purposes of a training step's sampling plans; the number of the round follows."""
    return f"step-{step:06d}-"
