"""Evaluation on held-out tasks: the same tasks every time, by the same runner that trains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from envgym.config.schema import EvalConfig
from envgym.engine import SamplingParams
from envgym.env import EnvSpec
from envgym.errors import EnvgymError, RunError
from envgym.learner import Learner
from envgym.rollout.runner import SamplingPlan
from envgym.tasks.task_set import tasks_at
from envgym.types import Episode, Group, SeedScope, Task, number_rows
from envgym.workers.group import WorkerGroup

from .result import result_of, score_warning

Scorer = Callable[[Sequence[Group]], Awaitable[None]]
RunGroups = Callable[[Sequence[Task], SamplingPlan], Awaitable[list[Group]]]


def check_held_out(spec: EnvSpec, *, required: bool) -> bool:
    """True if the environment has held-out tasks. Raises `EnvgymError` if it has none and they are `required`."""
    try:
        exists = spec.tasks("test").size != 0
    except EnvgymError:
        if required:
            raise
        return False
    if required and not exists:
        raise RunError(f"environment {spec.id} has no held-out tasks: set eval.every=0 to train without")
    return exists


class HeldOut:
    """The first `config.tasks` tasks of the environment's test split, on which a policy is evaluated."""

    def __init__(
        self,
        run_groups: RunGroups,
        spec: EnvSpec,
        sampling: SamplingParams,
        config: EvalConfig,
        seed_scope: Callable[[int], SeedScope],
    ) -> None:
        """`seed_scope` is that of evaluations with so many episodes per task."""
        self._run_groups = run_groups
        self._seed_scope = seed_scope
        self._spec = spec
        self._sampling = sampling if config.temperature is None else replace(sampling, temperature=config.temperature)
        self._config = config
        self._tasks: list[Task] = []
        self.episodes: list[Episode] = []
        """The episodes that the policy sampled; the caller empties it."""
        self.warning = ""
        """The warning about the latest result, or "" (`score_warning`)."""

    async def tasks(self) -> list[Task]:
        if not self._tasks:
            test = self._spec.tasks("test")
            check_held_out(self._spec, required=True)
            count = self._config.tasks if test.size is None else min(self._config.tasks, test.size)
            self._tasks = await tasks_at(test, range(count))
        return self._tasks

    async def evaluate_sampled(self) -> dict[str, Any]:
        """Evaluate at `config.temperature`, with `config.samples` episodes per task."""
        samples = self._config.samples
        plan = SamplingPlan("eval", self._sampling, samples, self._seed_scope(samples))
        groups = await self._run_groups(await self.tasks(), plan)
        self.warning = score_warning(self._spec, groups)
        self.episodes += [episode for group in groups for episode in group.episodes]
        return result_of(groups)

    async def evaluate_greedily(self) -> dict[str, Any]:
        """Evaluate by greedy sampling (the most likely token), with one episode per task."""
        sampling = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
        plan = SamplingPlan("eval-greedy", sampling, 1, self._seed_scope(1))
        groups = await self._run_groups(await self.tasks(), plan)
        self.episodes += [episode for group in groups for episode in group.episodes]
        return {**result_of(groups), "greedy": True}

    async def evaluate_recorded(self, learner: Learner, actor: WorkerGroup, score: Scorer) -> dict[str, Any]:
        """The learner's metrics on held-out recorded episodes, from the actor's outputs; `score` adds those of other
        roles."""
        plan = SamplingPlan("eval", self._sampling, self._spec.recordings_per_task)
        groups = [
            replace(g, episodes=[e for e in g.episodes if e.is_counted])
            for g in await self._run_groups(await self.tasks(), plan)
        ]
        complete = number_rows([group for group in groups if len(group.episodes) == plan.samples])
        await score(complete)
        rows = learner.prepare(complete)
        return {**learner.evaluate(rows, await actor.forward(rows)), "n_tasks": len(complete)}
