"""A reward function of a few lines as a complete environment: one completion of one prompt, scored by itself or with
its group.

    @envgym.reward
    def brevity(completion):
        return 1 / (1 + len(completion.split()))
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from pydantic import Field

from envgym.errors import ConfigError, DataError, InvalidStep
from envgym.loading import attribute, import_target, target_of
from envgym.processes import alarms
from envgym.processes.cancellation import call_in_time
from envgym.processes.pool import Processes
from envgym.rewards.functions import (
    FunctionHost,
    RewardFunction,
    as_reward,
    as_rewards,
    call,
    prompt_text,
    weighted_sum,
)
from envgym.tasks import TaskList, TaskSet, prompt_key
from envgym.tasks.columns import ANSWER_FIELDS, PROMPT_FIELDS, TaskReader
from envgym.tasks.config import SourceConfig
from envgym.tasks.split import draw_held_out
from envgym.types import Action, Episode, Message, Observation, Reward, StopReason, Task, as_messages, refuse_images

from .data import DataEnvConfig, DataEnvSpec
from .protocol import Env, Info, StepResult

TEST_FRACTION = 0.1
"""Fraction of the prompts of a decorator's `tasks` list that is held out."""
EXAMPLES = 100
"""Number of tasks that are searched for one with an answer."""

Function = TypeVar("Function", bound=Callable[..., Any])
Rows = Sequence[Mapping[str, Any]] | Callable[[str], Iterable[Mapping[str, Any]]]


