"""What a server says is not believed because it said it: numbers, errors, sizes, and what a proxy answers for it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import socket

import pytest
from aiohttp import web
from pydantic import ValidationError

import envgym.registry as registry
from envgym import errors
from envgym.errors import ConfigError, InvalidStep
from envgym.net import client as net_client
from envgym.net.problems import ProblemBody
from envgym.net.retries import WAITS
from envgym.remote import client, transport
from envgym.remote.access import Access
from envgym.remote.remote_env import RemoteTasks
from envgym.remote.transport import Counters, RemoteError, ServerFull, Transport, as_error
from envgym.remote.wire import EnvList, TaskPage
from envgym.types import Action, Episode, Outcome, Row, Segment, StopReason, Task, ToolCall, Turn

from .meddling import instead, meddling


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def step_with(url: str, old: str, new: str) -> str:
    """What is said of a step whose answer has `new` in place of `old`."""

    async def changed(request, forward):
        answer = await forward()
        if request.path.endswith("/step"):
            assert old.encode() in answer.body
            answer.body = answer.body.replace(old.encode(), new.encode())
        return answer

    async with meddling(url, changed) as wrong, registry.spec(wrong) as spec:
        env = spec.make()
        await env.reset(seed=1)
        with pytest.raises(RemoteError) as raised:
            await env.step(Action("no"))
        await env.close()
    assert (raised.value.kind, raised.value.retryable) == ("server", True)
    return str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"reward":0.0', '"reward":NaN', "a reward must be finite"),
        ('"reward":0.0', '"reward":1e400', "a reward must be finite"),
        ('"reward":0.0', '"reward":"1.0"', "not one of an envgym server"),
        ('"reward":0.0', '"reward":true', "not one of an envgym server"),
        ('"truncated":false', '"truncated":"no"', "not one of an envgym server"),
        ('"terminated":false', '"terminated":0', "not one of an envgym server"),
        ('"score":0.0', '"score":9', r"a score lies in [0, 1]"),
        ('"score":0.0', '"score":"high"', "a score is a number"),
        ('"score":0.0', '"score":NaN', "a score must be finite"),
        ('"luck"', '"metrics":[1],"luck"', "names to numbers"),
    ],
)
def test_a_step_that_pays_no_number_fails_its_episode(game, old, new, said):
    assert said in asyncio.run(step_with(game.url, old, new))


LONG = [
    {"text": "x" * 4_000_001, "messages": []},
    {"text": None, "messages": [{"role": "user", "content": [{"text": "x" * 100}]}] * 40_000},
    {"text": None, "messages": [{"role": "r" * 5000, "content": []}] * 801},
    {"text": "x", "messages": [], "sampling": {"stop_token_ids": list(range(600_000))}},
    {"text": "x", "messages": [], "tools": [{"name": "t", "description": "x" * 4_000_001, "parameters": {}}]},
]


@pytest.mark.parametrize("path", ["/v1/sessions", "/step"])
@pytest.mark.parametrize("observation", LONG, ids=range(len(LONG)))
def test_an_observation_from_a_server_may_be_as_long_as_one_from_here(game, path, observation):
    changed = []

    async def longer(request, forward):
        answer = await forward()
        if request.path.endswith(path):
            answer.body = json.dumps({**json.loads(answer.body), "observation": observation}).encode()
            changed.append(answer)
        return answer

    async def main() -> None:
        async with meddling(game.url, longer) as wrong, registry.spec(wrong) as spec, spec.make() as env:
            await env.reset(seed=1)
            await env.step(Action("no"))

    with pytest.raises(InvalidStep, match="more than the 4,000,000 that are rendered"):
        asyncio.run(main())
    assert len(changed) == 1


@pytest.mark.parametrize("name", ["CallTimeout", "ConfigError", "DataError", "InvalidStep", "ResetNeeded"])
def test_errors_that_are_the_environments_own_are_raised_as_they_were(name):
    assert type(as_error("u", of_environment(name))) is getattr(errors, name)


@pytest.mark.parametrize(
    "name", ["WorkerDied", "WorkerError", "RolloutFailed", "PromptTooLong", "EnvgymError", "Exception"]
)
def test_errors_that_would_mean_something_of_ours_are_the_environments_failure(name):
    error = as_error("u", of_environment(name))
    assert isinstance(error, RemoteError)
    assert (error.kind, error.retryable) == ("environment", False)
    assert f"the environment raised {name}: it broke" in str(error)


def of_environment(name: str) -> ProblemBody:
    return ProblemBody(type="urn:envgym:problem:environment-error", error=name, detail="it broke")


@pytest.mark.parametrize(("said", "seconds"), [(1e9, 60.0), (float("nan"), 0.1), (-3.0, 0.1), (None, 1.0), (2.0, 2.0)])
def test_how_long_a_full_server_is_waited_for_has_bounds(said, seconds):
    error = as_error("u", ProblemBody(type="urn:envgym:problem:server-full", retry_after=said))
    assert isinstance(error, ServerFull)
    assert error.retry_after == seconds
    assert transport._pause("nan" if said != said else "Sun, 22 Nov 2026 09:00:00 GMT") == 0.1
    assert transport._pause("Sun, 22 Nov 2099 09:00:00 GMT") == 60.0


@pytest.mark.parametrize(
    "wrong", ['"lease_seconds":0', '"lease_seconds":NaN', '"lease_seconds":1e400', '"max_sessions":0']
)
def test_a_lease_that_is_none_is_no_answer(wrong):
    good = '{"envs":[],"lease_seconds":60,"max_sessions":1}'
    assert EnvList.model_validate_json(good, strict=True)
    name = wrong.partition(":")[0]
    bad = good.replace({'"lease_seconds"': '"lease_seconds":60'}.get(name, '"max_sessions":1'), wrong)
    with pytest.raises(ValidationError):
        EnvList.model_validate_json(bad, strict=True)


def test_an_answer_without_an_end_is_read_no_further_than_a_body_may_go(game, monkeypatch):
    monkeypatch.setattr(net_client, "MAX_ANSWER", 2**20)
    sent = 0

    async def endless(request, forward):
        nonlocal sent
        if request.path != "/v1/envs":
            return await forward()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**18)
            sent += 2**18

    async def main() -> None:
        async with meddling(game.url, endless) as url:
            with pytest.raises(RemoteError, match="more than 1 MiB") as raised:
                async with registry.spec(url):
                    pass
            assert raised.value.kind == "server"
        assert sent < 2**25

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------
# What proxies say


def test_a_redirect_is_not_followed(game):
    async def main() -> None:
        async with meddling(game.url) as there:
            moved = web.Response(status=302, headers={"Location": f"{there}/v1/envs"})
            async with meddling(game.url, instead(moved, "/v1/envs")) as url:
                with pytest.raises(RemoteError, match="not one of an envgym server"):
                    async with registry.spec(url):
                        pass

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["/v1/sessions", "/step", "/tasks"])
def test_a_proxys_429_is_waited_out_as_long_as_it_says(game, ends):
    times: list[float] = []

    async def limiting(request, forward):
        if request.path.endswith(ends):
            times.append(asyncio.get_running_loop().time())
            if len(times) <= 2:
                return web.Response(status=429, text="slow down", headers={"Retry-After": "0.3"})
        return await forward()

    async def main() -> None:
        async with meddling(game.url, limiting) as url, registry.spec(url, reconnect=0) as spec:
            env = spec.make()
            await env.reset(seed=1, options={"task": await spec.tasks("train").get(0)})
            assert (await env.step(Action("no")))[4]["turns"] == 1
            await env.close()
        assert len(times) == 3
        assert all(later - earlier >= 0.29 for earlier, later in itertools.pairwise(times))

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------
# Requests that cannot be sent


def test_an_action_that_json_cannot_carry_is_refused_and_is_no_step(game):
    async def main() -> None:
        async with registry.spec(game.url) as spec:
            env = spec.make()
            await env.reset(seed=1)
            with pytest.raises(InvalidStep, match="cannot be sent as JSON"):
                await env.step(Action("no", tool_calls=(ToolCall("1", "f", {"x": float("nan")}),)))
            assert (await env.step(Action("no")))[4]["turns"] == 1
            await env.close()

    asyncio.run(main())


def test_a_call_after_the_connection_was_closed_may_be_made_again_elsewhere():
    async def main() -> None:
        closed = Transport("http://127.0.0.1:1", Access({}), Counters())
        await closed.close()
        with pytest.raises(RemoteError, match="was closed here") as raised:
            await closed.call("GET", "/livez", seconds=1)
        assert (raised.value.kind, raised.value.retryable) == ("connection", True)

    asyncio.run(main())


def test_patience_counts_from_the_first_failure(monkeypatch):
    """With pauses of 2, 4 and 8 hundredths of a second the third try is the last that a tenth leaves room for."""
    monkeypatch.setattr("envgym.remote.transport.FIRST_PAUSE", 0.02)

    async def main() -> None:
        nobody = Transport("http://127.0.0.1:1", Access({}), Counters())
        with pytest.raises(RemoteError) as raised:
            await nobody.call("GET", "/livez", seconds=60, patience=0.1)
        assert raised.value.kind == "connection"
        assert 1 <= nobody.counters.requests <= 3
        await nobody.close()

    asyncio.run(main())


def test_patience_is_for_an_outage_and_not_for_each_call_in_it(monkeypatch, caplog, unused_port):
    """A call after the others have given up is tried once; an answer ends the outage, and begins patience anew."""
    monkeypatch.setattr("envgym.remote.transport.FIRST_PAUSE", 0.02)
    monkeypatch.setattr("envgym.remote.transport.REPORT_SECONDS", 0.0)

    async def tries(server: Transport, patience: float) -> int:
        before = server.counters.requests
        with pytest.raises(RemoteError) as raised:
            await server.call("GET", "/livez", seconds=60, patience=patience)
        assert raised.value.kind == "connection"
        return server.counters.requests - before

    async def main() -> None:
        server = Transport(f"http://127.0.0.1:{unused_port}", Access({}), Counters())
        assert server.lost_at == 0
        assert await tries(server, 0.1) >= 2
        lost_at = server.lost_at
        assert lost_at > 0
        assert WAITS[server.url] == pytest.approx(lost_at + 0.1)
        while asyncio.get_running_loop().time() < lost_at + 0.1:  # the last pause would have been too long
            await tries(server, 0.1)
        assert [await tries(server, 0.1) for _ in range(3)] == [1, 1, 1]
        assert server.lost_at == lost_at
        runner = web.ServerRunner(web.Server(lambda request: asyncio.sleep(0, web.Response(status=404))))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_port).start()
        with pytest.raises(RemoteError) as raised:
            await server.call("GET", "/livez", seconds=60, patience=0.1)
        assert raised.value.kind == "server"
        assert server.lost_at == 0
        assert server.url not in WAITS
        await runner.cleanup()
        assert await tries(server, 0.1) >= 2
        assert server.lost_at > lost_at
        await server.close()

    asyncio.run(main())
    said = [record.getMessage() for record in caplog.records]
    assert f"http://127.0.0.1:{unused_port} cannot be reached: its episodes fail in 0 s" in said


def test_a_proxy_without_its_server_does_not_end_an_outage(serving):
    async def main() -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=502)

        async with serving(answer) as url:
            server = Transport(url, Access({}), Counters())
            for _ in range(2):
                with pytest.raises(RemoteError, match="502"):
                    await server.call("GET", "/livez", seconds=60)
                lost_at = server.lost_at
                assert lost_at > 0
            assert server.lost_at == lost_at
            await server.close()

    asyncio.run(main())


def test_the_deadline_of_a_remote_environments_calls_is_called_timeout():
    with pytest.raises(ConfigError, match=r"call_timeout.*timeout bounds a reset or a step") as raised:
        registry.spec("http://127.0.0.1:1", call_timeout=5)
    assert "\n" not in str(raised.value)
    saved = registry.spec("http://127.0.0.1:1", timeout=5).config.model_dump()
    assert registry.spec("http://127.0.0.1:1", **saved).config.timeout == 5


def finished(number: int, task: Task) -> Episode:
    segments = [Segment("prompt", [1]), Segment("action", [2], logprobs=[-1.5])]
    return Episode(
        f"e{number}", task, Outcome.finish(), rows=[Row(segments, turns=[Turn(1.0, StopReason.STOP)])], reward=1.0
    )


def test_a_group_is_sent_without_log_probabilities_and_refused_in_one_line_where_it_is_too_large(start, monkeypatch):
    server, sent = start("RankedSpec"), []

    async def noted(request, forward):
        if request.path.endswith("/score_group"):
            sent.append(await request.read())
        return await forward()

    async def main() -> None:
        async with meddling(server.url, noted) as url, registry.spec(url) as spec:
            task = await spec.tasks("train").get(0)
            episodes = [finished(number, task) for number in range(3)]
            assert len(await spec.score_group(task, episodes)) == 3
            assert b"-1.5" not in sent[0]
            assert list(episodes[0].rows[0].segments[1].logprobs) == [-1.5]
            for group, said in ([finished(0, task)] * 1025, "at most 1024 episodes, not 1025"), (episodes, "bytes"):
                with pytest.raises(RemoteError, match=said) as raised:
                    await spec.score_group(task, group)
                assert (raised.value.kind, raised.value.retryable) == ("refused", False)
                assert "\n" not in str(raised.value)
                monkeypatch.setattr(client, "MAX_BODY", 1000)
            assert len(sent) == 1

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------
# Pages of tasks


class Pages:
    """A split that is asked for; `asked` are the first task and the number of each request."""

    def __init__(self, size: int | None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.tasks = RemoteTasks(self.ask, "train", size)
        self.size = size
        self.broken = False

    async def ask(self, model, method, path):
        await asyncio.sleep(0)
        if self.broken:
            raise RemoteError("server", "broken")
        start, count = (int(part.partition("=")[2]) for part in path.split("&")[1:])
        self.asked.append((start, count))
        end = start + count if self.size is None else min(start + count, self.size)
        return TaskPage(split="train", start=start, tasks=tuple(Task(f"t{n}") for n in range(start, end)))

    async def get(self, indices) -> None:
        assert [(await self.tasks.get(index)).id for index in indices] == [f"t{index}" for index in indices]

    @property
    def sent(self) -> int:
        return sum(count for _, count in self.asked)


def test_tasks_of_a_large_split_are_read_one_by_one_and_of_another_by_pages():
    async def main() -> None:
        for large in (Pages(100_000), Pages(None)):
            await large.get(random.Random(0).sample(range(100_000), 512))
            assert large.sent == 512
        small = Pages(10_000)
        await small.get(random.Random(0).sample(range(10_000), 2_000))
        assert len(small.asked) <= 100

    asyncio.run(main())


def test_whoever_wants_the_same_tasks_waits_for_one_request():
    async def main() -> None:
        pages = Pages(50)
        await asyncio.gather(*(pages.tasks.get(7) for _ in range(5)))
        assert len(pages.asked) == 1

    asyncio.run(main())


def test_a_page_that_nobody_waits_for_any_more_may_fail(caplog):
    async def main() -> None:
        pages = Pages(50)
        pages.broken = True
        waiting = asyncio.create_task(pages.tasks.get(0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left)
        pages.broken = False
        await pages.get([0])

    asyncio.run(main())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
