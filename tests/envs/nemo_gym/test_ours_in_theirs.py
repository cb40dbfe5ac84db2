"""The real NeMo-Gym plays our environments: its collector and its agents, on `envgym serve --dialect nemo_gym`."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from envgym import registry
from envgym.agents.external.responses_api import messages_of, output_items, response, usage, with_tokens
from envgym.envs.nemo_gym import servers
from envgym.envs.nemo_gym.serve import application
from envgym.envs.nemo_gym.served_tasks import rows
from envgym.net.listening import listen
from envgym.net.server import serve_requests
from envgym.types import Message, ToolCall

DIALECT = ("--dialect", "nemo_gym", "--out")
GAMES = Path(__file__).with_name("game.py")
ENVGYM = Path(sys.executable).with_name("envgym")


def policy(messages):
    """What a policy says: it takes the stones two at a time and one by one, or it halves what is left to guess."""
    said = messages[-1].text
    if "stones" in messages[1 if len(messages) > 1 else 0].text:
        left = [int(message.text.split()[0]) for message in messages if message.role == "tool"]
        if left and left[-1] == 0:
            return Message("assistant", "none")
        if not left:
            return Message("assistant", "I take two.", calls(1, 1))
        return Message("assistant", (), calls(left[-1]))
    low, high = 0, 7
    for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
        middle = int(guess.text.split()[-1])
        low, high = (middle + 1, high) if hint.text == "higher" else (low, middle - 1)
    return Message("assistant", "raise" if said == "hello" else f"I say {(low + high) // 2}")


def calls(*counts):
    return tuple(ToolCall(f"c{number}", "take", {"count": count}) for number, count in enumerate(counts))


@pytest.fixture(scope="module")
def model_server(free_ports):
    """A model server with a scripted policy, for one that samples. Each call's tokens go on from the last call's."""
    [port] = free_ports(1)

    async def answer(request):
        body = await request.json()
        before = [item for item in body["input"] if "prompt_token_ids" in item]
        known = before[-1]["prompt_token_ids"] + before[-1]["generation_token_ids"] if before else [1]
        items = with_tokens(output_items(policy(messages_of(body["input"]))), [*known, 7], [8, 9], [-0.5, -0.25])
        return web.json_response(response(items, tools=body.get("tools") or (), usage=usage(10, 2)))

    async def main():
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/responses", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started.set()
        await stop.wait()
        await runner.cleanup()

    loop, started = asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert started.wait(20)
    yield port
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def all_free(*ports):
    with contextlib.ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def served(model_server, free_ports, server_process, tmp_path_factory):
    """Three environments, served as NeMo-Gym's. Gives the folder and the first port."""
    folder = tmp_path_factory.mktemp("served")
    port = next(port for port in free_ports(50) if port < 65000 and all_free(port, port + 1, port + 2))
    games = [f"{name.lower()}={GAMES}:{name}" for name in ("Stones", "Guess", "Broken")]
    command = [
        ENVGYM,
        "serve",
        *games,
        "--port",
        str(port),
        "--dialect",
        "nemo_gym",
        "--out",
        folder / "gym",
        "--rows",
        "6",
    ]
    command += ["--model-server", f"http://127.0.0.1:{model_server}"]
    with server_process(command, folder / "ours.log", [port, port + 1, port + 2]):
        yield folder / "gym", port


@pytest.fixture(scope="module")
def ours_collected(nemo_gym, served):
    """What their collector has of our agent servers, which it finds by our head server."""
    folder, port = served
    jobs = [("stones", folder / "stones_train.jsonl", 2), ("broken", folder / "broken_train.jsonl", 1)]
    return nemo_gym.collect(port, jobs)


