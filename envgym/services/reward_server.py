"""A reward model over HTTP, in the form that `RewardEndpoint` asks for: `envgym serve-reward-model`.

    POST /get_reward {"query": ["text", …], "prompts": […], "labels": […]}
        -> {"rewards": [2.0, …], "scores": [0.88, …], "extra_logs": {}}
    GET /healthz -> {"status": "ok"}

A query is text or a list of chat messages; prompts and labels are not read. Scores are in [0, 1] (see `preference`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from envgym.disk import cache_folder
from envgym.errors import ConfigError, InvalidOutcome, RunError, WorkerDied
from envgym.processes.local import LocalRuntime
from envgym.remote.access import refuse_web_pages
from envgym.remote.admission import read_json
from envgym.remote.listening import listen, stop_signals
from envgym.remote.wire import Problem
from envgym.types import as_messages

from .client import Conversation, RewardClient
from .declarations import RewardModel
from .http import read_token
from .reward import RewardModelClient

MAX_BODY = 32 * 2**20
"""Bytes of a request."""
MAX_QUERIES = 4096
"""Queries in a request."""
READ_SECONDS = 30.0
"""Seconds a request's body may take to arrive."""
DRAIN_SECONDS = 10.0
"""Seconds that requests in flight may take to finish once the server is asked to stop."""
REFUSAL = "without a token: whoever can reach it could use the model; leave --no-token away, or use --host 127.0.0.1"

logger = logging.getLogger(__name__)


async def serve_model(
    declared: RewardModel,
    host: str,
    port: int,
    *,
    token_file: str | None,
    open_to_all: bool,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve a reward model at `host:port` until SIGINT or SIGTERM, then finish what runs and close everything.

    Without `token_file` a token is made, unless the server is `open_to_all`, which only a loopback address may be.
    `on_ready` gets the URL and the token's file (empty where there is none) once the server answers; port 0 picks a
    free one. A second signal ends it at once. Raises `EnvgymError` for what cannot be served.
    """
    token = read_token(token_file) if token_file is not None else None
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, refusal=REFUSAL if open_to_all else None))
        stack.enter_context(stop_signals(stopping))
        logs = tempfile.mkdtemp(prefix="envgym-reward-model-")
        runtime = LocalRuntime(logs)
        stack.push_async_callback(runtime.close)
        client = RewardModelClient(declared, "reward-model", runtime)
        stack.push_async_callback(client.close)
        if await _first(client.start(), stopping.wait()):
            if token is None and not open_to_all:
                port = listener.getsockname()[1]
                token, token_file = stack.enter_context(made_token(f"reward-model-{port}"))
            server = RewardServer(client, token)
            await stack.enter_async_context(server.running(listener))
            on_ready(f"{_url(listener)}/get_reward", token_file or "")
            if await _first(server.dead.wait(), stopping.wait()):
                raise RunError(
                    f"the reward model's process ended without being asked to (log: {logs}/reward-model.log)"
                )
    shutil.rmtree(logs, ignore_errors=True)


@contextmanager
def made_token(name: str) -> Iterator[tuple[str, str]]:
    """A new token, and the file that holds it, which only this user can read; the file goes with the server."""
    folder = cache_folder("tokens")
    path = folder / name
    token = secrets.token_urlsafe(32)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # what a server that was killed has left; its permissions may be anything
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"the token cannot be written to {path}: {error.strerror}; give one with --token-file, or name a folder "
            "that can be with ENVGYM_CACHE=FOLDER"
        ) from None
    try:
        yield token, str(path)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


class RewardServer:
    """The routes over one reward model. `dead` is set when its worker is gone."""

    def __init__(self, client: RewardClient, token: str | None) -> None:
        self._client = client
        self._token = token
        self.dead = asyncio.Event()

    @asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer requests on `listener`; on leaving, let those in flight finish."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.router.add_get("/healthz", self._health)
        app.router.add_post("/get_reward", self._get_reward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_SECONDS)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, backlog=1024).start()
            yield
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _get_reward(self, request: web.Request) -> web.Response:
        conversations = await self._queries(request)
        # One by one into the common queue, so that small requests of many clients share batches.
        assessed = await asyncio.gather(
            *(self._client.assess(conversation) for conversation in conversations), return_exceptions=True
        )
        for index, result in enumerate(assessed):
            if isinstance(result, InvalidOutcome):
                raise _problem(503 if result.retryable else 422, f"query {index}: {result}")
            if isinstance(result, BaseException):
                raise result
        answers = [result for result in assessed if not isinstance(result, BaseException)]
        rewards = [answer.reward for answer in answers]
        names = sorted({name for answer in answers for name in answer.metrics})
        logs = {name: [answer.metrics.get(name, 0.0) for answer in answers] for name in names}
        scores = [answer.score for answer in answers]
        return web.json_response({"rewards": rewards, "scores": scores, "extra_logs": logs})

    async def _queries(self, request: web.Request) -> list[Conversation]:
        try:
            body = json.loads(await read_json(request, MAX_BODY, READ_SECONDS))
        except (ValueError, RecursionError):
            raise _problem(400, "the body is not JSON") from None
        queries = body.get("query") if isinstance(body, dict) else None
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list):
            raise _problem(422, 'the body is {"query": [text or messages, …]}')
        if len(queries) > MAX_QUERIES:
            raise _problem(413, f"at most {MAX_QUERIES} queries in a request, not {len(queries)}")
        return [_conversation(query, index) for index, query in enumerate(queries)]

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let in who has the token, and answer every error in one form; the server lives on."""
        try:
            if self._token is None:
                refuse_web_pages(request.headers.get("Host", ""), request.headers.get("Origin"))
            elif request.path != "/healthz":
                self._check_token(self._token, request.headers.get("Authorization", ""))
            return await handler(request)
        except Problem as problem:
            return web.json_response({"error": str(problem)}, status=problem.status)
        except web.HTTPException as error:  # no such route, method or room
            return web.json_response({"error": f"{error.status} {error.reason.lower()}"}, status=error.status)
        except WorkerDied:
            self.dead.set()
            return web.json_response({"error": "the reward model is gone"}, status=503)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            return web.json_response({"error": "a defect of the server; its log has more"}, status=500)

    def _check_token(self, token: str, authorization: str) -> None:
        kind, _, given = authorization.partition(" ")
        # Compared as bytes and in constant time: a header may hold anything.
        expected = token.encode()
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), expected):
            raise _problem(401, "send the server's token: Authorization: Bearer TOKEN")


def _problem(status: int, detail: str) -> Problem:
    return Problem(status, "invalid-request", detail)


def _conversation(query: Any, index: int) -> Conversation:
    if isinstance(query, str):
        return query
    try:
        if not isinstance(query, list) or not query:
            raise TypeError(f"text or a list of messages, not {type(query).__name__}")
        return as_messages(query)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _problem(422, f"query {index}: {str(error)[:200]}") from None


async def _first(one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object]) -> bool:
    """Wait for either, end the other, and say whether it was the first. Raises what the first raised."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if not tasks[0].done():
        return False
    tasks[0].result()
    return True


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
