"""Scripted episodes of the checks, with a record of each for comparison."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import zip_longest
from typing import Any, TypeVar

from envgym.env import CheckedEnv, EnvSpec
from envgym.errors import CallTimeout, InvalidOutcome, InvalidStep, ResetNeeded
from envgym.processes import cancellation
from envgym.processes.cancellation import Deadline, call_in_time
from envgym.rollout.episode import run_episode
from envgym.rollout.scripted import PlayedTurn, Script, ScriptedEpisode
from envgym.types import Action, Episode, Observation, Task, observed_messages

T = TypeVar("T")
CallContext = Callable[[], AbstractAsyncContextManager[Any]]
"""A context entered for each call of an environment."""

CALL_SECONDS = 10.0
"""Time limit of a reset or a step in checks (`call_limit`)."""
CLOSE_SECONDS = 5.0
EPISODE_SECONDS = 300.0
"""Time limit of an episode, and of judging a group."""


class CheckedEpisode(ScriptedEpisode):
    """One episode, up to its first error if it has one. Several may run concurrently."""

    result: Episode
    """The runner's record, with its outcome."""

    def __init__(
        self,
        spec: EnvSpec,
        task: Task,
        seed: int,
        script: Script,
        script_name: str = "",
        call_context: CallContext = nullcontext,
    ) -> None:
        super().__init__(task, seed, script)
        self.spec = spec
        self.script_name = script_name
        self.last_call = "reset"
        """The last called method."""
        self.seconds: list[float] = []
        """The duration of the reset and of each turn."""
        self.odd_flag = ""
        self.close_hangs = False
        """True if close took longer than `close_limit`."""
        self._limit = call_limit(spec)
        self.close_limit = min(CLOSE_SECONDS, self._limit)
        self._call_context = call_context

    async def play_out(self) -> None:
        """Run it on a new instance."""
        self.result = await run_episode(self.spec.spec_for(self.task), self.task, self.play, EPISODE_SECONDS)
        self.result.id = f"check/{self.task.key}:{self.script_name}"

    async def reset(self, env: CheckedEnv) -> Observation:
        self._watch_close(env)
        return await self._call("reset", super().reset(env))

    async def step(self, env: CheckedEnv, action: Action) -> PlayedTurn:
        await asyncio.sleep(0)  # without this, episodes of methods that never await would run one after the other
        turn = await self._call("step", super().step(env, action))
        self.odd_flag = env.odd_flag
        return turn

    async def _call(self, method: str, work: Coroutine[Any, Any, T]) -> T:
        """Await a call within the limit and the call context; record its duration in `seconds`."""
        self.last_call = method
        async with self._call_context():
            start = time.monotonic()
            try:
                return await call_in_time(work, self._limit, method)
            finally:
                self.seconds.append(time.monotonic() - start)

    @property
    def failed(self) -> bool:
        return self.result.failed

    @property
    def hangs(self) -> bool:
        """True if a call exceeded its time limit."""
        never_ends = self.result.outcome.reason == "does_not_end"
        return never_ends or self.close_hangs or isinstance(self.error, CallTimeout)

    @property
    def wrong_types(self) -> bool:
        """True if it stopped because a return value had not Gymnasium's types."""
        return isinstance(self.error, InvalidStep | ResetNeeded)

    @property
    def no_service(self) -> bool:
        """True if it stopped because the environment could not score the policy (`InvalidOutcome`)."""
        return isinstance(self.error, InvalidOutcome)

    def problem(self) -> str:
        """The failure as part of a sentence."""
        reason, text = self.result.outcome.reason, " ".join(self.result.outcome.message.split())
        if reason == "does_not_end":
            grace = cancellation.GRACE_SECONDS
            return f"{self.last_call} still runs {grace:g} s after it was cancelled, at {self._limit:g} s"
        if reason != "environment" or self.no_service:
            return text
        return f"{self.last_call} raised {text}"

    def record(self) -> list[dict[str, Any]]:
        """All return values of the environment: an entry for the reset and one per turn."""
        entries = [] if self.opening is None else [{"observation": self.opening}]
        entries += map(entry_of, self.turns)
        return entries if self.error is None else [*entries, {"error": type(self.error).__name__}]

    def _watch_close(self, env: CheckedEnv) -> None:
        """Give close a time limit, and record a timeout, which the runner ignores."""
        close = env.close

        async def close_in_time() -> None:
            self.close_hangs, deadline = True, Deadline(self.close_limit)
            try:
                async with deadline:
                    await close()
            finally:
                self.close_hangs = deadline.expired()

        env.close = close_in_time  # type: ignore[method-assign]


def entry_of(turn: PlayedTurn) -> dict[str, Any]:
    """The return values of a step in a record."""
    values = {name: getattr(turn, name) for name in ("observation", "reward", "terminated", "truncated")}
    return {**values, "score": turn.info.get("score")}


def text_of(observation: Observation) -> str:
    """The text of an observation that the policy reads, tools included."""
    tools = [f"{tool.name} {tool.description} {tool.parameters}" for tool in observation.tools]
    return "\n".join([*tools, *(message.printed for message in observed_messages(observation))])


def call_limit(spec: EnvSpec) -> float:
    """Time limit of a reset or a step; with services (a model) or programs it is the same as in a run."""
    limit = spec.config.call_timeout
    is_slow = any(part.services or part.starts_programs for part in (spec, *spec.parts()))
    return limit if is_slow else min(CALL_SECONDS, limit)


# -- comparison -------------------------------------------------------------------------------------------


def difference(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> str:
    """The first difference between two records (`CheckedEpisode.record`) as a sentence, or ""."""
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        place = f"turn {number}" if number else "the first observation"
        for key in dict.fromkeys([*a, *b]):
            if key not in a or key not in b:
                return f"{place}: an error in one of them ({a.get('error') or b.get('error')})"
            if not _is_equal(a[key], b[key]):
                label = place if key == "observation" and not number else f"{key} of {place}"
                return f"{label}: {_side_by_side(_text(a[key]), _text(b[key]))}"
    return f"{len(first) - 1} turns or {len(second) - 1}" if len(first) != len(second) else ""


def _side_by_side(first: str, second: str) -> str:
    """Both texts from shortly before their first difference."""
    place = next((i for i, (a, b) in enumerate(zip_longest(first, second)) if a != b), len(first))
    start = max(0, place - 20)
    return f"{first[start : start + 60]!r} or {second[start : start + 60]!r}"


def _text(value: Any) -> str:
    return text_of(value) if isinstance(value, Observation) else str(value)


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):  # batches of a reward model round differently
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return bool(a == b)
