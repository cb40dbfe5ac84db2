"""The endpoint that external programs call: OpenAI's chat completions and responses and Anthropic's messages, one
session per episode."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from envgym.agent import OutOfBudget
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome
from envgym.net.listening import is_loopback, listen
from envgym.net.problems import Problem
from envgym.net.server import MAX_BODY, authenticate, serve_requests

from .chat_api import CompletionRequest, PolicyRequest, Refusal
from .conversation import Answering, PolicyAnswer
from .messages_api import MessagesRequest
from .responses_api import ResponsesRequest

Api = type[CompletionRequest | ResponsesRequest | MessagesRequest]
APIS: dict[str, Api] = {
    "chat/completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
"""The APIs by their routes."""
TICKET = "envgym_session"
"""Key in a request's `metadata` that identifies the session of a program without its own URL."""
SESSION_HEADER = "X-Envgym-Session"
"""Header with a session's ticket, for programs that send a key of their own in `Authorization`."""


@dataclass(slots=True)
class PolicySession:
    """An episode's access to the policy."""

    conversation: Answering
    key: str
    context: Context = field(default_factory=copy_context)
    """The context of the episode: its deadlines pause while the policy answers."""
    sampling: set[asyncio.Future[PolicyAnswer]] = field(default_factory=set)


class PolicyAddress(NamedTuple):
    """The address of a program's session: its own URL and key, or instead of both the `ticket`: in the URL
    (`session_url`), in the header `SESSION_HEADER`, or under `TICKET` in the metadata of requests."""

    base_url: str
    key: str
    ticket: str

    @property
    def session_url(self) -> str:
        """A base URL with the key in it, for programs that send a key of their own."""
        return f"{self.base_url.rsplit('/', 2)[0]}/{self.ticket}/v1"


