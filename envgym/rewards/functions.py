"""Calls of reward functions: their arguments, by name, and their results, checked."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from envgym.errors import ConfigError, DataError, InvalidStep, describe, did_you_mean
from envgym.loading import load_function
from envgym.processes.threads import DedicatedThread
from envgym.types import Action, Message, Reward, Task, as_messages
from envgym.types.episodes import finite_metrics

from .callables import as_function

ARGUMENTS = ("completion", "prompt", "answer", "task", "messages", "action", "fields")
"""Parameters that a reward function may have besides the fields of the data row."""
AMBIGUOUS = ("task", "messages", "action")
"""The ones among `ARGUMENTS` that usual data also have as fields; the argument `fields` gives the data's."""
TRL_ARGUMENTS = ("completions", "prompts", "completion_ids")
"""Parameters of TRL's reward functions: lists with one value per completion."""

COMPLETIONS = ("completion", "messages", "action", "completions", "completion_ids")
"""Arguments that hold the completion."""
COMPLETION_NAMES = (
    "response", "output", "solution", "generation", "text", "responses", "outputs", "generations", "texts",
    "generated_text", "model_output", "predict_str", "prediction", "response_str", "solution_str",
)  # fmt: skip
"""Names that other programs give the completion. Here they name fields of the data, or nothing."""

REWARD_KEYS = ("reward", "score", "overall")
"""Keys of the reward in a mapping: envgym's, verl's and EasyR1's. Beside another, `score` is the score in [0, 1]."""


