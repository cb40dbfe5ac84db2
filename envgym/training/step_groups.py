"""The source of a step's groups: tasks are played until there are enough, in turns with learning or beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.parquet import write_learned, write_rollouts
from envgym.errors import RolloutFailed
from envgym.monitoring.metrics import check_failures, rollout_metrics
from envgym.rollout.async_buffer import AsyncRollouts, version_of
from envgym.rollout.buffer import Buffer, RolloutBatch, fill
from envgym.rollout.runner import SamplingPlan
from envgym.run_folder import RunFolder
from envgym.tasks.curriculum import Curriculum
from envgym.tasks.cursor import TaskCursor
from envgym.types import Group, Task

from .checkpoints import Progress
from .components import Components
from .stop import Stop
from .unfinished_step import UnfinishedStep, purpose
from .update import Update

if TYPE_CHECKING:
    from envgym.learner import Trajectory
    from envgym.monitoring.display import Display


@dataclass(eq=False)
class StepGroups:
    """Plays a stage's tasks into its buffer, and writes what was played to the run's folder. The counts and the times
    of a step go into `progress`; `stop` ends what is being played."""

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
        self.supply = None
        if stage.rollout.max_staleness and self.uses_policy:
            self.supply = AsyncRollouts(self.buffer, self.cursor, stage.rollout, self.play_alone)
        keeps = self.uses_policy and not run.deterministic and self.supply is None
        self.unfinished = UnfinishedStep(
            self.folder.unfinished_step, stage.checkpoint.episodes_every if keeps else None
        )
        self._writing: asyncio.Future[None] | None = None
        self._writing_learned: asyncio.Future[None] | None = None

    async def take(self) -> list[Group]:
        """Play tasks until the step has its groups. They come from the buffer, which outlives the step."""
        step, config = self.progress.step + 1, self.stage.rollout

        async def play(tasks: Sequence[Task], round: int) -> list[Group]:
            plan = SamplingPlan(f"{purpose(step)}{round}", self.components.sampling, self.group_size)
            return await self._play(tasks, plan, self.unfinished)

        self.unfinished.begin(step)
        with self.progress.timed("rollout"):
            if self.supply is None:
                batch = await self.stop.unless(fill(self.buffer, self.cursor, config, play))
                groups = self.buffer.take(config.tasks)
            else:
                batch, groups = await self.stop.unless(self.supply.take())
            if self.components.engine is not None:  # a replay only copies its data
                write = asyncio.to_thread(write_rollouts, self.folder.rollout_file(step), batch.episodes)
                self._writing = asyncio.ensure_future(write)
                times = [{"episode": episode.id, "spans": episode.spans} for episode in batch.episodes if episode.spans]
                self.folder.append_events(step, times)
            check_failures(batch.played, config.max_failed_share)
        if not groups:
            raise RolloutFailed(f"step {step}: {batch.why_nothing_was_kept(config)}")
        self.record_rollout(batch, groups)
        return groups

    def record_rollout(self, batch: RolloutBatch, groups: Sequence[Group]) -> None:
        """Add to the step's record what was played and which groups of it are learned from."""
        record, config = self.progress.record, self.stage.rollout
        spells = self.components.runner.agent.renderer.spells
        record |= rollout_metrics(batch.played, sampled=self.uses_policy, spells=spells) | self.cursor.metrics()
        if config.filter.on and self.uses_policy:
            record |= batch.metrics() | {"filter/filled_share": len(groups) / config.tasks}
            record["filter/carried_over"] = len(self.buffer)
        if self.supply is not None:
            ages = [self.progress.step - version_of(group.id) for group in groups]
            record |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
        self.progress.tokens["sampled"] += record.get("tokens/sampled", 0)

    def write_learned(self, groups: Sequence[Sequence[Trajectory]], update: Update) -> None:
        """Begin to write what was learned of a step's rows."""
        file = self.folder.learned_file(self.progress.step + 1)
        write = asyncio.to_thread(write_learned, file, groups, update.first, update.last)
        self._writing_learned = asyncio.ensure_future(write)

    async def written(self) -> None:
        """Wait until the last rollouts, and what was learned of them, are on the disk."""
        for writing in (self._writing, self._writing_learned):
            if writing is not None:
                await writing

    async def moved_on(self) -> None:
        """The engines sample from the weights of the step that was taken last."""
        if self.supply is not None:
            await self.supply.moved_on(self.progress.step)

    async def close(self) -> None:
        """Leave what is in play."""
        if self.supply is not None:
            await self.supply.close()

    async def play_alone(self, task: Task, name: str) -> Group:
        """Play a task as a group of this name."""
        plan = SamplingPlan(name, self.components.sampling, self.group_size)
        [group] = await self.components.runner.play([task], plan)
        return group

    async def play(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """Play tasks, unless the user stops the run first."""
        return await self.stop.unless(self._play(tasks, plan))

    async def _play(
        self, tasks: Sequence[Task], plan: SamplingPlan, unfinished: UnfinishedStep | None = None
    ) -> list[Group]:
        """Play tasks. What `unfinished` has of them is not played again."""
        kept, add = (None, None) if unfinished is None else (unfinished.kept(plan.purpose, tasks), unfinished.add)
        return await self.components.runner.play(tasks, plan, self.display.rollout, kept=kept, on_episode=add)
