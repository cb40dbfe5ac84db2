"""Worked examples before the first observation: training tasks as the policy reads them, with right answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envgym.errors import ConfigError, DataError
from envgym.tasks import TaskSet
from envgym.tasks.config import DataConfig
from envgym.tasks.task_set import tasks_at
from envgym.types import Message, Observation, Task

if TYPE_CHECKING:
    from .spec import EnvSpec


@dataclass(frozen=True, slots=True)
class Example:
    """A training task, its first observation and a right answer."""

    task: Task
    observation: Observation
    answer: Message


def with_examples(observation: Observation, examples: Sequence[Example], task: Task, count: int) -> Observation:
    """The first observation of `task`, with `count` of the examples before it: turns, behind its system messages, or
    raw text before raw text. An example with the task's own prompt is left out; there is one to spare."""
    examples = [example for example in examples if example.task.prompt != task.prompt][:count]
    if observation.text is not None:
        parts = [f"{example.observation.text}{example.answer.text.rstrip()}\n\n" for example in examples]
        return replace(observation, text="".join([*parts, observation.text]))
    messages = observation.messages
    start = next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
    turns = [message for example in examples for message in (*example.observation.messages, example.answer)]
    turns = [message for message in turns if message.role != "system"]
    return replace(observation, messages=(*messages[:start], *turns, *messages[start:]))


def check_examples(id: str, data: DataConfig, tasks: TaskSet) -> None:
    """Raise `DataError` if there are too few tasks to take the examples from."""
    if (size := tasks.index_bound) < data.few_shot:
        advice = "" if size else ": give training rows with data.path=FILE, and held-out ones with data.test_path=FILE"
        raise DataError(
            f"data.few_shot={data.few_shot}: environment {id} has {size} training tasks to take examples from, and a "
            f"held-out one is never shown{advice}"
        )


async def play_examples(spec: EnvSpec, data: DataConfig, tasks: TaskSet) -> list[Example]:
    """The examples of `data` and one to spare, if there is one: with `data.few_shot_select` the first of `tasks`, in
    their order, else tasks drawn by the seed. Raises `ConfigError` if a right answer is no single turn."""
    size = tasks.index_bound
    count = min(size, data.few_shot + 1)
    drawn = random.Random(f"few-shot {data.few_shot_seed}").sample(range(size), count)
    examples, env = [], spec.make()
    try:
        for task in await tasks_at(tasks, range(count) if data.few_shot_select else drawn):
            turns = spec.worked_answer(task)
            if len(turns) != 1:
                raise ConfigError(f"data.few_shot: an example has one turn, and a right answer in {spec.id} more")
            [turn] = turns
            answer = turn if isinstance(turn, Message) else Message("assistant", turn)
            examples.append(Example(task, await env.first_observation(task), answer))
    finally:
        await env.close()
    return examples
