"""Calling reward functions: what they take, by name, and what they return, checked."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from envgym.env.checked import finite_metrics, shown
from envgym.errors import ConfigError, DataError, InvalidStep, did_you_mean
from envgym.loading import load_function
from envgym.types import Message, Reward, Task, as_messages

ARGUMENTS = ("completion", "prompt", "answer", "task", "messages", "action")
"""Parameters that a reward function may have besides the fields of the data row."""


class Parameters:
    """The names that a reward function takes. Raises `ConfigError` for a function that takes others than by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function.__name__
        self._required: list[str] = []
        self._optional: list[str] = []
        self._takes_any = False
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"reward function {self.function}: {parameter.name!r} cannot be given by name; a reward function "
                    f"takes {', '.join(ARGUMENTS)} or fields of the data row, by their names"
                )
            if parameter.kind == parameter.VAR_KEYWORD:
                self._takes_any = True
            elif parameter.default is parameter.empty:
                self._required.append(parameter.name)
            else:
                self._optional.append(parameter.name)

    def check(self, task: Task, aliases: Mapping[str, str], *, from_data: bool) -> None:
        """Raise `ConfigError` where the function takes what a task like this does not have. `from_data`: its row was
        read as `data.*` say."""
        known = [name for name in (*ARGUMENTS, *task.fields) if name.isidentifier() and not iskeyword(name)]
        for name in self._required:
            if self._is_answer(name, task, aliases) and task.answer is None:
                named = "data.answer=FIELD says which field it is" if from_data else "call that field of them 'answer'"
                raise ConfigError(
                    f"reward function {self.function} takes {name!r}, and the tasks have no answer: {named} (they have "
                    f"{', '.join(map(repr, task.fields)) or 'no field but the prompt'})"
                )
            if name not in known and name not in aliases:
                others = [field for field in task.fields if field not in known]
                by_task = f" (what no parameter can be called is in task.fields: {', '.join(map(repr, others))})"
                raise ConfigError(
                    f"reward function {self.function} takes {name!r}, which is none of {', '.join(known)}"
                    f"{by_task if others else ''}.{did_you_mean(name, known)}"
                )

    def _is_answer(self, name: str, task: Task, aliases: Mapping[str, str]) -> bool:
        return name not in task.fields and aliases.get(name, name) == "answer"

    def pick(self, task: Task, aliases: Mapping[str, str], **given: Any) -> dict[str, Any]:
        """The arguments to call it with. `given` are values of `ARGUMENTS` that the task does not hold; `aliases` are
        other names of those. Raises `DataError` where this task lacks a field."""
        own = {**given, "task": task, "answer": task.answer, "prompt": prompt_text(task)}
        values = {alias: own[name] for alias, name in aliases.items()} | dict(task.fields) | own
        if missing := [name for name in self._required if name not in values]:
            raise DataError(f"task {task.id} has no field {missing[0]!r}, which {self.function} takes")
        if task.answer is None and any(self._is_answer(name, task, aliases) for name in self._required):
            raise DataError(f"task {task.id} has no answer, which {self.function} takes")
        if self._takes_any:
            return dict(task.fields) | own | {name: values[name] for name in self._required}
        return {name: values[name] for name in (*self._required, *self._optional) if name in values}


def prompt_text(task: Task) -> str:
    """A task's prompt as one text: what the user says, or, of several messages, who says what."""
    messages = as_messages(task.prompt)
    if len(messages) == 1:
        return messages[0].text
    return "".join(f"{message.role.capitalize()}: {message.text}\n" for message in messages)


def conversation(task: Task, answer: str) -> list[Message]:
    """The task's prompt and the answer to it, as messages."""
    return [*as_messages(task.prompt), Message.of("assistant", answer)]


async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may be asynchronous. One that is not may start an event loop of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    # It runs on this thread, in a process of its own the main one, where timeouts by signal work.
    asyncio._set_running_loop(None)
    try:
        return function(*args, **kwargs)
    finally:
        asyncio._set_running_loop(loop)


