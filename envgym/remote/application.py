"""The server's routes: requests to sessions and tasks, and every error to an RFC 9457 problem."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from envgym.env import EnvSpec
from envgym.errors import EnvgymError

from .sessions import IDLE_SECONDS, Sessions
from .wire import MAX_BODY, MAX_PAGE, EnvDescription, Opening, Problem, ProblemBody, Split, Step, TaskPage, encode

DRAIN_SECONDS = 10.0
"""How long requests in flight may take to finish once the server is asked to stop."""
SPLITS = ("train", "test")

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class Application:
    """The routes over one environment, and its sessions."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._sessions = Sessions(spec)
        self._draining = False

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer requests on `listener`; on leaving, let those in flight finish and close every session."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/v1/env", self._describe)
        app.router.add_get("/v1/tasks", self._tasks)
        app.router.add_post("/v1/sessions", self._open)
        app.router.add_post("/v1/sessions/{session_id}/step", self._step)
        app.router.add_delete("/v1/sessions/{session_id}", self._close)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_SECONDS)
        await runner.setup()
        reaper = asyncio.create_task(self._reap())
        try:
            await web.SockSite(runner, listener, backlog=1024).start()
            yield
        finally:
            self._draining = True
            reaper.cancel()
            await runner.cleanup()
            await self._sessions.close_all()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            await self._sessions.close_idle()

    # -- routes -------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return _json(b'{"status":"ok"}')

    async def _describe(self, request: web.Request) -> web.Response:
        splits = {name: self._split(name) for name in SPLITS}
        services = {name: type(service).__name__ for name, service in self._spec.services.items()}
        return _json(encode(EnvDescription(id=self._spec.id, splits=splits, services=services)))

    def _split(self, name: str) -> Split:
        try:
            return Split(size=self._spec.tasks(name).size)
        except EnvgymError as error:  # no held-out file, say: the other split is still of use
            return Split(error=str(error))

    async def _tasks(self, request: web.Request) -> web.Response:
        try:
            split = request.query["split"]
            start, count = int(request.query.get("start", 0)), int(request.query.get("count", 100))
        except (KeyError, ValueError):
            raise Problem(422, "invalid-request", "give split, and start and count as whole numbers") from None
        if split not in SPLITS or start < 0 or not 1 <= count <= MAX_PAGE:
            rule = f"split is one of {', '.join(SPLITS)}, start at least 0, count 1 to {MAX_PAGE}"
            raise Problem(422, "invalid-request", rule)
        try:
            tasks = self._spec.tasks(split)
            end = start + count if tasks.size is None else min(start + count, tasks.size)
            page = tuple([await tasks.get(index) for index in range(start, end)])
            return _json(encode(TaskPage(split=split, start=start, tasks=page)))
        except Exception as error:
            logger.exception("reading tasks %d to %d of %s", start, start + count, split)
            raise Problem(500, "environment-error", str(error), error=type(error).__name__) from None

    async def _open(self, request: web.Request) -> web.Response:
        opening = await self._read(request, Opening)
        return _json(await self._sessions.open(opening).opened())

    async def _step(self, request: web.Request) -> web.Response:
        step = await self._read(request, Step)
        return _json(await self._sessions[request.match_info["session_id"]].step(step))

    async def _close(self, request: web.Request) -> web.Response:
        await self._sessions.close(request.match_info["session_id"])
        return web.Response(status=204)

    async def _read(self, request: web.Request, model: type[B]) -> B:
        # Web pages can make a browser post plain text to a loopback address, but not JSON.
        if request.content_type != "application/json":
            raise Problem(415, "invalid-request", "send the body as application/json")
        body = await request.read()
        if self._draining:
            raise Problem(503, "shutting-down", "the server is shutting down")
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            raise Problem(422, "invalid-request", f"{where}: {first['msg'].lower()}") from None

    # -- errors -------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer every error as a problem; the server lives on."""
        try:
            return await handler(request)
        except Problem as problem:
            return _problem(problem.body)
        except web.HTTPException as error:  # no such route, method or room
            detail = f"{request.method} {request.path}: {error.reason.lower()}"
            return _problem(ProblemBody(title=error.reason, status=error.status, detail=detail))
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            return _problem(Problem(500, "internal-error", "a defect of the server; its log has more").body)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _problem(body: ProblemBody) -> web.Response:
    text = json.dumps(body.model_dump(exclude={"error"} if not body.error else None))
    return web.Response(text=text, status=body.status, content_type="application/problem+json")
