"""Answers for `openrlhf.utils` where that package is not installed: the base classes that agent files import, and how
reward functions read and grade mathematics.

One set of classes serves both interfaces those files are written for: `MultiTurnAgentExecutor(AgentInstance)` with
`execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)`, and the older
`AgentExecutorBase(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)` with
`execute(prompt, label, sampling_params)`, which hands its result to the queue.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from types import ModuleType
from typing import Any

from .mathematics import extract_boxed_answer, grade_answer


class AgentInstanceBase(ABC):
    """What an agent file derives its environment from: one episode."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class AgentExecutorBase:
    """What an agent file derives its executor from."""

    def __init__(
        self,
        agent_instance_cls: type | None = None,
        max_steps: int | None = None,
        max_length: int | None = None,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue

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
        """Play `reset` and `step` until the agent is done, its steps are used up or the context is full."""
        from .engine import NoRoom
        from .playing import Playing

        tokenizer = self.hf_tokenizer if hf_tokenizer is None else hf_tokenizer
        engine = self.llm_engine if llm_engine is None else llm_engine
        playing = await Playing.begin(self.agent_instance_cls, prompt, label, sampling_params)
        try:
            tokens = _encode(tokenizer, playing.text)
            ranges: list[tuple[int, int]] = []
            rewards: list[float] = []
            logprobs = [0.0] * len(tokens)
            done, score = False, None
            while not done and (self.max_steps is None or len(ranges) < self.max_steps):
                try:
                    output = (await engine.generate(tokens, playing.sampling)).outputs[0]
                except NoRoom:
                    break
                ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
                said = await playing.step(output.text)
                done, score = said.done, said.score
                rewards.append(said.reward)
                feedback = [] if done else _encode(tokenizer, said.feedback)
                logprobs += [one[id].logprob for id, one in zip(output.token_ids, output.logprobs, strict=True)]
                logprobs += [0.0] * len(feedback)
                tokens = [*tokens, *output.token_ids, *feedback]
        finally:
            await playing.close()
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
            "truncated": not done,
            "extra_logs": playing.logs,
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """The current interface's name for it."""


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# ---------------------------------------------------------------------------------------------------------
# Being found in its place


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


CONTENT: dict[str, dict[str, Any]] = {
    "openrlhf": {},
    "openrlhf.utils": {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer},
    "openrlhf.utils.agent": {
        "AgentInstanceBase": AgentInstanceBase,
        "AgentExecutorBase": AgentExecutorBase,
        "MultiTurnAgentExecutor": MultiTurnAgentExecutor,
    },
    "openrlhf.utils.math_utils": {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer},
    "openrlhf.utils.logging_utils": {"init_logger": _logger},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules above. It stands last, so it is only asked for what is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname in CONTENT and not _is_installed(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(CONTENT[module.__name__])


def _is_installed(fullname: str) -> bool:
    """Whether the module asked for belongs to a real package, which then lacks it."""
    parent = sys.modules.get(fullname.partition(".")[0])
    return parent is not None and not isinstance(getattr(parent, "__loader__", None), _Finder)


def install() -> None:
    """Stand in for `openrlhf` in this process from now on, where it is not installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
