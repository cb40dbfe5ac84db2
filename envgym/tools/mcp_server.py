"""The tools of an MCP server, over its standard streams or over HTTP, with the `mcp` library.

The library's sessions consist of task groups, which must be exited in the task that entered them, and are not cleaned
up if that task is cancelled from outside. So each session runs in a separate task, which is asked to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

from envgym.errors import ConfigError, EnvgymError, InvalidOutcome, did_you_mean, needs
from envgym.processes import family
from envgym.settings import Settings
from envgym.types import ImagePart, ToolSpec
from envgym.types.images import decoded

from .schema import WrongArguments, to_line, without_titles
from .tool import Tool, ToolFailure

if TYPE_CHECKING:
    from mcp import Client

CLOSE_TIMEOUT = 10.0
"""Seconds a session may take to close before it is cancelled."""
PROBE_TIMEOUT = 5.0
"""Seconds in which a server must answer a probe after an error that may be the server's."""
MAX_PAGES = 100
INVALID_PARAMS, CONNECTION_CLOSED = -32602, -32000  # JSON-RPC's, and the library's own
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class McpServer(Settings):
    """An MCP server: a program to start, or a URL."""

    command: list[str] | None = Field(None, min_length=1)
    """Program and arguments of a server that speaks on its standard streams; one process per session."""
    env: dict[str, str] = Field({})
    """Its environment variables, besides PATH, HOME and the like. `${NAME}` stands for a variable of this process."""
    url: str | None = None
    """Address of a server that speaks HTTP (the streamable kind)."""
    headers: dict[str, str] = Field({})
    """Sent with every request. `${NAME}` stands for an environment variable, so that no secret is written down."""
    only: list[str] | None = None
    """Names of the tools to offer; default: all of the server's."""
    start_timeout: float = Field(30.0, gt=0)
    """Seconds it may take to start and list its tools."""

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has either a command or a url")
        if self.env and self.command is None:
            raise ValueError("env belongs to a server with a command")
        if self.headers and self.url is None:
            raise ValueError("headers belong to a server with a url")
        return self

    @property
    def label(self) -> str:
        """The server's name in messages."""
        return self.url or " ".join(self.command or ())

    def check(self) -> None:
        """Raise `ConfigError` for a program that does not exist, or a variable that is not set."""
        _fill_in(self.headers, self.label)
        variables = _fill_in(self.env, self.label)
        if self.command and shutil.which(self.command[0], path=variables.get("PATH")) is None:
            raise ConfigError(f"MCP server {self.label}: there is no program {self.command[0]!r}")

    def session(self) -> McpSession:
        """A new session with the server, not yet started."""
        return McpSession(self)


