"""One episode with an `AgentInstance`: calls of its `reset` and `step`, and their results as plain numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envgym.errors import InvalidStep
from envgym.processes.runtime import close_object
from envgym.rewards.functions import number, plain
from envgym.types import ImagePart

ROUNDING = 1e-6
"""Rounding error outside [0, 1] that a 32-bit score may have."""


@dataclass(frozen=True, slots=True)
class InstanceStep:
    """The result of a step. `score` is the latest of any step, None if that was outside [0, 1]."""

    reward: float
    score: float | None
    feedback: str
    is_done: bool
    images: tuple[ImagePart, ...] = ()
    """The images of the feedback, which has the model's mark for each."""


class InstanceEpisode:
    """An instance, all text so far, the episode's own sampling parameters and the metrics that the instance logged."""

    def __init__(self, instance: Any, label: Any, sampling: Any) -> None:
        self.text = ""
        self.sampling = sampling
        self.metrics: dict[str, float] = {}
        self._instance = instance
        self._label = label
        self._score: float | None = None

    @classmethod
    async def start(cls, instance_class: Any, prompt: str, label: Any, sampling: Any) -> InstanceEpisode:
        """Make an instance and reset it."""
        if not isinstance(instance_class, type):
            raise InvalidStep("the executor has no AgentInstance class: give it to super().__init__(AgentInstance)")
        episode = cls(await _make(instance_class), label, sampling)
        states = await episode._instance.reset({"observation": prompt, "label": label})
        episode.text = _text(states, "observation", "reset")
        return episode

    async def step(self, action_text: str) -> InstanceStep:
        """The agent's step. Updates text, score, metrics and sampling parameters. Raises `InvalidStep` for a malformed
        result."""
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
                self.metrics["invalid_scores"] = self.metrics.get("invalid_scores", 0.0) + 1
        self.metrics |= finite_logs(result.get("extra_logs"))
        if result.get("sampling_params") is not None:
            self.sampling = result["sampling_params"]
        is_done = bool(result["done"])
        feedback = _text(result, "environment_feedback", "step", required=not is_done)
        self.text += action_text + feedback
        return InstanceStep(reward, self._score, feedback, is_done, () if is_done else _images(result))

    async def close(self) -> None:
        """Call the instance's `close`, if it has one."""
        await close_object(self._instance)


async def _make(instance_class: Any) -> Any:
    """An instance, also of a class whose `__init__` is a coroutine function, which Python itself does not await."""
    if not inspect.iscoroutinefunction(instance_class.__init__):
        return instance_class()
    instance = instance_class.__new__(instance_class)
    await instance_class.__init__(instance)
    return instance


def _text(result: Any, key: str, method: str, *, required: bool = True) -> str:
    text = result.get(key) if isinstance(result, Mapping) else None
    if text is None and not required:
        return ""
    if not isinstance(text, str):
        raise InvalidStep(f"{method} must return a dict with the text {key!r}, not {result!r:.80}")
    return text


def _images(result: Mapping[str, Any]) -> tuple[ImagePart, ...]:
    images = result.get("environment_images")
    images = images if isinstance(images, list | tuple) else [] if images is None else [images]
    try:
        return tuple(map(ImagePart.from_value, images))
    except (TypeError, ValueError) as error:
        raise InvalidStep(f"step returned environment_images: {error}") from None


# -- tensors, arrays, lists or numbers, in any mixture, as plain numbers ----------------------------------


def flat(value: Any) -> Any:
    """Convert like `plain`, and drop a second dimension of one: a column of shape [n, 1] becomes a list of n."""
    values = plain(value)
    if isinstance(values, list | tuple):
        return [item[0] if isinstance(item, list | tuple) and len(item) == 1 else item for item in map(plain, values)]
    return values


def valid_score(score: float | None) -> float | None:
    """The score clipped to [0, 1], None if it lies outside by more than rounding."""
    if score is None or not -ROUNDING <= score <= 1 + ROUNDING:
        return None
    return min(1.0, max(0.0, score))


def finite_logs(logs: Any) -> dict[str, float]:
    """An agent's logs as metrics: a number per name, the mean of several. Entries that are no numbers are omitted."""
    metrics: dict[str, float] = {}
    for key, value in (logs if isinstance(logs, Mapping) else {}).items():
        values = flat(value)
        values = values if isinstance(values, list) else [values]
        try:
            numbers = [number(item, "") for item in values]
        except InvalidStep:
            continue
        finite = [item for item in numbers if item is not None]
        if finite:
            metrics[str(key)] = sum(finite) / len(finite)
    return metrics
