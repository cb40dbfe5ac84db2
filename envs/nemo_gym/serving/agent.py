"""Our own loop as an agent server: it plays a whole episode against NeMo-Gym's model server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from envgym.env import EnvSpec
from envgym.envs.nemo_gym.protocol import FAILURE_CLASS
from envgym.errors import EnvgymError, InvalidOutcome
from envgym.responses import Item, input_items, output_items, response
from envgym.types import Message

from .aggregate import TASK, aggregate
from .playing import Playing, action_of
from .resources import body_of
from .rows import PARAMS, UnknownRow, place_of, pose, said

CALL_SECONDS = 600.0
"""How long the model server may take for one turn."""

logger = logging.getLogger(__name__)


class AgentServer:
    """`/run` plays a row as our own agents do: all calls of a turn are one action, and the environment's answer is what
    the policy reads next. `model_server` is the URL before `/v1/responses`; `most` episodes are played at once."""

    def __init__(self, name: str, spec: EnvSpec, model_server: str | None, most: int) -> None:
        self._name = name
        self._spec = spec
        self._model_server = model_server
        self._places = asyncio.Semaphore(most)

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
        async with self._places:
            try:
                playing, _ = await pose(self._spec, place_of(row, self._name), row)
            except UnknownRow as error:  # with another status their collector would give all other rows up
                logger.warning("a row is refused: %s", error)
                return web.json_response(_failed(row, [], error))
            except Exception as error:
                return web.json_response(_failed(row, [], error))
            output: list[Item] = []
            try:
                last = await self._play(playing, row[PARAMS], output)
                return web.json_response({**row, "response": {**last, "output": output}, **playing.told(row)})
            except Exception as error:  # an environment may raise anything at all
                return web.json_response(_failed(row, output, error))
            finally:
                await playing.close()

    async def _play(self, playing: Playing, params: Mapping[str, Any], output: list[Item]) -> Item:
        """Play to the end, adding to `output`. Returns the last `Response`, with the usage of all."""
        asked = params["input"]
        asked = input_items((Message.of("user", asked),)) if isinstance(asked, str) else list(asked)
        used: dict[str, int] = {}
        # With the cookies of this episode alone. The usual jar refuses those of hosts that are addresses.
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            while True:
                answer = await self._ask(client, {**params, "input": [*asked, *output]})
                output += answer["output"]
                for name, count in (answer.get("usage") or {}).items():
                    if isinstance(count, int):
                        used[name] = used.get(name, 0) + count
                action = action_of(answer)
                if action is None:
                    break
                observation, _ = await playing.step(action)
                if playing.ended:
                    break
                output += input_items(said(observation))
        usage = answer.get("usage")
        return {**answer, "usage": {**usage, **used} if usage else None}

    async def _ask(self, client: aiohttp.ClientSession, body: Mapping[str, Any]) -> Item:
        """One turn of the policy. Raises `InvalidOutcome` (`model_server`) where there is none."""
        url = f"{self._model_server}/v1/responses"
        try:
            timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
            async with client.post(url, json=body, timeout=timeout) as answered:
                text = await answered.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"{url} cannot be reached: {error or type(error).__name__}"
            raise InvalidOutcome("model_server", message, retryable=True) from None
        if answered.status != 200:
            message = f"{url} answers with {answered.status}: {text[:300]}"
            raise InvalidOutcome("model_server", message, retryable=answered.status >= 500)
        try:
            answer = json.loads(text)
            answer["output"] = [dict(item) for item in answer["output"]]
        except (ValueError, TypeError, KeyError):
            raise InvalidOutcome("model_server", f"{url} answers with no Response: {text[:100]}") from None
        return answer  # type: ignore[no-any-return]


def _failed(row: Mapping[str, Any], output: list[Item], error: Exception) -> Item:
    """The row of a rollout that says nothing about the policy, or that is none of ours. Their collector keeps it apart,
    in a file of failures; it has no reward, so that nobody takes it for one of zero."""
    if not isinstance(error, EnvgymError):
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