class McpSession:
    """One session with an MCP server: `async with server.session() as session: session.tools`.

    It belongs to the event loop in which it was started. A server that cannot be reached, or dies, raises an
    `InvalidOutcome` of kind `tool_server`; errors of its tools are results.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self.tools: tuple[Tool, ...] = ()
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._log: int | None = None
        self._last_words = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """True while the session is open."""
        return self._client is not None

    async def start(self) -> None:
        """Start or reach the server and list its tools.

        Raises `ConfigError` for invalid settings, `MissingDependency` without the `mcp` package, `InvalidOutcome` for
        a server that does not start in time.
        """
        with needs("mcp", "mcp", f"the MCP server {self._server.label}"):
            import anyio
            import mcp  # noqa: F401
        if logging.getLogger("mcp").level == logging.NOTSET:
            # It logs tracebacks of errors that are reported here, and every line of a server that is no message.
            logging.getLogger("mcp").setLevel(logging.CRITICAL)
        self._server.check()
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stop = asyncio.Event()
        self._scope = anyio.CancelScope()
        try:
            async with _start_slots():
                self._task = asyncio.create_task(self._run())
                # `_failure` reports the exception.
                self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
                timeout = self._server.start_timeout
                await asyncio.wait({self._task, self._started}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not self.alive:
                problem = "cannot be used" if self._task.done() else f"was not ready after {timeout:g} s"
                raise await self._failure(problem)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the session, and the server's process with it. Safe to call twice."""
        if self._task is None:
            return
        if not self._started.done():
            self._scope.cancel()
        self._stop.set()
        try:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
            if not self._task.done():
                self._scope.cancel()
                await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        finally:
            # If this is cancelled, the loop may be about to end, without time for the library's own clean-up.
            self._kill()
        self._task.cancel()

    async def _run(self) -> None:
        """The task of the session, from the handshake to the end."""
        from mcp import Client

        with self._scope:
            # The older handshake first: over HTTP it opens a session, by which servers separate the clients' states.
            # A server without this handshake rejects it.
            for mode in ("legacy", "auto"):
                with tempfile.TemporaryFile() as log:
                    self._log = log.fileno()
                    try:
                        async with Client(self._transport(log), mode=mode, cache=None) as client:
                            client.session.validate_tool_result = _accept_result
                            self.tools = await self._list(client)
                            self._client = client
                            self._started.set_result(None)
                            await self._stop.wait()
                        return
                    except Exception as error:
                        if mode == "auto" or self._started.done() or not _is_rejection(error):
                            raise
                    finally:
                        self._client = None
                        self._kill()
                        self._last_words = to_line(family.last_line(self._log))
                        self._log = None

    def _kill(self) -> None:
        """Kill the server's process and its descendants."""
        if self._log is not None and (pid := family.pid_in(self._log)) is not None:
            family.end_guarded(pid)

    @contextlib.asynccontextmanager
    async def _transport(self, log: Any) -> AsyncIterator[Any]:
        import httpx2
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command is not None:
            command = family.guard_command(server.command)
            variables = _fill_in(server.env, server.label)
            parameters = StdioServerParameters(command=command[0], args=command[1:], env=variables)
            async with stdio_client(parameters, errlog=log) as streams:
                yield streams
        else:
            headers = _fill_in(server.headers, server.label)
            timeout = httpx2.Timeout(30.0, read=None)  # no read timeout: each tool call has its own deadline
            async with (
                httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
                streamable_http_client(str(server.url), http_client=http) as streams,
            ):
                yield streams

    async def _list(self, client: Client) -> tuple[Tool, ...]:
        tools: dict[str, Any] = {}
        cursor = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            # A task's result is not the call's: it is asked for until it is there, which this client does not do.
            direct = [tool for tool in page.tools if getattr(tool.execution, "task_support", "") != "required"]
            tools |= {tool.name: tool for tool in direct}
            cursor = page.next_cursor
            if not cursor:
                break
        for name in self._server.only or ():
            if name not in tools:
                hint = did_you_mean(name, tools) or f" It has {', '.join(tools) or 'none'}."
                raise ConfigError(f"MCP server {self._server.label} has no tool {name!r}.{hint}")
        return tuple(self._tool(tools[name]) for name in self._server.only or tools)

    def _tool(self, tool: Any) -> Tool:
        spec = ToolSpec(tool.name, tool.description or "", without_titles(tool.input_schema))

        async def run(arguments: Mapping[str, Any]) -> Any:
            return await self._call(tool.name, arguments)

        return Tool(spec, run)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError

        if self._task is not None and asyncio.get_running_loop() is not self._loop:
            raise InvalidOutcome(
                "tool_server",
                f"the session with MCP server {self._server.label} belongs to another event loop: an environment that "
                "holds one has asynchronous methods, and is not `blocking`",
            )
        if self._client is None:
            raise await self._failure("has ended")
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise WrongArguments(to_line(error.message)) from None
            if error.code == CONNECTION_CLOSED or not await self._answers():
                raise await self._failure("died") from None
            raise ToolFailure(to_line(error.message)) from None
        except Exception:
            if self._client is None:  # the session ended during the call
                raise await self._failure("died") from None
            raise
        if result.is_error:
            raise ToolFailure(_text(result).strip())
        if any(block.type == "image" for block in result.content):
            return await asyncio.to_thread(_parts, result)
        return _text(result)

    async def _answers(self) -> bool:
        """Probe the server: an error may be the call's or the server's, and its code does not distinguish them."""
        if self._client is None:
            return False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await self._client.list_tools()
        except Exception:
            return False
        return True

    async def _failure(self, problem: str) -> EnvgymError:
        """The error for a server that cannot be used, with the reason from the server's output."""
        await self.close()
        error = None
        if self._task is not None and self._task.done() and not self._task.cancelled():
            error = _cause(self._task.exception())
        if isinstance(error, EnvgymError):
            return error
        why = self._last_words or (
            "" if error is None or getattr(error, "code", None) == CONNECTION_CLOSED else to_line(str(error))
        )
        message = f"MCP server {self._server.label} {problem}" + (f": {why}" if why else "")
        return InvalidOutcome("tool_server", message, retryable=True)


def _start_slots() -> asyncio.Semaphore:
    """A limit on concurrent starts: too many interpreters that start together all miss their deadline."""
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(max(4, os.cpu_count() or 1)))


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _fill_in(values: Mapping[str, str], label: str) -> dict[str, str]:
    """`values` with every `${NAME}` replaced by the environment variable."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"MCP server {label}: there is no environment variable {match[1]}")
        return os.environ[match[1]]

    return {key: _VARIABLE.sub(variable, value) for key, value in values.items()}


async def _accept_result(name: str, result: Any) -> None:
    """In place of the library's check against the tool's output schema, whose regular expressions may take any time.
    The policy reads a result as text, whatever its schema."""


def _text(result: Any) -> str:
    """A tool's result as text; of other kinds of content, the URI or the kind."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(map(_text_of, result.content))


def _parts(result: Any) -> list[str | ImagePart]:
    """A tool's result as texts and images, which are read to the end. Raises `ToolFailure` for one that cannot be."""
    parts: list[str | ImagePart] = []
    for is_image, blocks in itertools.groupby(result.content, lambda block: block.type == "image"):
        if not is_image:
            parts.append("\n".join(map(_text_of, blocks)))
            continue
        try:
            parts += [decoded(ImagePart.from_value(f"data:;base64,{block.data}")) for block in blocks]
        except ValueError as error:
            raise ToolFailure(str(error)) from None
    return parts


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return str(block.uri) if block.type == "resource_link" else f"[{block.type}]"


def _cause(error: BaseException | None) -> BaseException | None:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_rejection(error: BaseException) -> bool:
    """True for the error of a running server that rejected the handshake."""
    from mcp import MCPError

    cause = _cause(error)
    return isinstance(cause, MCPError) and cause.code != CONNECTION_CLOSED
