"""The server's connections: what is no HTTP at all is answered as a problem too, and logged without what it said."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from .frames import Answer
from .wire import Problem

LINGER_SECONDS = 5.0
"""How long the rest of a refused body is still taken in (and thrown away), so that its sender reads why."""
KEEPALIVE_SECONDS = 75.0
"""How long a connection may stay without a whole request on it."""

SERVER = "envgym"
"""The header `Server`: which versions run here is nobody's business."""

logger = logging.getLogger(__name__)
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def problem_answer(problem: Problem) -> Answer:
    """A problem as it is sent."""
    content = json.dumps(problem.body.model_dump(exclude_defaults=True)).encode()
    return Answer(problem.status, "application/problem+json", content)


def problem_response(problem: Problem) -> web.Response:
    """A problem as it is sent over HTTP."""
    answer = problem_answer(problem)
    response = web.Response(body=answer.content, status=answer.status, content_type=answer.content_type)
    response.headers["Server"] = SERVER
    if problem.body.retry_after is not None:
        response.headers["Retry-After"] = f"{max(1, round(problem.body.retry_after))}"
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


class Connections(web.Server):
    """Hands every request of every connection to `handler`."""

    def __init__(self, handler: Handler, max_body: int) -> None:
        loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body)

        super().__init__(handler, request_factory=request)
        self._loop_of_connections = loop

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=self._loop_of_connections,
            access_log=None,  # type: ignore[arg-type]  # its own way to ask for none
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # nothing that is sent grows in memory
        )


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        # What is malformed may hold a token: neither log nor answer quotes it.
        logger.debug("a malformed request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun")
        if status >= 500:
            logger.error("a defect of the server", exc_info=exc)
            problem = Problem(500, "internal-error", "a defect of the server; its log has more")
        else:
            problem = Problem(400, "invalid-request", "this is not a well-formed HTTP/1.1 request")
        response = problem_response(problem)
        response.force_close()
        return response
