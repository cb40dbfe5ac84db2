"""The endpoint that outside programs speak to: OpenAI chat completions on loopback, one session an episode."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from envgym.errors import EnvgymError
from envgym.transcript import OutOfBudget

from .chat import Completion, Refusal, parse
from .conversation import Conversation

MAX_BODY = 64 * 2**20
"""Bytes of the largest request taken."""


@dataclass(frozen=True, slots=True)
class Session:
    conversation: Conversation
    key: str


class Endpoint:
    """A server that runs while there are sessions. Each has a base URL and a key of its own.

    Other dialects than chat completions are more routes beside this one, over the same conversation.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._users = 0
        self._lock = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._address = ""

    @asynccontextmanager
    async def session(self, conversation: Conversation) -> AsyncIterator[tuple[str, str]]:
        """The base URL and the key under which a program finds the policy while the context lasts."""
        await self._enter()
        name, key = secrets.token_urlsafe(12), secrets.token_urlsafe(24)
        self._sessions[name] = Session(conversation, key)
        try:
            yield f"{self._address}/{name}/v1", key
        finally:
            del self._sessions[name]
            await asyncio.shield(self._leave())

    async def _enter(self) -> None:
        async with self._lock:
            self._users += 1
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_BODY)
            app.router.add_get("/{session}/v1/models", self._models)
            app.router.add_post("/{session}/v1/chat/completions", self._chat)
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
            await site.start()
            self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _leave(self) -> None:
        async with self._lock:
            self._users -= 1
            if self._users == 0 and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    # -- routes -------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except Refusal as refusal:
            return refusal.response()
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "envgym"}]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            conversation = self._session(request)
            try:
                asked = parse(await request.json())
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise Refusal(400, "the body is not JSON") from None
            try:
                answer = await conversation.complete(asked.messages, asked.tools, asked.max_tokens)
            except OutOfBudget as limit:
                words = {"context": "the context is full", "tokens": "the episode's token budget is used up"}
                raise Refusal(400, words[limit.reason], "context_length_exceeded") from None
            except EnvgymError as error:
                raise Refusal(400, str(error)) from None
        except Refusal as refusal:
            return refusal.response()
        completion = Completion(f"chatcmpl-{secrets.token_hex(8)}", int(time.time()), asked, *answer)
        if not asked.stream:
            return web.json_response(completion.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in completion.chunks():
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _session(self, request: web.Request) -> Conversation:
        """The conversation of a request's session. Raises `Refusal` for an unknown one or another's key."""
        session = self._sessions.get(request.match_info["session"])
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if session is None or not hmac.compare_digest(given.encode(), session.key.encode()):
            raise Refusal(401, "this session has ended, or the key is not its own", "invalid_api_key")
        return session.conversation
