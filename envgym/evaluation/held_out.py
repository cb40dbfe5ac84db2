"""Evaluation on held-out tasks: the same tasks every time, by the same runner that trains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from envgym.config.schema import EvalConfig
from envgym.engine import SamplingParams
from envgym.env import EnvSpec
from envgym.errors import EnvgymError, RunError
from envgym.learner import Learner, Trajectory, trajectories
from envgym.rollout.runner import SamplingPlan
from envgym.tasks.cursor import tasks_at
from envgym.types import Group, Task
from envgym.workers.group import WorkerGroup

from .result import doubt_of, result_of

Scorer = Callable[[Sequence[Sequence[Trajectory]]], Awaitable[None]]
Player = Callable[[Sequence[Task], SamplingPlan], Awaitable[list[Group]]]


def has_held_out(spec: EnvSpec, *, needed: bool) -> bool:
    """True where there is something to evaluate on. Raises `EnvgymError` where it is `needed` and is not there."""
    try:
        is_there = spec.tasks("test").size != 0
    except EnvgymError:
        if needed:
            raise
        return False
    if needed and not is_there:
        raise RunError(f"environment {spec.id} has no held-out tasks: set eval.every=0 to train without")
    return is_there


class HeldOut:
    """The first `config.tasks` tasks of the environment's test split, and ways to evaluate a policy on them."""

    def __init__(self, play: Player, spec: EnvSpec, sampling: SamplingParams, config: EvalConfig) -> None:
        self._play = play
        self._spec = spec
        self._sampling = sampling
        self._config = config
        self._tasks: list[Task] = []
        self.doubt = ""
        """A sentence on what the latest score may not tell; see `doubt_of`."""

    async def tasks(self) -> list[Task]:
        if not self._tasks:
            test = self._spec.tasks("test")
            has_held_out(self._spec, needed=True)
            count = self._config.tasks if test.size is None else min(self._config.tasks, test.size)
            self._tasks = await tasks_at(test, range(count))
        return self._tasks

    async def sampled(self) -> dict[str, Any]:
        """At the training temperature, `config.samples` episodes a task."""
        groups = await self._play(await self.tasks(), SamplingPlan("eval", self._sampling, self._config.samples))
        self.doubt = doubt_of(self._spec, groups)
        return result_of(groups)

    async def greedily(self) -> dict[str, Any]:
        """The likeliest token at every place, one episode a task."""
        sampling = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
        groups = await self._play(await self.tasks(), SamplingPlan("eval-greedy", sampling, 1))
        return {**result_of(groups), "greedy": True}

    async def recorded(self, learner: Learner, actor: WorkerGroup, score: Scorer) -> dict[str, Any]:
        """The learner's metrics of held-out recorded episodes, from the actor's outputs for them; `score` adds those of
        the roles that score."""
        plan = SamplingPlan("eval", self._sampling, self._spec.recordings)
        played = [
            replace(g, episodes=[e for e in g.episodes if not e.failed])
            for g in await self._play(await self.tasks(), plan)
        ]
        groups = trajectories([group for group in played if len(group.episodes) == plan.samples])
        await score(groups)
        samples = learner.prepare(groups)
        return {**learner.evaluate(samples, await actor.forward(samples)), "n_tasks": len(groups)}