@pytest.fixture(scope="module")
def theirs_collected(nemo_gym, served, free_ports, agent_entry, tmp_path_factory):
    """What their collector has of their agent servers on our resources servers, by their head server. For each agent
    the seeds of the rows, and the rollouts."""
    folder, _ = served
    new = tmp_path_factory.mktemp("theirs")
    head, *ports = free_ports(4)
    plans = [("simple_agent", "stones", 4), ("gymnasium_agent", "guess", 2), ("gymnasium_agent", "stones", 2)]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"run_head_server": True, "head_server": {"host": "127.0.0.1", "port": head}}
    jobs, seeds = [], {}
    for port, (agent, game, repeats) in zip(ports, plans, strict=True):
        name = f"{agent}_{game}"
        config[name] = agent_entry(agent, port, game)
        rows = [json.loads(line) for line in (folder / f"{game}_train.jsonl").read_text().splitlines()]
        seeds[name] = [row["envgym"]["seed"] for row in rows]
        path = new / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row | {"agent_ref": {"name": name}}) + "\n" for row in rows))
        jobs.append((name, path, repeats))
    with nemo_gym.running(new, config, [head, *ports]):
        collected = nemo_gym.collect(head, jobs)
    return {name: (seeds[name], *found) for name, found in collected.items()}


def contiguous(output):
    """Whether the tokens of an output's calls are one growing sequence, as NeMo-RL demands. Returns how many calls."""
    known, count = [], 0
    for item in output:
        if "generation_token_ids" in item:
            assert item["prompt_token_ids"][: len(known)] == known
            known = item["prompt_token_ids"] + item["generation_token_ids"]
            count += 1
    return count


def test_their_collector_drives_our_agent_server(ours_collected):
    rollouts, failures, metrics = ours_collected["stones"]
    assert (len(rollouts), failures) == (12, [])
    for rollout in rollouts:
        stones = 2 + rollout["envgym"]["seed"] % 2
        assert rollout["reward"] == 1 + 0.25 * stones
        assert (rollout["score"], rollout["calls"], rollout["terminated"]) == (1.0, float(stones), True)
        assert contiguous(rollout["response"]["output"]) == stones  # two stones at once, the third, and the end
    [agent] = metrics
    mean = sum(rollout["reward"] for rollout in rollouts) / 12
    assert agent["agent_ref"] == {"name": "stones_agent"}
    assert agent["key_metrics"]["mean/reward"] == pytest.approx(mean)
    assert agent["agent_metrics"]["max/output_tokens"] == 2 * max(rollout["calls"] for rollout in rollouts)
    assert [group["num_rollouts"] for group in agent["group_level_metrics"]] == [2] * 6


def test_their_collector_keeps_failures_apart_from_rewards(ours_collected):
    rollouts, failures, metrics = ours_collected["broken"]
    assert (rollouts, len(failures)) == ([], 6)
    for failure in failures:
        assert (failure["_ng_failure_class"], failure["failure_kind"]) == ("transient", "judge")
        assert "reward" not in failure
    assert metrics[0]["agent_metrics"] == {}


def test_their_simple_agent_calls_our_tools(theirs_collected):
    """Through /seed_session, the tools and /verify, each told the session by the cookie of the response before it."""
    _, rollouts, _, metrics = theirs_collected["simple_agent_stones"]
    assert len(rollouts) == 24
    for rollout in rollouts:
        stones = 2 + rollout["envgym"]["seed"] % 2
        assert (rollout["reward"], rollout["score"], rollout["calls"]) == (1 + 0.25 * stones, 1.0, float(stones))
        assert contiguous(rollout["response"]["output"]) == stones
    assert metrics[0]["agent_metrics"]["mean/score"] == 1.0


@pytest.mark.parametrize("game", ["guess", "stones"])
def test_their_gymnasium_agent_steps_our_environment(theirs_collected, game):
    seeds, rollouts, _, _ = theirs_collected[f"gymnasium_agent_{game}"]
    assert len(rollouts) == 12
    for rollout in rollouts:
        seed = seeds[rollout["_ng_task_index"]]
        stones = 2 + seed % 2
        assert rollout["reward"] == (1 + 0.25 * stones if game == "stones" else 1.0)
        assert rollout["terminated"] is True
        [last] = rollout["response"]["output"][-1]["content"]
        assert last["text"] == ("none" if game == "stones" else f"I say {seed % 8}")


@pytest.mark.slow
def test_their_launcher_starts_their_agent_on_our_servers_and_none_of_ours(
    nemo_gym, served, model_server, agent_entry, tmp_path
):
    folder, port = served
    ours = yaml.safe_load((folder / "config.yaml").read_text())
    config = {name: ours[name] for name in ("stones", "policy_model")}
    config |= {"theirs": agent_entry("simple_agent", port + 9, "stones")}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    starts, ports = nemo_gym.launch(path)
    assert starts == ["theirs"]
    assert ports == {"stones": port, "policy_model": model_server, "theirs": port + 9}
    assert nemo_gym.launch(folder / "config.yaml")[0] == []


