"""Tasks that only a tool can answer: the value of a key in a table of the task's own, which is not shown."""

from __future__ import annotations

import random
from collections.abc import Sequence

from envgym.hashing import hash_fraction
from envgym.types import Message, Task, TextPart, ToolCall

TEST_TASKS = 512
TEST_SHARE = 1 / 8  # of all keys
UNAIDED = ("I do not know.", "No idea.")
"""Demonstrations without a call of the tool."""


def train_task(index: int, hops: Sequence[int], digits: int) -> Task:
    """Train task `index`: a function of `index` alone."""
    return _task(f"train-{index}", hops, digits, held_out=False)


def held_out_tasks(hops: Sequence[int], digits: int) -> list[Task]:
    """The 512 test tasks. They begin with keys that no train task begins with."""
    return [_task(f"test-{index}", hops, digits, held_out=True) for index in range(TEST_TASKS)]


class Table:
    """The table of one task, behind the tool `get`."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def get(self, key: int) -> int:
        """Get the value of a key."""
        return value_of(self._task, key)


def value_of(task: Task, key: int) -> int:
    """The value of `key` in the table of `task`: another number of as many digits, drawn by task and key."""
    rng = random.Random(f"{task.id} {key}")
    start = 10 ** (task.fields["digits"] - 1)
    value = rng.randrange(start, 10 * start - 1)
    return value + (value >= key)  # any but the key


def demonstration(task: Task, *, calls: bool, rng: random.Random) -> list[str | Message]:
    """The turns that answer `task` by calling the tool, or a turn that gives up."""
    if not calls:
        return [rng.choice(UNAIDED)]
    turns: list[str | Message] = []
    key = task.fields["key"]
    for _ in range(task.fields["hops"]):
        call = ToolCall("", "get", {"key": key})
        turns.append(Message("assistant", (TextPart(""),), (call,)))
        key = value_of(task, key)
    return [*turns, str(key)]


def is_held_out(key: int) -> bool:
    """True for a key that test tasks begin with, by a hash that is the same everywhere."""
    return hash_fraction(f"key {key}") < TEST_SHARE


def _task(id: str, hops: Sequence[int], digits: int, *, held_out: bool) -> Task:
    rng = random.Random(f"lookup {id}")
    n_hops = rng.choice(list(hops))
    key = -1
    while key < 0 or is_held_out(key) != held_out:
        key = rng.randrange(10 ** (digits - 1), 10**digits)
    fields = {"key": key, "hops": n_hops, "digits": digits}
    task = Task(id=id, prompt=f"Value of {'the value of ' * (n_hops - 1)}{key}?", fields=fields, difficulty=n_hops)
    answer = key
    for _ in range(n_hops):
        answer = value_of(task, answer)
    return Task(task.id, task.prompt, answer, fields, float(n_hops))
