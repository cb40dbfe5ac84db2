"""Problems generated from the families: a train task for every index, and separate held-out tasks."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from string import Template
from typing import Any

import yaml

from envgym.types import Task

TEST_TASKS = 256
TEST_SHARE = 1 / 8
SHOWN_TESTS = 2
MAX_EQUAL_SHARE = 0.6
"""Maximum share of a task's tests with equal results, so that no constant function passes most of them."""
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Family:
    """Problems that differ only in their parameters; `families.yaml` describes the fields."""

    name: str
    inputs: Mapping[str, str]
    text: str
    body: str
    parameters: Mapping[str, Sequence[Any]]


def train_task(index: int, n_tests: int) -> Task:
    """Train task `index`: a function of `index` alone."""
    rng = random.Random(f"train {index}")
    while True:
        family = rng.choice(families())
        parameters = {name: rng.choice(values) for name, values in family.parameters.items()}
        if not is_held_out(family, parameters):
            task = make_task(f"train-{index}", family, parameters, n_tests, rng)
            if task is not None:
                return task


def held_out_tasks(n_tests: int) -> list[Task]:
    """The 256 test tasks, all different, from all families in rotation."""
    rng = random.Random("test")
    problems: set[tuple[str, str]] = set()
    tasks: list[Task] = []
    while len(tasks) < TEST_TASKS:
        for family in families():
            parameters = {name: rng.choice(values) for name, values in family.parameters.items()}
            key = (family.name, repr(parameters))
            if is_held_out(family, parameters) and key not in problems:
                problems.add(key)
                task = make_task(f"test-{len(tasks)}", family, parameters, n_tests, rng)
                if task is not None:
                    tasks.append(task)
    return tasks[:TEST_TASKS]


def is_held_out(family: Family, parameters: Mapping[str, Any]) -> bool:
    """True for a problem of the test tasks."""
    return tuple(parameters.values()) in _held_out(family.name)


@cache
def _held_out(name: str) -> frozenset[tuple[Any, ...]]:
    """An eighth of a family's combinations of parameters, drawn by a hash that is the same everywhere."""
    [family] = (family for family in families() if family.name == name)
    combinations = sorted(
        itertools.product(*family.parameters.values()),
        key=lambda values: hashlib.sha256(f"{name} {values}".encode()).digest(),
    )
    return frozenset(combinations[: math.ceil(len(combinations) * TEST_SHARE)])


def make_task(id: str, family: Family, parameters: Mapping[str, Any], n_tests: int, rng: random.Random) -> Task | None:
    """Make a task with its solution as the answer, and `tests` and `entry_point` as fields.

    None if too many results are equal, whichever arguments are tried.
    """
    filled = {name: str(value) for name, value in parameters.items()}
    filled |= {f"{name}th": _ordinal(value) for name, value in parameters.items() if isinstance(value, int)}
    if "order" in filled:
        filled["sign"] = "1" if filled["order"] == "small to large" else "-1"
    signature = f"{family.name}({', '.join(family.inputs)})"
    body = Template(family.body).substitute(filled).replace("\n", "\n    ")
    code = f"def {signature}:\n    {body}"
    tests = _tests(family, _compile(code), n_tests, rng)
    if tests is None:
        return None
    # The first cases are the edges (nothing, one of something); the prompt shows others.
    examples = "\n".join(tests[-SHOWN_TESTS:])
    text = Template(family.text).substitute(filled)
    prompt = f"Write a Python function `{signature}` that {text}\n\nFor example:\n{examples}"
    fields = {"tests": [f"assert {test}" for test in tests], "entry_point": family.name, "family": family.name}
    return Task(id=id, prompt=prompt, answer=code, fields=fields)


def _tests(family: Family, solve: Callable[..., Any], n_tests: int, rng: random.Random) -> list[str] | None:
    """Calls with drawn arguments and their results, `f(…) == …`; None if too many results are equal in every draw."""
    for _ in range(_TRIES):
        arguments = [[_KINDS[kind](case, rng) for kind in family.inputs.values()] for case in range(n_tests)]
        results = [repr(solve(*copy.deepcopy(args))) for args in arguments]
        [(_, n_equal)] = Counter(results).most_common(1)
        if n_equal <= MAX_EQUAL_SHARE * n_tests:
            calls = [f"{family.name}({', '.join(map(repr, args))})" for args in arguments]
            return [f"{call} == {result}" for call, result in zip(calls, results, strict=True)]
    return None


@cache
def families() -> list[Family]:
    """All families of problems."""
    return [
        Family(**{**entry, "parameters": {name: _values(spec) for name, spec in entry["parameters"].items()}})
        for entry in _data()["families"]
    ]


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
    return data


def _values(spec: Any) -> Sequence[Any]:
    """Values of a parameter: a range of numbers, a list, or the characters of a text."""
    return range(spec["from"], spec["to"] + 1, spec.get("step", 1)) if isinstance(spec, dict) else spec


def _ordinal(number: int) -> str:
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number, 'th')}"


def _integers(low: int, high: int) -> Callable[[int, random.Random], list[int]]:
    def make_list(case: int, rng: random.Random) -> list[int]:
        length = case if case < 2 else rng.randrange(3, 12)
        return [rng.randint(low, high) for _ in range(length)]

    return make_list


def _text(case: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_data()["words"], k=case if case < 2 else rng.randrange(2, 7)))


def _prices(case: int, rng: random.Random) -> dict[str, int]:
    names = rng.sample(_data()["words"], case if case < 2 else rng.randrange(2, 7))
    return {name: rng.randint(1, 30) for name in names}


# Arguments of each kind; cases 0 and 1 are the edge cases.
_KINDS: Mapping[str, Callable[[int, random.Random], Any]] = {
    "natural": lambda case, rng: case if case < 2 else rng.randrange(2, 150),
    "positive": lambda case, rng: 1 + case if case < 2 else rng.randrange(3, 100),
    "integer": lambda case, rng: -case if case < 2 else rng.randrange(-100, 100),
    "integers": _integers(-30, 50),
    "few_integers": _integers(-5, 9),
    "text": _text,
    "word": lambda case, rng: "" if case == 0 else rng.choice(_data()["words"]),
    "words": lambda case, rng: rng.choices(_data()["words"], k=case if case < 2 else rng.randrange(2, 7)),
    "few_letters": lambda case, rng: "".join(rng.choices("abcd", k=case if case < 2 else rng.randrange(3, 14))),
    "prices": _prices,
}


@lru_cache(maxsize=1024)
def _compile(code: str) -> Callable[..., Any]:
    """Compile one of the solutions above to a function."""
    names: dict[str, Any] = {}
    exec(code, names)
    function: Callable[..., Any] = names[code.removeprefix("def ").partition("(")[0]]
    return function