def test_the_head_tells_of_the_servers(served):
    folder, port = served
    _, text, _ = ask(port, "/global_config_dict_yaml")
    assert yaml.safe_load(json.loads(text)) == yaml.safe_load((folder / "config.yaml").read_text())
    assert ask(port + 1, "/")[:2] == (200, '{"status": "ok"}')


def ask(port, path, body=None, cookie=None, **headers):
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    if cookie:
        request.add_header("Cookie", cookie)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers.get("Set-Cookie", "").partition(";")[0]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers.get("Set-Cookie", "").partition(";")[0]


def first_row(folder, name):
    return json.loads((folder / f"{name}_train.jsonl").read_text().splitlines()[0])


def test_every_response_sets_the_cookie_and_sessions_are_apart(served):
    folder, port = served
    row = first_row(folder, "stones")
    stones = int(row["responses_create_params"]["input"][1]["content"].split()[0])
    _, _, one = ask(port, "/seed_session", row)
    _, _, other = ask(port, "/seed_session", row)
    assert one != other
    assert ask(port, "/take", {"count": 1}, one) == (200, f"{stones - 1} left", one)
    assert ask(port, "/take", {"count": 1}, one) == (200, f"{stones - 2} left", one)
    assert ask(port, "/take", {"count": 1}, other) == (200, f"{stones - 1} left", other)
    assert ask(port, "/juggle", {}, other) == (200, "there is no tool juggle", other)
    verdict = {**row, "response": response(output_items(Message("assistant", "well")))}
    status, text, again = ask(port, "/verify", verdict, other)
    assert (status, json.loads(text)["reward"], again) == (200, 0.5, other)
    status, text, again = ask(port, "/verify", verdict, other)
    assert (status, again) == (409, other)
    assert "no session" in text


def test_an_idle_session_is_closed_when_another_begins(monkeypatch):
    async def main():
        async with registry.spec(f"{GAMES}:Stones") as spec:
            [row] = [row async for row in rows(spec, "stones", "train", 1)]
            with listen("127.0.0.1", 0, refusal=None) as listener:
                port = listener.getsockname()[1]
                async with serve_requests(application("stones", spec, None, 10), listener, drain=1.0):
                    _, _, idle = await asyncio.to_thread(ask, port, "/seed_session", row)
                    assert (await asyncio.to_thread(ask, port, "/take", {"count": 1}, idle))[0] == 200
                    monkeypatch.setattr(servers, "IDLE_SECONDS", 0.0)
                    _, _, other = await asyncio.to_thread(ask, port, "/seed_session", row)
                    return [(await asyncio.to_thread(ask, port, "/take", {"count": 1}, it))[0] for it in (idle, other)]

    assert asyncio.run(main()) == [409, 200]


@pytest.mark.parametrize(
    ("name", "path", "change", "status", "says"),
    [
        ("stones", "/seed_session", lambda row: row | {"envgym": None}, 422, "does not name a task"),
        ("stones", "/seed_session", lambda row: row | {"envgym": row["envgym"] | {"env": "x"}}, 422, "is 'stones'"),
        (
            "stones",
            "/reset",
            lambda row: row | {"responses_create_params": {"input": "3 apples"}},
            422,
            "write the rows again",
        ),
        ("stones", "/seed_session", lambda row: b"[]", 400, "a JSON object"),
        ("stones", "/take", lambda row: {"count": 1}, 409, "no session"),
        ("stones", "/aggregate_metrics", lambda row: {"verify_responses": 1}, 422, "a list of objects"),
    ],
)
def test_what_is_asked_wrongly_is_refused(served, name, path, change, status, says):
    folder, port = served
    answer = ask(port, path, change(first_row(folder, name)))
    assert answer[0] == status
    assert says in answer[1]
    assert answer[2].startswith("envgym_session=")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row | {"responses_create_params": {"input": "9 stones"}}, "write the rows again"),
        (lambda row: row | {"envgym": None}, "does not name a task"),
        (lambda row: row | {"responses_create_params": None}, "responses_create_params: "),
    ],
)
def test_a_row_that_is_refused_is_one_that_failed_and_costs_the_others_nothing(served, change, says):
    """Their collector ends at the first answer that is no 200."""
    folder, port = served
    row = change(first_row(folder, "stones"))
    status, text, _ = ask(port, "/run", row)
    answer = json.loads(text)
    assert status == 200
    assert (answer["_ng_failure_class"], answer["failure_kind"]) == ("legitimate", "UnknownRow")
    assert says in answer["error_message"]
    assert "reward" not in answer
    assert answer["envgym"] == row["envgym"]


