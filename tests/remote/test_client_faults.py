"""Whole rollouts on servers that die, freeze, lie and fill up: they go on, and no failure is taken for a reward.

Every episode that is played to its end pays 1, so that a reward of 0 could only be a failure's; and it checks that the
environment has taken each of its steps once.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

import envgym
import envgym.registry as registry
from envgym.agent import Agent, AgentConfig
from envgym.engine import SamplingParams
from envgym.env import EnvSpec
from envgym.remote.transport import RemoteError
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Action, Episode, Group, Outcome, Row, Segment, StopReason, Turn

from .meddling import Forward, meddling

PAUSE = 0.03
STEPS = 4


class Guesser(Agent):
    """Guesses wrong three times and then says the number it was told."""

    pause = PAUSE

    async def run(self, env, task, engine, *, seed):
        await env.reset(seed=seed, options={"task": task})
        guess = "no"
        for turn in range(1, STEPS + 1):
            await asyncio.sleep(self.pause)
            observation, reward, *_, info = await env.step(Action(guess, token_ids=(turn,)))
            assert info["turns"] == turn, "a step was taken twice, or never"
            if turn == STEPS - 1:
                guess = observation.messages[0].text.rpartition(" ")[2]
        assert reward == 1.0
        row = Row(
            [Segment("prompt", [1]), Segment("action", [2], logprobs=[-1.0])], turns=[Turn(reward, StopReason.STOP)]
        )
        return Episode("", task, Outcome.finish(), rows=[row], reward=reward, score=1.0)


class Thinker(Guesser):
    """Thinks for longer than a lease lasts."""

    pause = 0.8


PACKAGE = f"{Path(envgym.__file__).parent}/"


async def roll(
    spec: EnvSpec,
    agent: type[Agent] = Guesser,
    on_episode: Callable[[Episode], None] | None = None,
    tasks: int = 8,
    on_end: Callable[[], bool] = lambda: True,
    **config: float,
) -> list[Group]:
    """Play tasks four times each and hold every promise that does not depend on what went wrong."""
    others = asyncio.all_tasks()
    config = {"refills": 0, "retries": 4, "concurrency": 8, "episode_timeout": 30.0, **config}
    runner = Runner(
        spec, agent(None, AgentConfig()), None, RolloutConfig(**config), max_model_len=64, seed=0, deterministic=False
    )
    async with spec, asyncio.timeout(60):
        posed = [await spec.tasks("train").get(index) for index in range(tasks)]
        groups = await runner.roll_out(posed, SamplingPlan("p", SamplingParams(max_tokens=4), 4), on_episode=on_episode)
        for replica in spec.replicas.servers:
            assert (replica.in_use, len(replica.leases)) == (0, 0), replica.address
        assert on_end()
    for episode in (episode for group in groups for episode in [*group.episodes, *group.superseded]):
        if episode.failed:
            assert (episode.reward, episode.score) == (None, None)
        else:
            assert episode.reward == 1.0
    left = [task.get_coro() for task in asyncio.all_tasks() - others]
    assert [
        task for task in left if task.cr_code.co_filename.startswith(PACKAGE)
    ] == []  # a proxy here may have its own
    return groups


def failures(groups: list[Group]) -> dict[str, int]:
    """Failed attempts by kind, tried again or not."""
    kinds = [e.outcome.reason for group in groups for e in [*group.episodes, *group.superseded] if e.failed]
    return {kind: kinds.count(kind) for kind in kinds}


def all_played(groups: list[Group]) -> bool:
    return not any(episode.failed for group in groups for episode in group.episodes)


async def counted(url: str, name: str) -> int:
    """A number of the server's metrics."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.search(rf'^{name}{{env="game"}} (\d+)', text, re.MULTILINE)
    return int(found.group(1)) if found else 0


