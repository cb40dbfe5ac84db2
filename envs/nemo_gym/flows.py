"""The two flows of NeMo-Gym's resources servers: what is said to them in an episode, and what their answers come to."""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from envgym import responses
from envgym.env import StepResult
from envgym.errors import InvalidOutcome, did_you_mean
from envgym.types import Action, Message, Observation, StopReason, Task, TextPart, ToolCall, ToolSpec, as_messages

from . import rows
from .protocol import number, void_kind
from .server import Session

PASSING = ("transport_", "provider_", "session_", "judge_failed")
"""How kinds of failure begin that another try may not meet."""


class Play(ABC):
    """An episode in one of the flows."""

    def __init__(self, session: Session, task: Task, *, max_turns: int, max_chars: int) -> None:
        self.session, self.task = session, task
        self.max_turns, self.max_chars = max_turns, max_chars
        self.row = dict(task.fields)
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in rows.tools(self.row)}
        self.turns = 0

    @abstractmethod
    async def begin(self) -> Observation:
        """Open the session; what the policy sees first."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer a turn of the policy."""

    async def close(self) -> None:
        await self.session.close()

    def opening(self, *more: Message) -> Observation:
        return Observation((*as_messages(self.task.prompt), *more), tools=tuple(self.tools.values()))

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A tool's result as the policy is told of it."""
        if len(text) > self.max_chars:
            text = f"{text[: self.max_chars]}\n[cut here: {len(text)} characters in all]"
        return Message("tool", (TextPart(text),), tool_call_id=call_id, name=name[:64])

    def response(self, output: list[dict[str, Any]], action: Action) -> dict[str, Any]:
        """What the policy has said, as the server expects it from its own agents."""
        params = self.row[rows.PARAMS]
        return responses.response(
            output,
            tools=rows.offered(self.row),
            tool_choice=params.get("tool_choice") or "auto",
            parallel_tool_calls=params.get("parallel_tool_calls") is not False,
            cut=action.stop_reason is StopReason.LENGTH,
        )


class ToolsFlow(Play):
    """Seed, call, verify."""

    def __init__(self, session: Session, task: Task, **limits: int) -> None:
        super().__init__(session, task, **limits)
        self._said: list[dict[str, Any]] = []
        self._counts = {"tool_calls": 0, "tool_malformed": 0, "tool_errors": 0}

    async def begin(self) -> Observation:
        await self.session.ask("seed_session", self.row)
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        self._said += responses.output_items(_spoken(action))
        cut = action.stop_reason is StopReason.LENGTH
        results = [] if cut else [await self._result(call) for call in action.tool_calls]
        if results and self.turns < self.max_turns:
            return results, 0.0, False, False, {"metrics": dict(self._counts)}
        verdict = await self.session.ask("verify", {**self.row, "response": self.response(self._said, action)})
        reward = _verdict(verdict, "verify")
        info = {"answer": action.text.strip() or None, "metrics": {**self._counts, **_extras(verdict, self.row)}}
        return results, reward, not results, bool(results), info

    async def _result(self, call: ToolCall) -> Message:
        self._counts["tool_calls"] += 1
        if call.error or call.name not in self.tools:
            self._counts["tool_malformed"] += 1
            text = call.error or f"there is no tool {call.name[:60]!r}.{did_you_mean(call.name, self.tools)}"
            # Of a call that cannot be read nothing but its text is told to the server, so neither is this.
            return self._told(call, f"Error: {text}", heard=not call.error)
        status, text = await self.session.post(call.name, call.arguments)
        self._counts["tool_errors"] += status >= 400
        return self._told(call, text)

    def _told(self, call: ToolCall, text: str, *, heard: bool = True) -> Message:
        message = self.result(call.id, call.name, text)
        if heard:
            self._said.append(responses.result_item(message))
        return message


