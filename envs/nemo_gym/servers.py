"""An environment as NeMo-Gym's servers: a resources server in both flows, and our own loop as an agent server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.typedefs import Handler

from envgym.agents.external.responses_api import Item, input_items, output_items, response
from envgym.env import EnvSpec
from envgym.errors import EnvgymError, InvalidOutcome, InvalidStep
from envgym.types import Action, Message, ToolCall, observed_messages

from .protocol import FAILURE_CLASS, PARAMS, numbers
from .served_tasks import ServedEpisode, UnknownRow, action_of, place_of, pose

if TYPE_CHECKING:
    from envgym.net.client import HttpClient

COOKIE = "envgym_session"
IDLE_SECONDS = 3600.0
"""After so long without a request a session is closed. There are none while the policy thinks: their agents send no
heartbeat."""
SWEEP_SECONDS = 30.0
SESSION_ID: ContextVar[str] = ContextVar("SESSION_ID")
"""The session of the request that is being answered."""
CALL_SECONDS = 600.0
"""Time limit of the model server for one turn."""
TASK = "_ng_task_index"

logger = logging.getLogger(__name__)


async def body_of(request: web.Request) -> Mapping[str, Any]:
    """A request's body. Raises a 400 unless it is a JSON object."""
    try:
        body = await request.json()
    except (ValueError, LookupError, RecursionError):  # no JSON, no such encoding, brackets 10,000 deep
        body = None
    if not isinstance(body, Mapping):
        raise web.HTTPBadRequest(text="the body is a JSON object")
    return body


