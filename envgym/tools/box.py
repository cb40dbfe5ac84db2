"""Runs the calls of one turn: in parallel, each under its deadline, every error as a result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from envgym.env.boundary import UsersCode
from envgym.errors import ConfigError, InvalidOutcome, did_you_mean
from envgym.processes.cancellation import abandon
from envgym.types import Message, TextPart, ToolCall, ToolSpec

from .schema import WrongArguments
from .tool import Tool, ToolFailure

PARALLEL = 16
"""Calls of one turn that run at the same time; a policy may write hundreds."""
GRACE = 2.0
"""Seconds a call past its deadline gets to clean up; then it is left to itself."""
ERROR_LENGTH = 1000
"""Characters of an error that the policy reads."""
NAME_LENGTH = 64
"""Characters of a tool's name that a result repeats; the policy may have made it up."""


class ToolBox:
    """The tools of one episode, and what came of calling them.

    `timeout` is in seconds for each call, where the tool has none of its own; results longer than `max_chars`
    characters are cut, with a note.
    """

    def __init__(
        self, tools: Iterable[Tool | Callable[..., Any]], *, timeout: float = 30.0, max_chars: int = 8000
    ) -> None:
        self._tools: dict[str, Tool] = {}
        for item in tools:
            tool = item if isinstance(item, Tool) else Tool.of(item)
            if tool.spec.name in self._tools:
                raise ConfigError(f"two tools are called {tool.spec.name!r}: give one of them another name")
            self._tools[tool.spec.name] = tool
        self._timeout, self._max_chars = timeout, max_chars
        self._counts = {"calls": 0, "errors": 0, "malformed": 0, "timeouts": 0}

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Descriptions of the tools for the policy."""
        return tuple(tool.spec for tool in self._tools.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of the calls so far: `tool_calls`, and how many of them were `tool_malformed` (unreadable, of no
        such tool, with wrong arguments), were `tool_errors` (the tool raised) or `tool_timeouts`."""
        return {f"tool_{name}": float(count) for name, count in self._counts.items()}

    async def call(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of one turn and return the results, in order.

        Errors are results too. Only `InvalidOutcome` is raised, by a tool that cannot do its work whatever the policy
        says: its server is gone.
        """
        slots = asyncio.Semaphore(PARALLEL)

        async def one(call: ToolCall) -> Message:
            async with slots:
                text = await self._answer(call)
            return Message("tool", (TextPart(text),), tool_call_id=call.id, name=_clean(call.name)[:NAME_LENGTH])

        jobs = [asyncio.create_task(one(call)) for call in calls]
        try:
            return await asyncio.gather(*jobs)
        finally:
            await _end(jobs)

    async def _answer(self, call: ToolCall) -> str:
        self._counts["calls"] += 1
        if call.error:
            return self._error("malformed", call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            known = did_you_mean(call.name, self._tools) or f" There is {', '.join(self._tools) or 'none'}."
            return self._error("malformed", f"there is no tool {call.name!r}.{known}")
        timeout = self._timeout if tool.timeout is None else tool.timeout
        job = asyncio.create_task(_run(tool, call))
        try:
            # Not `asyncio.timeout`: a tool that goes on when it is cancelled would hold the episode up.
            await asyncio.wait({job}, timeout=timeout)
            if not job.done():
                return self._error("timeouts", f"{call.name} took longer than {timeout:g} s")
            return _cut(job.result(), self._max_chars)
        except InvalidOutcome:
            raise
        except WrongArguments as error:
            return self._error("malformed", f"{call.name}: {error}")
        except ToolFailure as error:
            return self._error("errors", str(error))
        except Exception as error:
            message = str(error)
            return self._error("errors", f"{type(error).__name__}: {message}" if message else type(error).__name__)
        finally:
            await _end([job])

    def _error(self, kind: str, message: str) -> str:
        self._counts[kind] += 1
        return f"Error: {_cut(_clean(message), ERROR_LENGTH)}"


async def _run(tool: Tool, call: ToolCall) -> str:
    """The result as text. What an unwise tool raises must not end the loop (`exit()`), nor pass for our own end."""
    with UsersCode(Exception) as used:
        result = await tool.run(call.arguments)
        return _clean(result if isinstance(result, str) else to_json(result, fallback=str).decode())
    is_cancelled = isinstance(used.error, asyncio.CancelledError)
    raise ToolFailure("the call was cancelled" if is_cancelled else type(used.error).__name__)


async def _end(jobs: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait a little for it."""
    running = [job for job in jobs if not job.done()]
    for job in running:
        if not job.cancelling():  # a second time would interrupt one that is cleaning up
            job.cancel()
        abandon(job)
    if running:
        await asyncio.wait(running, timeout=GRACE)


def _clean(text: str) -> str:
    """Half of a surrogate pair is a character to Python, and to no tokenizer."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[:length]}\n[cut here: {len(text)} characters in all]"
