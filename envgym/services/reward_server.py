"""A reward model over HTTP, in the form that `RewardEndpoint` asks for: `envgym serve-reward-model`.

    POST /get_reward {"query": ["text", …], "prompts": […], "labels": […]}
        -> {"rewards": [2.0, …], "scores": [0.88, …], "extra_logs": {}}
    GET /healthz -> {"status": "ok"}

A query is text or a list of chat messages; prompts and labels are not read. Scores are in [0, 1] (see `preference`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from envgym.errors import InvalidOutcome, RunError, WorkerDied
from envgym.net.listening import listen, stop_signals, until_stopped, url_of
from envgym.net.problems import Problem
from envgym.net.server import authenticate, read_json, serve_requests, to_problem
from envgym.net.tokens import Tokens, new_token_file
from envgym.types import as_messages

from .client import Conversation, RewardClient
from .declarations import RewardModel
from .reward import RewardModelClient
from .start import temporary_runtime

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
    token_file: Path | None,
    open_to_all: bool,
    on_ready: Callable[[str, Path | None], None],
) -> None:
    """Serve a reward model at `host:port` until SIGINT or SIGTERM, then finish requests in flight and close everything.

    Without `token_file` a token is made, unless the server is `open_to_all`, which only a loopback address may be.
    `on_ready` gets the URL and the token's file, if there is one, once the server answers; port 0 picks a
    free one. A second signal ends it immediately. Raises `EnvgymError` for a model that cannot be served.
    """
    tokens = None if token_file is None else Tokens.read(token_file)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, refusal=REFUSAL if open_to_all else None))
        stopping = stack.enter_context(stop_signals())
        runtime, logs = await stack.enter_async_context(temporary_runtime("reward-model"))
        client = RewardModelClient(declared, "reward-model", runtime)
        stack.push_async_callback(client.close)
        if await until_stopped(client.start(), stopping):
            if token_file is None and not open_to_all:
                port = listener.getsockname()[1]
                token_file = stack.enter_context(new_token_file(f"reward-model-{port}"))
                tokens = Tokens.read(token_file)
            server = RewardServer(client, tokens)
            await stack.enter_async_context(serve_requests(server.app, listener, drain=DRAIN_SECONDS))
            on_ready(f"{url_of(listener)}/get_reward", token_file)
            if await until_stopped(server.dead.wait(), stopping):
                raise RunError(
                    f"the reward model's process ended without being asked to (log: {logs}/reward-model.log)"
                )


class RewardServer:
    """The routes over one reward model. `dead` is set when its worker has died."""

    def __init__(self, client: RewardClient, tokens: Tokens | None) -> None:
        self._client = client
        self._tokens = tokens
        self.dead = asyncio.Event()
        self.app = web.Application(middlewares=[self._guard])
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_post("/get_reward", self._get_reward)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _get_reward(self, request: web.Request) -> web.Response:
        """Score all queries of a request; one that cannot be scored fails the request."""
        conversations = await self._queries(request)
        # Each into the common queue, so that small requests of many clients share batches.
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
        """The conversations in a request. Raises an HTTP error for a body that is malformed or too large."""
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
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit requests with the token (`/healthz` needs none), and answer every error in one form; the server keeps
        running."""
        try:
            if self._tokens is None or request.path != "/healthz":
                authenticate(request, self._tokens)
            return await handler(request)
        except WorkerDied:
            self.dead.set()
            return web.json_response({"error": "the reward model is gone"}, status=503)
        except Exception as error:
            problem = to_problem(error, request.method, request.path)
            return web.json_response({"error": str(problem)}, status=problem.status)


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