class Endpoint:
    """A server that runs while there are sessions. Each session has its own base URL, key and ticket.

    It listens on loopback at a free port by default. All APIs are routes over the same conversation.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._sessions: dict[str, PolicySession] = {}
        self._lock = asyncio.Lock()
        self._server = AsyncExitStack()
        self._address = ""
        """The URL while the server listens, else empty."""

    @asynccontextmanager
    async def session(self, conversation: Answering) -> AsyncIterator[PolicyAddress]:
        """A program's access to the policy within the context.

        Raises `InvalidOutcome` if the endpoint cannot listen at its address. If the conversation has an error at the
        end, that is raised: it is the cause, whatever the program did next.
        """
        name, key = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        async with self._lock:
            if not self._address:
                await self._start()
            self._sessions[name] = PolicySession(conversation, key)
        try:
            yield PolicyAddress(f"{self._address}/{name}/v1", key, f"{name}.{key}")
            if conversation.error is not None:
                raise conversation.error
        except InvalidOutcome:
            if conversation.error is not None:
                raise conversation.error from None
            raise
        finally:
            for sampling in self._sessions.pop(name).sampling:  # the program did not wait for it, or was too slow
                sampling.cancel()
            await asyncio.shield(self._leave())

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._answer_refusals])
        for prefix in ("/{session}", ""):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            for path, api in APIS.items():
                app.router.add_post(f"{prefix}/v1/{path}", partial(self._respond, api))
        try:
            listener = self._server.enter_context(listen(self._host, self._port, refusal=None))
        except ConfigError as error:
            address, reason = f"{self._host}:{self._port}", str(error).partition(f":{self._port}: ")[2]
            raise InvalidOutcome("agent", f"the policy cannot be served at {address}: {reason}") from None
        await self._server.enter_async_context(serve_requests(app, listener, drain=1.0))
        self._address = f"http://{self._host}:{listener.getsockname()[1]}"

    async def _leave(self) -> None:
        async with self._lock:
            if not self._sessions:
                self._address = ""
                await self._server.aclose()

    # -- routes -------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer_refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors in the form of the API, and remember the last one for the episode's record, without the key."""
        try:
            if is_loopback(self._host):
                authenticate(request, None)  # refuses web pages and names of other machines
            return await handler(request)
        except Problem as problem:
            refusal = Refusal(problem.status, problem.body.detail, problem.body.kind)
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(413, f"a body has at most {MAX_BODY} bytes", "request_too_large")
        except web.HTTPException as error:
            refusal = Refusal(error.status, f"{error.status}: {error.reason}")
        except Refusal as error:
            refusal = error
        name = (_ticket(request) or request.path.split("/")[1]).partition(".")[0]
        if (session := self._sessions.get(name)) is not None:
            _, version, path = request.path.rpartition("/v1/")
            session.conversation.refusal = f"{refusal} (/v1/{path:.60})" if version else str(refusal)
        api = MessagesRequest if "/v1/messages" in request.path else CompletionRequest
        return web.json_response(api.error_body(refusal), status=refusal.status)

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request, _ticket(request))
        model = {"id": "policy", "object": "model", "owned_by": "envgym", "created": 0}
        model |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _count(self, request: web.Request) -> web.Response:
        session, body = await self._authenticated(request)
        parsed = MessagesRequest.parse({**body, "max_tokens": 1} if isinstance(body, Mapping) else body)
        try:
            return web.json_response({"input_tokens": session.conversation.count(parsed.messages, parsed.tools)})
        except EnvgymError as error:
            raise Refusal(400, str(error)) from None

    async def _respond(self, api: Api, request: web.Request) -> web.StreamResponse:
        session, body = await self._authenticated(request)
        parsed = api.parse(body)
        try:
            sampled = await _sample(session, parsed)
            if parsed.needs_call:
                missing = session.conversation.missing_calls or 0
                session.conversation.missing_calls = missing + (not sampled.message.tool_calls)
            answer = parsed.answer(sampled)
        except OutOfBudget as limit:
            answer = parsed.out_of_budget(limit.reason)
        except EnvgymError as error:
            raise Refusal(400, str(error)) from None
        if isinstance(answer, dict):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in answer:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        await response.write(api.events_end)
        return response

    async def _authenticated(self, request: web.Request) -> tuple[PolicySession, Any]:
        """The session that a request belongs to, and its body. Raises a `Refusal`."""
        if sent := _ticket(request):
            return self._session(request, sent), await _body(request)
        body = await _body(request)
        metadata = body.get("metadata") if isinstance(body, Mapping) else None
        ticket = metadata.get(TICKET) if isinstance(metadata, Mapping) else None
        if not isinstance(ticket, str):
            reason = f"whose request is it? Its URL, header {SESSION_HEADER} and metadata ({TICKET}) name no session"
            raise Refusal(401, reason, "invalid_api_key")
        session = self._session(request, ticket)
        request.match_info["session"] = ticket  # as if the URL named it
        return session, body

    def _session(self, request: web.Request, ticket: str) -> PolicySession:
        """The session of a ticket, or of a name with the key in the request's headers. Raises a `Refusal` for an
        unknown name or a wrong key."""
        name, _, key = ticket.partition(".")
        headers = (request.headers.get("x-api-key", ""), request.headers.get("Authorization", ""))
        keys = [key] if key else [value.removeprefix("Bearer ") for value in headers]
        session = self._sessions.get(name)
        if session is None or not any(_is_key(text, session.key) for text in keys):
            raise Refusal(401, "this session has ended, or the key is not its own", "invalid_api_key")
        return session


def _is_key(text: str, key: str) -> bool:
    return hmac.compare_digest(text.encode(errors="replace"), key.encode())


def _ticket(request: web.Request) -> str:
    """The ticket in a request's header or, without one, the ticket or the name in its URL; else empty."""
    return request.headers.get(SESSION_HEADER) or request.match_info.get("session", "")


async def _sample(session: PolicySession, parsed: PolicyRequest) -> PolicyAnswer:
    """The policy's answer. The request is cancelled when its session ends, since the episode is then complete."""
    answering = session.conversation.answer(parsed.messages, parsed.tools, parsed.max_tokens, parsed.stop)
    sampling = asyncio.create_task(answering, context=session.context.copy())
    session.sampling.add(sampling)
    try:
        return await sampling
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Refusal(401, "this session has ended", "invalid_api_key") from None
    finally:
        session.sampling.discard(sampling)


async def _body(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, LookupError, RecursionError):  # no JSON, no such encoding, brackets 10,000 deep
        raise Refusal(400, "the body is not JSON") from None
