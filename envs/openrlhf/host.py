"""The process of a file written for OpenRLHF: holds its reward function, or its agents."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envgym.env.checked import finite_metrics
from envgym.errors import ConfigError, InvalidStep
from envgym.loading import import_target, load_function, split_target
from envgym.rewards.functions import Reward, column, number, run

from . import package
from .episode import InstanceEpisode, InstanceStep, finite_logs, flat, plain, valid_score
from .llm_engine import EngineProxy, QueueProxy, Run, SamplingParams, overrides

CONSTRUCTOR_ARGUMENTS = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
"""Arguments that the older interface's executors take, by name."""


def seed_generators(seed: int) -> None:
    """Seed the global generators, which are this process's own, so that a file's draws can be repeated."""
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
    """The rewards of `count` answers in a dict of `rewards`, `scores` and `extra_logs`, or in rewards alone.

    Of `extra_logs`, a list with a number for each answer holds a metric of each, and a single number is one of all.
    A score that is the reward adds nothing; one outside [0, 1] is left out and counted (`invalid_scores`). Where there
    is none, rewards are scores if they all lie in [0, 1].
    """
    table = result if isinstance(result, Mapping) else {"rewards": result}
    if table.get("rewards") is None:
        raise InvalidStep(f"{name} returned no 'rewards', only {', '.join(map(str, table)) or 'an empty dict'}")
    rewards = _column(table["rewards"], count, f"{name} returned as rewards")
    scores = [None] * count if table.get("scores") is None else _column(table["scores"], count, f"{name}, scores:")
    read: list[Reward | InvalidStep] = []
    for index in range(count):
        try:
            reward = number(rewards[index], f"{name} returned the reward")
            if reward is None:
                raise InvalidStep(f"{name} returned None as a reward")
            score = number(scores[index], f"{name} returned the score")
            metrics = finite_metrics(_logged(table.get("extra_logs"), index, count))
            if score is not None and valid_score(score) is None:
                metrics["invalid_scores"] = 1.0
            read.append(Reward(reward, None if score == reward else valid_score(score), metrics))
        except InvalidStep as error:
            read.append(error)
    return read


def _column(value: Any, count: int, what: str) -> list[Any]:
    values = flat(value)
    return column(values if isinstance(values, list) else [values], count, what)


def _logged(logs: Any, index: int, count: int) -> dict[str, Any]:
    """The part of `extra_logs` that is about the answer at `index`."""
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
    """Holds the file's agents, one for each episode, or lets its executor play whole episodes."""

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
        """The episodes in play, with the run's sampling parameters."""
        self._runs: dict[str, Run] = {}

    def executes(self) -> bool:
        """Tell whether the executor has an `execute` of its own, which drives the model itself."""
        return self._executes

    # -- reset and step ---------------------------------------------------------------------------------------

    async def reset(self, key: str, prompt: str, label: Any, sampling: dict[str, Any]) -> str:
        """Make the episode's agent and return its first observation. `sampling` are the run's parameters."""
        await self.close_episode(key)
        executor = self._make_executor({})
        instance_class = getattr(executor, "agent_instance_cls", None) or self._instance_class
        if instance_class is None:  # there is nothing but an `execute`
            return prompt
        episode = await InstanceEpisode.begin(instance_class, prompt, label, SamplingParams.of(sampling))
        self._episodes[key] = episode, sampling
        return episode.text

    async def step(self, key: str, action_text: str) -> tuple[InstanceStep, dict[str, float], dict[str, Any]]:
        """The agent's result of an action, all it has logged, and its changes of the sampling parameters."""
        if key not in self._episodes:
            raise InvalidStep("the file has no AgentInstance: its execute is played by agent=openrlhf_executor")
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

    async def begin(
        self,
        key: str,
        prompt: str | list[dict[str, Any]],
        label: Any,
        sampling: dict[str, Any],
        limits: dict[str, int | None],
    ) -> None:
        """Start an episode's `execute`. `limits` are `max_length` and `max_steps`."""
        if not isinstance(prompt, str):
            prompt = str(self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
        given = {"llm_engine": EngineProxy(), "hf_tokenizer": self._tokenizer, "max_length": limits["max_length"]}
        executor = self._make_executor({**given, "max_steps": limits["max_steps"], "result_queue": QueueProxy()})
        parameters = inspect.signature(executor.execute).parameters
        takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
        given["images"] = None
        arguments = {name: value for name, value in given.items() if takes_any or name in parameters}
        self._runs[key] = run = Run(self._tokenizer, sampling)
        run.start(executor.execute(prompt, label, SamplingParams.of(sampling), **arguments))

    async def next(self, key: str) -> tuple[str, Any]:
        """The next request of an episode's `execute`, or its result."""
        kind, value = await self._runs[key].next()
        return kind, read_result(value) if kind == "result" else value

    def answer(self, key: str, number: int, generation: dict[str, Any] | None) -> None:
        self._runs[key].answer(number, generation)

    def _make_executor(self, known: dict[str, Any]) -> Any:
        """The file's executor, which all episodes in this process share. The older interface's constructor gets the
        arguments that it names, where they are `known`."""
        if bool(known) not in self._executors:
            parameters = inspect.signature(self._executor_class).parameters
            if self._executor_class.__module__.partition(".")[0] in ("openrlhf", "envgym"):
                arguments = {"agent_instance_cls": self._instance_class}
            else:
                arguments = {name: known.get(name) for name in CONSTRUCTOR_ARGUMENTS if name in parameters}
            try:
                self._executors[bool(known)] = self._executor_class(**arguments)
            except TypeError as error:
                raise ConfigError(f"{self._name}(…) cannot be made with {list(arguments)}: {error}") from error
        return self._executors[bool(known)]


def read_result(result: Any) -> dict[str, Any]:
    """The result of `execute`, as plain numbers: reward, score, metrics, truncated, tokens, ranges, turn_rewards."""
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
