"""Keeping answers from being run as programs.

Some of the library's scorers hand an answer to `eval`, by themselves or by way of sympy's parser. Here `eval` takes
arithmetic on numbers, and lists and the like of it; by way of sympy's parser also sympy's own symbols and functions.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LARGEST_EXPONENT = 10_000

ALLOWED = (
    ast.Constant, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.keyword,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
"""The kinds of node an expression may have, beside names, calls and binary operations, which are looked into."""

_eval = builtins.eval


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
