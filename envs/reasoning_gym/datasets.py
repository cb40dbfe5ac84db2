"""The puzzles of reasoning-gym and their scorers, in a separate process (the class that `Processes` hosts).

The library cannot run in the run's process, for four reasons: several datasets order their text by the hash of strings,
which differs between processes unless `PYTHONHASHSEED` is set; some draw from the global random generators; some
scorers evaluate the completion; and sympy may run forever or block the interpreter.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import functools
import json
import math
import random
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError, NameNotFound, did_you_mean, needs
from envgym.hashing import hash_fraction

if TYPE_CHECKING:
    from . import ReasoningGymConfig

CHUNK = 500
"""Items of one dataset object; the library's own default."""
MEMORY_BYTES = 4 * 2**30
TEST_START = 2**31
"""Items from here on are held out."""
TEST_SHARE = 1 / 4
"""Share of all questions that are held out. The smaller it is, the longer the search for one."""
TRIES = 200
STRIDE = 1_000_003
"""Distance from an item to its substitute."""

EXAMPLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "graph_color": lambda metadata: json.dumps({str(k): v for k, v in metadata["possible_answer"].items()}),
    "propositional_logic": lambda metadata: str(metadata["example_answer"]),
    "rubiks_cube": lambda metadata: str(metadata["example_correct_answer"]),
}
"""Location of a right answer in datasets that accept many, and so have no `answer`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One puzzle. `answer` is a right answer, None if the dataset has none."""

    dataset: str
    question: str
    answer: str | None
    level: int | None


def is_held_out(question: str) -> bool:
    """True for a question of the test split, by a hash that is the same everywhere.

    Seeds do not keep the splits apart: item N of seed S is item 0 of seed S + N in most datasets, and small datasets
    repeat questions.
    """
    return hash_fraction(question) < TEST_SHARE