@overload
def reward(function: Function, /, *, batch: bool = False, tasks: Rows | None = None) -> Function: ...
@overload
def reward(
    functions: Sequence[Callable[..., Any]], /, *, weights: Sequence[float] | None = None, batch: bool = False,
    tasks: Rows | None = None,
) -> Callable[..., Any]: ...  # fmt: skip
@overload
def reward(*, batch: bool = False, tasks: Rows | None = None) -> Callable[[Function], Function]: ...
def reward(
    function: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None, /, *,
    weights: Sequence[float] | None = None, batch: bool = False, tasks: Rows | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Make a function that scores a completion an environment: one prompt, one completion, one reward.

    The function takes arguments by name: `completion` (text), `prompt` (text), `answer` (the task's reference answer),
    any field of the data row, `fields` (all of them), `task`, `messages` (the conversation, the completion included),
    `action`. It may be asynchronous. It returns a number, None for no reward, an `envgym.Reward` (or a mapping with its
    fields), or what verl's, EasyR1's and NeMo-RL's functions return (`as_reward`).

    With `batch` it is called once for all completions of a task, takes lists and returns one. So is a function that
    takes `completions`, `prompts` or `completion_ids`, as TRL's reward functions do. Its environment gives the reward
    when the group has ended, so `step` returns None. `tasks` are the rows to use without `data.path`: a list of
    mappings, of which a fraction is held out, or a function of the split (`train`, `test`).

    `function` may be any callable: an instance of a class, a bound method, a `functools.partial`. A function itself is
    returned, for another callable a function that calls it. A file with one such function is an environment, as are
    `file.py:name` and an `envgym.register`ed function. A list of functions makes one function that returns the weighted
    sum of their rewards; `weights` are 1 by default. Raises `ConfigError` for a function that cannot be called by
    names.
    """
    if function is None:
        return functools.partial(reward, batch=batch, tasks=tasks)
    parts = function if isinstance(function, Sequence) else [function]
    functions = [RewardFunction(part) for part in parts]
    trl_names = [part.name for part in functions if part.is_trl]
    if trl_names and len(trl_names) < len(parts) and not batch:
        raise ConfigError(f"{trl_names[0]} takes lists of completions: all functions must, with batch=True if they do")
    batch = batch or bool(trl_names)
    original, function = function, functions[0].function if functions else None
    if isinstance(original, Sequence) or weights is not None:
        function = weighted_sum(functions, [1.0] * len(parts) if weights is None else weights, batch)
    assert function is not None
    if function is not original:
        function.__module__ = sys._getframe(1).f_globals["__name__"]
    function.__environment__ = _environment(function, functions, batch, tasks)  # type: ignore[attr-defined]
    return function


def _environment(
    function: Callable[..., Any], functions: Sequence[RewardFunction], batch: bool, tasks: Rows | None
) -> type[RewardSpec]:
    content = {
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "function": staticmethod(function),
        "functions": functions,
        "rows": staticmethod(tasks) if callable(tasks) else tasks,
    }
    return type(function.__name__, (GroupRewardSpec if batch else RewardSpec,), content)


def environment_of(path: Path, name: str) -> type[RewardSpec] | None:
    """The environment of the undecorated callable `name` of a file, if it takes an argument of reward functions."""
    if not name:
        return None
    module = import_target(str(path))
    value = attribute(module, name)
    if not callable(value) or isinstance(value, type) or hasattr(value, "__environment__"):
        return None
    scorer = RewardFunction(value)
    if not scorer.scores_completions:
        return None
    if scorer.function is not value:
        scorer.function.__module__ = module.__name__
    environment = _environment(scorer.function, [scorer], scorer.is_trl, None)
    environment.target = f"{path}:{name}"
    return environment


class RewardConfig(DataEnvConfig):
    """Settings of every reward function."""

    chat: bool = True
    """Send prompts as chat messages, through the model's template; false: as raw text, for base models."""
    processes: int = Field(0, ge=0)
    """Call the function in this many separate processes, where a call that hangs is killed at its deadline. 0: in
    threads, which cannot be killed."""
    logs: str | None = None
    """Folder for the output of those processes. Unset: a temporary one, deleted unless something went wrong."""


class RewardEnv(Env):
    """Sends the task's prompt and returns the reward of the one completion."""

    spec: RewardSpec
    task: Task

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        if self.config.chat:
            return Observation(messages=as_messages(self.task.prompt)), {}
        refuse_images(as_messages(self.task.prompt), "a prompt of raw text")
        return Observation(text=prompt_text(self.task)), {}

    async def step(self, action: Action) -> StepResult:
        reward = await self.spec.reward_of(self.task, action)
        return None, reward.reward, True, False, {"score": reward.score, "metrics": dict(reward.metrics)}


class GroupRewardEnv(RewardEnv):
    """Sends the task's prompt. The reward comes once all completions of the group are there."""

    async def step(self, action: Action) -> StepResult:
        return None, None, True, False, {}


class RewardSpec(DataEnvSpec):
    """The environment of one function; `reward` makes a subclass per function."""

    Config = RewardConfig
    config: RewardConfig
    answer_required = False
    function: ClassVar[Callable[..., Any]]
    functions: ClassVar[Sequence[RewardFunction]]
    """The function, or the functions whose rewards it sums."""
    rows: ClassVar[Rows | None] = None
    target: ClassVar[str] = ""
    """The target of an undecorated callable; empty for a decorated one, which its module names."""

    _processes: Processes[FunctionHost] | None = None

    def __init__(self, id: str, env_class: type[Env] = RewardEnv, /, **kwargs: Any) -> None:
        super().__init__(id, env_class, **kwargs)
        self.name = self.function.__name__

    def __reduce__(self) -> Any:
        return type(self).from_json, (self.to_json(),)

    async def setup(self) -> None:
        await super().setup()
        alarms.install()  # functions on threads
        for tasks in (self.tasks(split) for split in ("train", "test")):
            if tasks.size != 0:
                example = await _example(tasks)
                for function in self.functions:
                    function.check(example, self._aliases, from_data=self.config.data is not None)
        if self.config.processes:
            self._processes = Processes(
                "envgym.rewards.functions:FunctionHost",
                {"target": self.target or target_of(self.function)},
                count=self.config.processes,
                name=self.name,
                logs=self.config.logs,
            )
            await self._processes.start()
            self.closing.push_async_callback(self._processes.close)

    def default_tasks(self, split: str) -> TaskSet:
        if self.rows is None:
            raise ConfigError(f"environment {self.id} needs tasks: data.path=FILE, or tasks=… in its decorator")
        return TaskList(self._row_splits[split])

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The task's reference answer, if it is text or a number."""
        if isinstance(task.answer, str | int | float):
            return [str(task.answer)]
        return super().demonstrations(task, seed)

    def arguments(self, task: Task, action: Action) -> dict[str, Any]:
        """The arguments of the function for one completion."""
        arguments: dict[str, Any] = {}
        for function in self.functions:
            arguments |= function.arguments(task, action, self._aliases)
        return arguments

    async def reward_of(self, task: Task, action: Action) -> Reward:
        arguments = self.arguments(task, action)
        if self._processes is not None:
            return await self._processes.call(lambda host: host.score(arguments), timeout=self.config.call_timeout)
        return as_reward(await call(self.function, arguments), self.name)

    @functools.cached_property
    def _aliases(self) -> dict[str, str]:
        """Possible names of prompt and answer in the data → their parameters. They are not in the task's fields."""
        data = self.config.data
        prompts = (*PROMPT_FIELDS, *(data.prompt if data else ()))
        answers = (*ANSWER_FIELDS, *(data.answer if data else ()))
        return dict.fromkeys(prompts, "prompt") | dict.fromkeys(answers, "answer")

    @functools.cached_property
    def _row_splits(self) -> dict[str, list[Task]]:
        rows = self.rows
        if callable(rows):
            return {split: _read(rows(split), f"{self.name}-{split}") for split in ("train", "test")}
        tasks = _read(rows or (), self.name)
        keys = [prompt_key(task) for task in tasks]
        held_out = draw_held_out(keys, TEST_FRACTION)
        return {
            "train": [task for task, key in zip(tasks, keys, strict=True) if key not in held_out],
            "test": [task for task, key in zip(tasks, keys, strict=True) if key in held_out],
        }


async def _example(tasks: TaskSet) -> Task:
    """The first task with an answer, as the one of a single row may be null; without any, the first task."""
    for index in range(min(tasks.index_bound, EXAMPLES)):
        if (task := await tasks.get(index)).answer is not None:
            return task
    return await tasks.get(0)


class GroupRewardSpec(RewardSpec):
    """The environment of a batch function."""

    def __init__(self, id: str, env_class: type[Env] = GroupRewardEnv, /, **kwargs: Any) -> None:
        super().__init__(id, env_class, **kwargs)
        self._calls = asyncio.Semaphore(self.config.concurrency or 2**31)

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Reward | InvalidStep]:
        rows = [self.arguments(task, last_action(episode)) for episode in episodes]
        columns = {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}
        timeout = self.config.call_timeout
        if self._processes is not None:
            seed = seed_of(episodes)
            return await self._processes.call(lambda host: host.group(columns, len(rows), seed), timeout=timeout)
        async with self._calls:
            calling = call_in_time(call(self.function, columns), timeout, f"{self.id}: {self.name}")
            return as_rewards(await calling, len(rows), self.name)


def last_action(episode: Episode) -> Action:
    """The last completion of an episode; an empty one if a limit ended it before the first."""
    messages = [message for message in episode.messages if message.role == "assistant"]
    actions = [segment for row in episode.rows for segment in row.segments if segment.role == "action"]
    turns = [turn for row in episode.rows for turn in row.turns]
    token_ids = actions[-1].token_ids if actions else ()  # an API gives none
    text, stop_reason = messages[-1].text if messages else "", turns[-1].stop_reason if turns else StopReason.LENGTH
    return Action(text, token_ids, stop_reason=stop_reason)


def seed_of(episodes: Sequence[Episode]) -> int:
    """A seed for a call that scores these episodes: the same for the same episodes."""
    return random.Random("\n".join(episode.id for episode in episodes)).randrange(2**31)


def _read(rows: Iterable[Mapping[str, Any]], name: str) -> list[Task]:
    reader, tasks = TaskReader(SourceConfig(), answer_required=False), []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: tasks=… is a list of mappings, or a function of the split; it has {row!r:.60}")
        tasks.append(reader.read(dict(row), f"{name}:{number}", f"{name}-{number}")[0])
    if not tasks:
        raise DataError(f"{name}: there are no rows in tasks=…")
    return tasks
