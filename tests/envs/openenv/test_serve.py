"""`envgym serve --dialect openenv`, for OpenEnv's own clients and tools and for envgym's: rewards, sessions, limits."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

import envgym
from envgym.types import Action, ToolCall

pytestmark = pytest.mark.timeout(900)  # the package may have to be installed first

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ["math_verify", "tool_use", f"{ROOT / 'examples' / 'guess.py'}:Guess"]
TOKENS = {"first": "first-token-of-twenty", "second": "second-token-of-twenty"}


@pytest.fixture(scope="module")
def server(serving_ours):
    with serving_ours(ENVIRONMENTS) as server:
        yield server


@pytest.fixture(scope="module")
def ours(server):
    return dict(zip(("math", "tools", "guess"), server.urls, strict=True))


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"first {TOKENS['first']}\nsecond {TOKENS['second']} max_sessions=1\n")
    file.chmod(0o600)
    return file


async def play(spec, seed, turns):
    """The task of an episode, its first observation as text, and what each step says."""
    async with spec.make() as env:
        observation, _ = await env.reset(seed=seed)
        steps = []
        for said in turns(env.task) if callable(turns) else turns:
            steps.append(await env.step(said))
            if steps[-1][2] or steps[-1][3]:
                break
        return env.task, "\n\n".join(message.text for message in observation.messages), steps


def played(name, seed, turns):
    async def main():
        async with envgym.spec(name) as spec:
            return await play(spec, seed, turns)

    return asyncio.run(main())


def call(name, **arguments):
    return Action("", (), (ToolCall("call0", name, arguments),), content="")


# -- OpenEnv's clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_right", [True, False])
def test_answers_have_the_rewards_that_they_have_locally(ours, their_clients, is_right):
    def answers(task):
        return [Action(f"It is \\boxed{{{task.answer if is_right else 'x'}}}.")]

    local = [played("math_verify", seed, answers) for seed in range(4)]
    jobs = [
        {"reset": {"seed": seed}, "actions": [{"message": answers(task)[0].text}]}
        for seed, (task, _, _) in enumerate(local)
    ]
    for (_, first, [step]), seen in zip(local, their_clients(ours["math"], jobs), strict=True):
        [[_, reward, done]] = seen["steps"]
        assert seen["first"]["text"] == first
        assert (reward, done) == (step[1], True)
    assert local[0][2][0][1] == float(is_right)


def test_turns_have_the_rewards_and_texts_that_they_have_locally(ours, their_clients):
    turns = [str(guess) for guess in range(1, 6)]
    local = [played(ENVIRONMENTS[2], seed, list(map(Action, turns))) for seed in range(12)]
    jobs = [{"reset": {"seed": seed}, "actions": [{"message": turn} for turn in turns]} for seed in range(12)]
    for (_, first, steps), seen in zip(local, their_clients(ours["guess"], jobs), strict=True):
        assert seen["first"]["text"] == first
        assert [(reward, done) for _, reward, done in seen["steps"]] == [(step[1], step[2]) for step in steps]
        texts = ["\n\n".join(message.text for message in step[0].messages) for step in steps]
        assert [shown["text"] for shown, _, _ in seen["steps"]] == texts
    assert {steps[-1][1] for _, _, steps in local} == {0.0, 1.0}


def calls_of(task):
    """The look-up of a key, and the answer."""
    return [call("get", key=task.fields["key"]), Action(str(task.answer))]


def test_tools_are_called_by_steps_and_by_the_client_of_tools(ours, their_clients):
    local = [played("tool_use", seed, calls_of) for seed in range(3)]
    jobs = []
    for seed, (task, _, _) in enumerate(local):
        look_up, answer = ("get", {"key": task.fields["key"]}), ("final_answer", {"text": str(task.answer)})
        actions = [{"type": "call_tool", "tool_name": name, "arguments": given} for name, given in (look_up, answer)]
        jobs.append({"reset": {"seed": seed}, "actions": actions})
        jobs.append({"reset": {"seed": seed}, "calls": [look_up, answer]})
    seen = their_clients(ours["tools"], jobs)
    for (_, _, [found, answered]), stepped, called in zip(local, seen[::2], seen[1::2], strict=True):
        text = found[0].messages[0].text
        [[shown, reward, done], last] = stepped["steps"]
        assert (shown["tool_name"], shown["result"]["data"], shown["error"]) == ("get", text, None)
        assert (reward, done, *last[1:]) == (found[1], False, answered[1], True)
        assert called == {"tools": ["get", "final_answer"], "results": [text, ""]}
    assert local[0][2][1][1] == 1.0


def test_a_task_is_reset_by_its_place(ours, their_clients):
    async def question():
        async with envgym.spec("math_verify") as spec:
            return (await spec.tasks("test").get(7)).prompt

    [seen] = their_clients(ours["math"], [{"reset": {"index": 7, "split": "test"}, "actions": []}])
    prompt = asyncio.run(question())
    assert seen["first"]["text"].startswith(prompt)


def test_openenv_validates_the_server(ours, openenv_package):
    python, variables = openenv_package
    for url in ours.values():
        command = [python.with_name("openenv"), "validate", "--url", url]
        run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stdout
        assert "profile: openenv-http/1.x" in run.stdout
        assert (run.stdout.count("  PASS  "), run.stdout.count("FAIL")) == (6, 0)


# -- envgym's own player ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "environment", "turns"),
    [
        ("math", "math_verify", lambda task: [Action("\\boxed{1}")]),
        ("guess", ENVIRONMENTS[2], [Action("15")] * 5),
        ("tools", "tool_use", [call("get", key="none"), call("final_answer", text="12")]),
    ],
)
def test_our_player_sees_what_the_environment_says(ours, name, environment, turns):
    async def main():
        async with envgym.spec(f"openenv:{ours[name]}") as spec, spec.make() as env:
            observation, _ = await env.reset(seed=3, options={"task": await spec.tasks("train").get(3)})
            steps = []
            for said in turns(None) if callable(turns) else turns:
                steps.append(await env.step(said))
                if steps[-1][2]:
                    break
            return observation.messages[0].text, steps

    local_turns = [Action("12") if said.tool_calls and said.tool_calls[0].name == "final_answer" else said for said in (
        turns(None) if callable(turns) else turns
    )]  # fmt: skip
    _, first, local = played(environment, 3, local_turns)
    seen_first, steps = asyncio.run(main())
    assert seen_first == first
    assert [step[1:4] for step in steps] == [step[1:4] for step in local]
    assert [step[0].messages[0].text for step in steps[:-1]] == [step[0].messages[0].text for step in local[:-1]]


def test_an_end_by_a_limit_is_a_truncation(serving_ours):
    async def main(url):
        async with envgym.spec(f"openenv:{url}") as spec, spec.make() as env:
            await env.reset(options={"task": await spec.tasks("train").get(0)})
            await env.step(call("get", key="none"))
            return await env.step(call("get", key="none"))

    with serving_ours(["tool_use"], "env.max_calls=1") as server:
        _, _, terminated, truncated, info = asyncio.run(main(server.urls[0]))
    assert (terminated, truncated) == (False, True)
    assert info["metrics"]["truncated"] == 1.0


def test_three_hundred_episodes_leave_nothing_at_a_server_with_four_places(serving_ours):
    async def main(url):
        async with envgym.spec(f"openenv:{url}") as spec:
            gate = asyncio.Semaphore(8)

            async def episode(number):
                async with gate, spec.make() as env:
                    await env.reset(options={"task": await spec.tasks("train").get(number)})
                    return (await env.step(Action("\\boxed{1}")))[2]

            return await asyncio.gather(*map(episode, range(300)))

    async def open_and_close(url):
        """Take all places, and give them back."""
        async with aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                socket = await stack.enter_async_context(http.ws_connect(f"{url}/ws"))
                await socket.send_json({"type": "state"})
                assert (await socket.receive_json())["type"] == "state"

    def open_files(server):
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    with serving_ours(["math_verify"], "--max-sessions", 4) as server:
        asyncio.run(open_and_close(server.urls[0]))
        before = open_files(server)
        assert asyncio.run(main(server.urls[0])) == [True] * 300
        asyncio.run(open_and_close(server.urls[0]))
        deadline = time.monotonic() + 20
        while open_files(server) > before:  # a socket takes a moment to close
            assert time.monotonic() < deadline
            time.sleep(0.1)


# -- sessions, tokens and limits ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(url, token="", session=""):
    """A function that sends a message and returns the answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    query = f"?session_id={session}" if session else ""
    async with aiohttp.ClientSession(headers=headers) as http, http.ws_connect(f"{url}/ws{query}") as socket:

        async def ask(message):
            await (socket.send_str(message) if isinstance(message, str) else socket.send_json(message))
            return await socket.receive_json()

        yield ask