class GymnasiumFlow(Play):
    """Reset, and a step for each response. Tools are called by the server, which reads them from the response."""

    def __init__(self, session: Session, task: Task, **limits: int) -> None:
        super().__init__(session, task, **limits)
        self._closes = self._idempotent = False

    async def begin(self) -> Observation:
        answer = await self.session.ask("reset", self.row)
        info = _info(answer, "reset")
        self._closes = info.get("supports_explicit_close") is True
        self._idempotent = info.get("supports_step_idempotency") is True
        return self.opening(*_observed(answer, "reset"))

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        spoken = _spoken(action)
        body = {**self.row, "response": self.response(responses.output_items(spoken), action)}
        if self._idempotent:
            body["_ng_step_request_id"] = uuid.uuid4().hex
        answer = await self.session.ask("step", body, repeatable=self._idempotent)
        info = _info(answer, "step")
        reward, ends = _verdict(answer, "step"), answer.get("terminated") is True
        metrics = _extras({**info, **answer}, self.row)
        said = [*self._results(info, spoken), *_observed(answer, "step")]
        cut = answer.get("truncated") is True or (not ends and self.turns >= self.max_turns)
        return said, reward, ends, cut, {"answer": action.text.strip() or None, "metrics": metrics}

    def _results(self, info: Mapping[str, Any], spoken: Message) -> list[Message]:
        """What the server's tools answered, and what is wrong with calls that never reached it."""
        names = {call.id: call.name for call in spoken.tool_calls}
        unread = [call for call in spoken.tool_calls if call.error]
        results = [self.result(call.id, call.name, f"Error: {call.error}") for call in unread]
        for output in info.get("tool_outputs") or ():
            if not isinstance(output, Mapping) or not isinstance(output.get("output"), str):
                raise InvalidOutcome("server_protocol", f"the server's tool_outputs hold {output!r:.80}")
            id = str(output.get("call_id"))
            results.append(self.result(id, names.get(id, ""), output["output"]))
        return results

    async def close(self) -> None:
        try:
            if self._closes:
                with contextlib.suppress(InvalidOutcome):  # the episode is over, whatever the server makes of that
                    await self.session.ask("close", {})
        finally:
            await super().close()


def _spoken(action: Action) -> Message:
    """The policy's turn as a message. Where a call cannot be read, its text holds all there is."""
    whole = action.content is None or any(call.error for call in action.tool_calls)
    return Message("assistant", (TextPart(action.text if whole else str(action.content)),), action.tool_calls)


def _verdict(answer: Mapping[str, Any], route: str) -> float:
    """The reward in an answer. Raises `InvalidOutcome` where there is none, or the server says that it is void."""
    if (kind := void_kind(answer)) is not None:
        said = answer.get("failure_reason") or answer.get("_ng_failure_judge_error")
        reason = " ".join(str(said or "the server says that it counts for nothing").split())
        passes = kind.startswith(PASSING) and not answer.get("_ng_failure_terminal")
        raise InvalidOutcome(kind, f"/{route}: {reason[:300]}", retryable=passes)
    reward = number(answer.get("reward"))
    if reward is None:
        raise InvalidOutcome("server_protocol", f"/{route} answered with the reward {answer.get('reward')!r:.60}")
    return reward


def _extras(answer: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in an answer that are neither the reward nor the row's own, which servers send back."""
    components = answer.get("reward_components")
    parts = {f"reward_{name}": value for name, value in components.items()} if isinstance(components, Mapping) else {}
    own = {"reward", "mask_sample", "terminated", "truncated", "supports_explicit_close", "supports_step_idempotency"}
    numbers = {str(name): number(value) for name, value in {**answer, **parts}.items()}
    return {name: n for name, n in numbers.items() if n is not None and name not in own and name not in row}


def _info(answer: Mapping[str, Any], route: str) -> Mapping[str, Any]:
    info = answer.get("info") or {}
    if not isinstance(info, Mapping):
        raise InvalidOutcome("server_protocol", f"/{route} answered with the info {info!r:.60}")
    return info


def _observed(answer: Mapping[str, Any], route: str) -> list[Message]:
    observation = answer.get("observation")
    if observation is not None and not isinstance(observation, str):
        raise InvalidOutcome("server_protocol", f"/{route} answered with the observation {observation!r:.60}")
    return [Message.of("user", observation)] if observation else []