async def emptied(url: str) -> bool:
    """Whether the server has no session any more, at once or within a lease."""
    for _ in range(600):
        if await counted(url, "envgym_sessions") == 0:
            return True
        await asyncio.sleep(0.1)
    return False


def after(count: int, do: Callable[[], object]) -> Callable[[Episode], None]:
    """Do something once, in the middle of other episodes, when so many have ended."""
    ended = 0

    def tell(episode: Episode) -> None:
        nonlocal ended
        ended += 1
        if ended == count:  # those played side by side are in step with each other: they end together
            asyncio.get_running_loop().call_later(1.5 * PAUSE, do)

    return tell


def test_a_well_server_plays_every_episode_once(start):
    server = start("GuessSpec")

    async def main() -> None:
        groups = await roll(registry.spec(server.url))
        assert failures(groups) == {}
        times = [[kind for kind, _, _ in episode.spans] for group in groups for episode in group.episodes]
        assert times == [["waiting", *["environment"] * (1 + STEPS)]] * 32
        assert await counted(server.url, "envgym_steps_total") == 32 * STEPS
        assert await counted(server.url, "envgym_sessions") == 0

    asyncio.run(main())


def test_a_server_that_is_killed_and_started_again_costs_its_sessions_and_no_more(start):
    server = start("GuessSpec")
    port = urlsplit(server.url).port

    async def main() -> None:
        starting: list[asyncio.Task[object]] = []

        def kill() -> None:
            server.process.kill()
            server.process.wait()
            starting.append(asyncio.create_task(asyncio.to_thread(start, "GuessSpec", f"port={port}")))

        groups = await roll(registry.spec(server.url), on_episode=after(10, kill))
        again = await starting[0]
        assert again.url == server.url
        assert all_played(groups)
        assert 1 <= sum(failures(groups).values()) <= 8
        assert set(failures(groups)) <= {"session_lost", "connection"}
        assert await counted(again.url, "envgym_sessions") == 0

    asyncio.run(main())


