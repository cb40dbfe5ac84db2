"""The process of a file written for OpenRLHF: holds its reward function, or its agents."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, InvalidStep
from envgym.loading import import_target, load_function, split_target
from envgym.rewards.functions import column, number, plain, run
from envgym.types import Reward
from envgym.types.episodes import finite_metrics

from . import package
from .episode import InstanceEpisode, InstanceStep, finite_logs, flat, valid_score
from .llm_engine import EngineProxy, ExecutorRun, QueueProxy, VLLMSamplingParams, overrides

Prompt = str | list[dict[str, Any]]
"""Text, or chat messages."""
CONSTRUCTOR_ARGUMENTS = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
"""Constructor arguments of the older interface's executors, by name."""


def seed_generators(seed: int) -> None:
    """Seed this process's global generators, so that a file's random draws are repeatable."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


class RewardHost:
    """Calls `reward_func(queries, prompts, labels)`."""

    def __init__(self, target: str) -> None:
        package.install(Path(split_target(target)[0]))
        self._function = load_function(target, "reward function")
        self._name = self._function.__name__

    async def group(
        self, queries: list[str], prompts: list[str], labels: list[Any], seed: int
    ) -> list[Reward | InvalidStep]:
        """The rewards of a group's answers."""
        seed_generators(seed)
        result = await run(self._function, queries, prompts, labels)
        return read_rewards(result, len(queries), self._name)


def read_rewards(result: Any, count: int, name: str) -> list[Reward | InvalidStep]:
    """The rewards of `count` answers from a dict of `rewards`, `scores` and `extra_logs`, or from rewards alone.

    In `extra_logs`, a list with one number per answer is a metric of each answer, and a single number one of all.
    A score that only repeats the reward is omitted; one outside [0, 1] is omitted and counted (`invalid_scores`).
    Without scores, the rewards are scores if they all lie in [0, 1].
    """
    table = result if isinstance(result, Mapping) else {"rewards": result}
    if table.get("rewards") is None:
        raise InvalidStep(f"{name} returned no 'rewards', only {', '.join(map(str, table)) or 'an empty dict'}")
    rewards = _column(table["rewards"], count, f"{name} returned as rewards")
    scores = [None] * count if table.get("scores") is None else _column(table["scores"], count, f"{name}, scores:")
    outcomes: list[Reward | InvalidStep] = []
    for index in range(count):
        try:
            reward = number(rewards[index], f"{name} returned the reward")
            if reward is None:
                raise InvalidStep(f"{name} returned None as a reward")
            score = number(scores[index], f"{name} returned the score")
            metrics = finite_metrics(_logs_of(table.get("extra_logs"), index, count))
            if score is not None and valid_score(score) is None:
                metrics["invalid_scores"] = 1.0
            outcomes.append(Reward(reward, None if score == reward else valid_score(score), metrics))
        except InvalidStep as error:
            outcomes.append(error)
    return outcomes


def _column(value: Any, count: int, subject: str) -> list[Any]:
    values = flat(value)
    return column(values if isinstance(values, list) else [values], count, subject)


def _logs_of(logs: Any, index: int, count: int) -> dict[str, Any]:
    """The part of `extra_logs` for the answer at `index`."""
    logged: dict[str, Any] = {}
    for name, value in (logs if isinstance(logs, Mapping) else {}).items():
        values = flat(value)
        if isinstance(values, list):
            if len(values) not in (1, count):
                continue
            values = values[index if len(values) == count else 0]
        if not isinstance(values, str):
            logged[str(name)] = values
    return logged


