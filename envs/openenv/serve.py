"""`envgym serve --dialect openenv`: environments as OpenEnv's servers, each at its own port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from envgym.env import CheckedEnv, EnvSpec
from envgym.errors import ConfigError, EnvgymError, did_you_mean
from envgym.net.client import json_object
from envgym.net.listening import NEEDS_TOKENS, is_loopback, listen, stop_signals, url_of
from envgym.net.problems import Problem
from envgym.net.server import MAX_BODY, Connections, authenticate, read_json, serve_requests
from envgym.net.tokens import ServerClient, Tokens
from envgym.processes.cancellation import UsersCode
from envgym.services import check_servable, start_services
from envgym.types import Action, Observation, ToolCall, ToolSpec, observed_messages

from .actions import FINAL
from .export import export as export  # which `envgym envs export` calls

BODY_SECONDS, SHUTDOWN_SECONDS = 60.0, 2.0
"""Time limits for a request's body to arrive, and for sending the last answers."""
PING_SECONDS = 60.0
"""Interval of pings, which show that a client is gone."""
IDLE_SECONDS = 600.0
"""Seconds without use after which a session without a socket makes room for another."""
NO_TLS = "serving without TLS: tokens and episodes can be read on the way; use an SSH tunnel, or a proxy with TLS"

TYPES = {"text": "string", "done": "boolean", "reward": ["number", "null"], "metadata": "object"}
"""The fields of an observation and their JSON types."""
STATE = {"episode_id": None, "step_count": 0}
"""A session's state before its first reset."""

logger = logging.getLogger(__name__)
Answer = dict[str, Any]
M = TypeVar("M", bound=BaseModel)


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this dialect."""
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8000, help="port of the first environment (8000)")
    parser.add_argument("--token-file", metavar="F", type=Path, help="lines NAME TOKEN [max_sessions=N], or one token")
    parser.add_argument("--max-sessions", metavar="N", type=int, default=10_000, help="concurrent sessions (10000)")
    parser.add_argument("--drain-seconds", metavar="S", type=float, default=20, help="grace period at shutdown (20)")


async def serve(specs: Mapping[str, EnvSpec], options: Namespace) -> None:
    """Serve environments as OpenEnv would, until SIGINT or SIGTERM: the first at `port`, the others at the ports after
    it (all at free ports if it is 0). Prints each one's URL once it answers. Raises `ConfigError`."""
    if options.max_sessions < 1 or options.drain_seconds < 0:
        raise ConfigError("--max-sessions is at least 1, and --drain-seconds at least 0")
    for spec in specs.values():
        check_servable(spec)
        if spec.scores_groups:
            raise ConfigError(f"environment {spec.id} judges groups of episodes, and OpenEnv's have a reward each")
    tokens = None if options.token_file is None else Tokens.read(options.token_file)
    async with contextlib.AsyncExitStack() as stack:
        listeners = [
            stack.enter_context(listen(options.host, port, refusal=None if tokens else NEEDS_TOKENS))
            for port in (options.port + number if options.port else 0 for number in range(len(specs)))
        ]
        if not is_loopback(listeners[0].getsockname()[0]):
            logger.warning(NO_TLS)
        stopping = stack.enter_context(stop_signals())
        servers = []
        for (name, spec), listener in zip(specs.items(), listeners, strict=True):
            await stack.enter_async_context(start_services(spec))
            server = EnvServer(name, spec, tokens, options.max_sessions, await has_tools(spec))
            connections = Connections(server.answer)
            await stack.enter_async_context(serve_requests(connections, listener, drain=SHUTDOWN_SECONDS))
            servers.append(server)
            print(f"serving {spec.id} at {url_of(listener)} (Ctrl-C ends it)", flush=True)
        await stopping.wait()
        await asyncio.gather(*(server.close(options.drain_seconds) for server in servers))


async def has_tools(spec: EnvSpec) -> bool:
    """True if the environment offers tools, which a reset shows. Raises the environment's error, and `ConfigError` for
    a tool called `FINAL`."""
    env = spec.make()
    try:
        observation, _ = await env.reset(seed=0)
    finally:
        await env.close()
    if any(tool.name == FINAL for tool in observation.tools):
        raise ConfigError(f"environment {spec.id}: its tool {FINAL!r} has the name of OpenEnv's final answer")
    return bool(observation.tools)


