"""Episodes played from scripts in place of a policy, with a record of each, so that two can be compared."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from envgym.engine import Generation
from envgym.env import CheckedEnv, EnvSpec, Info
from envgym.env.checked import shown
from envgym.errors import CallTimeout, InvalidOutcome, InvalidStep, ResetNeeded
from envgym.loading import users_line
from envgym.processes import cancellation
from envgym.processes.deadline import Deadline
from envgym.rollout.runner import apply_judgement, as_judgement
from envgym.rollout.transcript import Transcript
from envgym.types import Action, Episode, Message, Observation, Outcome, Task, float_array, int_array

Script = Callable[[int, Observation], Action | None]
"""The action for turn k (from 0) given what was just observed; None where it has nothing more to do."""

CALL_SECONDS = 10.0
"""Seconds a reset or a step may take here; see `call_limit`."""
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class Turn:
    """One action and the environment's answer to it."""

    action: Action
    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Info
    seconds: float


@dataclass(slots=True)
class Played:
    """One episode, or what there was of it when a call raised `error`, in the method `failed_in`."""

    task: Task
    seed: int
    script: str
    first: Observation | None = None
    info: Info = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    error: BaseException | None = None
    failed_in: str = ""
    close_error: BaseException | None = None
    reset_seconds: float = 0.0
    odd_flag: str = ""
    """A value of `terminated` or `truncated` that is no truth value, as part of a sentence."""

    @property
    def ended(self) -> bool:
        """True if the environment ended it."""
        return bool(self.turns) and (self.turns[-1].terminated or self.turns[-1].truncated)

    @property
    def hangs(self) -> bool:
        """True if a call took longer than it may."""
        return isinstance(self.error, CallTimeout) or isinstance(self.close_error, CallTimeout)

    @property
    def wrong_types(self) -> bool:
        """True if it stopped because something was returned that is not Gymnasium's."""
        return isinstance(self.error, InvalidStep | ResetNeeded)

    @property
    def no_service(self) -> bool:
        """True if it stopped because the environment could not judge the policy."""
        return isinstance(self.error, InvalidOutcome)

    def problem(self) -> str:
        """The error as part of a sentence."""
        if self.error is None:
            return ""
        if isinstance(self.error, InvalidStep | CallTimeout | InvalidOutcome):
            return f"{self.error}"
        where = f" ({own})" if (own := users_line(self.error)) else ""
        return f"{self.failed_in} raised {type(self.error).__name__}: {' '.join(str(self.error).split())[:200]}{where}"

    def record(self) -> list[dict[str, Any]]:
        """All that the environment returned, as plain data: an entry for the reset and one for each turn."""
        entries: list[dict[str, Any]] = [] if self.first is None else [{"observation": _plain(self.first)}]
        for turn in self.turns:
            entries.append(
                {
                    "observation": _plain(turn.observation),
                    "reward": turn.reward,
                    "terminated": turn.terminated,
                    "truncated": turn.truncated,
                    "score": turn.info.get("score"),
                }
            )
        return entries if self.error is None else [*entries, {"error": type(self.error).__name__}]

    def episode(self) -> Episode:
        """The episode as an agent would have written it down, with the bytes of the texts for tokens."""
        transcript = Transcript(None)
        transcript.begin([0])
        transcript.messages = list(messages_of(self.first or Observation()))
        for turn in self.turns:
            ids = int_array(turn.action.token_ids)
            transcript.record(Generation(ids, float_array([0.0] * len(ids)), turn.action.stop_reason, ()), 1.0)
            transcript.add_reward(turn.reward, turn.info)
            transcript.messages += [Message.of("assistant", turn.action.text), *messages_of(turn.observation)]
        outcome = Outcome.completed() if self.ended else Outcome.truncated("turns")
        episode = transcript.episode(self.task, outcome)
        episode.id, episode.seed = f"check/{self.task.key}:{self.script}", self.seed
        return episode


def messages_of(observation: Observation) -> tuple[Message, ...]:
    """An observation as messages."""
    return (Message.of("user", observation.text),) if observation.text is not None else observation.messages


def text_of(observation: Observation) -> str:
    """Everything the policy reads of an observation, tools included."""
    tools = [f"{tool.name} {tool.description} {tool.parameters}" for tool in observation.tools]
    return "\n".join([*tools, *(message.text for message in messages_of(observation))])


def action_of(turn: str | Message) -> Action:
    """A turn of the assistant as an action; its bytes stand for tokens."""
    message = turn if isinstance(turn, Message) else Message.of("assistant", turn)
    return Action(message.text, tuple(message.text.encode("utf-8", "replace")), message.tool_calls)


def call_limit(spec: EnvSpec) -> float:
    """Seconds a reset or a step may take here. One that waits for a model may take as long as in a run."""
    own = spec.config.call_timeout
    return own if any(part.services for part in (spec, *spec.parts())) else min(CALL_SECONDS, own)


