"""An environment as NeMo-Gym's servers: a resources server with both flows, and envgym's loop as an agent server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from envgym.agents.external.responses_api import Item, input_items, output_items, response
from envgym.env import EnvSpec
from envgym.errors import EnvgymError, InvalidOutcome, InvalidStep
from envgym.net.client import HttpClient
from envgym.types import Action, Message, ToolCall, observed_messages

from .client import post_json
from .protocol import FAILURE_CLASS, PARAMS, numbers
from .served_tasks import ServedEpisode, UnknownRow, action_of, place_of, pose

COOKIE = "envgym_session"
IDLE_SECONDS = 3600.0
"""Seconds without a request after which a session is closed. NeMo-Gym's agents send no heartbeat during a turn."""
SESSION_ID: ContextVar[str] = ContextVar("SESSION_ID")
"""Session of the current request."""
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
    """Set the session's cookie on every response: NeMo-Gym's agents keep only the cookies of the latest one."""
    SESSION_ID.set(session_id := request.cookies.get(COOKIE) or secrets.token_urlsafe(24))
    answer = await handler(request)
    answer.set_cookie(COOKIE, session_id, path="/", httponly=True, samesite="Lax")
    return answer


# -- the resources server ----------------------------------------------------------------------------------


class ResourcesServer:
    """The routes of one environment. A session is an episode, identified by a cookie: it begins with `/seed_session` or
    `/reset`, and ends with `/verify`, or when the environment ends the episode."""

    def __init__(self, name: str, spec: EnvSpec, max_sessions: int) -> None:
        self._name = name
        self._spec = spec
        self._max_sessions = max_sessions
        self._sessions: dict[str, ServedEpisode] = {}
        self._opening = 0

    def add_to(self, app: web.Application) -> None:
        app.on_cleanup.append(self._close_all)
        app.router.add_post("/seed_session", partial(self._begin, {}))
        app.router.add_post("/verify", self._verify)
        # The first observation is in the row's input.
        app.router.add_post("/reset", partial(self._begin, {"observation": None, "info": {}}))
        app.router.add_post("/step", self._step)
        app.router.add_post("/{tool}", self._tool)  # last, so that the other routes take precedence

    # -- sessions -------------------------------------------------------------------------------------------

    async def _begin(self, answer: Item, request: web.Request) -> web.Response:
        """Start an episode of the row's task in the session, in place of an earlier one. `answer` is the response."""
        row = await body_of(request)
        place = place_of(row, self._name)
        await self._close_idle()
        if len(self._sessions) + self._opening >= self._max_sessions:
            raise web.HTTPTooManyRequests(text="as many sessions as this server may have", headers={"Retry-After": "5"})
        self._opening += 1  # `pose` may be slow
        try:
            episode, _ = await pose(self._spec, place, row)
        finally:
            self._opening -= 1
        previous, self._sessions[SESSION_ID.get()] = self._sessions.get(SESSION_ID.get()), episode
        if previous is not None:
            await previous.close()
        return web.json_response(answer)

    def _session(self) -> ServedEpisode:
        episode = self._sessions.get(SESSION_ID.get())
        if episode is None:
            raise web.HTTPConflict(text=f"no session: /seed_session begins one, and its cookie {COOKIE} names it")
        episode.last_used = time.monotonic()
        return episode

    async def _close(self, id: str) -> None:
        if (episode := self._sessions.pop(id, None)) is not None:
            await episode.close()

    async def _close_idle(self) -> None:
        limit = time.monotonic() - IDLE_SECONDS
        for id, episode in list(self._sessions.items()):
            if episode.last_used < limit and not episode.lock.locked():
                await self._close(id)

    async def _close_all(self, _: web.Application) -> None:
        for id in list(self._sessions):
            await self._close(id)

    # -- the tools flow -------------------------------------------------------------------------------------

    async def _tool(self, request: web.Request) -> web.Response:
        """A tool's result, as text that NeMo-Gym's agents pass to the policy unmodified."""
        episode, name = self._session(), request.match_info["tool"]
        arguments = await body_of(request)
        async with episode.lock:
            if episode.has_ended:
                raise web.HTTPConflict(text="The episode has ended.")
            call = ToolCall(f"call_{episode.calls}", name, arguments)
            episode.calls += 1
            turn = await episode.answer(Action("", (), (call,), content=""))
        return web.Response(text="\n\n".join(message.printed for message in observed_messages(turn.observation)))

    async def _verify(self, request: web.Request) -> web.Response:
        """The result of a whole `Response`. Its calls have their rewards; its last message is the last action. Closes
        the session."""
        episode, row = self._session(), await body_of(request)
        action = _action(row)
        async with episode.lock:
            try:
                if action is not None and not episode.has_ended:
                    await episode.answer(action)
                return web.json_response({**row, **episode.result(row)})
            finally:
                await self._close(SESSION_ID.get())

    # -- the gymnasium flow ---------------------------------------------------------------------------------

    async def _step(self, request: web.Request) -> web.Response:
        """The environment's answer to a `Response`. Closes the session at the end of the episode."""
        episode, row = self._session(), await body_of(request)
        action = _action(row)
        async with episode.lock:
            if episode.has_ended:
                raise web.HTTPConflict(text="The episode has ended.")
            try:
                return web.json_response(await _step_result(episode, action))
            finally:
                if episode.has_ended or episode.error is not None:  # the agent sends no further request
                    await self._close(SESSION_ID.get())


def _action(row: Mapping[str, Any]) -> Action | None:
    """The policy's turn in a body. Raises a 422 for a malformed `Response`."""
    try:
        return action_of(row.get("response"))
    except InvalidStep as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from None