class RewardFunction:
    """A reward function, or another callable, and its parameters. Raises `ConfigError` for parameters that cannot be
    passed by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.original = function
        self.function = as_function(function)
        self.name = self.function.__name__
        parameters = list(inspect.signature(self.function).parameters.values())
        if len(parameters) > 1:  # what is not given needs no name
            parameters = [parameter for parameter in parameters if parameter.kind != parameter.VAR_POSITIONAL]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"reward function {self.name}: {parameter.name!r} cannot be given by name; a reward function "
                    f"takes {', '.join(ARGUMENTS)} or fields of the data row, by their names"
                )
        by_name = [parameter for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
        self._takes_any = len(by_name) < len(parameters)
        self._required = [parameter.name for parameter in by_name if parameter.default is parameter.empty]
        self._optional = [parameter.name for parameter in by_name if parameter.default is not parameter.empty]
        self._parameters = {*self._required, *self._optional}
        self.scores_completions = not self._parameters.isdisjoint((*ARGUMENTS, *TRL_ARGUMENTS, *COMPLETION_NAMES))
        """True for what takes an argument of reward functions, or a usual name for one: it is no other callable."""
        self.is_trl = not self._parameters.isdisjoint(TRL_ARGUMENTS)
        """True for a function in TRL's form, in which a data field wins over an argument of envgym's."""

    def check(self, task: Task, aliases: Mapping[str, str], *, from_data: bool) -> None:
        """Raise `ConfigError` for a parameter for which a task such as `task` has no value, or two. `from_data`: the
        settings `data.*` read the task's row."""
        self._check_meanings(task)
        synonyms = sorted(self._parameters & set(COMPLETION_NAMES)) if self._parameters.isdisjoint(COMPLETIONS) else []
        if synonyms and not (self._takes_any and {*task.fields, *aliases}.issuperset(synonyms)):
            raise ConfigError(
                f"reward function {self.name} takes {synonyms[0]!r}, and no completion: the completion's parameter is "
                "`completion`"
            )
        names = [name for name in (*ARGUMENTS, *TRL_ARGUMENTS, *task.fields) if _is_parameter(name)]
        for name in self._required:
            if task.answer is None and name not in task.fields and aliases.get(name, name) == "answer":
                advice = "set data.answer=FIELD to the field" if from_data else "name their field 'answer'"
                raise ConfigError(
                    f"reward function {self.name} takes {name!r}, and the tasks have no answer: {advice} "
                    f"(they have {', '.join(map(repr, task.fields)) or 'no field but the prompt'})"
                )
            if name not in names and name not in aliases:
                unusable = ", ".join(repr(field) for field in task.fields if not _is_parameter(field))
                by_task = f" (task.fields also has {unusable}, which cannot be parameters)" if unusable else ""
                raise ConfigError(
                    f"reward function {self.name} takes {name!r}, which is none of {', '.join(names)}"
                    f"{by_task}.{did_you_mean(name, names)}"
                )

    def _check_meanings(self, task: Task) -> None:
        ambiguous = self._parameters.intersection(AMBIGUOUS, task.fields)
        if ambiguous and "fields" not in self._parameters and not self.is_trl:
            name = min(ambiguous)
            raise ConfigError(
                f"reward function {self.name} takes {name!r}, which is a field of the row and an argument of "
                f"envgym's: add the parameter `fields`, then fields[{name!r}] is the row's and {name} envgym's"
            )

    def arguments(self, task: Task, action: Action, aliases: Mapping[str, str]) -> dict[str, Any]:
        """The arguments for one completion; `aliases` are other names of prompt and answer. Raises `DataError` if the
        task lacks a field, `ConfigError` if the function takes token ids and there are none."""
        self._check_meanings(task)
        text, is_text = action.text, isinstance(task.prompt, str)
        messages = as_messages(task.prompt)
        values = {
            "completion": text, "prompt": prompt_text(task), "answer": task.answer, "task": task,
            "messages": [*messages, Message("assistant", text)], "action": action,
        }  # fmt: skip
        available = {alias: values[name] for alias, name in aliases.items()} | {"fields": task.fields}
        if self.is_trl:
            available |= values | dict(task.fields) | {
                "completions": text if is_text else [{"role": "assistant", "content": text}],
                "prompts": task.prompt if is_text else [message.as_dict() for message in messages],
            }  # fmt: skip
            if action.token_ids or not text:
                available["completion_ids"] = list(action.token_ids)
            elif "completion_ids" in self._required:
                raise ConfigError(
                    f"reward function {self.name} takes 'completion_ids', and there is only text: an API or a file "
                    "gives none"
                )
        else:
            of_row = set(AMBIGUOUS) - self._parameters  # in **kwargs
            available |= dict(task.fields) | values | {n: value for n, value in task.fields.items() if n in of_row}
        if missing := [name for name in self._required if name not in available]:
            raise DataError(f"task {task.id} has no field {missing[0]!r}, which {self.name} takes")
        names = [*self._required, *self._optional]
        if self._takes_any:
            answers = [alias for alias, name in aliases.items() if name == "answer"]
            names += [*task.fields, *((*answers, *TRL_ARGUMENTS) if self.is_trl else values)]
        return {name: available[name] for name in names if name in available}

    def select(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments that this function takes, out of those of several functions."""
        names = arguments if self._takes_any else (*self._required, *self._optional)
        return {name: arguments[name] for name in names if name in arguments}


def _is_parameter(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


def prompt_text(task: Task) -> str:
    """A task's prompt as one text: the user's, or `Role: text` lines for several messages."""
    messages = as_messages(task.prompt)
    if len(messages) == 1:
        return messages[0].text
    return "".join(f"{message.role.capitalize()}: {message.text}\n" for message in messages)


async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may be asynchronous, on this thread; a plain one may start its own event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    # In a worker process this is the main thread, where timeouts by signal work.
    asyncio._set_running_loop(None)
    try:
        return function(*args, **kwargs)
    finally:
        asyncio._set_running_loop(loop)


async def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function that may be asynchronous without blocking the event loop: a plain one runs on a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    thread = DedicatedThread(function.__name__)
    try:
        return await thread.call(function, **arguments)
    finally:
        thread.end()


# ---------------------------------------------------------------------------------------------------------
# Results


def as_reward(value: Any, name: str) -> Reward:
    """The reward that the function `name` returned for one completion. Raises `InvalidStep` if it is not one.

    Besides a number and a `Reward` it is what other programs' functions return: a mapping with the reward under the
    first of `REWARD_KEYS` that it has, whose other numbers are metrics, or a tuple of the reward and metrics.
    """
    if isinstance(value, tuple) and value:
        value = _of_tuple(value)
    if isinstance(value, Mapping):
        value = _of_mapping(value, name)
    if not isinstance(value, Reward):
        return Reward(number(value, f"{name} returned"))
    score = number(value.score, f"{name} returned the score")
    if score is not None and not 0 <= score <= 1:
        raise InvalidStep(f"{name} returned the score {score:g}: a score lies in [0, 1]")
    if not isinstance(value.metrics, Mapping):
        raise InvalidStep(f"{name} returned the metrics {value.metrics!r:.60}: they are names and numbers")
    return Reward(number(value.reward, f"{name} returned the reward"), score, finite_metrics(value.metrics))


def _of_mapping(value: Mapping[str, Any], name: str) -> Reward:
    fields = Reward.__dataclass_fields__
    for key, item in value.items() if "reward" in value else ():
        if key not in fields and isinstance(item, Mapping) and (hint := did_you_mean(str(key), fields)):
            raise InvalidStep(f"{name} returned a mapping with {key!r}; its keys are {', '.join(fields)}.{hint}")
    reward_key = next((key for key in REWARD_KEYS if key in value), None)
    if reward_key is None:
        raise InvalidStep(f"{name} returned a mapping without 'reward' (or {' or '.join(map(repr, REWARD_KEYS[1:]))})")
    score, metrics = None if reward_key == "score" else value.get("score"), value.get("metrics") or {}
    if isinstance(metrics, Mapping):
        extra = _numbers({key: item for key, item in value.items() if key not in (reward_key, "score")})
        metrics = extra | dict(metrics)
    return Reward(value[reward_key], score, metrics)


def _of_tuple(value: tuple[Any, ...]) -> Reward:
    """NeMo-RL's pair of the reward and metrics, or whether the answer is correct; a longer tuple begins with the
    reward, as verl reads it."""
    extra = value[1] if len(value) == 2 else None
    if type(extra).__name__ in ("bool", "bool_"):  # bool_ is NumPy's
        extra = {"correct": extra}
    return Reward(value[0], metrics=_numbers(extra) if isinstance(extra, Mapping) else {})


def _numbers(items: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the items, as metrics; an extracted answer, which is text, is none."""
    return {key: item for key, item in items.items() if hasattr(item, "__float__")}


def as_rewards(value: Any, count: int, name: str) -> list[Reward | InvalidStep]:
    """The rewards that a batch function returned for `count` completions; an invalid one is an error in the list.

    `value` is a list of items for `as_reward`, a mapping of lists: `reward`, `score` and `metrics`, by name, or a tuple
    of a list of rewards and metrics. Raises `InvalidStep` unless there is one item per completion.
    """
    if isinstance(value, tuple) and value and isinstance(plain(value[0]), list):
        extra = value[1] if len(value) == 2 else None
        if isinstance(extra, Mapping):
            value = {key: _spread(items, count) for key, items in extra.items()} | {"reward": value[0]}
        else:
            rewards_alone = column(value[0], count, f"{name} returned")
            value = list(zip(rewards_alone, _spread(extra, count), strict=True))
    rows = column(value, count, f"{name} returned") if not isinstance(value, Mapping) else _rows(value, count, name)
    rewards: list[Reward | InvalidStep] = []
    for row in rows:
        try:
            rewards.append(row if isinstance(row, InvalidStep) else as_reward(row, name))
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


def _spread(value: Any, count: int) -> list[Any]:
    """A list of `count` unchanged; any other value for each of `count`."""
    values = plain(value)
    return values if isinstance(values, list) and len(values) == count else [values] * count


def plain(value: Any) -> Any:
    """An array or a tensor as a list or a number."""
    return value.tolist() if hasattr(value, "tolist") else value


def column(value: Any, count: int, context: str) -> list[Any]:
    """A list, a tuple, an array or a tensor as a list of `count`. `context` begins the message of the `InvalidStep`."""
    values = plain(value)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidStep(f"{context} {describe(value)}: it must be a list of {count} items, one per completion")
    if len(values) != count:
        raise InvalidStep(f"{context} {len(values)} values for {count} completions")
    return list(values)


def number(value: Any, context: str) -> float | None:
    """A finite float of a number, or of an array or tensor of one; None stays None. `context` begins the message of
    the `InvalidStep`."""
    if value is None:
        return None
    if inspect.iscoroutine(value):
        raise InvalidStep(f"{context} {describe(value)}")
    try:
        result = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        result = math.nan
    if not math.isfinite(result):
        raise InvalidStep(f"{context} {value!r:.60}: it must be a finite number or None")
    return result


# ---------------------------------------------------------------------------------------------------------
# Several functions


def weighted_sum(functions: Sequence[RewardFunction], weights: Sequence[float], batch: bool) -> Callable[..., Any]:
    """One function of several: it returns the weighted sum of their rewards, and each reward as a metric.

    A function that returns None for a completion does not count for it; if all do, it gets no reward. The score is the
    first that a function returns. Asynchronous functions run concurrently.
    """
    names = numbered([item.name for item in functions])
    if not names:
        raise ConfigError("envgym.reward was given an empty list of functions")
    if len(weights) != len(names):
        raise ConfigError(f"{len(weights)} weights for {len(names)} reward functions: give each function a weight")
    if len({id(item.original) for item in functions}) < len(names):
        raise ConfigError(f"a reward function stands twice among {', '.join(item.name for item in functions)}")

    def add(rewards: Sequence[Reward | InvalidStep]) -> Reward | InvalidStep:
        score: float | None = None
        metrics: dict[str, float] = {}
        terms = []
        for reward, name, weight in zip(rewards, names, weights, strict=True):
            if isinstance(reward, InvalidStep):
                return reward
            score = reward.score if score is None else score
            metrics |= reward.metrics
            if reward.reward is not None:
                metrics[name] = reward.reward
                terms.append(weight * reward.reward)
        return Reward(sum(terms) if terms else None, score, metrics)

    def total(values: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
        if not batch:
            return add([as_reward(value, name) for value, name in zip(values, names, strict=True)])
        count = len(next(iter(arguments.values())))
        columns = [as_rewards(value, count, name) for value, name in zip(values, names, strict=True)]
        return [add(rewards) for rewards in zip(*columns, strict=True)]

    def plain(**arguments: Any) -> Any:
        return total([item.function(**item.select(arguments)) for item in functions], arguments)

    async def asynchronous(**arguments: Any) -> Any:
        calls = [call(item.function, item.select(arguments)) for item in functions]
        return total(await asyncio.gather(*calls), arguments)

    is_async = any(inspect.iscoroutinefunction(item.function) for item in functions)
    summed: Callable[..., Any] = asynchronous if is_async else plain
    summed.__name__, summed.__doc__ = "+".join(names), f"The weighted sum of {', '.join(names)}."
    return summed


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number where several are equal, as two partials of one function have them."""
    return [
        name if names.count(name) == 1 else f"{name}_{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


# ---------------------------------------------------------------------------------------------------------
# In worker processes


class FunctionHost:
    """Calls the function at `target` (`file.py:name`). Its results cross the wire as plain numbers."""

    def __init__(self, target: str) -> None:
        self._function = as_function(load_function(target, "reward function"))
        self._name = self._function.__name__

    async def score(self, arguments: dict[str, Any]) -> Reward:
        return as_reward(await run(self._function, **arguments), self._name)

    async def group(self, columns: dict[str, list[Any]], count: int, seed: int) -> list[Reward | InvalidStep]:
        random.seed(seed)  # only this function runs in the process, so its random draws can be repeated
        return as_rewards(await run(self._function, **columns), count, self._name)