# ---------------------------------------------------------------------------------------------------------
# What they return


def as_reward(value: Any, name: str) -> Reward:
    """The reward that the function `name` returned for one answer. Raises `InvalidStep` for what is no reward."""
    if isinstance(value, Mapping):
        fields = Reward.__dataclass_fields__
        if unknown := [str(key) for key in value if key not in fields]:
            raise InvalidStep(
                f"{name} returned a mapping with {unknown[0]!r}; its keys are {', '.join(fields)}."
                f"{did_you_mean(unknown[0], fields)}"
            )
        if "reward" not in value:
            raise InvalidStep(f"{name} returned a mapping without 'reward'")
        value = Reward(**value)
    if not isinstance(value, Reward):
        return Reward(number(value, f"{name} returned"))
    score = number(value.score, f"{name} returned the score")
    if score is not None and not 0 <= score <= 1:
        raise InvalidStep(f"{name} returned the score {score:g}: a score lies in [0, 1]")
    if not isinstance(value.metrics, Mapping):
        raise InvalidStep(f"{name} returned the metrics {value.metrics!r:.60}: they are names and numbers")
    return Reward(number(value.reward, f"{name} returned the reward"), score, finite_metrics(value.metrics))


def as_rewards(value: Any, count: int, name: str) -> list[Reward | InvalidStep]:
    """The rewards that a batch function returned for `count` answers: what is wrong with one leaves the others alone.

    It is a list of what `as_reward` takes, or a mapping of lists: `reward`, `score` and `metrics`, by name. Raises
    `InvalidStep` where there is not one thing for each answer.
    """
    rows = column(value, count, f"{name} returned") if not isinstance(value, Mapping) else _rows(value, count, name)
    rewards: list[Reward | InvalidStep] = []
    for row in rows:
        try:
            rewards.append(as_reward(row, name))
        except InvalidStep as error:
            rewards.append(error)
    return rewards


def _rows(table: Mapping[str, Any], count: int, name: str) -> list[dict[str, Any]]:
    metrics = {
        key: column(values, count, f"{name} returned the metric {key}")
        for key, values in (table.get("metrics") or {}).items()
    }
    columns = {
        key: column(values, count, f"{name} returned {key!r}")
        for key, values in table.items()
        if key != "metrics" and values is not None
    }
    return [
        {key: values[index] for key, values in columns.items()}
        | {"metrics": {key: values[index] for key, values in metrics.items()}}
        for index in range(count)
    ]


def column(value: Any, count: int, what: str) -> list[Any]:
    """A list, a tuple, an array or a tensor as a list of `count`. `what` begins the message of the `InvalidStep`."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidStep(f"{what} {shown(value)}: it must be a list, with something for each of {count} answers")
    if len(values) != count:
        raise InvalidStep(f"{what} {len(values)} values for {count} answers")
    return list(values)


def number(value: Any, what: str) -> float | None:
    """A finite float of a number, or of an array or tensor of one; None stays None. `what` begins the message of the
    `InvalidStep`."""
    if value is None:
        return None
    if inspect.iscoroutine(value):
        raise InvalidStep(f"{what} {shown(value)}")
    try:
        result = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        result = math.nan
    if not math.isfinite(result):
        raise InvalidStep(f"{what} {value!r:.60}: it must be a finite number or None")
    return result


# ---------------------------------------------------------------------------------------------------------
# In processes of their own


class FunctionHost:
    """Calls the function that `target` (`file.py:name`) names. What it returns crosses the wire as plain numbers."""

    def __init__(self, target: str) -> None:
        self._function = load_function(target, "reward function")
        self._name = self._function.__name__

    async def one(self, arguments: dict[str, Any]) -> Reward:
        return as_reward(await run(self._function, **arguments), self._name)

    async def group(self, columns: dict[str, list[Any]], count: int, seed: int) -> list[Reward | InvalidStep]:
        random.seed(seed)  # the process is the function's own, so that what it draws at random can be repeated
        return as_rewards(await run(self._function, **columns), count, self._name)