async def rpc(url, method, token="", **params):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(f"{url}/mcp", json=body) as answer:
        return await answer.json()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("not JSON", "INVALID_JSON"),
        ("[1]", "INVALID_JSON"),
        ({"type": "dance"}, "UNKNOWN_TYPE"),
        ({"type": "reset", "data": {"seed": "x"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"index": 10**9, "split": "test"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"index": 0, "split": "none"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": [1]}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": "too early"}}, "EXECUTION_ERROR"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step"}, "VALIDATION_ERROR"),
    ],
)
def test_a_malformed_message_is_answered_and_the_session_goes_on(ours, message, code):
    async def main():
        async with connected(ours["math"]) as ask:
            refused = await ask(message)
            await ask({"type": "reset", "data": {"seed": 1, "episode_id": "e"}})
            await ask({"type": "step", "data": {"message": "15"}})
            return refused, await ask({"type": "state"})

    refused, state = asyncio.run(main())
    assert (refused["type"], refused["data"]["code"]) == ("error", code)
    assert state["data"] == {"episode_id": "e", "step_count": 1}


def test_a_session_is_attached_once_and_outlives_its_socket(ours):
    async def main():
        url = ours["guess"]
        session = (await rpc(url, "openenv/session/create"))["result"]["session_id"]
        async with connected(url, session=session) as ask:
            await ask({"type": "reset", "data": {"seed": 1}})
            async with connected(url, session=session) as second:
                busy = await second({"type": "state"})
        async with connected(url, session=session) as ask:
            answer = await ask({"type": "step", "data": {"message": "15"}})
        closed = await rpc(url, "openenv/session/close", session_id=session)
        async with connected(url, session=session) as ask:
            return busy, answer, closed, await ask({"type": "state"})

    busy, answer, closed, forgotten = asyncio.run(main())
    assert "already has" in busy["data"]["message"]
    assert answer["type"] == "observation"
    assert closed["result"]["closed"] is True
    assert forgotten["data"] == {"code": "SESSION_ERROR", "message": "Unknown session_id"}


