"""Endless sums: a train task for every index, and held-out tasks that share no problem with them."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Sequence
from typing import Literal

from envgym.env import TaskSet
from envgym.types import Task

Operation = Literal["+", "-", "*"]

COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TEST_TASKS = 512
TEST_SHARE = 1 / 8  # of all problems; of two-digit sums that is 1250, of which TEST_TASKS are asked


class ArithmeticTasks(TaskSet):
    """Train tasks: task `index` is a function of `index` alone."""

    def __init__(self, operations: Sequence[Operation], digits: int) -> None:
        self._operations, self._digits = operations, digits

    @property
    def size(self) -> int | None:
        return None

    async def get(self, index: int) -> Task:
        rng = random.Random(f"train {index}")
        while True:
            problem = draw(rng, self._operations, self._digits)
            if not is_held_out(*problem):
                return _task(f"train-{index}", *problem)


def held_out_tasks(operations: Sequence[Operation], digits: int) -> list[Task]:
    """The 512 test tasks, all different; fewer where there are not as many problems (one digit)."""
    rng = random.Random("test")
    problems: dict[tuple[Operation, int, int], None] = {}
    for _ in range(40 * TEST_TASKS):  # ample: one draw in eight is held out
        problem = draw(rng, operations, digits)
        if is_held_out(*problem):
            problems[problem] = None
        if len(problems) == TEST_TASKS:
            break
    return [_task(f"test-{index}", *problem) for index, problem in enumerate(problems)]


def draw(rng: random.Random, operations: Sequence[Operation], digits: int) -> tuple[Operation, int, int]:
    """An operation and two operands of at most `digits` digits."""
    return rng.choice(operations), rng.randrange(10**digits), rng.randrange(10**digits)


def is_held_out(operation: Operation, a: int, b: int) -> bool:
    """Whether a problem belongs to the test tasks, by a hash that is the same everywhere.

    The order of the operands does not count: 45 + 23 is no new problem to one who was taught 23 + 45.
    """
    digest = hashlib.sha256(f"{min(a, b)} {operation} {max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < TEST_SHARE * 2**32


def _task(id: str, operation: Operation, a: int, b: int) -> Task:
    return Task(id=id, prompt=f"What is {a} {operation} {b}?", answer=COMPUTE[operation](a, b))
