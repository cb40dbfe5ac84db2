"""Endless sums: a train task for every index, and held-out tasks that share no problem with them."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Literal

from envgym.hashing import hash_fraction
from envgym.types import Task

Operation = Literal["+", "-", "*"]

COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TEST_TASKS = 512
TEST_SHARE = 1 / 8  # of all problems; of two-digit sums that is 1250, of which TEST_TASKS are asked


def train_task(index: int, operations: Sequence[Operation], digits: int) -> Task:
    """Train task `index`: a function of `index` alone."""
    rng = random.Random(f"train {index}")
    while True:
        problem = draw(rng, operations, digits)
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
    """True for a problem of the test tasks, by a hash that is the same everywhere.

    The order of the operands does not count: 45 + 23 is no new problem to one who was taught 23 + 45.
    """
    return hash_fraction(f"{min(a, b)} {operation} {max(a, b)}") < TEST_SHARE


def _task(id: str, operation: Operation, a: int, b: int) -> Task:
    return Task(id=id, prompt=f"What is {a} {operation} {b}?", answer=COMPUTE[operation](a, b))
