"""A served environment, played through a real server process, is the environment it is locally."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import envgym.registry as registry
from envgym.cli import main
from envgym.env import CheckedEnv, Env, EnvSpec
from envgym.errors import ConfigError, InvalidStep, ResetNeeded
from envgym.remote.client import RemoteEnvSpec
from envgym.services import Policy
from envgym.types import Action, Task

GAME = Path(__file__).with_name("game.py")


def local(name: str = "GuessSpec") -> EnvSpec:
    return registry.spec(f"{GAME}:{name}")


async def play(env: CheckedEnv, seed: int, task: Task | None = None) -> list[Any]:
    """Everything an environment says in one episode of guesses 0, 1, 2, …"""
    said: list[Any] = [await env.reset(seed=seed, options=None if task is None else {"task": task})]
    over, guess = False, 0
    while not over:
        said.append(await env.step(Action(str(guess), token_ids=(guess, 7))))
        over = said[-1][2] or said[-1][3]
        guess += 1
    return [env.task, *said]


@pytest.mark.parametrize("name", ["GuessSpec", "Dice"])
def test_the_same_seed_gives_the_same_episode_as_locally(start, name):
    url = start(name).url

    async def episodes(spec: EnvSpec) -> list[Any]:
        async with spec:
            env = spec.make()
            task = await spec.tasks("train").get(5)
            played = [await play(env, seed) for seed in range(5)]
            played += [await play(env, seed, task) for seed in range(5)]
            await env.close()
        return played

    assert asyncio.run(episodes(registry.spec(url))) == asyncio.run(episodes(local(name)))


def test_make_takes_a_url_and_the_spec_rebuilds_from_its_description(game):
    async def main() -> None:
        env = registry.make(game.url + "/")
        observation, _ = await env.reset(seed=1)
        assert observation.messages[0].text == "Guess."
        await env.close()
        await env.spec.close()

    asyncio.run(main())
    spec = registry.spec(game.url, timeout=5)
    rebuilt = registry.spec_from_json(spec.to_json())
    assert isinstance(rebuilt, RemoteEnvSpec)
    assert rebuilt == spec
    assert rebuilt.config.timeout == 5


def test_resets_without_a_seed_follow_from_the_last_one_with_a_seed(game):
    async def main() -> list[Any]:
        async with registry.spec(game.url) as spec:
            env = spec.make()
            await env.reset(seed=3)
            said = [await env.reset(), await env.reset()]
            await env.close()
            return said

    first = asyncio.run(main())
    assert first == asyncio.run(main())
    assert first[0] != first[1]


def test_tasks_are_paged_and_a_page_is_read_once(game):
    async def main() -> None:
        async with registry.spec(game.url) as spec:
            tasks = spec.tasks("train")
            assert tasks.size == 250
            before = spec.counters.requests
            remote = await asyncio.gather(*(tasks.get(index) for index in range(250)))
            assert spec.counters.requests - before == 3
            assert remote == [await local().tasks("train").get(index) for index in range(250)]
            for index in (250, -1):
                with pytest.raises(IndexError):
                    await tasks.get(index)
            with pytest.raises(ConfigError, match=r"held_out\.jsonl: no such file"):
                spec.tasks("test")
            with pytest.raises(ConfigError, match="no split 'dev'; it has train, test"):
                spec.tasks("dev")

    asyncio.run(main())


def test_endless_tasks_keep_their_seeds(start):
    url = start("Dice").url

    async def main() -> None:
        async with registry.spec(url) as spec:
            for split in ("train", "test"):
                assert spec.tasks(split).size is None
                for index in (0, 12345):
                    assert await spec.tasks(split).get(index) == await local("Dice").tasks(split).get(index)

    asyncio.run(main())


def test_a_hundred_sessions_run_side_by_side(game):
    async def one(spec: EnvSpec, seed: int) -> list[Any]:
        env = spec.make()
        await env.reset(seed=seed)
        await env.step(Action("meet"))  # answered only when all hundred wait in it
        played = await play(env, seed)
        await env.close()
        return played

    async def alone(seed: int) -> list[Any]:
        async with local() as spec:
            return await play(spec.make(), seed)

    async def main() -> None:
        async with registry.spec(game.url) as spec, asyncio.timeout(60):
            together = await asyncio.gather(*(one(spec, seed) for seed in range(100)))
            assert spec.counters.retries == spec.counters.failures == 0
        for seed in (0, 42, 99):
            assert together[seed] == await alone(seed)

    asyncio.run(main())


def test_one_spec_serves_two_event_loops_in_turn(game):
    spec = registry.spec(game.url)

    async def main() -> list[Any]:
        env = spec.make()
        played = await play(env, 0)
        await env.close()
        return played

    assert asyncio.run(main()) == asyncio.run(main())


def test_info_that_json_cannot_carry_is_left_out_counted_and_named(game, caplog):
    async def main() -> None:
        async with registry.spec(game.url) as spec:
            env = spec.make()
            await env.reset(seed=0)
            with caplog.at_level(logging.WARNING):
                for _ in range(2):
                    *_, info = await env.step(Action("odd info"))
            assert info == {"metrics": {"ok": 1.0, "invalid_metrics": 1.0}, "pair": [1, "x"]}
            assert spec.counters.dropped_info == 4
            warnings = [record for record in caplog.records if record.name == "envgym.remote.client"]
            assert sorted(record.args[1] for record in warnings) == ["3", "set"]
            with pytest.raises(InvalidStep, match="cannot be sent as JSON"):  # what must arrive whole is not trimmed
                await env.step(Action("set"))
            await env.close()

    asyncio.run(main())


def test_numpy_values_in_info_arrive_as_numbers_and_lists():
    numpy = pytest.importorskip("numpy")
    from envgym.remote.encoding import encodable_info

    kept, dropped = encodable_info({"score": numpy.float32(0.5), "hits": numpy.arange(3), "ok": numpy.bool_(True)})
    assert kept == {"score": 0.5, "hits": [0, 1, 2], "ok": True}
    assert dropped == ()


def test_steps_out_of_order_are_refused_as_locally(game):
    async def main() -> None:
        async with registry.spec(game.url) as spec:
            env = spec.make()
            with pytest.raises(ResetNeeded):
                await env.step(Action("0"))
            await play(env, 0)
            with pytest.raises(ResetNeeded):
                await env.step(Action("0"))
            await env.close()

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_lets_a_step_finish_and_closes_everything(start, number):
    server = start("GuessSpec")

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            env, other = spec.make(), spec.make()
            await env.reset(seed=0)
            await other.reset(seed=0)
            step = asyncio.create_task(env.step(Action("doze")))
            assert await asyncio.to_thread(server.line) == "dozing"
            server.process.send_signal(number)
            assert (await step)[4]["turns"] == 1

    asyncio.run(main())
    assert server.rest() == ["closed", "closed", "torn down"]
    assert server.process.wait(30) == 0


def test_client_and_server_stay_light():
    heavy = "torch vllm deepspeed ray transformers datasets pyarrow numpy"
    code = f"import sys, envgym.remote.client, envgym.remote.server; print(set({heavy.split()!r}) & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_what_cannot_be_served_is_refused():
    from envgym.services import check_servable

    class SelfPlay(EnvSpec):
        services = {"opponent": Policy()}  # noqa: RUF012

    with pytest.raises(ConfigError, match="opponent"):
        check_servable(SelfPlay("x", Env))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--port", "70000"], "cannot serve on port 70000: ports go from 1 to 65535"),
        (["--port", "-1"], "cannot serve on port -1"),
        (["--rows", "3"], "envgym serve has no option '--rows'"),
        (["--dialect", "nemo_gim"], "there is no dialect 'nemo_gim'. Did you mean 'nemo_gym'?"),
        (["--drain-seconds", "inf"], "--drain-seconds is at least 0, not inf"),
        (["--host", "8.8.8.8"], "choose another host"),
    ],
)
def test_options_that_cannot_be_meant_are_one_line(given, said, capsys, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    token.chmod(0o600)
    assert main(["serve", f"{GAME}:GuessSpec", "--token-file", str(token), *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_was_made_closes_its_connections_and_what_is_shared_leaves_them(game):
    async def main() -> None:
        async with registry.make(game.url) as env:
            await env.reset(seed=1)
            assert list(env.spec._replicas)
        assert not list(env.spec._replicas)
        async with registry.spec(game.url) as spec:
            async with spec.make() as env:
                await env.reset(seed=1)
            assert list(spec._replicas)

    asyncio.run(main())


def test_what_is_no_action_is_refused_and_is_no_step(game):
    async def main() -> None:
        async with registry.make(game.url) as env:
            await env.reset(seed=1)
            with pytest.raises(TypeError, match="an action is text or an Action, not 4"):
                await env.step(4)
            await env.step("4")

    asyncio.run(main())
