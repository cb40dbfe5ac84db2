"""One episode on a server of NeMo-Gym's kind: what has been paid so far, and what a `Response` does in it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.env import CheckedEnv
from envgym.errors import InvalidOutcome, InvalidStep
from envgym.responses import Item, MalformedItem, call_of, messages_of
from envgym.types import Action, Observation, StopReason, Task, ToolCall


class Playing:
    """An instance in play. Rewards add up, as in an episode of ours; the last score and value of each metric stand.

    What the environment raises ends the episode without a reward: every later step, and `told`, raises it again.
    """

    def __init__(self, env: CheckedEnv, task: Task) -> None:
        self.task = task
        self.terminated = False
        self.truncated = False
        self.metrics: dict[str, float] = {}
        self.score: float | None = None
        self._env = env
        self._failure: Exception | None = None
        self._rewards: list[float] = []

    async def reset(self, seed: int) -> Observation:
        observation, _ = await self._env.reset(seed=seed, options={"task": self.task})
        return observation

    async def step(self, action: Action) -> tuple[Observation, float | None]:
        """What the environment says to an action, and what it pays for it."""
        if self._failure is not None:
            raise self._failure
        try:
            observation, reward, self.terminated, self.truncated, info = await self._env.step(action)
        except Exception as error:  # an environment may raise anything at all
            self._failure = error
            raise
        if reward is not None:
            self._rewards.append(reward)
        self.metrics |= info.get("metrics") or {}
        self.score = info.get("score", self.score)
        return observation, reward

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def reward(self) -> float:
        """What the episode earned. Raises what it failed of, and `InvalidOutcome` where nothing was paid: that is not a
        reward of zero, and NeMo-Gym has no word for it."""
        if self._failure is not None:
            raise self._failure
        if not self._rewards:
            raise InvalidOutcome("unjudged", "the environment has paid nothing, and so there is no reward")
        return sum(self._rewards)

    def told(self, row: Mapping[str, Any]) -> Item:
        """What is known at the end, beside `row`'s own fields: reward, score, metrics and how it ended."""
        score = {} if self.score is None else {"score": self.score}
        more = {**self.metrics, **score, "terminated": self.terminated, "truncated": not self.terminated}
        return {**{name: value for name, value in more.items() if name not in row}, "reward": self.reward}

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the episode is over: this changes nothing
            await self._env.close()


def action_of(response: Any) -> Action | None:
    """The policy's turn: what stands in a `Response` after the last result of a tool. None where it holds none, as
    where the policy had no token left. Raises `InvalidStep` for what is no `Response`."""
    output = response.get("output") if isinstance(response, Mapping) else None
    if isinstance(output, str) or not isinstance(output, Sequence):
        raise InvalidStep("a response is an object with a list `output`")
    items = [item for item in output if isinstance(item, Mapping)]
    starts = [at + 1 for at, item in enumerate(items) if not _is_policys(item)]
    items = items[max(starts, default=0) :]
    try:
        text = "".join(message.text for message in messages_of([i for i in items if i.get("type") != "function_call"]))
    except MalformedItem as error:
        raise InvalidStep(str(error)) from None
    calls = tuple(_call(item) for item in items if item.get("type") == "function_call")
    sampled = [item.get("generation_token_ids") for item in items]
    tokens = tuple(token for token_ids in sampled if isinstance(token_ids, list) for token in token_ids)
    cut = bool(response.get("incomplete_details"))
    if not items or (cut and not (text or calls or tokens)):
        return None
    stop = StopReason.LENGTH if cut else StopReason.STOP
    return Action(text, tokens, calls, stop, text if calls else None)


def _is_policys(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


def _call(item: Mapping[str, Any]) -> ToolCall:
    try:
        return call_of(item)
    except MalformedItem as error:  # the environment tells the policy so
        return ToolCall(str(item.get("call_id") or ""), str(item.get("name") or ""), error=str(error))


def spoken(observation: Observation) -> str:
    """An observation as one text."""
    if observation.text is not None:
        return observation.text
    return "\n\n".join(message.text for message in observation.messages)