def test_what_cannot_be_judged_is_no_reward_of_zero(served):
    folder, port = served
    row = first_row(folder, "broken")
    for words, says in (("raise", "the judge is out"), ("fine", "there is no reward")):
        _, _, cookie = ask(port + 2, "/seed_session", row)
        status, text, _ = ask(
            port + 2, "/verify", {**row, "response": response(output_items(Message("assistant", words)))}, cookie
        )
        assert status == 500
        assert says in text


def test_a_web_page_is_refused(served):
    _, port = served
    assert ask(port, "/seed_session", {}, Origin="http://example.com")[0] == 403
    assert ask(port, "/seed_session", {}, Host="example.com")[0] == 403


def test_the_pages_command_serves_rows_without_answers(documented, free_ports, server_process, tmp_path):
    [port] = free_ports(1)
    words = [word.replace("21080", str(port)) for word in documented("--dialect")]
    with server_process([ENVGYM, *words, "--rows", "3"], tmp_path / "log", [port]) as server:
        for split in ("train", "validation"):
            rows = [json.loads(line) for line in (tmp_path / "served" / f"tool_use_{split}.jsonl").open()]
            assert [row["envgym"]["index"] for row in rows] == [0, 1, 2]
            assert set(rows[0]) == {"responses_create_params", "envgym", "agent_ref"}
            assert rows[0]["responses_create_params"]["tools"][0]["name"] == "get"
            assert ask(port, "/seed_session", rows[0])[0] == 200
        server.terminate()
        assert server.wait(timeout=20) == 0  # and its sessions are closed


def test_a_split_that_is_not_there_has_no_file_and_none_of_an_earlier_server(free_ports, server_process, tmp_path):
    [port] = free_ports(1)
    (tmp_path / "gym").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "gym" / f"only_{split}.jsonl").write_text("of an earlier server")
    command = [
        ENVGYM,
        "serve",
        f"only={GAMES}:TrainOnly",
        "--port",
        str(port),
        "--dialect",
        "nemo_gym",
        "--out",
        "gym",
        "--rows",
        "2",
    ]
    with server_process(command, tmp_path / "log", [port]):
        assert first_row(tmp_path / "gym", "only")["envgym"]["index"] == 0
        assert not (tmp_path / "gym" / "only_validation.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([f"{GAMES}:Judged", *DIALECT, "gym"], "judges groups"),
        ([f"{GAMES}:Unset", *DIALECT, "gym"], "which judge? set env.judge"),
        (
            [f"a={GAMES}:Guess", f"a_agent={GAMES}:Guess", *DIALECT, "gym"],
            "'a_agent' is another server's",
        ),
        (
            [f"{GAMES}:Unposed", *DIALECT, "gym"],
            "Unposed: train task 1 cannot be reset: KeyError: 'three'",
        ),
        (
            [f"{GAMES}:Guess", *DIALECT, "gym", "--host", "0.0.0.0"],
            "refusing to serve on 0.0.0.0",
        ),
        ([f"{GAMES}:Guess", *DIALECT, "gym", "--token-file", "t"], "has no option '--token-file'"),
        ([f"{GAMES}:Guess", *DIALECT, "gym", "--drain-seconds", "3"], "has no option '--drain-seconds'"),
        ([f"{GAMES}:Guess", *DIALECT, "gym", "--model-server", "http://x:1/v1"], "without /v1"),
        ([f"{GAMES}:Guess", *DIALECT, "gym", "--rows", "0"], "--rows and --max-sessions are at least 1"),
        ([f"{GAMES}:Guess", "--model-server", "http://x:1"], "has no option '--model-server'"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(tmp_path, options, says):
    run = subprocess.run(
        [ENVGYM, "serve", *options, "--port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert says in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