class Datasets:
    """Makes item N of a weighted set of datasets, the same one in every process, and scores answers to it.

    Raises `NameNotFound` for unknown datasets and `ConfigError` for unknown settings.
    """

    def __init__(self, config: ReasoningGymConfig) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        with needs("reasoning-gym", "reasoning-gym", "reasoning_gym"):
            import reasoning_gym.factory as factory
        self._factory = factory
        self._config = config
        self._dataset = functools.lru_cache(maxsize=256)(self._make_dataset)
        self._item = functools.lru_cache(maxsize=2048)(self._make_item)
        for name in config.weights:
            if name not in factory.DATASETS or name == "composite":
                raise NameNotFound(f"reasoning-gym has no dataset {name!r}.{did_you_mean(name, factory.DATASETS)}")
            for level in config.level or (None,):
                self._dataset(name, level, 0)

    def item(self, number: int) -> Item:
        """Item `number`."""
        name, level, entry, answer = self._item(number)
        return Item(name, entry["question"], answer, level)

    def score(self, number: int, answer: str) -> float:
        """The score of `answer` to item `number`, in [0, 1]; see `score_answer`."""
        name, level, entry, _ = self._item(number)
        return score_answer(name, self._dataset(name, level, 0), answer, entry)

    def _make_item(self, number: int) -> tuple[str, int | None, dict[str, Any], str | None]:
        """(dataset, level, the library's entry, a right answer).

        Another item replaces an unusable one: the library could not make it, or does not accept its own answer, or the
        question belongs to the other split. Raises `RuntimeError` after `TRIES` of them.
        """
        rng = random.Random(f"{self._config.seed} {number}")
        name = rng.choices(list(self._config.weights), list(self._config.weights.values()))[0]
        level = rng.choice(self._config.level) if self._config.level else None
        reason: object = ""
        for attempt in range(TRIES):
            try:
                entry = self._generate(name, level, number + attempt * STRIDE)
            except Exception as error:
                reason = error
                continue
            if is_held_out(entry["question"]) != (number >= TEST_START):
                reason = "there are too few different ones to hold some out"
                continue
            answer = EXAMPLES[name](entry["metadata"]) if name in EXAMPLES else entry["answer"]
            if answer is None or score_answer(name, self._dataset(name, level, 0), str(answer), entry) == 1:
                return name, level, entry, None if answer is None else str(answer)
            reason = f"its own answer {answer!r:.80} is not accepted"
        raise RuntimeError(f"dataset {name} makes no puzzle with these parameters: {reason}")

    def _generate(self, name: str, level: int | None, number: int) -> dict[str, Any]:
        """The library's entry `number`. Seeds the global generators, from which some datasets draw."""
        import numpy as np

        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            entry: dict[str, Any] = self._dataset(name, level, 0)[number]
        except IndexError:
            # Most datasets make item N from seed + N, without end. A few prepare `size` items in advance.
            chunk_index, index = divmod(number, CHUNK)
            entry = self._dataset(name, level, chunk_index)[index]
        return entry

    def _make_dataset(self, name: str, level: int | None, chunk_index: int) -> Any:
        """Make a dataset object. Most continue without end, so chunk 0 serves all their items. One that prepares only
        `size` items needs chunk N // `CHUNK` for item N (`_generate`)."""
        params = self._config.params_of.get(name, {}) | {"seed": self._config.seed + chunk_index * CHUNK, "size": CHUNK}
        try:
            if level is None and not self._config.attributes:
                config = self._factory.DATASETS[name][1](**params)
            else:
                config = dataclasses.replace(self._curriculum(name, level).generate_configuration(), **params)
            return self._factory.DATASETS[name][0](config)
        except TypeError as error:
            fields = [field.name for field in dataclasses.fields(self._factory.DATASETS[name][1])]
            raise ConfigError(f"dataset {name}: {error}. Its parameters are {', '.join(fields)}") from None
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"dataset {name}: {' '.join(str(error).split()) or 'invalid parameters'}") from None

    def _curriculum(self, name: str, level: int | None) -> Any:
        """The curriculum at `level` and the configured attributes. Raises `ConfigError` if it has none of these."""
        if not self._factory.has_curriculum(name):
            raise ConfigError(f"dataset {name} has no curriculum: unset the level")
        curriculum = self._factory.create_curriculum(name)
        attributes = curriculum.attributes
        highest = max(len(attribute.levels) for attribute in attributes.values()) - 1
        if level is not None:
            if level > highest:
                raise ConfigError(f"dataset {name} has the levels 0 to {highest}, not {level}")
            curriculum.set_global_level(level)
        for attribute, value in self._config.attributes.items():
            if attribute not in attributes:
                raise ConfigError(
                    f"the curriculum of {name} has no attribute {attribute!r}, only {', '.join(attributes)}."
                    f"{did_you_mean(attribute, attributes)}"
                )
            curriculum.set_attr_level(attribute, value)
        return curriculum


# -- scorers: each dataset's own, except those that give a wrong answer the full score ---------------------
#
# Some of the library's scorers pass an answer to `eval`, directly or through sympy's parser. Here `eval` accepts
# arithmetic on numbers, and lists and the like of it; through sympy's parser also sympy's own symbols and functions.

Entry = Mapping[str, Any]

LARGEST_EXPONENT = 10_000
CONSOLATION = 0.1
"""Scores up to here count as 0: the library gives them to any answer, or to any of the right form."""
CONSOLATIONS = {"prime_factorization": 0.5, "propositional_logic": 0.25}
"""The same for datasets that give more: for repeating the number of the question, or for a tautology."""

ALLOWED = (
    ast.Constant, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.keyword,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
"""The kinds of node that an expression may have, besides names, calls and binary operations, which are checked."""

_eval = builtins.eval

_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)


