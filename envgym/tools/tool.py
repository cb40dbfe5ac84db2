"""A tool: its description for the policy, and the function that runs it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envgym.errors import ConfigError, InvalidOutcome
from envgym.loading import attribute, import_target, load_function, split_target
from envgym.processes.threads import DedicatedThread
from envgym.types import ToolSpec

from .schema import read_parameters

MAX_OVERDUE = 64
"""Maximum number of threads of blocking tools past their deadline. A thread cannot be killed, so a tool that always
hangs would add one per call."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_overdue: list[DedicatedThread] = []


class ToolFailure(Exception):
    """A failed call; the policy reads the message unmodified."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: `run` takes a call's arguments and returns the result: text, any object that can be written as JSON, an
    `ImagePart`, or a list of texts and images.

    `run` raises `WrongArguments` for invalid arguments, and `InvalidOutcome` to end the episode; of any other exception
    the policy reads the message. `timeout` is in seconds; None takes the tool box's.
    """

    spec: ToolSpec
    run: Callable[[Mapping[str, Any]], Awaitable[Any]]
    timeout: float | None = None

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], *, name: str | None = None, timeout: float | None = None
    ) -> Tool:
        """A tool made of a typed function. A plain `def` runs on a thread, an `async def` on the event loop.

        The policy reads its parameters' types and its docstring. Raises `ConfigError` for a function with
        untyped, `*args` or `**kwargs` parameters, or with types without a JSON schema.
        """
        if not callable(function):
            raise ConfigError(f"a tool is a function, not {function!r:.60}")
        if name is None:
            name = str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a tool's name is made of letters, digits, _ and -, not {name!r}: give it a name")
        parameters = read_parameters(function, f"tool {name!r}")
        spec = ToolSpec(name, parameters.description, parameters.schema)
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

        async def run(arguments: Mapping[str, Any]) -> Any:
            positional, keywords = parameters.read(arguments)
            if is_async:
                return await function(*positional, **keywords)
            return await _run_on_thread(name, function, positional, keywords)

        return cls(spec, run, timeout)


async def _run_on_thread(name: str, function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on a dedicated thread, so that a hanging one delays no other call."""
    _overdue[:] = [thread for thread in _overdue if thread.busy]
    if len(_overdue) >= MAX_OVERDUE:
        message = f"{MAX_OVERDUE} tool calls are running past their deadline: tool {name!r} is not started"
        raise InvalidOutcome("tool_stuck", message)
    thread = DedicatedThread(f"tool {name}")
    try:
        return await thread.call(function, *args, **kwargs)
    finally:
        thread.end()
        if thread.busy:
            _overdue.append(thread)


def load_tool(target: str) -> Tool:
    """The tool named by `target`, a function or a `Tool`, as `file.py:name` or `package.module:name`.

    Raises `NameNotFound` if it does not exist, `ConfigError` if it is not a tool.
    """
    module, name = split_target(target)
    tool = attribute(import_target(module), name) if name else None
    return tool if isinstance(tool, Tool) else Tool.from_function(load_function(target, "tool"))
