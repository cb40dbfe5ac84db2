"""The update that a rollout brings: its samples scored, prepared and cut into optimizer steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgym.config.schema import StageConfig
from envgym.errors import ConfigError, RunError
from envgym.learner import LearnerConfig, TrainSample, Trajectory
from envgym.monitoring.metrics import computing_metrics, token_counts

from .checkpoints import Progress
from .components import Components
from .pretraining import spread

if TYPE_CHECKING:
    from envgym.learner import FloatArray


class Update:
    """Learns from a step's groups: scores their samples, prepares them and takes the optimizer steps they make up."""

    def __init__(self, components: Components, stage: StageConfig, progress: Progress, steps: int) -> None:
        self._components = components
        self._stage = stage
        self._progress = progress
        self._steps = steps
        self.first: dict[int, FloatArray] = {}
        self.last: dict[int, FloatArray] = {}
        """The trainer's log-probabilities [T] of this step's samples, by the `id` of the sample: at the first pass over
        it, and at the last."""

    async def score(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Let every role that scores (reference, critic) add its numbers to the samples that the learner will see."""
        samples = self._components.learner.samples_to_score(groups)
        roles = [role for role, spec in self._components.learner.roles.items() if spec.scored]
        if not roles:
            return
        with self._progress.timed("score"):
            for role in roles:
                scorer = self._components.apis.get(role) or self._components.workers[role]
                outputs = await scorer.forward(samples)
                for sample, output in zip(samples, outputs, strict=True):
                    sample.arrays[role] = output

    async def learn(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Prepare samples and take the optimizer steps they make up, each with normalizers over all of it."""
        progress, learner, pretraining = self._progress, self._components.learner, self._components.pretraining
        self.first, self.last = {}, {}
        with progress.timed("prepare"):
            samples = learner.prepare(groups)
            if not samples:
                raise RunError(f"step {progress.step + 1}: the learner found nothing to learn from")
            progress.record |= learner.metrics(samples)
            text = [] if pretraining is None else await pretraining.next()
        logged = []
        with progress.timed("learn"):
            for sample in samples:
                sample.is_on_policy = sample.versions == (progress.step,)
            for _ in range(learner.config.epochs):
                parts = cut(samples, learner.config.minibatches)
                for part, its_text in zip(parts, spread(text, len(parts)), strict=True):
                    logged.append(await self.take(part, its_text))
                    for sample in samples:
                        sample.is_on_policy = False  # the weights have moved on from those that sampled it
        progress.record |= aggregate_steps(logged) | token_counts(samples, text, learner.config.epochs)
        progress.max_mismatch = max(progress.max_mismatch, progress.record.get("mismatch/max", 0.0))
        progress.tokens["trained"] += progress.record["tokens/trained"]
        learner.on_step_end(progress.record)

    async def take(self, samples: Sequence[TrainSample], text: Sequence[TrainSample]) -> dict[str, float]:
        """One step of every trained role; the policy also learns from `text`. Returns what they log: the policy's
        numbers under their own names, another role's behind its name."""
        components, progress = self._components, self._progress
        sampling, sync = components.sampling, components.sync
        logged: dict[str, float] = {}
        normalizers = components.learner.loss_normalizers([*samples, *text])
        for role, spec in components.learner.roles.items():
            if not spec.trained or progress.step < spec.frozen_steps:
                continue
            lr = learning_rate(self._config_of(role), progress.optimizer_steps, self._steps)
            worker, started = components.workers[role], time.monotonic()
            learned = [*samples, *text] if role == "actor" else samples
            metrics = await worker.accumulate(learned, normalizers)
            if role == "actor" and components.learner.needs_policy_samples:
                logprobs = {id(sample): line for sample, line in await worker.accumulated_logprobs()}
                self.first, self.last = logprobs | self.first, self.last | logprobs
            whole = sampling.top_p == 1 and not sampling.top_k  # else they differ by the cut
            if role == "actor" and sync is not None and whole:
                # Before the first step of an update, sampler and trainer are the same policy, or a sync was lost.
                sync.check("this step's episodes", metrics.get("mismatch/mean_abs", 0.0))
            metrics |= await worker.step(lr) | {"lr": lr}
            flops, seconds = worker.info.flops(learned), time.monotonic() - started
            metrics |= computing_metrics(flops, worker.info.peak_flops, worker.settings.ranks, seconds)
            prefix = "" if role == "actor" else f"{role}/"
            logged |= {f"{prefix}{name}": value for name, value in metrics.items()}
        progress.optimizer_steps += 1
        return logged

    def _config_of(self, role: str) -> LearnerConfig:
        """The learner's settings as they hold for a role, which may have a learning rate of its own."""
        config, own = self._components.learner.config, self._stage.roles.get(role)
        return config if own is None or own.lr is None else config.model_copy(update={"lr": own.lr})


def cut(samples: Sequence[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Samples in `parts` consecutive pieces of about as many units each; a unit is never cut."""
    units = list(dict.fromkeys(sample.microbatch_key for sample in samples))
    parts = min(parts, len(units))
    piece = {unit: index * parts // len(units) for index, unit in enumerate(units)}
    return [[sample for sample in samples if piece[sample.microbatch_key] == index] for index in range(parts)]


def steps_of(stage: StageConfig, n_tasks: int | None) -> int:
    """Loop steps of a stage on a training split of `n_tasks` (None: without end); by `epochs` as many as pass so often
    over the tasks, where a step that is begun is taken whole."""
    if stage.epochs is None:
        assert stage.steps is not None, "a stage has one of the two"
        return stage.steps
    if n_tasks is None:
        raise ConfigError("epochs are passes over the training tasks, which have no end here: set steps")
    return max(1, math.ceil(stage.epochs * n_tasks / stage.rollout.tasks))


def learning_rate(config: LearnerConfig, optimizer_step: int, loop_steps: int) -> float:
    """The learning rate of the `optimizer_step`-th step (from 0) of a run of `loop_steps`."""
    total = loop_steps * config.epochs * config.minibatches
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
    if optimizer_step < warmup:
        return config.lr * (optimizer_step + 1) / warmup
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (optimizer_step - warmup) / max(1, total - warmup))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)


def aggregate_steps(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of several optimizer steps as one: the mean of each over the steps that have it, the largest of those
    whose names end in `/max`, the smallest of `/min`."""
    values: dict[str, list[float]] = {}
    for step in logged:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: _together(name, own) for name, own in values.items()}


def _together(name: str, values: Sequence[float]) -> float:
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return math.fsum(values) / len(values)