@web.middleware
async def with_cookie(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the session in every response: their agents keep the cookies of the latest one alone."""
    SESSION_ID.set(session_id := request.cookies.get(COOKIE) or secrets.token_urlsafe(24))
    answer = await handler(request)
    answer.set_cookie(COOKIE, session_id, path="/", httponly=True, samesite="Lax")
    return answer


# -- the resources server ----------------------------------------------------------------------------------


class ResourcesServer:
    """The routes of one environment. A session is an episode, known by a cookie: it begins with `/seed_session` or
    `/reset`, and ends with `/verify`, or with the environment."""

    def __init__(self, name: str, spec: EnvSpec, max_sessions: int) -> None:
        self._name = name
        self._spec = spec
        self._max_sessions = max_sessions
        self._sessions: dict[str, ServedEpisode] = {}
        self._opening = 0

    def add_to(self, app: web.Application) -> None:
        app.cleanup_ctx.append(self._closing_sessions)
        app.router.add_post("/seed_session", self._seed_session)
        app.router.add_post("/verify", self._verify)
        app.router.add_post("/reset", self._reset)
        app.router.add_post("/step", self._step)
        app.router.add_post("/{tool}", self._tool)  # last, so that the others are found first

    # -- sessions -------------------------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> None:
        row = await body_of(request)
        place = place_of(row, self._name)
        if len(self._sessions) + self._opening >= self._max_sessions:
            raise web.HTTPTooManyRequests(text="as many sessions as this server may have", headers={"Retry-After": "5"})
        self._opening += 1  # posing may take its time
        try:
            episode, _ = await pose(self._spec, place, row)
        finally:
            self._opening -= 1
        before, self._sessions[SESSION_ID.get()] = self._sessions.get(SESSION_ID.get()), episode
        if before is not None:
            await before.close()

    def _session(self) -> ServedEpisode:
        episode = self._sessions.get(SESSION_ID.get())
        if episode is None:
            raise web.HTTPConflict(text=f"no session: /seed_session begins one, and its cookie {COOKIE} names it")
        episode.last_used = time.monotonic()
        return episode

    async def _close(self, id: str) -> None:
        if (episode := self._sessions.pop(id, None)) is not None:
            await episode.close()

    async def _closing_sessions(self, _: web.Application) -> AsyncIterator[None]:
        """While the server runs, sessions that nobody uses are closed; at its end all are."""

        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                oldest = time.monotonic() - IDLE_SECONDS
                idle = [id for id, one in self._sessions.items() if one.last_used < oldest and not one.lock.locked()]
                for id in idle:
                    await self._close(id)

        sweeping = asyncio.create_task(sweep())
        yield
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeping
        for id in list(self._sessions):
            await self._close(id)

    # -- with tools and a verdict ---------------------------------------------------------------------------

    async def _seed_session(self, request: web.Request) -> web.Response:
        await self._open(request)
        return web.json_response({})

    async def _tool(self, request: web.Request) -> web.Response:
        """A tool's result, as the text that their agents hand to the policy as it stands."""
        episode, name = self._session(), request.match_info["tool"]
        arguments = await body_of(request)
        async with episode.lock:
            if episode.has_ended:
                raise web.HTTPConflict(text="The episode has ended.")
            call = ToolCall(f"call_{episode.calls}", name, arguments)
            episode.calls += 1
            turn = await episode.answer(Action("", (), (call,), content=""))
        return web.Response(text="\n\n".join(message.text for message in observed_messages(turn.observation)))

    async def _verify(self, request: web.Request) -> web.Response:
        """The verdict on a whole `Response`. The rewards of its calls are known; its last words are the last action."""
        episode, row = self._session(), await body_of(request)
        action = _action(row)
        async with episode.lock:
            try:
                if action is not None and not episode.has_ended:
                    await episode.answer(action)
                return web.json_response({**row, **episode.result(row)})
            finally:
                await self._close(SESSION_ID.get())

    # -- the Gymnasium flavour ------------------------------------------------------------------------------

    async def _reset(self, request: web.Request) -> web.Response:
        await self._open(request)
        return web.json_response({"observation": None, "info": {}})  # the row's input has it

    async def _step(self, request: web.Request) -> web.Response:
        episode, row = self._session(), await body_of(request)
        action = _action(row)
        async with episode.lock:
            if episode.has_ended:
                raise web.HTTPConflict(text="The episode has ended.")
            try:
                return web.json_response(await _stepped(episode, action))
            finally:
                if episode.has_ended or episode.error is not None:  # their agent comes no more
                    await self._close(SESSION_ID.get())


def _action(row: Mapping[str, Any]) -> Action | None:
    """The policy's turn in a body. Raises a 422 for what is no `Response`."""
    try:
        return action_of(row.get("response"))
    except InvalidStep as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from None


async def _stepped(episode: ServedEpisode, action: Action | None) -> Item:
    """The answer to `/step`."""
    turn = await episode.answer(action)
    observation = turn.observation
    results = [message for message in observation.messages if message.role == "tool"]
    others = [message for message in observation.messages if message.role != "tool"]
    info: dict[str, Any] = {"tool_outputs": [{"call_id": m.tool_call_id, "output": m.text} for m in results]}
    if episode.has_ended:
        info |= {name: value for name, value in episode.result({}).items() if name not in ("reward", "terminated")}
    return {
        "observation": observation.text or "\n\n".join(message.text for message in others) or None,
        "reward": turn.reward or 0.0,
        "info": info,
        "terminated": turn.terminated,
        "truncated": turn.truncated and not turn.terminated,
    }


# -- the agent server --------------------------------------------------------------------------------------


class AgentServer:
    """`/run` plays a row as our own agents do: all calls of a turn are one action, and the environment's answer is what
    the policy reads next. `model_server` is the URL before `/v1/responses`."""

    def __init__(self, name: str, spec: EnvSpec, model_server: str | None, max_episodes: int) -> None:
        self._name = name
        self._spec = spec
        self._model_server = model_server
        self._places = asyncio.Semaphore(max_episodes)

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/run", self._run)
        app.router.add_post("/aggregate_metrics", self._aggregate)

    async def _aggregate(self, request: web.Request) -> web.Response:
        results = (await body_of(request)).get("verify_responses")
        if not isinstance(results, list) or not all(
            isinstance(result, Mapping) and isinstance(result.get(TASK, 0), int) for result in results
        ):
            raise web.HTTPUnprocessableEntity(text=f"verify_responses is a list of objects, {TASK} a number")
        return web.json_response(aggregate(results))

    async def _run(self, request: web.Request) -> web.Response:
        row = await body_of(request)
        if self._model_server is None:
            raise web.HTTPServiceUnavailable(text="/run needs a policy: serve with --model-server URL")
        output: list[Item] = []
        async with self._places:
            try:
                episode, _ = await pose(self._spec, place_of(row, self._name), row)
                try:
                    last = await self._play(episode, row[PARAMS], output)
                    return web.json_response({**row, "response": {**last, "output": output}, **episode.result(row)})
                finally:
                    await episode.close()
            except Exception as error:  # an environment may raise anything at all
                # With another status than 200 their collector would give all other rows up.
                return web.json_response(_failed(row, output, error))

    async def _play(self, episode: ServedEpisode, params: Mapping[str, Any], output: list[Item]) -> Item:
        """Play to the end, adding to `output`. Returns the last `Response`, with the usage of all."""
        from .client import http_client

        prompt = params["input"]
        prompt = input_items((Message.of("user", prompt),)) if isinstance(prompt, str) else list(prompt)
        used = Counter[str]()
        async with http_client(keeps_cookies=True) as http:  # this episode's alone
            while True:
                answer = await self._sample(http, {**params, "input": [*prompt, *output]})
                output += answer["output"]
                usage = answer.get("usage") or {}
                used.update({name: count for name, count in usage.items() if isinstance(count, int)})
                action = action_of(answer)
                if action is None:
                    break
                turn = await episode.answer(action)
                if episode.has_ended:
                    break
                output += input_items(observed_messages(turn.observation))
        return {**answer, "usage": {**usage, **used} if usage else None}

    async def _sample(self, http: HttpClient, body: Mapping[str, Any]) -> Item:
        """One turn of the policy. Raises `InvalidOutcome` (`model_server`) where there is none."""
        from .client import post_json

        url = f"{self._model_server}/v1/responses"
        answer = await post_json(http, url, body, kind="model_server", seconds=CALL_SECONDS)
        try:
            return {**answer, "output": [dict(item) for item in answer["output"]]}
        except (ValueError, TypeError, KeyError):
            raise InvalidOutcome("model_server", f"{url} answers with no Response: {answer!s:.100}") from None


def _failed(row: Mapping[str, Any], output: list[Item], error: Exception) -> Item:
    """The row of a rollout that says nothing about the policy, or that is none of ours. Their collector keeps it apart,
    in a file of failures; it has no reward, so that nobody takes it for one of zero."""
    if isinstance(error, UnknownRow):
        logger.warning("a row is refused: %s", error)
    elif not isinstance(error, EnvgymError):
        logger.error("a rollout failed", exc_info=error)
    kind = error.kind if isinstance(error, InvalidOutcome) else type(error).__name__
    retryable = isinstance(error, InvalidOutcome) and error.retryable
    return {
        **row,
        "response": response(output or output_items(Message.of("assistant", ""))),
        FAILURE_CLASS: "transient" if retryable else "legitimate",
        "failure_kind": kind,
        "error_message": str(error) or kind,
        "mask_sample": True,
    }


def aggregate(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of rollouts, by task and over all: mean, max, min, median and sample standard deviation (0 of one
    value) of each numeric field and of the tokens in `response.usage`, as `mean/reward` and so on.

    Rollouts that failed are no part of it; neither are fields whose names begin with `_`.
    """
    by_task: dict[int, list[dict[str, float]]] = {}
    for result in results:
        if not result.get(FAILURE_CLASS):
            whole = result.get("response")
            usage = whole.get("usage") if isinstance(whole, Mapping) else None
            fields = {**result, **usage} if isinstance(usage, Mapping) else result
            by_task.setdefault(result.get(TASK, 0), []).append(numbers(fields))
    overall = _statistics([fields for own in by_task.values() for fields in own])
    return {
        "group_level_metrics": [
            {TASK: task, **_statistics(own), "num_rollouts": len(own)} for task, own in sorted(by_task.items())
        ],
        "agent_metrics": overall,
        "key_metrics": {name: value for name, value in overall.items() if name.startswith("mean/")},
    }


def _statistics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        found[f"mean/{name}"] = statistics.fmean(values)
        found[f"max/{name}"] = max(values)
        found[f"min/{name}"] = min(values)
        found[f"median/{name}"] = statistics.median(values)
        found[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found
