"""Runs inside the sandbox: calls the functions of a solution and writes their results.

The sandbox runs this file as the program, next to the solution; outside it, only `encode` is used. Expected results
never come here: they are compared outside, in a process that the solution cannot reach.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
from typing import Any

REQUEST, SOLUTION, TESTS = "request.json", "solution.py", "tests.py"
SHOWN = 300
"""Maximum characters of a result's `repr` in a report."""


def encode(value: Any) -> Any:
    """Encode a value of Python's literal types as JSON without loss; dictionaries keep their order, as arguments must.

    Lists stay lists; other containers and bytes become `{kind: content}`. Raises `TypeError` for other types.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((encode(item) for item in value), key=json.dumps)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return encode(value.tolist())
    raise TypeError(f"a result of type {type(value).__name__} cannot be compared")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    items = decode(content)
    return dict(items) if kind == "dict" else {"tuple": tuple, "set": set}[kind](items)


def main() -> None:
    """Run the request in this folder with the solution: tests, then calls. Prints the token after the tests, and a line
    of JSON per call."""
    with open(REQUEST, encoding="utf-8") as file:
        request = json.load(file)
    os.unlink(REQUEST)
    # Python's `site` defines them elsewhere.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    results = os.dup(1)
    os.dup2(2, 1)  # the solution's own output goes to stderr
    try:
        import solution  # type: ignore[import-not-found]

        if "token" in request:
            with open(TESTS, encoding="utf-8") as file:
                tests = file.read()
            exec(compile(tests, TESTS, "exec"), {**vars(solution), "__name__": "tests"})
            os.write(results, request["token"].encode())
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        sys.stderr.flush()
        os._exit(1)
    for call in request["calls"]:
        line = json.dumps(_outcome(solution, call)).encode() + b"\n"
        while line:
            line = line[os.write(results, line) :]
    os._exit(0)  # threads of the solution may run forever


def _outcome(solution: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The encoded value of a call and its `repr`, or its error."""
    try:
        function = getattr(solution, call["function"], None)
        if function is None and hasattr(solution, "Solution"):
            function = getattr(solution.Solution(), call["function"], None)
        if function is None:
            return {"error": f"there is no function {call['function']}"}
        result = function(*decode(call["args"]), **decode(call["kwargs"]))
        return {"value": encode(result), "shown": repr(result)[:SHOWN]}
    except BaseException as error:
        try:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if SOLUTION in frame.filename]
            location = f" (line {lines[-1]})" if lines else ""
            return {"error": "".join(traceback.format_exception_only(error)).strip()[:SHOWN] + location}
        except BaseException:
            return {"error": "an exception that cannot be shown"}


if __name__ == "__main__":
    main()
