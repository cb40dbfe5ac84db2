"""Runs the tool calls of one turn: concurrently, each with a deadline, every error as a result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from envgym.errors import ConfigError, InvalidOutcome, did_you_mean
from envgym.processes.cancellation import UsersCode, abandon
from envgym.types import ImagePart, Message, ToolCall, ToolSpec

from .schema import WrongArguments
from .tool import Tool, ToolFailure

PARALLEL = 16
"""Concurrent calls of one turn; a policy may generate hundreds."""
GRACE = 2.0
"""Seconds in which a call past its deadline may clean up; then it is abandoned."""
ERROR_LENGTH = 1000
"""Maximum length of an error message for the policy, in characters."""
NAME_LENGTH = 64
"""Maximum length of a tool's name in a result, in characters; the policy may have invented it."""
MAX_IMAGES = 16
"""Maximum number of images in a result; one with more is an error."""
Part = str | ImagePart


class ToolBox:
    """The tools of one episode, and counts of their calls.

    `timeout` is in seconds per call, for tools without their own; results longer than `max_chars` characters
    lose their middle, with a note. Unless `with_images`, a text such as `[image 64 x 48]` stands for an image in one.
    """

    def __init__(
        self, tools: Iterable[Tool | Callable[..., Any]], *, timeout: float = 30.0, max_chars: int = 8000,
        with_images: bool = True,
    ) -> None:  # fmt: skip
        self._tools: dict[str, Tool] = {}
        for item in tools:
            tool = item if isinstance(item, Tool) else Tool.from_function(item)
            if tool.spec.name in self._tools:
                raise ConfigError(f"two tools have the name {tool.spec.name!r}: rename one of them")
            self._tools[tool.spec.name] = tool
        self._timeout, self._max_chars, self._with_images = timeout, max_chars, with_images
        self._counts = {"calls": 0, "errors": 0, "malformed": 0, "timeouts": 0}

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Descriptions of the tools for the policy."""
        return tuple(tool.spec for tool in self._tools.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of the calls so far: `tool_calls`, and among them `tool_malformed` (unreadable, unknown tool, wrong
        arguments), `tool_errors` (the tool raised) and `tool_timeouts`."""
        return {f"tool_{name}": float(count) for name, count in self._counts.items()}

    async def call(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of one turn and return the results, in order.

        Errors are results too. Only `InvalidOutcome` is raised, by a tool that cannot work whatever its arguments: its
        server is gone, for example.
        """
        slots = asyncio.Semaphore(PARALLEL)

        async def run_call(call: ToolCall) -> Message:
            async with slots:
                content = await self._answer(call)
            return Message("tool", content, tool_call_id=call.id, name=_clean(call.name)[:NAME_LENGTH])

        jobs = [asyncio.create_task(run_call(call)) for call in calls]
        try:
            return await asyncio.gather(*jobs)
        finally:
            await _end(jobs)

    async def _answer(self, call: ToolCall) -> str | list[Part]:
        self._counts["calls"] += 1
        if call.error:
            return self._error("malformed", call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, self._tools) or f" There is {', '.join(self._tools) or 'none'}."
            return self._error("malformed", f"there is no tool {call.name!r}.{hint}")
        timeout = self._timeout if tool.timeout is None else tool.timeout
        job = asyncio.create_task(_run(tool, call))
        try:
            # Not `asyncio.timeout`: a tool that ignores its cancellation would delay the episode.
            await asyncio.wait({job}, timeout=timeout)
            if not job.done():
                return self._error("timeouts", f"{call.name} took longer than {timeout:g} s")
            return self._limited(job.result())
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

    def _limited(self, parts: list[Part]) -> str | list[Part]:
        """A result within the limits. Raises `ToolFailure` for more than `MAX_IMAGES` images."""
        images = [part for part in parts if isinstance(part, ImagePart)]
        if len(images) > MAX_IMAGES:
            raise ToolFailure(f"the result has {len(images)} images, more than {MAX_IMAGES}")
        words = [part.label if isinstance(part, ImagePart) else part for part in parts]
        if not (images and self._with_images):
            return _truncate("".join(words), self._max_chars)
        text = "".join(part for part in parts if isinstance(part, str))
        return parts if len(text) <= self._max_chars else [_truncate(text, self._max_chars), *images]

    def _error(self, kind: str, message: str) -> str:
        self._counts[kind] += 1
        return f"Error: {_truncate(_clean(message), ERROR_LENGTH)}"


async def _run(tool: Tool, call: ToolCall) -> list[Part]:
    """The result as text and images. A tool's `SystemExit` or `CancelledError` neither ends the loop nor cancels the
    episode."""
    with UsersCode(Exception) as guard:
        result = await tool.run(call.arguments)
        has_images = isinstance(result, list | tuple) and any(isinstance(item, ImagePart) for item in result)
        return [
            item
            if isinstance(item, ImagePart)
            else _clean(item if isinstance(item, str) else to_json(item, fallback=str).decode())
            for item in (result if has_images else [result])
        ]
    is_cancelled = isinstance(guard.error, asyncio.CancelledError)
    raise ToolFailure("the call was cancelled" if is_cancelled else type(guard.error).__name__)


async def _end(jobs: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the running jobs, and wait `GRACE` seconds for them."""
    unfinished = [job for job in jobs if not job.done()]
    for job in unfinished:
        if not job.cancelling():  # a second cancellation would interrupt its clean-up
            job.cancel()
        abandon(job)
    if unfinished:
        await asyncio.wait(unfinished, timeout=GRACE)


def _clean(text: str) -> str:
    """Replace unpaired surrogates, which are characters in Python but invalid in every tokenizer."""
    return text.encode("utf-8", "replace").decode()


def _truncate(text: str, length: int) -> str:
    """The text without its middle if it is longer than `length`: an error comes last, after what was printed."""
    if len(text) <= length:
        return text
    start = length // 2
    return f"{text[:start]}\n[truncated: {len(text)} characters in all]\n{text[start - length :]}"
