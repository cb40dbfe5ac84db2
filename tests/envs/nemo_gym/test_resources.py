"""A resources server in process: what fails is no reward, places are kept to, and what is malformed is refused."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from envgym import Env, EnvSpec
from envgym.agents.external.responses_api import output_items, response
from envgym.envs.nemo_gym.serve import application
from envgym.envs.nemo_gym.served_tasks import rows
from envgym.errors import InvalidOutcome
from envgym.types import Message, Observation, ToolCall, ToolSpec

USE = ToolSpec("use", "", {"type": "object", "properties": {}})


class Fragile(Env):
    """Its tool breaks; words are paid, with a metric that is called like the reward."""

    steps = 0
    open = 0

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0.02)
        Fragile.open += 1
        return Observation((Message("user", "go"),), tools=(USE,)), {}

    async def step(self, action):
        Fragile.steps += 1
        if action.tool_calls:
            raise InvalidOutcome("sandbox", "the sandbox died", retryable=True)
        return None, 0.5, action.text != "wait", False, {"metrics": {"reward": 7.0}}

    async def close(self):
        await asyncio.sleep(0.02)
        Fragile.open -= 1


class Clinging(Fragile):
    async def close(self):
        await super().close()
        raise OSError("the port is still held")


@asynccontextmanager
async def serving_it(most=10, model_server=None, env=Fragile):
    """Gives a row, and `post(path, body, client)`."""
    spec = EnvSpec("Fragile-v0", env)
    [row] = [row async for row in rows(spec, "fragile", "train", 1)]
    Fragile.steps = Fragile.open = 0
    async with TestServer(application("fragile", spec, model_server, most)) as server, browser() as own:

        async def post(path, body, client=own):
            given = {"data": body} if isinstance(body, bytes) else {"json": body}
            headers = {"Content-Type": "application/json; charset=unheard"} if body == b"{}" else None
            async with client.post(server.make_url(path), headers=headers, **given) as answer:
                return answer.status, await answer.text()

        yield row, post
    assert Fragile.open == 0


def browser():
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


def saying(row, message):
    return {**row, "response": response(output_items(message))}


WORDS = Message("assistant", "done")
CALL = Message("assistant", (), (ToolCall("c", "use", {}),))


def test_an_episode_whose_tool_failed_has_no_reward_whatever_comes_after():
    async def main():
        async with serving_it() as (row, post):
            await post("/seed_session", row)
            answers = [await post("/use", {}), await post("/use", {}), await post("/verify", saying(row, WORDS))]
            return answers, Fragile.steps, Fragile.open

    answers, steps, left = asyncio.run(main())
    assert [status for status, _ in answers] == [500, 500, 500]
    assert all("the sandbox died" in text for _, text in answers)
    assert (steps, left) == (1, 0)


def test_a_step_that_failed_gives_the_place_back():
    async def main():
        async with serving_it() as (row, post):
            await post("/reset", row)
            status, text = await post("/step", saying(row, CALL))
            return status, text, Fragile.open

    status, text, left = asyncio.run(main())
    assert (status, left) == (500, 0)
    assert "the sandbox died" in text


def test_a_metric_is_never_taken_for_the_reward():
    async def main():
        async with serving_it() as (row, post):
            await post("/seed_session", row)
            return await post("/verify", saying(row, WORDS))

    status, text = asyncio.run(main())
    assert status == 200
    assert '"reward": 0.5' in text
    assert "7.0" not in text


def test_no_more_sessions_are_begun_than_there_are_places():
    """Posing takes its time: those that come meanwhile find the places taken."""

    async def main():
        async with serving_it(most=2) as (row, post):

            async def one():
                async with browser() as client:
                    return (await post("/seed_session", row, client))[0]

            return sorted(await asyncio.gather(*(one() for _ in range(6)))), Fragile.open

    assert asyncio.run(main()) == ([200, 200, 429, 429, 429, 429], 2)


def test_of_episodes_begun_under_one_cookie_at_once_the_last_stays():
    async def main():
        async with serving_it() as (row, post):
            await post("/seed_session", row)
            await asyncio.gather(*(post("/seed_session", row) for _ in range(4)))
            return Fragile.open

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/seed_session", b"[" * 100_000, 400, "a JSON object"),
        ("/seed_session", b'{"envgym": ' + b"9" * 5000 + b"}", 400, "a JSON object"),
        ("/seed_session", b"{}", 400, "a JSON object"),  # in an encoding that nobody knows
        ("/verify", {"response": 1}, 422, "a list `output`"),
        ("/step", {"response": {"output": [{"role": "assistant", "content": 3}]}}, 422, "content of a message is text"),
        ("/aggregate_metrics", {"verify_responses": [{"_ng_task_index": []}]}, 422, "a list of objects"),
    ],
)
def test_what_cannot_be_read_is_the_senders_mistake(path, body, status, says):
    async def main():
        async with serving_it() as (row, post):
            await post("/seed_session", row)
            return await post(path, body)

    answer = asyncio.run(main())
    assert answer[0] == status
    assert says in answer[1]


def test_token_ids_that_are_none_are_left_out():
    said = {"response": {"output": [{"role": "assistant", "content": "done", "generation_token_ids": 3}]}}

    async def main():
        async with serving_it() as (row, post):
            await post("/reset", row)
            return await post("/step", said)

    assert asyncio.run(main())[0] == 200


def test_what_goes_wrong_when_an_episode_is_over_costs_it_nothing():
    async def model(request):
        return web.json_response(response(output_items(WORDS)))

    async def main():
        app = web.Application()
        app.router.add_post("/v1/responses", model)
        async with TestServer(app) as model_server:
            url = f"http://127.0.0.1:{model_server.port}"
            async with serving_it(model_server=url, env=Clinging) as (row, post):
                await post("/seed_session", row)
                return await post("/run", row), await post("/verify", saying(row, WORDS))

    for status, text in asyncio.run(main()):
        assert status == 200
        assert '"reward": 0.5' in text


def test_the_model_server_gets_the_cookies_of_its_own_session_back():
    """By them theirs sends all calls of an episode to the same replica."""
    cookies = []

    async def model(request):
        cookies.append(request.cookies.get("session"))
        words = Message("assistant", "wait") if len(cookies) == 1 else WORDS
        answer = web.json_response(response(output_items(words)))
        answer.set_cookie("session", "its own")
        return answer

    async def main():
        app = web.Application()
        app.router.add_post("/v1/responses", model)
        async with TestServer(app) as model_server:
            url = f"http://127.0.0.1:{model_server.port}"
            async with serving_it(model_server=url) as (row, post):
                assert (await post("/run", row))[0] == 200

    asyncio.run(main())
    assert cookies == [None, "its own"]