# -- messages ----------------------------------------------------------------------------------------------


class Reset(BaseModel):
    """The arguments of a reset: the task at `index` of `split`, else one that the seed draws."""

    seed: int | None = Field(None, ge=0)
    episode_id: str | None = None
    index: int | None = Field(None, ge=0)
    split: str = "train"


class TextAction(BaseModel):
    """Say a text to the environment."""

    message: str


class CallToolAction(BaseModel):
    """Call a tool, or give the final answer by the tool `final_answer`."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: Answer = Field(default_factory=dict)


class FinalAnswer(BaseModel):
    """Give the final answer, which ends the episode unless the environment has more to say."""

    text: str


class MessageError(Exception):
    """An error of a message, with OpenEnv's code."""

    def __init__(self, code: str, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.data = {"code": code, "message": message, **fields}


def read(model: type[M], data: Any) -> M:
    """The data of a message. Raises `MessageError`, with the wrong fields."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        raise MessageError("VALIDATION_ERROR", "Invalid message", errors=errors) from None


def observed(fields: Answer, reward: float | None = None, ends: bool = False, **metadata: Any) -> Answer:
    """An observation as OpenEnv's servers send it, with the metadata twice."""
    answer = {"observation": {**fields, "metadata": metadata}, "reward": reward, "done": ends}
    return answer | ({"metadata": metadata} if metadata else {})


def text_of(observation: Observation) -> str:
    return "\n\n".join(message.printed for message in observed_messages(observation))


# -- sessions ----------------------------------------------------------------------------------------------


class ServedSession:
    """One instance of the environment. A step whose client is gone is taken to its end."""

    def __init__(self, env: CheckedEnv, client: ServerClient) -> None:
        self.env, self.client, self.id = env, client, secrets.token_urlsafe(24)
        self.state: Answer = dict(STATE)
        self.is_attached = self.is_closing = False
        self.last_used = time.monotonic()
        self.lock = asyncio.Lock()
        self._tools: dict[str, ToolSpec] = {}

    async def reset(self, data: Any) -> Answer:
        """Start an episode."""
        arguments, options = read(Reset, data or {}), {}
        if arguments.index is not None:
            try:
                options["task"] = await self.env.spec.tasks(arguments.split).get(arguments.index)
            except (IndexError, ConfigError) as error:
                raise MessageError("VALIDATION_ERROR", f"there is no such task: {error}") from None
        observation, _ = await self._call(self.env.reset(seed=arguments.seed, options=options))
        self._tools = {tool.name: tool for tool in observation.tools}
        self.state = {**STATE, "episode_id": arguments.episode_id}
        return observed({"text": text_of(observation)})

    async def step(self, data: Any) -> Answer:
        """Take a step with a text or with a call, or list the tools."""
        if isinstance(data, Mapping) and data.get("type") == "list_tools":
            return observed({"tools": self.tools()})
        if not self._tools:
            return await self._step(Action(read(TextAction, data).message))
        call = read(CallToolAction, data)
        if call.tool_name == FINAL:
            return await self._step(Action(read(FinalAnswer, call.arguments).text), FINAL)
        if call.tool_name not in self._tools:
            message = f"Unknown tool: {call.tool_name}.{did_you_mean(call.tool_name, self._tools)}"
            error = {"error_type": "tool_not_found", "message": message}
            return observed({"tool_name": call.tool_name, "result": None, "error": error})
        tool_call = ToolCall(f"call_{self.state['step_count']}", call.tool_name, call.arguments)
        return await self._step(Action("", (), (tool_call,), content=""), call.tool_name)

    def tools(self) -> list[Answer]:
        """The tools of the episode, and one that takes the final answer."""
        final = ToolSpec(FINAL, str(FinalAnswer.__doc__), FinalAnswer.model_json_schema())
        return [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
            for tool in ([*self._tools.values(), final] if self._tools else ())
        ]

    async def _step(self, action: Action, tool: str = "") -> Answer:
        observation, reward, terminated, truncated, info = await self._call(self.env.step(action))
        self.state["step_count"] += 1
        metadata = {**(info.get("metrics") or {}), **({"truncated": True} if truncated else {})}
        if info.get("score") is not None:
            metadata["score"] = info["score"]
        text = text_of(observation)
        content = {"content": [{"type": "text", "text": text}], "data": text, "is_error": False}
        fields = {"tool_name": tool, "result": content, "error": None} if tool else {"text": text}
        return observed(fields, reward, terminated or truncated, **metadata)

    async def _call(self, work: Awaitable[Any]) -> Any:
        """Await a call of the environment. Raises its error as a `MessageError`."""
        async with self.lock:
            try:
                with UsersCode() as called:
                    return await work
            finally:
                self.last_used = time.monotonic()
        if not isinstance(called.error, EnvgymError):
            logger.error("the environment raised", exc_info=called.error)
        raise MessageError("EXECUTION_ERROR", f"{type(called.error).__name__}: {called.error}")


class EnvServer:
    """The routes of one environment, and its sessions."""

    def __init__(self, name: str, spec: EnvSpec, tokens: Tokens | None, max_sessions: int, has_tools: bool) -> None:
        self._spec, self._tokens = spec, tokens
        self._max_sessions = min(max_sessions, spec.concurrency_bound() or max_sessions)
        self._sessions: dict[str, ServedSession] = {}
        self._sockets: set[web.WebSocketResponse] = set()
        self._has_ended = asyncio.Event()
        action: type[BaseModel] = CallToolAction if has_tools else TextAction
        fields = {
            "observation": {name: {"type": kind} for name, kind in TYPES.items()},
            "state": {key: {} for key in STATE},
        }
        schema = {name: {"type": "object", "properties": properties} for name, properties in fields.items()}
        paths: Answer = {path: {} for path in ("/reset", "/step", "/state", "/schema", "/metadata", "/health", "/mcp")}
        self._documents: dict[str, Answer] = {
            "/health": {"status": "healthy"},
            "/metadata": {"name": name, "description": spec.summary or spec.id},
            "/schema": {"action": action.model_json_schema(), **schema},
            "/openapi.json": {"openapi": "3.1.0", "info": {"title": name, "version": "1.0.0"}, "paths": paths},
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to a request. Raises a `Problem`."""
        client = authenticate(request, self._tokens)
        if request.path == "/ws":
            return await self._serve_socket(request, client)
        if request.method == "GET" and request.path in self._documents:
            return web.json_response(self._documents[request.path])
        if request.path in ("/reset", "/step", "/state"):
            raise Problem(409, "step-conflict", "episodes belong to a session: use the WebSocket /ws")
        if (request.method, request.path) != ("POST", "/mcp"):
            raise Problem(404, "not-found", f"there is no {request.method} {request.path} here")
        body = await read_json(request, MAX_BODY, BODY_SECONDS)
        return web.json_response(await self._answer_rpc(json_object(body.decode("utf-8", "replace")) or {}, client))

    async def _open(self, client: ServerClient) -> ServedSession:
        """A new session, after unused ones have ended. Raises `MessageError` if server, environment or client
        has no place for it."""
        longest = time.monotonic() - IDLE_SECONDS
        for session in list(self._sessions.values()):
            if session.last_used < longest and not session.is_attached and not session.lock.locked():
                await self._end(session)
        limit, n_used = self._max_sessions, sum(session.client == client for session in self._sessions.values())
        if len(self._sessions) >= limit or n_used >= (client.max_sessions or limit):
            sizes = {"active_sessions": len(self._sessions), "max_sessions": limit}
            raise MessageError("CAPACITY_REACHED", f"all {limit} sessions are taken", **sizes)
        session = ServedSession(self._spec.make(), client)
        self._sessions[session.id] = session
        return session

    def _session(self, id: Any, client: ServerClient) -> ServedSession:
        """The client's session. Raises `MessageError`, of other clients' sessions too."""
        session = self._sessions.get(id) if isinstance(id, str) else None
        if session is None or session.client != client:
            raise MessageError("SESSION_ERROR", "Unknown session_id")
        return session

    async def _end(self, session: ServedSession) -> None:
        with UsersCode():  # the session is over in any case
            await session.env.close()
        self._sessions.pop(session.id, None)  # only now: its place is free when its instance is closed
        self._has_ended.set()

    async def close(self, seconds: float) -> None:
        """Accept no sessions, wait for `seconds` at most until the open ones have ended, and end them."""
        self._max_sessions = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._sessions:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        await asyncio.gather(*(socket.close(code=aiohttp.WSCloseCode.GOING_AWAY) for socket in self._sockets))
        await asyncio.gather(*map(self._end, list(self._sessions.values())))

    async def _serve_socket(self, request: web.BaseRequest, client: ServerClient) -> web.WebSocketResponse:
        """Answer the messages of a session: the one that the query names, else a new one, which ends with the
        socket."""
        # Compression would cost more than the rest of an answer.
        options: Answer = {"heartbeat": PING_SECONDS, "max_msg_size": MAX_BODY, "compress": False}
        socket = web.WebSocketResponse(timeout=SHUTDOWN_SECONDS, **options)
        if not socket.can_prepare(request):
            raise Problem(426, "invalid-request", "this path is for a WebSocket")
        await socket.prepare(request)
        id, session = request.query.get("session_id"), None
        self._sockets.add(socket)
        try:
            attached = self._session(id, client) if id else await self._open(client)
            if attached.is_attached:
                raise MessageError("SESSION_ERROR", f"Session {id} already has an attached WebSocket")
            session, attached.is_attached = attached, True
            async for message in socket:
                if (answer := await self._answer_message(session, json_object(message.data) or {})) is None:
                    break
                await socket.send_str(json.dumps(answer))
        except MessageError as error:
            with contextlib.suppress(ConnectionError):
                await socket.send_str(json.dumps({"type": "error", "data": error.data}))
        except ConnectionError:  # the client is gone
            pass
        finally:
            self._sockets.discard(socket)
            if session is not None:
                session.is_attached, session.last_used = False, time.monotonic()
                if not id or session.is_closing:
                    await self._end(session)
        await socket.close()
        return socket

    async def _answer_message(self, session: ServedSession, message: Answer) -> Answer | None:
        """The answer to a message; None to `close`."""
        kind, data = message.get("type"), message.get("data")
        try:
            match kind:
                case "close":
                    return None
                case "reset":
                    return {"type": "observation", "data": await session.reset(data)}
                case "step":
                    return {"type": "observation", "data": await session.step(data)}
                case "state":
                    return {"type": "state", "data": session.state}
            raise MessageError("UNKNOWN_TYPE" if kind else "INVALID_JSON", f"Unknown message type: {kind}")
        except MessageError as error:
            return {"type": "error", "data": error.data}

    async def _answer_rpc(self, request: Answer, client: ServerClient) -> Answer:
        """The answer to a JSON-RPC request."""
        head = {"jsonrpc": "2.0", "id": request.get("id")}
        try:
            return {**head, "result": await self._carry_out(request.get("method"), request.get("params"), client)}
        except MessageError as failure:
            codes = {"CAPACITY_REACHED": -32000, "UNKNOWN_TYPE": -32601}
            error = {"code": codes.get(failure.data["code"], -32602), "message": str(failure), "data": failure.data}
            return {**head, "error": error}

    async def _carry_out(self, method: Any, params: Any, client: ServerClient) -> Answer:
        """The result of a JSON-RPC method. Raises `MessageError`."""
        params = params if isinstance(params, Mapping) else {}
        if method == "openenv/session/create":
            return {"session_id": (await self._open(client)).id}
        if method not in ("openenv/session/close", "tools/list", "tools/call"):
            raise MessageError("UNKNOWN_TYPE", f"Method not found: {method}")
        session = self._session(params.get("session_id"), client)
        if method == "openenv/session/close":
            session.is_closing = True
            if not session.is_attached:
                await self._end(session)
            return {"session_id": session.id, "closed": not session.is_attached}
        if method == "tools/list":
            return {"tools": session.tools()}
        call = {"tool_name": params.get("name"), "arguments": params.get("arguments") or {}}
        observation = (await session.step(call))["observation"]
        if observation["error"] is not None:
            raise MessageError("VALIDATION_ERROR", observation["error"]["message"])
        result: Answer = observation["result"]
        return result