def test_clients_have_tokens_sessions_and_quotas_of_their_own(serving_ours, token_file, their_clients):
    async def main(url):
        first, second = TOKENS["first"], TOKENS["second"]
        session = (await rpc(url, "openenv/session/create", first))["result"]["session_id"]
        async with connected(url, second, session) as ask:
            foreign = await ask({"type": "state"})
        closed = await rpc(url, "openenv/session/close", second, session_id=session)
        called = await rpc(url, "tools/call", second, session_id=session, name="get", arguments={})
        await rpc(url, "openenv/session/create", second)
        full = await rpc(url, "openenv/session/create", second)
        async with connected(url, first, session) as ask:
            return foreign, closed, called, full, await ask({"type": "state"})

    async def statuses(url):
        statuses = []
        for headers in ({}, {"Authorization": "Bearer wrong-token-of-twenty"}):
            async with aiohttp.ClientSession(headers=headers) as http:
                for path in ("/schema", "/ws", "/state"):
                    async with http.get(url + path) as answer:
                        statuses.append(answer.status)
                async with http.post(url + "/mcp", json={}) as answer:
                    statuses.append(answer.status)
        return statuses

    with serving_ours(["tool_use"], "--token-file", token_file) as server:
        [url] = server.urls
        assert asyncio.run(statuses(url)) == [401] * 8
        foreign, closed, called, full, own = asyncio.run(main(url))
        assert foreign["data"]["code"] == "SESSION_ERROR"
        assert closed["error"]["message"] == called["error"]["message"] == "Unknown session_id"
        assert (full["error"]["code"], full["error"]["data"]["code"]) == (-32000, "CAPACITY_REACHED")
        assert own["type"] == "state"
        [seen] = their_clients(url, [{"reset": {"seed": 1}, "actions": []}], PEER_TOKEN=TOKENS["first"])
        assert seen["first"]["text"]
        assert all(token not in server.log for token in (*TOKENS.values(), "wrong-token"))


