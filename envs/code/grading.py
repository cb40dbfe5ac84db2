"""Grades a solution by its tests. Calls and printed output are compared here, outside the solution's process."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.sandbox import Execution, Sandbox

from .cases import AssertCase, CallCase, Case, OutputCase
from .driver import REQUEST, SOLUTION, TESTS

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9
PRINTED_TOLERANCE = 1e-6
"""Of a printed float, absolute or relative: a program may print more digits than the expected output, or fewer."""
_FLOAT = re.compile(r"[-+]?(?:\d*\.\d+|\d+\.?(?=[eE]))(?:[eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"([^\s,;:=%$()\[\]{}]+)")
_PROGRAM = f"""\
import builtins, sys
builtins.exit = builtins.quit = sys.exit
del builtins, sys
exec(compile(open("{SOLUTION}", "rb").read(), "{SOLUTION}", "exec"))
"""
"""Runs the solution as the main program, with `exit` and `quit`, which Python's `site` defines elsewhere."""
_DRIVER = Path(__file__).with_name("driver.py")
_MAX_LENGTH_RATIO = 16
"""A result this many times longer than the expected one is wrong; it is not parsed, which would take time."""
_MAX_SHOWN = 500
_REASONS = {
    "timeout": "it did not end within the time limit",
    "memory": "it needed more memory than allowed",
    "output": "it printed more than allowed",
    "processes": "it started more processes than allowed",
}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one case. `reason` is the sandbox's (`timeout`, `memory`, …), `error`, or `wrong`."""

    passed: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The results of all cases, in their order."""

    results: tuple[Result, ...]

    @property
    def share(self) -> float:
        """Share of the cases that passed."""
        return sum(result.passed for result in self.results) / len(self.results)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def has_failure(self, reason: str) -> bool:
        return any(result.reason == reason for result in self.results)

    def feedback(self) -> str:
        """The message of the first case that failed, for the policy."""
        for number, result in enumerate(self.results, start=1):
            if not result.passed:
                return f"Test {number} of {len(self.results)} failed: {result.message}"
        return "All tests passed."


async def grade(sandbox: Sandbox, code: str, cases: Sequence[Case]) -> SuiteResult:
    """Run the tests of a solution. After a test that runs out of time, the remaining ones fail without being run.

    Raises `InvalidOutcome` if the sandbox itself fails.
    """
    results: dict[int, Result] = {}
    calls = {number: case for number, case in enumerate(cases) if isinstance(case, CallCase)}
    if calls:
        results.update(zip(calls, await _calls(sandbox, code, list(calls.values())), strict=True))
    for number, case in enumerate(cases):
        if isinstance(case, CallCase):
            continue
        if any(result.reason == "timeout" for result in results.values()):
            results[number] = Result(False, "skipped", "it was not run, for an earlier test took too long")
        elif isinstance(case, OutputCase):
            results[number] = await _output(sandbox, code, case)
        else:
            results[number] = await _asserts(sandbox, code, case)
    return SuiteResult(tuple(results[number] for number in range(len(cases))))


async def _calls(sandbox: Sandbox, code: str, cases: Sequence[CallCase]) -> list[Result]:
    """Run all calls in one program; those after its early end are `skipped`."""
    calls = [{"function": case.function, "args": case.args, "kwargs": case.kwargs} for case in cases]
    files = {REQUEST: json.dumps({"calls": calls}), SOLUTION: code}
    execution = await sandbox.run(_DRIVER.read_text(encoding="utf-8"), files=files)
    lines = execution.stdout.splitlines()
    results = [_compare(case, line) for case, line in zip(cases, lines, strict=False)]
    if len(results) < len(cases):
        results.append(_ended_early(execution, f"{_truncate(cases[len(results)].text)}: "))
    missing = Result(False, "skipped", "it was not run, for an earlier one ended the program")
    return results + [missing] * (len(cases) - len(results))


def _compare(case: CallCase, line: str) -> Result:
    """Compare a line of output with the expected result. The solution may forge a line, but must know the result."""
    expected = json.dumps(case.expected)
    try:
        outcome = json.loads(line) if len(line) <= _MAX_LENGTH_RATIO * len(expected) + 8192 else {}
    except (ValueError, RecursionError):
        outcome = {}
    call = _truncate(case.text)
    if not isinstance(outcome, dict):
        outcome = {}
    if "error" in outcome:
        error = str(outcome["error"])
        reason = "memory" if error.startswith("MemoryError") else "error"
        return Result(False, reason, f"{call} raised {_truncate(error)}")
    results = [case.expected, *(case.expected if case.in_list else ())]
    if "value" in outcome and any(is_equal(outcome["value"], result) for result in results):
        return Result(True)
    value = _truncate(str(outcome.get("shown", "something else")))
    return Result(False, "wrong", f"{call} returned {value}, expected {_truncate(case.result)}")


def is_equal(value: Any, expected: Any) -> bool:
    """True for two encoded values that are equal in Python; but a tuple may equal a list, and an expected float is
    compared to six digits."""
    value, expected = _canonical(value), _canonical(expected)
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(is_equal, value, expected))
    if isinstance(expected, dict):
        return isinstance(value, dict) and value.keys() == expected.keys() and all(
            is_equal(value[kind], expected[kind]) for kind in expected
        )  # fmt: skip
    if isinstance(expected, float):
        try:
            return math.isclose(value, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
        except (TypeError, OverflowError):  # no number, or an integer beyond all floats
            return False
    return bool(value == expected)


def _canonical(value: Any) -> Any:
    """Convert an encoded tuple to a list, and sort the items of an encoded dictionary by their keys."""
    match value:
        case {"tuple": items} if len(value) == 1:
            return items
        case {"dict": [*items]} if len(value) == 1:
            return {"dict": sorted(items, key=json.dumps)}
    return value


async def _output(sandbox: Sandbox, code: str, case: OutputCase) -> Result:
    """Run the program on an input and compare what it prints, line by line."""
    execution = await sandbox.run(_PROGRAM, case.stdin, files={SOLUTION: code})
    prefix = f"with the input {_truncate(case.stdin)!r}"
    if execution.reason != "ok":
        return _ended_early(execution, f"{prefix}: ")
    if is_printed(execution.stdout, case.stdout):
        return Result(True)
    printed, expected = _truncate(execution.stdout), _truncate(case.stdout)
    return Result(False, "wrong", f"{prefix} it printed {printed!r}, expected {expected!r}")


def is_printed(text: str, expected: str) -> bool:
    """True for equal lines, with numbers in place of their notation where the expected word is a float."""
    printed, words = (_WORD.split("\n".join(_lines(item))) for item in (text, expected))
    return len(printed) == len(words) and all(map(_is_word, printed, words))


def _is_word(word: str, expected: str) -> bool:
    if word == expected or not (_FLOAT.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return word == expected
    number, tolerance = float(expected), PRINTED_TOLERANCE
    return math.isfinite(number) and math.isclose(float(word), number, rel_tol=tolerance, abs_tol=tolerance)


def _lines(text: str) -> list[str]:
    """The lines of a text, without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _asserts(sandbox: Sandbox, code: str, case: AssertCase) -> Result:
    """Run assertions; they pass only if the driver prints a token that the solution cannot know."""
    token = secrets.token_hex(16)
    request = json.dumps({"token": token, "calls": []})
    files = {REQUEST: request, SOLUTION: code, TESTS: case.code}
    execution = await sandbox.run(_DRIVER.read_text(encoding="utf-8"), files=files)
    if execution.reason == "ok" and execution.stdout == token:
        return Result(True)
    return _ended_early(execution)


def _ended_early(execution: Execution, prefix: str = "") -> Result:
    """The result of a case whose program ended too early; `prefix` begins its message."""
    if execution.reason in _REASONS:
        return Result(False, execution.reason, prefix + _REASONS[execution.reason])
    last = execution.stderr.strip().splitlines()[-4:]
    text = _truncate("\n".join(last))
    message = f"it ended with exit status {execution.exit}" + (f":\n{text}" if text else "")
    return Result(False, "error", prefix + message)


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
