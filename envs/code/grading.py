"""Grades a solution by its tests. Calls and printed output are compared here, outside the solution's process."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.sandbox import Execution, Sandbox

from .cases import AssertCase, CallCase, Case, OutputCase
from .driver import REQUEST, SOLUTION, TESTS

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-9
_DRIVER = Path(__file__).with_name("driver.py")
_LONGER = 16
"""A result so many times longer than the right one is not read: it is wrong, and reading takes time."""
_SHOWN = 500
_WHY = {
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
class Verdict:
    """The results of all cases, in their order."""

    results: tuple[Result, ...]

    @property
    def share(self) -> float:
        """Share of the cases that passed."""
        return sum(result.passed for result in self.results) / len(self.results)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def has(self, reason: str) -> bool:
        return any(result.reason == reason for result in self.results)

    def feedback(self) -> str:
        """The message of the first case that failed, for the policy."""
        for number, result in enumerate(self.results, start=1):
            if not result.passed:
                return f"Test {number} of {len(self.results)} failed: {result.message}"
        return "All tests passed."


async def grade(sandbox: Sandbox, code: str, cases: Sequence[Case]) -> Verdict:
    """Run the tests of a solution. One that runs out of time is not run again: the tests that are left fail.

    Raises `InvalidOutcome` where the sandbox itself is in trouble.
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
    return Verdict(tuple(results[number] for number in range(len(cases))))


async def _calls(sandbox: Sandbox, code: str, cases: Sequence[CallCase]) -> list[Result]:
    calls = [{"function": case.function, "args": case.args, "kwargs": case.kwargs} for case in cases]
    done = await sandbox.run(
        _DRIVER.read_text(encoding="utf-8"), files={REQUEST: json.dumps({"calls": calls}), SOLUTION: code}
    )
    lines = done.stdout.splitlines()
    results = [_compare(case, line) for case, line in zip(cases, lines, strict=False)]
    if len(results) < len(cases):
        reason, message = _why(done)
        results.append(Result(False, reason, f"{_cut(cases[len(results)].text)}: {message}"))
    missing = Result(False, "skipped", "it was not run, for an earlier one ended the program")
    return results + [missing] * (len(cases) - len(results))


def _compare(case: CallCase, line: str) -> Result:
    """Judge a line that the driver wrote; or the solution, who gains nothing unless it knows the result."""
    expected = json.dumps(case.expected)
    try:
        outcome = json.loads(line) if len(line) <= _LONGER * len(expected) + 8192 else {}
    except (ValueError, RecursionError):
        outcome = {}
    call = _cut(case.text)
    if not isinstance(outcome, dict):
        outcome = {}
    if "error" in outcome:
        error = str(outcome["error"])
        return Result(False, "memory" if error.startswith("MemoryError") else "error", f"{call} raised {_cut(error)}")
    if "value" in outcome and same(outcome["value"], case.expected):
        return Result(True)
    shown = _cut(str(outcome.get("shown", "something else")))
    return Result(False, "wrong", f"{call} returned {shown}, expected {_cut(case.result)}")


def same(value: Any, expected: Any) -> bool:
    """True for two encoded values that are equal to Python, but for two things: a tuple is like a list, and where the
    right one is a number with a point, six digits count."""
    value, expected = _canonical(value), _canonical(expected)
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, dict):
        return isinstance(value, dict) and value.keys() == expected.keys() and all(
            same(value[kind], expected[kind]) for kind in expected
        )  # fmt: skip
    if isinstance(expected, float):
        try:
            return math.isclose(value, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
        except (TypeError, OverflowError):  # no number, or a whole one that no float comes near
            return False
    return bool(value == expected)


def _canonical(value: Any) -> Any:
    """An encoded tuple as a list, and the items of an encoded dictionary in the order of their keys."""
    match value:
        case {"tuple": items} if len(value) == 1:
            return items
        case {"dict": [*items]} if len(value) == 1:
            return {"dict": sorted(items, key=json.dumps)}
    return value


async def _output(sandbox: Sandbox, code: str, case: OutputCase) -> Result:
    done = await sandbox.run(code, case.stdin)
    given = f"with the input {_cut(case.stdin)!r}"
    if done.reason != "ok":
        reason, message = _why(done)
        return Result(False, reason, f"{given}: {message}")
    if _lines(done.stdout) == _lines(case.stdout):
        return Result(True)
    printed, expected = _cut(done.stdout), _cut(case.stdout)
    return Result(False, "wrong", f"{given} it printed {printed!r}, expected {expected!r}")


def _lines(text: str) -> list[str]:
    """Without spaces at the ends of lines and lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _asserts(sandbox: Sandbox, code: str, case: AssertCase) -> Result:
    token = secrets.token_hex(16)
    request = json.dumps({"token": token, "calls": []})
    files = {REQUEST: request, SOLUTION: code, TESTS: case.code}
    done = await sandbox.run(_DRIVER.read_text(encoding="utf-8"), files=files)
    if done.reason == "ok" and done.stdout == token:
        return Result(True)
    reason, message = _why(done)
    return Result(False, reason, message)


def _why(done: Execution) -> tuple[str, str]:
    """The reason and a sentence for a program that ended before it should have."""
    if done.reason in _WHY:
        return done.reason, _WHY[done.reason]
    last = done.stderr.strip().splitlines()[-4:]
    text = _cut("\n".join(last))
    return "error", f"it ended with exit status {done.exit}" + (f":\n{text}" if text else "")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
