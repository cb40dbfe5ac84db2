"""A training step: the groups that it rolls out, and the update of the weights from them.

Tasks are rolled out until there are enough groups, before training or concurrently. Episodes are saved as they end, so
that a run that is killed in a long step resumes within it. The update scores the groups' rows, prepares them and splits
them into optimizer steps.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.files import EpisodeKey, Journal
from envgym.episodes.record import learned_values, write_learned, write_rollouts
from envgym.errors import ConfigError, RolloutFailed, RunError
from envgym.hashing import task_hash
from envgym.learner import LearnerConfig
from envgym.monitoring.metrics import check_failures, computing_metrics, rollout_metrics, token_counts
from envgym.rollout.async_buffer import AsyncRollouts, version_of
from envgym.rollout.buffer import Buffer, RolloutBatch, can_drop, fill_buffer
from envgym.rollout.runner import SamplingPlan, group_ids
from envgym.run_folder import RunFolder, append_lines
from envgym.tasks.curriculum import Curriculum
from envgym.tasks.task_set import TaskCursor
from envgym.types import Episode, Group, Row, Task
from envgym.workers.micro_batches import merge_metrics

from .checkpoints import Progress
from .components import Components

if TYPE_CHECKING:
    from envgym.monitoring.display import Display
    from envgym.types.episodes import FloatArray

    from .trainer import Stop

MEASURED_STEP, MEASURED_ROWS = 10, 8
"""The policy's movement is measured in this step, on this many rows of the first one."""


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
        self._n_gone_before: int | None = None
        """`_n_gone` at the end of the step before, in this process or an earlier one."""
        self._writing: list[asyncio.Future[None]] = []

    async def collect(self) -> list[Group]:
        """Roll out tasks until the buffer has the groups of the next step, and return these."""
        step, config = self.progress.step + 1, self.stage.rollout

        async def roll_out(tasks: Sequence[Task], round_number: int) -> list[Group]:
            return await self._run_groups(tasks, self._plan(f"{purpose_prefix(step)}{round_number}"), self.unfinished)

        self.unfinished.start_step(step)
        if self._n_gone_before is None:
            self._n_gone_before = self._n_gone if self.progress.step else 0
        with self.progress.timed("rollout"):
            if self.async_rollouts is None:
                filling = fill_buffer(self.buffer, self.cursor, config, roll_out)
                batch = await self.stop.run_until_stopped(filling)
                groups = self.buffer.take(config.tasks_per_step)
            else:
                batch, groups = await self.stop.run_until_stopped(self.async_rollouts.take())
            if self.components.engine is not None:  # a replay's episodes are its data
                files = self.folder.rollout_file(step), self.folder.event_file(step)
                self._write(partial(write_step, *files, batch.episodes))
            check_failures(batch.groups, config.max_failed_share)
        if not groups:
            raise RolloutFailed(f"step {step}: {batch.explain_no_groups(config)}")
        self.record_rollout(batch, groups)
        return groups

    @property
    def _n_gone(self) -> int:
        """Number of tasks drawn that no longer wait for their rollout; 0 if the cursor does not count."""
        waiting = 0 if self.async_rollouts is None else self.async_rollouts.n_waiting
        return 0 if self.cursor.n_drawn is None else self.cursor.n_drawn - waiting

    def record_rollout(self, batch: RolloutBatch, groups: Sequence[Group]) -> None:
        """Add the metrics of a rollout, and of the groups that are trained on, to the step's record."""
        record, config = self.progress.record, self.stage.rollout
        spells = self.components.runner.agent.renderer.spells
        record |= rollout_metrics(batch.groups, sampled=self.uses_policy, spells=spells) | self.cursor.metrics()
        if can_drop(config.filter) and self.uses_policy:
            record |= batch.metrics() | {"filter/filled_share": len(groups) / config.tasks_per_step}
            record["filter/carried_over"] = len(self.buffer)
        n_missing = self._n_gone - (self._n_gone_before or 0) - len(batch.groups)
        self._n_gone_before = self._n_gone
        if (laws := self.components.laws) is not None:
            record |= laws.of_rollout(batch.groups, groups, self.buffer.groups, self.group_size, n_missing)
        if self.async_rollouts is not None:
            ages = [self.progress.step - version_of(group.id) for group in groups]
            record |= {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
        self.progress.tokens["sampled"] += record.get("tokens/sampled", 0)

    def write_learned(self, groups: Sequence[Group]) -> None:
        """Start writing the advantages and the trainer's log-probabilities of a step's rows."""
        self._write(partial(write_learned, self.folder.learned_file(self.progress.step + 1), learned_values(groups)))

    def _write(self, write: Callable[[], None]) -> None:
        self._writing.append(asyncio.ensure_future(self.components.runner.attempts.write(write)))

    async def wait_for_writes(self) -> None:
        """Wait until the files of the last step are on the disk."""
        writing, self._writing = self._writing, []
        for file in writing:
            await file

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
        rollout = self.stage.rollout
        branches = rollout.branches if self.uses_policy else 0
        scope = rollout.seed_scope or "group"
        return SamplingPlan(purpose, self.components.sampling, self.group_size, scope, branches, rollout.branch_at)

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


def write_step(rollouts: Path, events: Path, episodes: Sequence[Episode]) -> None:
    """Write a step's episodes, and the times of what they did, to these files."""
    write_rollouts(rollouts, episodes)
    append_lines(events, [{"episode": episode.id, "spans": episode.spans} for episode in episodes if episode.spans])


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


class Update:
    """Trains on a training step's groups: scores their rows, prepares them and takes the optimizer steps."""

    def __init__(self, components: Components, stage: StageConfig, progress: Progress, steps: int) -> None:
        self._components = components
        self._role_configs = {name: stage.learner_config_of(name) for name, role in stage.roles.items() if role.learner}
        """The learner's settings of the roles whose optimizer has settings of its own."""
        self._progress = progress
        self._steps = steps
        self._measured: list[Row] = []
        self._first: Sequence[FloatArray] = []
        """The policy's log-probabilities [T] of the rows in `_measured`, before the first step."""

    async def score(self, groups: Sequence[Group]) -> None:
        """Add the outputs of every role that scores rows (reference, critic) to their arrays."""
        rows = self._components.learner.rows_to_score(groups)
        roles = [role for role, spec in self._components.learner.roles.items() if spec.scored]
        if not roles:
            return
        with self._progress.timed("score"):
            for role in roles:
                scorer = self._components.apis.get(role) or self._components.workers[role]
                outputs = await scorer.forward(rows)
                for row, output in zip(rows, outputs, strict=True):
                    row.arrays[role] = output

    async def learn(self, groups: Sequence[Group]) -> None:
        """Prepare the rows and take an optimizer step on each mini-batch, normalized over all of it."""
        progress, components = self._progress, self._components
        learner, pretraining = components.learner, components.pretraining
        with progress.timed("prepare"):
            rows = learner.prepare(groups)
            if not rows:
                raise RunError(f"step {progress.step + 1}: the learner prepared no rows to train on")
            if not all(isinstance(row, Row) for row in rows):
                raise learner.wrong_return(learner.prepare, f"{rows!r:.60}, which must be a list of Row")
            progress.record |= learner.metrics(rows)
            text = [] if pretraining is None else await pretraining.next()
        laws = components.laws
        progress.record |= {} if laws is None else laws.of_rows(rows, groups)
        logged: list[dict[str, float]] = []
        with progress.timed("learn"):
            role = learner.roles["actor"]
            is_measured = role.head == "lm" and not role.frozen_steps and self._steps >= MEASURED_STEP
            if progress.step == 0 and is_measured:
                await self._measure_movement(rows)
            for row in rows:
                row.is_on_policy = row.versions == (progress.step,)
            for _ in range(learner.config.update_epochs):
                minibatches = split_minibatches(rows, learner.config.minibatches)
                for batch, batch_text in zip(minibatches, deal_out(text, len(minibatches)), strict=True):
                    logged.append(await self.optimizer_step(batch, batch_text, is_first=not logged))
                    for row in rows:
                        row.is_on_policy = False
            if progress.step == MEASURED_STEP - 1:
                await self._measure_movement(rows)
        progress.record |= {} if laws is None else laws.of_update(rows, groups)
        progress.record |= aggregate_steps(logged) | token_counts(rows, text, learner.config.update_epochs)
        progress.max_mismatch = max(progress.max_mismatch, progress.record.get("mismatch/max", 0.0))
        progress.tokens["trained"] += progress.record["tokens/trained"]
        learner.end_step(rows)

    async def _measure_movement(self, rows: Sequence[Row]) -> None:
        """Before the first step: store the log-probabilities of some of its rows. After the tenth: record by how
        much they differ on average (`policy/movement`), unless the warm-up lasts longer. A run that was resumed in
        between records nothing."""
        import numpy as np

        progress, actor, config = self._progress, self._components.workers["actor"], self._components.learner.config
        if progress.step == 0:
            self._measured = copy.deepcopy(list(rows[:MEASURED_ROWS]))  # training changes them
            self._first = await actor.forward(self._measured)
        elif self._measured and config.lr and progress.optimizer_steps >= config.warmup_steps:
            pairs = zip(await actor.forward(self._measured), self._first, strict=True)
            weights = np.concatenate([row.loss_weights != 0 for row in self._measured])
            differences = np.abs(np.concatenate([last - first for last, first in pairs]))
            progress.record["policy/movement"] = float((differences * weights).sum() / max(1, weights.sum()))

    async def optimizer_step(
        self, rows: Sequence[Row], text: Sequence[Row], *, is_first: bool = False
    ) -> dict[str, float]:
        """Take one optimizer step of every trained role; the policy is also trained on `text`. Returns their metrics:
        the policy's without a prefix, another role's with `ROLE/`."""
        components, progress = self._components, self._progress
        sampling, sync = components.sampling, components.sync
        logged: dict[str, float] = {}
        normalizers = components.learner.loss_normalizers([*rows, *text])
        for role, spec in components.learner.roles.items():
            if not spec.trained or progress.step < spec.frozen_steps:
                continue
            lr = learning_rate(
                self._role_configs.get(role, self._components.learner.config), progress.optimizer_steps, self._steps
            )
            worker, start = components.workers[role], time.monotonic()
            role_rows = [*rows, *text] if role == "actor" else rows
            metrics = await worker.accumulate(role_rows, normalizers)
            if role == "actor":
                for row, outputs in await worker.accumulated_outputs():
                    if row.first_outputs is None:
                        row.first_outputs, row.entropies, row.pushes = outputs
                    row.last_outputs = outputs[0]
                if is_first and components.laws is not None:
                    difference = None if sync is None else sync.difference
                    progress.record |= components.laws.of_first_pass(role_rows, difference)
            if role == "actor" and sync is not None:
                samples_all_tokens = sampling.top_p == 1 and not sampling.top_k  # else the sampler renormalizes
                # Before the update's first optimizer step, sampler and trainer must be the same policy.
                sync.check_samples(sampling_difference(rows) if samples_all_tokens else None)
            metrics |= await worker.step(lr) | {"lr": lr}
            flops, seconds = worker.info.flops(role_rows), time.monotonic() - start
            metrics |= computing_metrics(flops, worker.info.peak_flops, worker.settings.ranks, seconds)
            prefix = "" if role == "actor" else f"{role}/"
            logged |= {f"{prefix}{name}": value for name, value in metrics.items()}
        progress.optimizer_steps += 1
        return logged


def sampling_difference(rows: Sequence[Row]) -> float | None:
    """The mean absolute difference, in nats, of the trainer's log-probabilities from the sampler's, over the tokens
    that the weights of the last pass sampled; None if there are none."""
    import numpy as np

    pairs = [(row.last_outputs, row.old_logprobs) for row in rows if row.is_on_policy and row.last_outputs is not None]
    differences = [np.abs(outputs - sampled)[np.isfinite(sampled)] for outputs, sampled in pairs]
    return float(np.concatenate(differences).mean(dtype=np.float64)) if sum(map(len, differences)) else None


def split_minibatches(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Split rows into at most `count` consecutive mini-batches with about as many microbatch keys each; rows with the
    same key stay together."""
    keys = list(dict.fromkeys(row.microbatch_key for row in rows))
    count = min(count, len(keys))
    batch_of = {key: index * count // len(keys) for index, key in enumerate(keys)}
    return [[row for row in rows if batch_of[row.microbatch_key] == index] for index in range(count)]


def deal_out(rows: Sequence[Row], n_steps: int) -> list[list[Row]]:
    """Deal rows of pre-training text out to optimizer steps, as evenly as their number allows."""
    return [list(rows[index::n_steps]) for index in range(n_steps)]


def fit_steps(stage: StageConfig, n_tasks: int | None, note: Callable[[str], None]) -> None:
    """Make the steps of a stage on `n_tasks` training tasks smaller if they are too few for
    `rollout.min_steps_per_epoch`; then `note` is called."""
    rollout = stage.rollout
    if not n_tasks or math.ceil(n_tasks / rollout.tasks_per_step) >= rollout.min_steps_per_epoch:
        return
    size = max(1, n_tasks // rollout.min_steps_per_epoch)
    note(
        f"{n_tasks} training tasks are fewer than {rollout.min_steps_per_epoch} steps of {rollout.tasks_per_step}: "
        f"rollout.tasks_per_step={size} for this run; set it to choose another size"
    )
    stage.rollout = rollout.model_copy(update={"tasks_per_step": size})


def steps_of(stage: StageConfig, n_tasks: int | None) -> int:
    """The training steps of a stage on `n_tasks` training tasks (None: an endless set): its `steps`, or as many as its
    `epochs` need, rounded up."""
    if stage.epochs is None:
        assert stage.steps is not None, "a stage has one of the two"
        return stage.steps
    if n_tasks is None:
        raise ConfigError("epochs are passes over the training tasks, which have no end here: set steps")
    return max(1, math.ceil(stage.epochs * n_tasks / stage.rollout.tasks_per_step))


def evaluation_interval(stage: StageConfig, n_tasks: int | None) -> int:
    """The training steps between evaluations, of a stage on `n_tasks` training tasks; 0: no evaluation."""
    if stage.eval.every != "epoch":
        return stage.eval.every
    if n_tasks is None:
        raise ConfigError("eval.every=epoch counts passes over the training tasks, which have no end here: set steps")
    return math.ceil(n_tasks / stage.rollout.tasks_per_step)


def learning_rate(config: LearnerConfig, optimizer_step: int, training_steps: int) -> float:
    """The learning rate of optimizer step `optimizer_step` (from 0) in a stage of `training_steps`."""
    total = training_steps * config.update_epochs * config.minibatches
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
    if optimizer_step < warmup:
        return config.lr * (optimizer_step + 1) / warmup
    if config.lr_schedule == "constant":
        return config.lr
    fraction = min(1.0, (optimizer_step - warmup) / max(1, total - warmup))
    decay = 1 - fraction if config.lr_schedule == "linear" else (1 + math.cos(math.pi * fraction)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * decay)


def aggregate_steps(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several optimizer steps as one record: the mean of each over the steps that have it, the maximum
    if its name ends in `/max`, the minimum if in `/min`."""
    return merge_metrics([{name: (value, 1.0) for name, value in step.items()} for step in logged])
