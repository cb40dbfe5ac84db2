"""Unit tests as data: a call and its result, an input and its output, or lines of `assert`."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from envgym.errors import DataError

from .driver import encode

MAX_DIGITS = 100_000
"""Digits of the longest integers that `long_integers` allows."""


@contextmanager
def long_integers() -> Iterator[None]:
    """Let this process read and write integers of `MAX_DIGITS`: programs are asked for more than Python's 4,300."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(max(limit, MAX_DIGITS) if limit else 0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


@dataclass(frozen=True, slots=True)
class CallCase:
    """A call of a function and its result. Arguments and result are encoded (see `driver`)."""

    function: str
    args: Any
    kwargs: Any
    expected: Any
    text: str
    """The call, as source code."""
    result: str
    """The expected result, as source code."""
    in_list: bool = False
    """The expected result is in a list of one; either is right."""


@dataclass(frozen=True, slots=True)
class OutputCase:
    """Text on standard input, and the program's expected output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Statements that run in the solution's own process, and raise an exception if it is wrong.

    A malicious solution can make them pass: use the other kinds where possible.
    """

    code: str


Case = CallCase | OutputCase | AssertCase

_KINDS = "give {'call', 'args', 'expected'} or {'stdin', 'stdout'} objects, or lines of assert"


def call_case(function: str, args: list[Any], kwargs: Mapping[str, Any], expected: Any) -> CallCase:
    """Make a case of a call. Raises `TypeError` for values that are not of Python's literal types."""
    arguments = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    text = f"{function}({', '.join(arguments)})"
    return CallCase(function, encode(list(args)), encode(dict(kwargs)), encode(expected), text, repr(expected))


def read_cases(tests: Any, entry_point: str = "") -> list[Case]:
    """Read the cases of a row's tests: a list of objects or of assert lines, a text of assert lines, or JSON of these.

    `entry_point` is the function under test, if a test does not name one. Raises `DataError`.
    """
    if isinstance(tests, str):
        tests = _parse(tests)
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        tests = _pairs(tests)
    items = [tests] if isinstance(tests, str | Mapping) else tests
    if not isinstance(items, list) or not items:
        raise DataError(f"no tests in {tests!r:.60}: {_KINDS}")
    return [case for item in items for case in _read(item, entry_point)]


def _parse(text: str) -> Any:
    """Parse JSON; other text is code, and returned unmodified."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pairs(tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert `{"inputs": […], "outputs": […], "fn_name": …}`, columns, to rows."""
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise DataError(f"tests have lists of as many inputs as outputs, not {tests!r:.60}")
    if name:
        # Some data sets have the result in a list of one; their graders accept either, as a result may be one.
        in_list = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        rows = zip(inputs, outputs, strict=True)
        return [{"call": name, "args": x, "expected": y, "in_list": in_list} for x, y in rows]
    return [{"stdin": x, "stdout": y} for x, y in zip(inputs, outputs, strict=True)]


def _read(item: Any, entry_point: str) -> list[Case]:
    """The cases of one test. Raises `DataError` if it cannot be used."""
    if isinstance(item, str):
        calls = calls_in(item, entry_point)
        if calls is not None:
            return [call_case(*call) for call in calls]
        check = f"\ncheck({entry_point})\n" if entry_point and "def check(" in item else ""
        return [AssertCase(item + check)]
    if isinstance(item, Mapping):
        for stdin, stdout in (("stdin", "stdout"), ("input", "output")):
            if isinstance(item.get(stdin), str) and isinstance(item.get(stdout), str):
                return [OutputCase(item[stdin], item[stdout])]
        function = item.get("call", entry_point)
        args, kwargs = item.get("args", []), item.get("kwargs", {})
        if isinstance(function, str) and function and isinstance(args, list) and "expected" in item:
            try:
                case = call_case(function, args, kwargs, item["expected"])
                return [replace(case, in_list=item.get("in_list") is True)]
            except (TypeError, AttributeError) as error:
                raise DataError(f"a test that cannot be used, {item!r:.60}: {error}") from None
    raise DataError(f"a test that cannot be used, {item!r:.60}: {_KINDS}")


Call = tuple[str, list[Any], dict[str, Any], Any]
"""A function's name, arguments, keyword arguments and result."""


def calls_in(code: str, entry_point: str = "") -> list[Call] | None:
    """The calls in a text of assertions; None if it has any other statement.

    Supports `assert f(…) == …` with literal values, also inside `def check(candidate):`, where the candidate is
    `entry_point`.
    """
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names: dict[str, str] = {}
    match [statement for statement in statements if not _is_no_op(statement)]:
        case [ast.FunctionDef(name="check", args=ast.arguments(args=[argument]), body=body)] if entry_point:
            names = {argument.arg: entry_point}
            statements = body
    calls = [_call(statement, names) for statement in statements if not _is_no_op(statement)]
    parsed = [call for call in calls if call is not None]
    return parsed if parsed and len(parsed) == len(calls) else None


def _is_no_op(statement: ast.stmt) -> bool:
    """True for a text, `pass`, or the note that some collections of problems put before their tests."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assign(targets=[ast.Name(id="METADATA")]):
            return True
    return False


def _call(statement: ast.stmt, names: dict[str, str]) -> Call | None:
    """The call in `assert f(…) == value` and the value; None for any other statement. `names` replaces names of
    functions."""
    match statement:
        case ast.Assert(
            ast.Compare(ast.Call(ast.Name(name), args, keywords), [ast.Eq() | ast.Is()], [value])
        ) | ast.Assert(ast.Compare(value, [ast.Eq() | ast.Is()], [ast.Call(ast.Name(name), args, keywords)])):
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
