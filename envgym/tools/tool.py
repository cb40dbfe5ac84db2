"""A tool: its description for the policy, and the function that runs it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envgym.errors import ConfigError, InvalidOutcome
from envgym.loading import import_target, load_function, split_target
from envgym.processes.threads import OwnThread
from envgym.types import ToolSpec

from .schema import parameters_of

MAX_OVERDUE = 64
"""Threads of blocking tools that may run on after their deadline. A thread cannot be stopped from outside, so a tool
that always hangs would start one more with every call."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_overdue: list[OwnThread] = []


class ToolFailure(Exception):
    """A call that failed; the policy reads the message as it stands."""


@dataclass(frozen=True, slots=True)
class Tool:
    """`run` takes a call's arguments and returns the result: text, or anything that can be written as JSON.

    It raises `WrongArguments` for arguments it does not take, and `InvalidOutcome` to end the episode; of anything else
    it raises the policy reads the message. `timeout` is in seconds; None: that of the tool box.
    """

    spec: ToolSpec
    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    timeout: float | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str | None = None, timeout: float | None = None) -> Tool:
        """The tool that a typed function is. A plain `def` runs on a thread, an `async def` on the event loop.

        The policy reads its parameters' types and its docstring. Raises `ConfigError` for a function with
        untyped, `*args` or `**kwargs` parameters, or with types that JSON has no words for.
        """
        if not callable(function):
            raise ConfigError(f"a tool is a function, not {function!r:.60}")
        if name is None:
            name = str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a tool's name is made of letters, digits, _ and -, not {name!r}: give it a name")
        parameters = parameters_of(function, f"tool {name!r}")
        spec = ToolSpec(name, parameters.description, parameters.schema)
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

        async def run(arguments: Mapping[str, Any]) -> Any:
            positional, named = parameters.read(arguments)
            if is_async:
                return await function(*positional, **named)
            return await _run_on_thread(name, function, positional, named)

        return cls(spec, run, timeout)


async def _run_on_thread(
    name: str, function: Callable[..., Any], positional: list[Any], named: Mapping[str, Any]
) -> Any:
    """Call a function on a thread of its own, so that one that hangs holds nobody else up."""
    _overdue[:] = [thread for thread in _overdue if thread.busy]
    if len(_overdue) >= MAX_OVERDUE:
        raise InvalidOutcome(
            "tool_stuck", f"{MAX_OVERDUE} calls of tools are running on past their deadline: tool {name!r} is not begun"
        )
    thread = OwnThread(f"tool {name}")
    try:
        return await thread.call(function, *positional, **named)
    finally:
        thread.end()
        if thread.busy:
            _overdue.append(thread)


def load_tool(target: str) -> Tool:
    """The tool that `target` names: a function, or a `Tool`, as `file.py:name` or `package.module:name`.

    Raises `NameNotFound` where there is no such thing, `ConfigError` where it is no tool.
    """
    where, name = split_target(target)
    found = getattr(import_target(where), name, None) if name else None
    return found if isinstance(found, Tool) else Tool.of(load_function(target, "tool"))
