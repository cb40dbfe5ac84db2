"""Episodes that a check plays from scripts, with a record of each, so that two can be compared."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from envgym.env import CheckedEnv, EnvSpec
from envgym.errors import CallTimeout, InvalidOutcome, InvalidStep, ResetNeeded
from envgym.processes import cancellation
from envgym.processes.deadline import Deadline, call_in_time
from envgym.rollout.runner import play_episode
from envgym.rollout.scripted import PlayedTurn, Script, ScriptedEpisode
from envgym.types import Action, Episode, Observation, Task, observed_messages

T = TypeVar("T")
Around = Callable[[], AbstractAsyncContextManager[Any]]
"""Entered for each call of an environment."""

CALL_SECONDS = 10.0
"""Seconds a reset or a step may take here; see `call_limit`."""
CLOSE_SECONDS = 5.0
EPISODE_SECONDS = 300.0
"""Seconds an episode may take, and a judgement of several."""


class Played(ScriptedEpisode):
    """One episode, or what there was of it when something went wrong. Other episodes may be played beside it."""

    result: Episode
    """The runner's record, with its outcome."""

    def __init__(
        self, spec: EnvSpec, task: Task, seed: int, script: Script, name: str = "", around: Around = nullcontext
    ) -> None:
        super().__init__(task, seed, script)
        self.spec = spec
        self.script = name
        self.last_call = "reset"
        """The method that was called last."""
        self.seconds: list[float] = []
        """Those of the reset and of each turn."""
        self.odd_flag = ""
        self.close_hangs = False
        """Its close took longer than `close_limit`."""
        self._limit = call_limit(spec)
        self.close_limit = min(CLOSE_SECONDS, self._limit)
        self._around = around

    async def play_out(self) -> None:
        """Play it on a new instance."""
        self.result = await play_episode(self.spec, self.task, self.play, EPISODE_SECONDS)
        self.result.id = f"check/{self.task.key}:{self.script}"

    async def reset(self, env: CheckedEnv) -> Observation:
        self._watch_close(env)
        return await self._call("reset", super().reset(env))

    async def step(self, env: CheckedEnv, action: Action) -> PlayedTurn:
        await asyncio.sleep(0)  # methods that never wait would else be played one episode after the other
        turn = await self._call("step", super().step(env, action))
        self.odd_flag = env.odd_flag
        return turn

    async def _call(self, method: str, work: Coroutine[Any, Any, T]) -> T:
        """Await a call within the limit."""
        self.last_call = method
        async with self._around():
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
        """True if a call took longer than it may."""
        goes_on = self.result.outcome.reason == "does_not_end"
        return goes_on or self.close_hangs or isinstance(self.error, CallTimeout)

    @property
    def wrong_types(self) -> bool:
        """True if it stopped because something was returned that is not Gymnasium's."""
        return isinstance(self.error, InvalidStep | ResetNeeded)

    @property
    def no_service(self) -> bool:
        """True if it stopped because the environment could not judge the policy."""
        return isinstance(self.error, InvalidOutcome)

    def problem(self) -> str:
        """The failure as part of a sentence."""
        reason, text = self.result.outcome.reason, " ".join(self.result.outcome.message.split())
        if reason == "does_not_end":
            grace = cancellation.GRACE_SECONDS
            return f"{self.last_call} goes on {grace:g} s after it was cancelled, which was after {self._limit:g} s"
        if reason != "environment" or self.no_service:
            return text
        return f"{self.last_call} raised {text}"

    def record(self) -> list[dict[str, Any]]:
        """All that the environment returned: an entry for the reset and one for each turn."""
        entries: list[dict[str, Any]] = [] if self.first is None else [{"observation": self.first}]
        for turn in self.turns:
            entries.append(
                {
                    "observation": turn.observation,
                    "reward": turn.reward,
                    "terminated": turn.terminated,
                    "truncated": turn.truncated,
                    "score": turn.info.get("score"),
                }
            )
        return entries if self.error is None else [*entries, {"error": type(self.error).__name__}]

    def _watch_close(self, env: CheckedEnv) -> None:
        """Limit the close, and note whether it takes longer: to the runner that makes no difference."""
        close = env.close

        async def watched() -> None:
            self.close_hangs, deadline = True, Deadline(self.close_limit)
            try:
                async with deadline:
                    await close()
            finally:
                self.close_hangs = deadline.expired()

        env.close = watched  # type: ignore[method-assign]


def text_of(observation: Observation) -> str:
    """Everything the policy reads of an observation, tools included."""
    tools = [f"{tool.name} {tool.description} {tool.parameters}" for tool in observation.tools]
    return "\n".join([*tools, *(message.text for message in observed_messages(observation))])


def call_limit(spec: EnvSpec) -> float:
    """Seconds a reset or a step may take here. One that waits for a model may take as long as in a run."""
    limit = spec.config.call_timeout
    return limit if any(part.services for part in (spec, *spec.parts())) else min(CALL_SECONDS, limit)


# -- comparison -------------------------------------------------------------------------------------------


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """The first difference between two records by `Played.record`, as a sentence; empty where there is none."""
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        where = f"turn {number}" if number else "the first observation"
        for key in dict.fromkeys([*left, *right]):
            if key not in left or key not in right:
                return f"{where}: an error in one of them ({left.get('error') or right.get('error')})"
            if not _same(left[key], right[key]):
                what = where if key == "observation" and not number else f"{key} of {where}"
                return f"{what}: {_side_by_side(_text(left[key]), _text(right[key]))}"
    return f"{len(one) - 1} turns or {len(other) - 1}" if len(one) != len(other) else ""


def _side_by_side(one: str, other: str) -> str:
    """Two texts from a little before where they part."""
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, start - 20)
    return f"{one[start : start + 60]!r} or {other[start : start + 60]!r}"


def _text(value: Any) -> str:
    return text_of(value) if isinstance(value, Observation) else str(value)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):  # batches of a reward model round differently
        return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
    return bool(left == right)
