"""Scoring an answer as its dataset does, except where the dataset pays a wrong one in full.

Some of the library's scorers hand an answer to `eval`, by themselves or by way of sympy's parser. Here `eval` takes
arithmetic on numbers, and lists and the like of it; by way of sympy's parser also sympy's own symbols and functions.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Entry = Mapping[str, Any]

LARGEST_EXPONENT = 10_000

ALLOWED = (
    ast.Constant, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.keyword,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
"""The kinds of node an expression may have, beside names, calls and binary operations, which are looked into."""

_eval = builtins.eval

_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)


def scored(name: str, dataset: Any, answer: str, entry: Entry) -> float:
    """The score of `answer`, in [0, 1], by the scorer of dataset `name`, or by ours where that one is wrong."""
    if _NOT_A_NUMBER.search(answer) and not _NOT_A_NUMBER.search(str(entry["answer"])):
        return 0.0  # no distance from it is large, and some scorers find it none
    scorer = CORRECTED.get(name, dataset.score_answer)
    try:
        with answers_are_data():
            score = float(scorer(answer, copy.deepcopy(entry)))  # some write into the entry
    except (Exception, SystemExit):  # whatever an answer brings a scorer to raise, it is not right
        return 0.0
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


def _coin_flip(answer: str, entry: Entry) -> float:
    """The library's accepts every beginning of the right number: 0 for 0.25."""
    given, right = _fraction(answer), _fraction(entry["answer"])
    return float(abs(given - right) <= min(1e-4, 1e-2 * right))


def _game_of_life_halting(answer: str, entry: Entry) -> float:
    """The library's compares the truth of two strings, so that any answer is right."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def _puzzle24(answer: str, entry: Entry) -> float:
    """The library's accepts any four numbers, not only those given, and rounds: 6*4*1*1 is always right."""
    from sympy.parsing.sympy_parser import parse_expr

    given = sorted(entry["metadata"]["numbers"])
    if sorted(int(number) for number in re.findall(r"\d+", answer)) != given or re.search(r"[^\d\s+\-*/()]|//", answer):
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


class Refused(ValueError):
    """An answer that is not data."""


@contextmanager
def answers_are_data() -> Iterator[None]:
    """Within, `eval` raises `Refused` for anything but data."""
    builtins.eval = _guarded
    try:
        yield
    finally:
        builtins.eval = _eval


def _guarded(source: Any, globals: Any = None, locals: Any = None) -> Any:
    if not isinstance(source, str):
        raise Refused("compiled code")
    source = source.strip()
    names = {**(globals or {}), **(locals or {})}
    _check(ast.parse(source, mode="eval").body, names)
    return _eval(source, {"__builtins__": {}, **names})


def _check(node: ast.AST, names: Mapping[str, Any]) -> None:
    """Raise `Refused` unless an expression is arithmetic on numbers and on what sympy offers."""
    if isinstance(node, ast.Name):
        if not _is_mathematics(names.get(node.id)):
            raise Refused(node.id)
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name):
            raise Refused("a call of something computed")
    elif isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            _check_exponent(node.right)
    elif not isinstance(node, ALLOWED):
        raise Refused(type(node).__name__)
    for part in ast.iter_child_nodes(node):
        _check(part, names)


def _check_exponent(exponent: ast.AST) -> None:
    """Towers of powers take for ever."""
    for node in ast.walk(exponent):
        if isinstance(node, ast.Pow):
            raise Refused("a power in an exponent")
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > LARGEST_EXPONENT:
            raise Refused("an exponent of more than four digits")


def _is_mathematics(value: Any) -> bool:
    """Numbers, symbols, constants and functions; not `Integral` and the like, which would be the question again."""
    import sympy

    if isinstance(value, type):
        return issubclass(value, sympy.Function | sympy.Number | sympy.Symbol)
    return isinstance(value, sympy.Atom) or value in (sympy.sqrt, sympy.cbrt)