def test_a_server_that_freezes_is_noticed_within_a_lease_and_used_again_once_it_goes_on(start):
    server = start("GuessSpec", "limit.lease_seconds=0.5")

    async def main() -> None:
        def freeze() -> None:
            server.process.send_signal(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(2, server.process.send_signal, signal.SIGCONT)

        groups = await roll(registry.spec(server.url), on_episode=after(10, freeze))
        assert all_played(groups)
        assert set(failures(groups)) <= {"connection", "session_lost"}
        assert failures(groups)["connection"] >= 1
        assert await emptied(server.url)

    asyncio.run(main())


def test_an_answer_that_makes_no_sense_fails_its_episode(start):
    server = start("GuessSpec")
    steps: list[str] = []

    async def garbled(request: web.BaseRequest, forward: Forward) -> web.Response:
        """A step's answer, garbled once in each of the first eight sessions."""
        answer = await forward()
        if request.path.endswith("/step") and request.path not in steps and len(steps) < 8:
            assert isinstance(answer.body, bytes)
            answer.body = [b"<html>hello</html>", answer.body[:-20], b'{"observation": 3}', b""][len(steps) % 4]
            steps.append(request.path)
        return answer

    async def main() -> None:
        async with meddling(server.url, garbled) as url:
            groups = await roll(registry.spec(url))
        assert all_played(groups)
        assert failures(groups) == {"server": 8}
        assert await emptied(server.url)

    asyncio.run(main())


def test_every_tenth_connection_dropped_costs_nothing(start, losing_proxy):
    server = start("GuessSpec")

    async def main() -> None:
        async with losing_proxy(server.url, 10) as url:
            spec = registry.spec(url)
            groups = await roll(spec, retries=0)
        assert failures(groups) == {}
        assert spec.counters.retries >= 10
        assert await counted(server.url, "envgym_steps_total") == 32 * STEPS
        assert await emptied(server.url)

    asyncio.run(main())


def test_a_full_server_makes_episodes_wait_outside_their_own_time(start):
    server = start("GuessSpec", "limit.max_sessions=2")

    async def main() -> None:
        groups = await roll(registry.spec(server.url), tasks=4, retries=0, episode_timeout=2.0)
        assert failures(groups) == {}
        assert await counted(server.url, "envgym_sessions_opened_total") == 16

    asyncio.run(main())


def test_places_that_others_take_are_waited_for_and_failing_that_it_is_the_capacity(start):
    server = start("GuessSpec", "limit.max_sessions=3")

    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            for name in ("a", "b", "c"):
                await http.post(f"{server.url}/v1/sessions", json={"session_id": name, "seed": 1})
            async with registry.spec(server.url, timeout=1.5) as spec:
                env = spec.make()
                with pytest.raises(
                    RemoteError, match=r"no slot became free within 1\.5 s .*all 3\S* sessions"
                ) as raised:
                    await env.reset(seed=1)
                assert (raised.value.kind, raised.value.retryable) == ("capacity", True)
                await env.close()
            await http.delete(f"{server.url}/v1/sessions/a")
        groups = await roll(registry.spec(server.url), tasks=5, retries=0, concurrency=32, episode_timeout=2.0)
        assert failures(groups) == {}  # with one place, in turns: all together they take longer than any may

    asyncio.run(main())


def test_sessions_outlive_their_leases_while_the_policy_thinks(start):
    server = start("GuessSpec", "limit.lease_seconds=0.3")

    async def main() -> None:
        spec = registry.spec(server.url)
        groups = await roll(spec, Thinker, tasks=2, retries=0)
        assert failures(groups) == {}
        assert spec.counters.heartbeats >= 10

    asyncio.run(main())


def test_sessions_are_spread_over_servers_and_go_on_with_those_that_are_left(start):
    servers = [start("GuessSpec"), start("GuessSpec")]

    async def main() -> None:
        urls = [server.url for server in servers]
        groups = await roll(registry.spec("game", urls=urls), retries=0)
        assert failures(groups) == {}
        opened = [await counted(url, "envgym_sessions_opened_total") for url in urls]
        assert sum(opened) == 32
        assert min(opened) >= 12

        spec = registry.spec("game", urls=urls, reconnect=1)
        groups = await roll(spec, on_episode=after(10, servers[0].process.kill))
        assert all_played(groups)
        assert failures(groups).keys() == {"connection"}
        assert sum(failures(groups).values()) <= 6
        assert await counted(urls[1], "envgym_sessions") == 0

        groups = await roll(registry.spec("game", urls=urls))  # one of them is down from the start
        assert failures(groups) == {}
        restarted = start("GuessSpec", f"port={urlsplit(urls[0]).port}", "n=3")
        assert restarted.url == urls[0]
        with pytest.raises(RemoteError, match="serves other tasks"):
            await roll(registry.spec("game", urls=urls))

    asyncio.run(main())


def test_a_served_judge_of_groups_judges_in_a_rollout(start):
    server = start("RankedSpec")

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            task = await spec.tasks("train").get(0)
            row = [
                Row(
                    [Segment("prompt", [1]), Segment("action", [2], logprobs=[-1.0])],
                    turns=[Turn(0.5, StopReason.STOP)],
                )
            ]
            episodes = [
                Episode(f"e{n}", task, Outcome.finish(), rows=row, reward=value)
                for n, value in enumerate([2.0, None, 1.0])
            ]
            judged = await spec.score_group(task, episodes)
            assert [getattr(one, "reward", None) for one in judged] == [1 / 3, None, 0.0]
            assert (judged[1].kind, judged[1].retryable, str(judged[1])) == ("judge", True, "the judge is out")
            assert judged[0].metrics == {"turns": 1.0}
        async with registry.spec(start("GuessSpec").url) as plain:
            assert await plain.score_group(task, episodes) is None

    asyncio.run(main())