class Player:
    """One episode in the making, call by call, so that several can be interleaved. An error ends it."""

    def __init__(self, spec: EnvSpec, task: Task, seed: int, script: Script, name: str) -> None:
        self.played = Played(task, seed, name)
        self._script = script
        self._limit = call_limit(spec)
        self._make = spec.of(task).make
        self._env: CheckedEnv | None = None

    async def begin(self, env: CheckedEnv | None = None) -> bool:
        """Reset a new instance, or `env`. Returns whether there is a turn to play."""
        played = self.played
        played.failed_in, start = "reset", time.monotonic()
        try:
            self._env = self._make() if env is None else env
            self._watch_flags(self._env)
            await self._env.acquire()  # waiting for a place is not the call's own time
            options = {"task": played.task}
            played.first, played.info = await self._call(self._env.reset(seed=played.seed, options=options))
        except BaseException as error:
            played.error = _of_environment(error)
        played.reset_seconds = time.monotonic() - start
        return played.error is None

    async def turn(self) -> bool:
        """Play a turn. Returns whether there is another."""
        assert self._env is not None
        played = self.played
        observation = played.turns[-1].observation if played.turns else played.first
        assert observation is not None
        action = self._script(len(played.turns), observation)
        if action is None:
            return False
        played.failed_in, start = "step", time.monotonic()
        try:
            observation, reward, terminated, truncated, info = await self._call(self._env.step(action))
        except BaseException as error:
            played.error = _of_environment(error)
            return False
        seconds = time.monotonic() - start
        played.turns.append(Turn(action, observation, reward, terminated, truncated, info, seconds))
        return not played.ended

    async def end(self) -> Played:
        """Close the instance."""
        if self._env is not None:
            self.played.failed_in = self.played.failed_in if self.played.error else "close"
            self._limit = min(CLOSE_SECONDS, self._limit)
            try:
                await self._call(self._env.close())
            except BaseException as error:
                self.played.close_error = _of_environment(error)
        return self.played

    async def rest(self, goes_on: bool) -> Played:
        """Play the turns there are, if it `goes_on`, and close the instance. Others may play in between."""
        while goes_on:
            await asyncio.sleep(0)  # methods that never wait would else be played one episode after the other
            goes_on = await self.turn()
        return await self.end()

    async def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call within the limit."""
        method = self.played.failed_in
        deadline = Deadline(self._limit)

        async def limited() -> Any:
            async with deadline:
                return await work

        try:
            return await cancellation.run_to_end(limited())
        except cancellation.StillRunning:
            grace = cancellation.GRACE_SECONDS
            raise CallTimeout(
                f"{method} goes on {grace:g} s after it was cancelled, which was after {self._limit:g} s"
            ) from None
        except TimeoutError:
            if not deadline.expired():
                raise
            raise CallTimeout(f"{method} took longer than {self._limit:g} s") from None

    def _watch_flags(self, checked: CheckedEnv) -> None:
        """Note flags that are no truth values: behind `CheckedEnv` they are already made into some."""
        if checked.env is checked:  # a remote one: its server has looked
            return
        step, played = checked.env.step, self.played

        def noted(result: Any) -> Any:
            if isinstance(result, tuple) and len(result) == 5:
                for name, flag in (("terminated", result[2]), ("truncated", result[3])):
                    if type(flag).__name__ not in ("bool", "bool_"):
                        played.odd_flag = f"step returned {shown(flag)} as {name}"
            return result

        async def awaited(result: Coroutine[Any, Any, Any]) -> Any:
            return noted(await result)

        def watched(action: Action) -> Any:
            result: Any = step(action)
            return awaited(result) if inspect.iscoroutine(result) else noted(result)

        watched.__name__ = "step"
        checked.env.step = watched  # type: ignore[method-assign]


def _of_environment(error: BaseException) -> BaseException:
    """`error`, where it is one of an episode. Raises what ends this process, or the check."""
    if isinstance(error, SystemExit | KeyboardInterrupt) or cancellation.is_shutdown(error):
        raise error
    return error


async def judged(spec: EnvSpec, task: Task, episodes: Sequence[Episode]) -> list[Episode]:
    """Let the environment judge the episodes of a task together, where it does. Returns those it could judge."""
    verdicts = await spec.of(task).score_group(task, episodes)
    if verdicts is None:
        return list(episodes)
    kept = []
    for episode, verdict in zip(episodes, map(as_judgement, verdicts), strict=True):
        if not isinstance(verdict, Exception):
            apply_judgement(episode, verdict)
            kept.append(episode)
    return kept


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


def _plain(observation: Observation) -> dict[str, Any]:
    """An observation as data that can be compared and pickled."""
    return {
        "messages": [message.as_dict() for message in observation.messages],
        "text": observation.text,
        "sampling": dict(observation.sampling or {}),
        "tools": [tool.as_dict() for tool in observation.tools],
    }


def _text(value: Any) -> str:
    if isinstance(value, dict) and "messages" in value:
        messages = "\n".join(message["content"] for message in value["messages"])
        return "\n".join(filter(None, [messages, value["text"], str(value["tools"] or "")]))
    return str(value)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):  # batches of a reward model round differently
        return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
    return bool(left == right)