def test_web_pages_and_large_messages_are_refused(ours, server):
    async def status(headers=None, path="/schema", **options):
        async with aiohttp.ClientSession(headers=headers) as http:
            method = http.post if options else http.get
            async with method(ours["math"] + path, **options) as answer:
                return answer.status

    async def close_code():
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{ours['math']}/ws") as socket:
            with contextlib.suppress(ConnectionError):  # the server may close while the message is in writing
                await socket.send_bytes(b"x" * (64 * 2**20 + 1))
            await socket.receive()
            return socket.close_code

    assert asyncio.run(status({"Host": "attacker.example"})) == 403
    assert asyncio.run(status({"Origin": "http://127.0.0.1"})) == 403
    assert asyncio.run(status({"Origin": "http://127.0.0.1"}, "/ws")) == 403
    assert asyncio.run(status(path="/mcp", data=b" " * (64 * 2**20 + 1), headers={"Content-Type": "text/plain"})) == 415
    large = {"Content-Type": "application/json", "Content-Length": str(64 * 2**20 + 1)}
    assert asyncio.run(status(large, "/mcp", data=b"")) == 413
    codes = aiohttp.WSCloseCode.MESSAGE_TOO_BIG, aiohttp.WSCloseCode.ABNORMAL_CLOSURE  # the latter if it is not read
    assert asyncio.run(close_code()) in codes
    assert "Traceback" not in server.log
    assert asyncio.run(status(path="/step", json={})) == 409
    assert asyncio.run(status(path="/none")) == 404


def test_a_stopped_server_lets_episodes_end(serving_ours, documented, free_ports):
    async def main(server):
        [url] = server.urls
        async with connected(url) as ask:
            await ask({"type": "reset", "data": {"seed": 1}})
            server.process.send_signal(signal.SIGTERM)
            while "result" in (answer := await rpc(url, "openenv/session/create")):
                await rpc(url, "openenv/session/close", session_id=answer["result"]["session_id"])
            return await ask({"type": "step", "data": {"message": "\\boxed{1}"}})

    with serving_ours(documented("serve", {"8000": str(free_ports(1)[0])})) as server:
        assert asyncio.run(main(server))["data"]["done"] is True
        assert server.process.wait(timeout=60) == 0


def test_what_cannot_be_served_is_one_line(run):
    public = run("serve", "math_verify", "--dialect", "openenv", "--host", "0.0.0.0", "--port", 0)
    assert (public.returncode, public.stderr.count("\n")) == (2, 1)
    assert "refusing to serve on 0.0.0.0 without tokens" in public.stderr
    none = run("serve", "math_verify", "--dialect", "openenv", "--max-sessions", 0)
    assert "--max-sessions is at least 1" in none.stderr


# -- exported -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("environment", "turn"), [("math_verify", "\\boxed{1}"), (ENVIRONMENTS[2], "15")])
def test_an_exported_project_is_valid_and_serves_the_environment(
    run, openenv_package, their_clients, documented, free_ports, tmp_path, environment, turn
):
    words = ["env.digits=3"] if environment == "math_verify" else []
    exported = run(*documented("envs export", {"math_verify": environment}), *words)
    assert exported.returncode == 0, exported.stderr
    python, variables = openenv_package
    command = [python.with_name("openenv"), "validate", tmp_path / "project", "--level", "static"]
    valid = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert valid.returncode == 0, valid.stdout + valid.stderr
    again = run("envs", "export", environment, "--as", "openenv", "--out", "project")
    assert "project is not empty: choose another folder with --out" in again.stderr

    [port] = free_ports(1)
    app = [sys.executable, "project/server/app.py", "--port", str(port)]
    with subprocess.Popen(app, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline().startswith("serving ")
            [seen] = their_clients(f"http://127.0.0.1:{port}", [{"reset": {"seed": 1}, "actions": [{"message": turn}]}])
        finally:
            server.terminate()
    settings = {"digits": 3} if words else {}

    async def local():
        async with envgym.spec(environment, **settings) as spec:
            return await play(spec, 1, [Action(turn)])

    _, first, [step] = asyncio.run(local())
    assert seen["first"]["text"] == first
    assert seen["steps"][0][1:] == [step[1], step[2]]


def test_only_a_dialect_with_projects_is_exported_to(run):
    refused = run("envs", "export", "math_verify", "--as", "nemo_gym", "--out", "project")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "nemo_gym has no projects to export to" in refused.stderr
