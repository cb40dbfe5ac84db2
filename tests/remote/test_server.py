"""What the server does beside playing: several environments, leases, batches, groups, counts, and its end."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from envgym.cli import main
from envgym.cli.serve import make_specs, split_words
from envgym.episodes.record import to_record
from envgym.errors import ConfigError
from envgym.types import Episode, Outcome, Task

GAME = Path(__file__).with_name("game.py")
ENVGYM = Path(sys.executable).with_name("envgym")


async def ask(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.request(method, url + path, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if "json" in response.content_type else text


def step(step_id: int, text: str) -> dict[str, Any]:
    return {"step_id": step_id, "action": {"text": text}}


# ---------------------------------------------------------------------------------------------------------
# Several environments


def test_one_server_serves_several_environments_by_name():
    words = [
        "serve",
        f"{GAME}:GuessSpec",
        f"dice={GAME}:Dice",
        "GuessSpec.env.n=7",
        "--port",
        "0",
        "--lease-seconds",
        "9",
    ]
    server = subprocess.Popen([ENVGYM, *words], stdout=subprocess.PIPE, text=True)
    try:
        urls = [next(word for word in server.stdout.readline().split() if word.startswith("http")) for _ in range(2)]
        base = urls[0].removesuffix("/GuessSpec")
        assert urls == [f"{base}/GuessSpec", f"{base}/dice"]

        async def main() -> None:
            _, served = await ask(base, "GET", "/v1/envs")
            assert (served["protocol"], served["version"], served["lease_seconds"]) == ("envgym", 4, 9.0)
            guess, dice = served["envs"]
            assert guess["splits"] == {
                "train": {"size": 7, "tasks": guess["splits"]["train"]["tasks"], "error": None},
                "test": {"size": None, "tasks": "", "error": "held_out.jsonl: no such file"},
            }
            assert re.fullmatch("[0-9a-f]{16}", guess["splits"]["train"]["tasks"])
            assert (guess["name"], guess["agent"], guess["scores_groups"]) == ("GuessSpec", "multi_turn", False)
            assert set(guess["fingerprint"]) == {"code", "spec"}
            assert await ask(base, "GET", "/v1/envs/dice") == (200, dice)
            _, page = await ask(base, "GET", "/v1/envs/GuessSpec/tasks?split=train&start=5")
            assert [task["id"] for task in page["tasks"]] == ["t5", "t6"]
            _, page = await ask(base, "GET", "/v1/envs/dice/tasks?split=test&start=3&count=1")
            assert [task["seed"] for task in page["tasks"]] == [2**31 + 3]
            opening = {"session_id": "s", "seed": 4}
            status, problem = await ask(base, "POST", "/v1/sessions", opening)
            assert (status, problem["type"]) == (404, "urn:envgym:problem:environment-not-found")
            assert "there is GuessSpec, dice" in problem["detail"]
            _, opened = await ask(base, "POST", "/v1/sessions", opening | {"env": "dice"})
            assert opened["observation"]["text"].startswith("seed ")
            assert opened["lease_seconds"] == 9.0
            status, problem = await ask(base, "POST", "/v1/sessions", opening | {"env": "GuessSpec"})
            assert (status, problem["type"]) == (409, "urn:envgym:problem:session-conflict")

        asyncio.run(main())
        server.send_signal(signal.SIGKILL)
    finally:
        server.kill()
        server.wait()


def test_how_environments_and_their_settings_are_written():
    words = ["a=x.py:X", "env.n=3", "math_verify", "b.data.path=f", "http://host/e?x=1"]
    assert split_words(words) == (
        [("a", "x.py:X"), ("", "math_verify"), ("", "http://host/e?x=1")],
        ["env.n=3", "b.data.path=f"],
    )
    game = f"{GAME}:GuessSpec"
    [(name, spec)] = make_specs([("", game)], ["env.n=3"]).items()
    assert (name, spec.config.n) == ("GuessSpec", 3)
    assert list(make_specs([("", "math_verify")], [])) == ["math_verify"]
    specs = make_specs([("one", game), ("two", game)], ["two.env.n=3", "one.env.n=2"])
    assert {name: spec.config.n for name, spec in specs.items()} == {"one": 2, "two": 3}
    for environments, settings, message in (
        ([("", game), ("", game)], [], "two environments are called 'GuessSpec'"),
        ([("one", game), ("two", game)], ["env.n=3"], "names no environment"),
        ([("one", game), ("two", game)], ["three.env.n=3"], "names no environment"),
        ([("v1", game), ("two", game)], [], "choose a name"),
        ([], ["env.n=3"], "name an environment"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_specs(environments, settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-sessions", "0"], "--max-sessions is at least 1, not 0"),
        (["--lease-seconds", "0"], "--lease-seconds is at least 0.1, not 0"),
        (["--drain-seconds", "nan"], "--drain-seconds is at least 0, not nan"),
        (["--token-file", "nothing"], "token file nothing: No such file or directory"),
        (["--token", "x"], "has no option '--token'. Did you mean '--token-file'?"),
        (["--host", "0.0.0.0"], "refusing to serve on 0.0.0.0 without tokens"),
        (["b=math_verify", "env.n=3"], "names no environment"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", f"{GAME}:GuessSpec", *words, "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------
# Leases and room


def test_a_session_that_is_not_heard_of_is_closed_and_heartbeats_and_work_keep_it(start):
    server = start("GuessSpec", "limit.lease_seconds=0.6")

    async def main() -> None:
        for name in ("kept", "busy", "left"):
            assert (await ask(server.url, "POST", "/v1/sessions", {"session_id": name, "seed": 1}))[0] == 200
        hanging = asyncio.create_task(ask(server.url, "POST", "/v1/sessions/busy/step", step(0, "hang")))
        beat = {"session_ids": ["kept", "nobody"]}
        metrics = ""
        async with asyncio.timeout(60):
            while 'envgym_sessions_closed_total{by="lease",env="game"} 1.0' not in metrics:
                await asyncio.sleep(0.1)
                assert await ask(server.url, "POST", "/v1/sessions/heartbeat", beat) == (200, {"alive": ["kept"]})
                _, metrics = await ask(server.url, "GET", "/metrics")
        assert 'envgym_sessions{env="game"} 2.0' in metrics
        assert (await ask(server.url, "POST", "/v1/sessions/left/step", step(0, "0")))[0] == 404
        assert (await ask(server.url, "POST", "/v1/sessions/kept/step", step(0, "0")))[0] == 200
        assert not hanging.done()
        assert (await ask(server.url, "DELETE", "/v1/sessions/busy"))[0] == 204
        status, problem = await hanging
        assert (status, problem["type"]) == (404, "urn:envgym:problem:session-not-found")

    asyncio.run(main())
    assert "closing sessions not heard of for 0.6 s: 1" in server.log()


def test_more_clients_are_connected_than_processes_may_usually_have_open_files(start):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        server = start("GuessSpec")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def main() -> None:
        address = urlsplit(server.url)
        connections = [await asyncio.open_connection(address.hostname, address.port) for _ in range(200)]
        for _, writer in connections:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(10):
            for reader, _ in connections:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in connections:
            writer.close()

    asyncio.run(main())


def test_an_environments_own_limit_is_answered_with_429_rather_than_a_wait(start):
    server = start("GuessSpec", "concurrency=1")

    async def main() -> None:
        _, served = await ask(server.url, "GET", "/v1/envs/game")
        assert served["concurrency"] == 1
        assert (await ask(server.url, "POST", "/v1/sessions", {"session_id": "a", "seed": 1}))[0] == 200
        status, problem = await ask(server.url, "POST", "/v1/sessions", {"session_id": "b", "seed": 1})
        assert (status, problem["type"]) == (429, "urn:envgym:problem:server-full")
        await ask(server.url, "DELETE", "/v1/sessions/a")
        assert (await ask(server.url, "POST", "/v1/sessions", {"session_id": "b", "seed": 1}))[0] == 200

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------
# Groups


def test_groups_are_judged_on_the_server_and_a_group_sent_again_is_not_judged_again(start):
    server = start("RankedSpec")
    task = Task("t1", "guess", fields={"range": 11})
    episodes = [Episode(f"e{number}", task, Outcome.finish(), reward=reward) for number, reward in
                enumerate((3.0, 1.0, None))]  # fmt: skip

    async def judged(task: Task, records: list[Any]) -> tuple[int, Any]:
        body = {"task": asdict(task), "episodes": records}
        return await ask(server.url, "POST", "/v1/envs/game/score_group", body)

    async def main() -> None:
        assert (await ask(server.url, "GET", "/v1/envs/game"))[1]["scores_groups"] is True
        records = [to_record(episode) for episode in episodes]
        first, second = await asyncio.gather(judged(task, records), judged(task, records))
        assert first == second == await judged(task, records)
        status, answer = first
        assert status == 200
        one, two, three = answer["verdicts"]
        assert (one["reward"], two["reward"], one["metrics"]) == (pytest.approx(1 / 3), 0.0, {"turns": 0.0})
        assert one["problem"] is None
        problem = three["problem"]
        assert (problem["error"], problem["failure"], problem["retryable"]) == ("InvalidOutcome", "judge", True)
        assert problem["detail"] == "the judge is out"
        for _ in range(2):  # a judge that failed is asked again
            status, problem = await judged(replace(task, id="raise"), records)
            assert (status, problem["error"]) == (422, "KeyError")
        status, problem = await judged(task, [{"id": "x"}])
        assert (status, problem["type"]) == (422, "urn:envgym:problem:invalid-request")
        assert problem["detail"].startswith("episodes.0: not an episode's record")
        assert (await judged(task, []))[0] == 422

    asyncio.run(main())
    server.process.terminate()
    assert server.rest() == ["judged"] * 3 + ["torn down"] * 1


def test_an_environment_that_judges_no_groups_says_so(game):
    body = {"task": {"id": "t"}, "episodes": [to_record(Episode("e", Task("t"), Outcome.finish()))]}
    assert asyncio.run(ask(game.url, "POST", "/v1/envs/game/score_group", body)) == (200, {"verdicts": None})


# ---------------------------------------------------------------------------------------------------------
# Counts


def test_metrics_count_what_happened(start):
    server = start("GuessSpec")

    async def main() -> str:
        await ask(server.url, "POST", "/v1/sessions", {"session_id": "a", "seed": 1})
        for number, text in enumerate(("0", "0", "raise")):
            for _ in range(2):  # a repeat is not another step
                await ask(server.url, "POST", "/v1/sessions/a/step", step(number, text))
        await ask(server.url, "POST", "/v1/sessions/a/step", step(9, "0"))
        await ask(server.url, "DELETE", "/v1/sessions/a")
        return (await ask(server.url, "GET", "/metrics"))[1]

    text = asyncio.run(main())
    for line in (
        'envgym_sessions{env="game"} 0.0',
        'envgym_sessions_opened_total{env="game"} 1.0',
        'envgym_sessions_closed_total{by="client",env="game"} 1.0',
        'envgym_steps_total{env="game"} 3.0',
        'envgym_failures_total{env="game",kind="KeyError"} 1.0',
        'envgym_rejected_total{reason="step-conflict"} 1.0',
        'envgym_reset_seconds_count{env="game"} 1.0',
        'envgym_step_seconds_count{env="game"} 3.0',
        'envgym_step_seconds_bucket{env="game",le="+Inf"} 3.0',
    ):
        assert line in text.splitlines()
    sample = re.compile(r"[a-z_]+(\{[a-z]+=\"[^\"]*\"(,[a-z]+=\"[^\"]*\")*\})? [0-9.e+-]+")
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line), line


# ---------------------------------------------------------------------------------------------------------
# The end


def test_a_server_that_is_asked_to_stop_finishes_its_sessions_and_takes_no_new_ones(start):
    server = start("GuessSpec", "limit.drain_seconds=1000")

    async def main() -> None:
        await ask(server.url, "POST", "/v1/sessions", {"session_id": "a", "seed": 1})
        assert (await ask(server.url, "GET", "/readyz")) == (200, {"status": "ready"})
        server.process.terminate()
        for _ in range(10000):  # until the signal has come through
            if (await ask(server.url, "GET", "/readyz"))[0] == 503:
                break
        assert (await ask(server.url, "GET", "/livez")) == (200, {"status": "ok"})
        status, problem = await ask(server.url, "POST", "/v1/sessions", {"session_id": "b", "seed": 1})
        assert (status, problem["type"]) == (503, "urn:envgym:problem:shutting-down")
        for number in range(3):
            assert (await ask(server.url, "POST", "/v1/sessions/a/step", step(number, "0")))[0] == 200
        assert (await ask(server.url, "DELETE", "/v1/sessions/a"))[0] == 204

    asyncio.run(main())
    assert server.process.wait(60) == 0  # as soon as the last session was closed
    assert server.rest() == ["closed", "torn down"]
    assert "sessions still open: 1" in server.log()


def test_an_environment_that_is_being_closed_when_the_server_ends_is_closed_to_the_end(start):
    server = start("GuessSpec", "close_seconds=1.5", "limit.lease_seconds=0.2", "limit.drain_seconds=0")

    async def main() -> None:
        await ask(server.url, "POST", "/v1/sessions", {"session_id": "a", "seed": 1})
        async with asyncio.timeout(60):
            for _ in range(3000):  # until its lease has run out
                if "not heard of" in server.log():
                    break
                await asyncio.sleep(0.02)

    asyncio.run(main())
    server.process.terminate()
    assert server.rest() == ["closed", "torn down"]
    assert server.process.wait(60) == 0
