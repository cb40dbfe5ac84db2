"""One episode with an `AgentInstance`: calls its `reset` and `step`, and reads what they return."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envgym.env.rewards.functions import number
from envgym.errors import InvalidStep

from .reading import finite_logs, valid_score


@dataclass(frozen=True, slots=True)
class Said:
    """What a step said. `score` is the last that any step gave, None where that was none in [0, 1]."""

    reward: float
    score: float | None
    feedback: str
    done: bool


class Playing:
    """An instance, all text so far, the episode's own sampling parameters and what the instance logged."""

    def __init__(self, instance: Any, label: Any, sampling: Any) -> None:
        self.text = ""
        self.sampling = sampling
        self.logs: dict[str, float] = {}
        self._instance = instance
        self._label = label
        self._score: float | None = None

    @classmethod
    async def begin(cls, instance_class: Any, prompt: str, label: Any, sampling: Any) -> Playing:
        """Make an instance and reset it."""
        if not isinstance(instance_class, type):
            raise InvalidStep("the executor has no AgentInstance class: give it to super().__init__(AgentInstance)")
        playing = cls(await make(instance_class), label, sampling)
        states = await playing._instance.reset({"observation": prompt, "label": label})
        playing.text = _text(states, "observation", "reset")
        return playing

    async def step(self, action_text: str) -> Said:
        states = {
            "observation_text": self.text,
            "action_text": action_text,
            "label": self._label,
            "sampling_params": self.sampling,
        }
        result = await self._instance.step(states)
        if not isinstance(result, Mapping):
            raise InvalidStep(f"step must return a dict, not {result!r:.60}")
        for key in ("rewards", "done"):
            if key not in result:
                raise InvalidStep(f"step returned no {key!r}, only {', '.join(map(str, result))}")
        reward = number(result["rewards"], "step returned the rewards")
        if reward is None:
            raise InvalidStep("step returned None as rewards")
        if (score := number(result.get("scores"), "step returned the scores")) is not None:
            self._score = valid_score(score)
            if self._score is None:
                self.logs["invalid_scores"] = self.logs.get("invalid_scores", 0.0) + 1
        self.logs |= finite_logs(result.get("extra_logs"))
        if result.get("sampling_params") is not None:
            self.sampling = result["sampling_params"]
        done = bool(result["done"])
        feedback = _text(result, "environment_feedback", "step", needed=not done)
        self.text += action_text + feedback
        return Said(reward, self._score, feedback, done)

    async def close(self) -> None:
        """Call the instance's `close`, should it have one."""
        close = getattr(self._instance, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing


async def make(instance_class: Any) -> Any:
    """An instance, also of a class whose `__init__` is a coroutine function, which Python itself does not await."""
    if not inspect.iscoroutinefunction(instance_class.__init__):
        return instance_class()
    instance = instance_class.__new__(instance_class)
    await instance_class.__init__(instance)
    return instance


def _text(result: Any, key: str, method: str, *, needed: bool = True) -> str:
    text = result.get(key) if isinstance(result, Mapping) else None
    if text is None and not needed:
        return ""
    if not isinstance(text, str):
        raise InvalidStep(f"{method} must return a dict with the text {key!r}, not {result!r:.80}")
    return text
