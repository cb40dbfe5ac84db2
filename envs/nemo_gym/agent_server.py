"""Our own loop as an agent server: it plays whole episodes against NeMo-Gym's model server, and sums rollouts up."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from envgym.agents.external.responses_api import Item, input_items, output_items, response
from envgym.agents.token_level import observed_messages
from envgym.env import EnvSpec
from envgym.errors import EnvgymError, InvalidOutcome
from envgym.types import Message

from .protocol import FAILURE_CLASS, PARAMS, numbers, post_json
from .resources_server import body_of
from .served_tasks import ServedEpisode, UnknownRow, action_of, place_of, pose

CALL_SECONDS = 600.0
"""Time limit of the model server for one turn."""
TASK = "_ng_task_index"

logger = logging.getLogger(__name__)


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
        prompt = params["input"]
        prompt = input_items((Message.of("user", prompt),)) if isinstance(prompt, str) else list(prompt)
        used = Counter[str]()
        # With the cookies of this episode alone. The usual jar refuses those of hosts that are addresses.
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
            while True:
                answer = await self._sample(http, {**params, "input": [*prompt, *output]})
                output += answer["output"]
                usage = answer.get("usage") or {}
                used.update({name: count for name, count in usage.items() if isinstance(count, int)})
                action = action_of(answer)
                if action is None:
                    break
                observation, _ = await episode.step(action)
                if episode.ended:
                    break
                output += input_items(observed_messages(observation))
        return {**answer, "usage": {**usage, **used} if usage else None}

    async def _sample(self, http: aiohttp.ClientSession, body: Mapping[str, Any]) -> Item:
        """One turn of the policy. Raises `InvalidOutcome` (`model_server`) where there is none."""
        url = f"{self._model_server}/v1/responses"
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        answer = await post_json(http, url, body, kind="model_server", timeout=timeout)
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
