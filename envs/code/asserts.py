"""Reads `assert f(1, 2) == 3` as a call and its result, so that nobody but us compares the two."""

from __future__ import annotations

import ast
from typing import Any

from .driver import encode

Call = tuple[str, list[Any], dict[str, Any], Any]
"""A function's name, arguments, keyword arguments and what it returns."""


def calls_in(code: str, entry_point: str = "") -> list[Call] | None:
    """The calls that a text of assertions makes, or None where it does anything else.

    Understood are `assert f(…) == …` with literal values, also within `def check(candidate):`, where the candidate is
    `entry_point`.
    """
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names: dict[str, str] = {}
    match [statement for statement in statements if not _says_nothing(statement)]:
        case [ast.FunctionDef(name="check", args=ast.arguments(args=[argument]), body=body)] if entry_point:
            names = {argument.arg: entry_point}
            statements = body
    calls = [_call(statement, names) for statement in statements if not _says_nothing(statement)]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _says_nothing(statement: ast.stmt) -> bool:
    """A text, or the note that some collections of problems put before their tests."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assign(targets=[ast.Name(id="METADATA")]):
            return True
    return False


def _call(statement: ast.stmt, names: dict[str, str]) -> Call | None:
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])):
            call, value = (left, right) if isinstance(left, ast.Call) else (right, left)
        case _:
            return None
    match call:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            pass
        case _:
            return None
    try:
        read = (
            names.get(name, name),
            [ast.literal_eval(argument) for argument in args],
            {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg is not None},
            ast.literal_eval(value),
        )
        encode(list(read))
    except (ValueError, TypeError, RecursionError):
        return None
    return read if len(read[2]) == len(keywords) else None