async def _step_result(episode: ServedEpisode, action: Action | None) -> Item:
    """The answer to `/step`."""
    turn = await episode.answer(action)
    observation = turn.observation
    results = [message for message in observation.messages if message.role == "tool"]
    texts = [message.printed for message in observation.messages if message.role != "tool"]
    info: dict[str, Any] = {"tool_outputs": [{"call_id": m.tool_call_id, "output": m.printed} for m in results]}
    if episode.has_ended:
        info |= {name: value for name, value in episode.result({}).items() if name not in ("reward", "terminated")}
    return {
        "observation": observation.text or "\n\n".join(texts) or None,
        "reward": turn.reward or 0.0,
        "info": info,
        "terminated": turn.terminated,
        "truncated": turn.truncated and not turn.terminated,
    }


# -- the agent server --------------------------------------------------------------------------------------


class AgentServer:
    """`/run` runs the episode of a row as envgym's agents do: all calls of a turn are one action, and the environment's
    answer is the next input of the policy. `model_server` is the URL before `/v1/responses`."""

    def __init__(self, name: str, spec: EnvSpec, model_server: str | None, max_episodes: int) -> None:
        self._name = name
        self._spec = spec
        self._model_server = model_server
        self._slots = asyncio.Semaphore(max_episodes)

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
        """Run a row's episode with the model server's policy. A failure is answered as a failed row, with status
        200."""
        row = await body_of(request)
        if self._model_server is None:
            raise web.HTTPServiceUnavailable(text="/run needs a policy: serve with --model-server URL")
        output: list[Item] = []
        async with self._slots:
            try:
                episode, _ = await pose(self._spec, place_of(row, self._name), row)
                try:
                    last = await self._run_episode(episode, row[PARAMS], output)
                    return web.json_response({**row, "response": {**last, "output": output}, **episode.result(row)})
                finally:
                    await episode.close()
            except Exception as error:  # an environment may raise anything at all
                # A status other than 200 would make NeMo-Gym's collector abandon all other rows.
                return web.json_response(_failed_row(row, output, error))

    async def _run_episode(self, episode: ServedEpisode, params: Mapping[str, Any], output: list[Item]) -> Item:
        """Run the episode to its end, appending to `output`. Returns the last `Response`, with the usage of all."""
        prompt = params["input"]
        prompt = input_items((Message("user", prompt),)) if isinstance(prompt, str) else list(prompt)
        total_usage = Counter[str]()
        async with HttpClient(keeps_cookies=True) as http:  # cookies of this episode alone
            while True:
                answer = await self._sample(http, {**params, "input": [*prompt, *output]})
                output += answer["output"]
                usage = answer.get("usage") or {}
                total_usage.update({name: count for name, count in usage.items() if isinstance(count, int)})
                action = action_of(answer)
                if action is None:
                    break
                turn = await episode.answer(action)
                if episode.has_ended:
                    break
                output += input_items(observed_messages(turn.observation))
        return {**answer, "usage": {**usage, **total_usage} if usage else None}

    async def _sample(self, http: HttpClient, body: Mapping[str, Any]) -> Item:
        """One turn of the policy. Raises `InvalidOutcome` (`model_server`) if the model server gives none."""
        url = f"{self._model_server}/v1/responses"
        answer = await post_json(http, url, body, kind="model_server", seconds=CALL_SECONDS)
        try:
            return {**answer, "output": [dict(item) for item in answer["output"]]}
        except (ValueError, TypeError, KeyError):
            raise InvalidOutcome("model_server", f"{url} answers with no Response: {answer!s:.100}") from None


def _failed_row(row: Mapping[str, Any], output: list[Item], error: Exception) -> Item:
    """The row of a failed rollout. NeMo-Gym's collector saves it in a separate file of failures; it has no reward, so
    that none of zero is counted."""
    if isinstance(error, UnknownRow):
        logger.warning("a row is rejected: %s", error)
    elif not isinstance(error, EnvgymError):
        logger.error("a rollout failed", exc_info=error)
    kind = error.kind if isinstance(error, InvalidOutcome) else type(error).__name__
    retryable = isinstance(error, InvalidOutcome) and error.retryable
    return {
        **row,
        "response": response(output or output_items(Message("assistant", ""))),
        FAILURE_CLASS: "transient" if retryable else "legitimate",
        "failure_kind": kind,
        "error_message": str(error) or kind,
        "mask_sample": True,
    }


def aggregate(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of rollouts, by task and over all: mean, max, min, median and sample standard deviation (0 of one
    value) of each numeric field and of the tokens in `response.usage`, as `mean/reward` and so on.

    Failed rollouts, and fields whose names begin with `_`, are excluded.
    """
    by_task: dict[int, list[dict[str, float]]] = {}
    for result in results:
        if not result.get(FAILURE_CLASS):
            answer = result.get("response")
            usage = answer.get("usage") if isinstance(answer, Mapping) else None
            fields = {**result, **usage} if isinstance(usage, Mapping) else result
            by_task.setdefault(result.get(TASK, 0), []).append(numbers(fields))
    overall = _statistics([fields for rows in by_task.values() for fields in rows])
    return {
        "group_level_metrics": [
            {TASK: task, **_statistics(rows), "num_rollouts": len(rows)} for task, rows in sorted(by_task.items())
        ],
        "agent_metrics": overall,
        "key_metrics": {name: value for name, value in overall.items() if name.startswith("mean/")},
    }


def _statistics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean, max, min, median and standard deviation of each field, over the rows that have it."""
    summary: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        summary[f"mean/{name}"] = statistics.fmean(values)
        summary[f"max/{name}"] = max(values)
        summary[f"min/{name}"] = min(values)
        summary[f"median/{name}"] = statistics.median(values)
        summary[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return summary
