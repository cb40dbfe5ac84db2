r"""Substitute for the package `openrlhf` if it is not installed: the names that reward and agent files import.

One set of classes supports both interfaces of OpenRLHF: `MultiTurnAgentExecutor(AgentInstance)` with
`execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)`, and the older
`AgentExecutorBase(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)` with
`execute(prompt, label, sampling_params)`, which puts its result in the queue.

Mathematics is graded by `math_verify`, not by OpenRLHF's own code: an answer that is no value, or hard to read, is
wrong.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from envgym import registry
from envgym.errors import ConfigError, InvalidStep
from envgym.loading import load_function

from .episode import InstanceEpisode
from .llm_engine import OutOfRoom

GRADING_SECONDS = 5
"""Time limit for parsing an answer, and for comparing it."""


class AgentInstanceBase(ABC):
    """Base class of an agent file's environment: one episode."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


@dataclass(eq=False)
class AgentExecutorBase:
    """Base class of an agent file's executor."""

    agent_instance_cls: type | None = None
    max_steps: int | None = None
    max_length: int | None = None
    llm_engine: Any = None
    hf_tokenizer: Any = None
    result_queue: Any = None

    async def generate(self, prompt_ids: list[int], sampling_params: Any) -> Any:
        """Sample after `prompt_ids` (older files call this from their `execute`)."""
        return await self.llm_engine.generate(prompt_ids, deepcopy(sampling_params))

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
        images: Any = None,
    ) -> dict[str, Any]:
        """Run `reset` and `step` until the agent is done, its steps are used up or the context is full."""
        tokenizer = self.hf_tokenizer if hf_tokenizer is None else hf_tokenizer
        engine = self.llm_engine if llm_engine is None else llm_engine
        episode = await InstanceEpisode.start(self.agent_instance_cls, prompt, label, sampling_params)
        try:
            tokens = _encode(tokenizer, episode.text)
            ranges: list[tuple[int, int]] = []
            rewards: list[float] = []
            logprobs = [0.0] * len(tokens)
            is_done, score = False, None
            while not is_done and (self.max_steps is None or len(ranges) < self.max_steps):
                try:
                    output = (await engine.generate(tokens, episode.sampling)).outputs[0]
                except OutOfRoom:
                    break
                ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
                step = await episode.step(output.text)
                if step.images:
                    raise InvalidStep("environment_images are shown where the file has no execute of its own")
                is_done, score = step.is_done, step.score
                rewards.append(step.reward)
                feedback = [] if is_done else _encode(tokenizer, step.feedback)
                logprobs += [entry[id].logprob for id, entry in zip(output.token_ids, output.logprobs, strict=True)]
                logprobs += [0.0] * len(feedback)
                tokens = [*tokens, *output.token_ids, *feedback]
        finally:
            await episode.close()
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": logprobs,
            "reward": sum(rewards),
            "turn_rewards": rewards,
            "scores": score,
            "truncated": not is_done,
            "extra_logs": episode.metrics,
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """The executor's name in the current interface."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One completion of the prompt, with the reward of the function `reward_func` of a Python file.

    Raises `ConfigError` for the address of a reward server: `--remote_rm_url` without an agent file asks it.
    """

    def __init__(self, remote_rm_url: Any = None) -> None:
        super().__init__()
        endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
        if endpoints and not endpoints[0].endswith(".py"):
            raise ConfigError(f"SingleTurnAgentExecutor({endpoints[0]!r}): give a Python file with a reward_func")
        self.reward_func = load_function(f"{endpoints[0]}:reward_func", "reward function") if endpoints else None

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
        images: Any = None,
    ) -> dict[str, Any]:
        """Sample a completion. Without a reward function, `reward` is None: a subclass sets it."""
        tokens = _encode(hf_tokenizer, prompt)
        output = (await llm_engine.generate(tokens, deepcopy(sampling_params))).outputs[0]
        logprobs = [entry[id].logprob for id, entry in zip(output.token_ids, output.logprobs, strict=True)]
        result = {
            "prompt": prompt,
            "label": label,
            "images": images,
            "observation_tokens": [*tokens, *output.token_ids],
            "action_ranges": [(len(tokens), len(tokens) + len(output.token_ids))],
            "rollout_log_probs": [0.0] * len(tokens) + logprobs,
            "truncated": output.finish_reason == "length",
            "reward": None,
            "scores": None,
            "extra_logs": {},
        }
        if self.reward_func is not None:
            query = hf_tokenizer.decode(result["observation_tokens"], skip_special_tokens=False)
            rewards = await asyncio.to_thread(self.reward_func, [query], [prompt], [label])
            result["reward"], scores = (_first(rewards.get(name)) for name in ("rewards", "scores"))
            result["scores"] = result["reward"] if scores is None else scores
            result["extra_logs"] = rewards.get("extra_logs") or {}
        return result


def _first(values: Any) -> Any:
    """The number of a list, array or tensor of one number."""
    return values[0] if hasattr(values, "__len__") and len(values) else values


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last `\boxed{…}`; None where there is none."""
    answer: str | None = _mathematics().boxed(str(solution))
    return answer


def grade_answer(given_answer: Any, ground_truth: Any) -> bool:
    """True if an answer, without its box, is right."""
    if given_answer is None or ground_truth is None:
        return False
    # The time limit is a signal, which works only in the main thread; reward functions are called there.
    seconds = GRADING_SECONDS if threading.current_thread() is threading.main_thread() else None
    return bool(_mathematics().grade_here(str(given_answer).strip(), str(ground_truth).strip(), seconds))


def _mathematics() -> type[Any]:
    """The class of the environment `math_verify`. Raises `NameNotFound` where it is not installed."""
    return registry.load_env_class(registry.find("math_verify").entry_point)


MATHEMATICS = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
AGENT = {
    cls.__name__: cls for cls in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor)
}
MODULES: dict[str, dict[str, Any]] = {
    "openrlhf": {},
    "openrlhf.utils": MATHEMATICS,
    "openrlhf.utils.agent": AGENT,
    "openrlhf.utils.math_utils": MATHEMATICS,
    "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
}


def install(file: Path) -> None:
    """Substitute the modules above in this process, unless `openrlhf` is installed or lies next to `file`."""
    if "openrlhf" in sys.modules or find_spec("openrlhf") or PathFinder.find_spec("openrlhf", [str(file.parent)]):
        return
    for name, content in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