class AgentHost:
    """Holds the file's agents, one per episode, or lets its executor run whole episodes."""

    def __init__(self, target: str) -> None:
        file, name = split_target(target)
        package.install(Path(file))
        module = import_target(file)
        agent = importlib.import_module("openrlhf.utils.agent")  # the real one where it is installed
        self._name = name
        self._instance_class = getattr(module, "AgentInstance", None)
        self._executor_class = getattr(module, name, None) or agent.MultiTurnAgentExecutor
        if not isinstance(self._executor_class, type):
            raise ConfigError(f"{target} is not a class")
        bases = (agent.AgentExecutorBase, agent.MultiTurnAgentExecutor)
        self._executes = getattr(self._executor_class, "execute", None) not in [base.execute for base in bases]
        self._executors: dict[bool, Any] = {}
        self._tokenizer: Any = None
        self._episodes: dict[str, tuple[InstanceEpisode, dict[str, Any]]] = {}
        """The running episodes, with the run's sampling parameters."""
        self._runs: dict[str, ExecutorRun] = {}

    def executes(self) -> bool:
        """True if the executor has its own `execute`, which drives the model itself."""
        return self._executes

    # -- reset and step ---------------------------------------------------------------------------------------

    async def reset(self, key: str, prompt: str, label: Any, sampling: dict[str, Any]) -> str:
        """Make the episode's agent and return its first observation. `sampling` are the run's parameters."""
        await self.close_episode(key)
        executor = self._make_executor({})
        instance_class = getattr(executor, "agent_instance_cls", None) or self._instance_class
        if instance_class is None:  # the file has only an `execute`
            return prompt
        episode = await InstanceEpisode.start(instance_class, prompt, label, VLLMSamplingParams.from_run(sampling))
        self._episodes[key] = episode, sampling
        return episode.text

    async def step(self, key: str, action_text: str) -> tuple[InstanceStep, dict[str, float], dict[str, Any]]:
        """Let the agent answer an action. Returns its step, its metrics so far, and the sampling parameters of the next
        turn that differ from the run's."""
        if key not in self._episodes:
            raise InvalidStep("the file has no AgentInstance: its execute is run by agent=openrlhf_executor")
        episode, sampling = self._episodes[key]
        result = await episode.step(action_text)
        return result, dict(episode.metrics), overrides(episode.sampling, sampling)

    async def close_episode(self, key: str) -> None:
        if key in self._episodes:
            episode, _ = self._episodes.pop(key)
            await episode.close()
        if (run := self._runs.pop(key, None)) is not None:
            run.cancel()

    # -- execute ----------------------------------------------------------------------------------------------

    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def set_tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def start_execute(
        self, key: str, prompt: Prompt, label: Any, sampling: dict[str, Any], limits: dict[str, int | None]
    ) -> None:
        """Start an episode's `execute`. `limits` are `max_length` and `max_steps`."""
        if not isinstance(prompt, str):
            prompt = str(self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
        options = {"llm_engine": EngineProxy(), "hf_tokenizer": self._tokenizer, "max_length": limits["max_length"]}
        executor = self._make_executor({**options, "max_steps": limits["max_steps"], "result_queue": QueueProxy()})
        parameters = inspect.signature(executor.execute).parameters
        takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        options["images"] = None
        arguments = {name: value for name, value in options.items() if takes_any or name in parameters}
        self._runs[key] = run = ExecutorRun(self._tokenizer, sampling)
        run.start(executor.execute(prompt, label, VLLMSamplingParams.from_run(sampling), **arguments))

    async def next(self, key: str) -> tuple[str, Any]:
        """The next request of an episode's `execute`, or its result."""
        kind, value = await self._runs[key].next()
        return kind, read_result(value) if kind == "result" else value

    def answer(self, key: str, number: int, generation: Mapping[str, Any] | None) -> None:
        self._runs[key].answer(number, generation)

    def _make_executor(self, options: dict[str, Any]) -> Any:
        """The file's executor, shared by all episodes in this process: one with and one without `options`, from which
        the older interface's constructor gets the arguments that it names."""
        if bool(options) not in self._executors:
            parameters = inspect.signature(self._executor_class).parameters
            if self._executor_class.__module__.partition(".")[0] in ("openrlhf", "envgym"):
                arguments = {"agent_instance_cls": self._instance_class}
            else:
                arguments = {name: options.get(name) for name in CONSTRUCTOR_ARGUMENTS if name in parameters}
            try:
                self._executors[bool(options)] = self._executor_class(**arguments)
            except TypeError as error:
                raise ConfigError(f"{self._name}(…) cannot be made with {list(arguments)}: {error}") from error
        return self._executors[bool(options)]


def read_result(result: Any) -> dict[str, Any]:
    """The result of `execute` as plain numbers: reward, score, metrics, truncated, tokens, ranges, turn_rewards. Raises
    `InvalidStep` for a malformed result."""
    if not isinstance(result, Mapping) or "reward" not in result:
        raise InvalidStep(f"execute must return a dict with 'reward' (and observation_tokens, …), not {result!r:.80}")
    score = number(result.get("scores"), "execute returned the scores")
    metrics = finite_logs(result.get("extra_logs"))
    if score is not None and valid_score(score) is None:
        metrics["invalid_scores"] = 1.0
    tokens, ranges = result.get("observation_tokens"), result.get("action_ranges")
    return {
        "reward": number(result["reward"], "execute returned the reward"),
        "turn_rewards": result.get("turn_rewards"),
        "score": valid_score(score),
        "metrics": metrics,
        "truncated": bool(result.get("truncated", False)),
        "tokens": None if tokens is None else [int(id) for id in flat(tokens)],
        "ranges": None if ranges is None else [(int(start), int(end)) for start, end in plain(ranges)],
    }