def score_answer(name: str, dataset: Any, answer: str, entry: Entry) -> float:
    """The score of `answer`, in [0, 1], by the scorer of dataset `name`, or by the corrected one below."""
    if _NOT_A_NUMBER.search(answer) and not _NOT_A_NUMBER.search(str(entry["answer"])):
        return 0.0  # some scorers take the distance to NaN or infinity for none
    scorer = CORRECTED.get(name, dataset.score_answer)
    try:
        with restricted_eval():
            score = float(scorer(answer, copy.deepcopy(entry)))  # some scorers modify the entry
    except (Exception, SystemExit):  # an answer on which the scorer fails is wrong
        return 0.0
    return min(score, 1.0) if CONSOLATIONS.get(name, CONSOLATION) < score < math.inf else 0.0


def _coin_flip(answer: str, entry: Entry) -> float:
    """The library's scorer accepts every prefix of the right number: 0 for 0.25."""
    value, expected = _fraction(answer), _fraction(entry["answer"])
    return float(abs(value - expected) <= min(1e-4, 1e-2 * expected))


def _game_of_life_halting(answer: str, entry: Entry) -> float:
    """The library's scorer compares the truth values of two strings, so that any answer is right."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def _puzzle24(answer: str, entry: Entry) -> float:
    """The library's scorer accepts any four numbers, not only the task's, and rounds: 6*4*1*1 is always right."""
    from sympy.parsing.sympy_parser import parse_expr

    task_numbers = sorted(entry["metadata"]["numbers"])
    numbers = sorted(int(number) for number in re.findall(r"\d+", answer))
    if numbers != task_numbers or re.search(r"[^\d\s+\-*/()]|//", answer):
        return 0.0
    return float(parse_expr(answer) == 24)


def _fraction(text: str) -> float:
    numerator, slash, denominator = text.replace(",", "").partition("/")
    return float(numerator) / float(denominator) if slash else float(numerator)


CORRECTED: Mapping[str, Callable[[str, Entry], float]] = {
    "coin_flip": _coin_flip,
    "game_of_life_halting": _game_of_life_halting,
    "puzzle24": _puzzle24,
}


class UnsafeExpression(ValueError):
    """An answer that is more than data."""


@contextmanager
def restricted_eval() -> Iterator[None]:
    """In the block, `eval` raises `UnsafeExpression` for anything but data."""
    builtins.eval = _safe_eval
    try:
        yield
    finally:
        builtins.eval = _eval


def _safe_eval(source: Any, globals: Any = None, locals: Any = None) -> Any:
    """`eval` for data only. Raises `UnsafeExpression` for anything else."""
    if not isinstance(source, str):
        raise UnsafeExpression("compiled code")
    source = source.strip()
    names = {**(globals or {}), **(locals or {})}
    _check_is_data(ast.parse(source, mode="eval").body, names)
    return _eval(source, {"__builtins__": {}, **names})


def _check_is_data(node: ast.AST, names: Mapping[str, Any]) -> None:
    """Raise `UnsafeExpression` unless an expression is arithmetic on numbers and sympy's symbols and functions."""
    if isinstance(node, ast.Name):
        if not _is_mathematics(names.get(node.id)):
            raise UnsafeExpression(node.id)
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name):
            raise UnsafeExpression("a call of something computed")
    elif isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            _check_exponent(node.right)
    elif not isinstance(node, ALLOWED):
        raise UnsafeExpression(type(node).__name__)
    for part in ast.iter_child_nodes(node):
        _check_is_data(part, names)


def _check_exponent(exponent: ast.AST) -> None:
    """Raise `UnsafeExpression` for towers of powers, which take forever."""
    for node in ast.walk(exponent):
        if isinstance(node, ast.Pow):
            raise UnsafeExpression("a power in an exponent")
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > LARGEST_EXPONENT:
            raise UnsafeExpression("an exponent of more than four digits")


def _is_mathematics(value: Any) -> bool:
    """True for numbers, symbols, constants and functions; not for `Integral` and the like, which would repeat the
    question."""
    import sympy

    if isinstance(value, type):
        return issubclass(value, sympy.Function | sympy.Number | sympy.Symbol)
    return isinstance(value, sympy.Atom) or value in (sympy.sqrt, sympy.cbrt)
