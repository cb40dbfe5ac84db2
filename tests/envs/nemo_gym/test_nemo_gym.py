"""nemo_gym: what is said to a resources server in each flow, what its answers come to, and every way it can fail."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

import envgym
from envgym.config.resolve import resolve
from envgym.envs.nemo_gym.client import find_resources_server
from envgym.errors import ConfigError, DataError, EnvgymError, InvalidOutcome
from envgym.net import client as net
from envgym.net.client import HttpClient
from envgym.types import Action, Message, StopReason, TextPart, ToolCall

TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "What is a gym?"}],
        "tools": [TOOL],
    },
    "expected_answer": "a hall",
    "limit": 3,
}
OTHER = {**ROW, "responses_create_params": {"input": "What is a hall?"}}
LOOK = ToolCall("call00001", "look_up", {"word": "gym"})


class Server:
    """A resources server: answers from a table of route to body, status or coroutine, and what it was told."""

    def __init__(self, **answers):
        self.answers = answers
        self.told = []
        self.sessions = []

    async def __call__(self, request):
        route = request.match_info["path"]
        if route not in self.answers:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.method != "POST":
            return web.Response(status=405)
        self.told.append((route, await request.json()))
        session = request.cookies.get("session")
        self.sessions.append(session)
        answer = self.answers[route]
        if callable(answer):
            answer = await answer(request)
        if not isinstance(answer, web.Response):
            answer = web.json_response(answer)
        answer.set_cookie("session", session or f"s{len(self.told)}")
        return answer

    @property
    def routes(self):
        return [route for route, _ in self.told]


def tools_server(**answers):
    return Server(**{"seed_session": {}, "look_up": {"found": "a hall"}, "verify": {"reward": 1.0}, **answers})


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROW, OTHER)))
    return str(file)


@asynccontextmanager
async def opened(serving, server, path, **settings):
    """The environment set up against `server`, and its first row's task."""
    async with serving(server) as url:
        data = {"path": path, "test_fraction": 0}
        async with envgym.spec("nemo_gym", url=url, data=data, **settings) as spec:
            yield spec, await spec.tasks("train").get(0)


def turn(text="", *calls, content=None, stop=StopReason.STOP):
    return Action(text, (1, 2), calls, stop, content)


def episode(serving, server, path, actions, **settings):
    """First observation, and the last step, of actions that play the first row."""

    async def main():
        async with opened(serving, server, path, **settings) as (spec, task), spec.make() as env:
            observation, _ = await env.reset(options={"task": task})
            steps = [await env.step(action) for action in actions]
            return observation, steps

    return asyncio.run(main())


# -- rows -------------------------------------------------------------------------------------------------


def test_a_row_is_a_task_and_is_kept_whole(serving, path):
    async def main():
        async with opened(serving, tools_server(), path) as (spec, task):
            return task, await spec.tasks("train").get(1)

    task, other = asyncio.run(main())
    assert task.prompt == (Message("system", "Be brief."), Message("user", "What is a gym?"))
    assert task.fields == ROW
    assert task.answer == "a hall"
    assert other.prompt == (Message("user", "What is a hall?"),)


def game(copies, **more):
    """Rows with the same prompt for all."""
    return [
        {"responses_create_params": {"input": "Play."}, **{k: v(n) for k, v in more.items()}} for n in range(copies)
    ]


@pytest.mark.parametrize(
    "rows",
    [game(20, table=str), game(20), game(1)],
    ids=["rows that differ", "rows that are all the same", "one row"],
)
def test_rows_that_share_one_prompt_are_held_out_all_the_same(serving, tmp_path, rows):
    """By the row, or where that says nothing either by its name, from which seeds are drawn."""
    file, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    for path, written in ((file, rows), (other, game(3, table=lambda n: f"other {n}"))):
        path.write_text("".join(json.dumps(row) + "\n" for row in written))

    async def tasks(**data):
        async with serving(tools_server()) as url, envgym.spec("nemo_gym", url=url, data=data) as spec:
            return [
                [await spec.tasks(split).get(n) for n in range(spec.tasks(split).size)] for split in ("train", "test")
            ]

    train, test = asyncio.run(tasks(path=str(file)))
    assert test
    assert train
    assert len(train) + len(test) == max(2, len(rows))
    assert not {task.key for task in train} & {task.key for task in test}
    if "table" in rows[0]:
        assert not {task.fields["table"] for task in train} & {task.fields["table"] for task in test}
    train, test = asyncio.run(tasks(path=str(file), test_path=str(other)))
    assert (len(train), len(test)) == (len(rows), 3)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "hi"}, "not a row of NeMo-Gym: responses_create_params.input is missing"),
        ({"responses_create_params": {"input": [{"role": "tool", "content": ""}]}}, "input item 0: a message's role"),
        ({"responses_create_params": {"input": "hi", "instructions": 3}}, "instructions are text, not int"),
        ({"responses_create_params": {"input": "hi", "tools": [{"type": "web_search"}]}}, "tools: one is 'web_search'"),
        ({"responses_create_params": {"input": "hi", "tools": [{**TOOL, "name": "verify"}]}}, "'verify' is no name"),
        ({"responses_create_params": {"input": "hi", "tools": [{**TOOL, "name": "../x"}]}}, r"'\.\./x' is no name"),
    ],
)
def test_a_row_that_cannot_be_played_is_named_with_its_line(serving, tmp_path, row, says):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")

    async def main():
        async with opened(serving, tools_server(), str(file)):
            pass

    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{says}"):
        asyncio.run(main())


# -- seed, call, verify -----------------------------------------------------------------------------------


def test_an_episode_with_tools(serving, path):
    server = tools_server(verify={**ROW, "reward": 0.5, "speed": 2, "fine": True, "limit": 3, "note": "x"})
    calls = turn("I look. <call>", LOOK, content="I look.")
    observation, [first, last] = episode(serving, server, path, [calls, turn("It is a hall.")])

    assert [tool.name for tool in observation.tools] == ["look_up"]
    assert first[0].messages == (
        Message("tool", (TextPart('{"found": "a hall"}'),), tool_call_id="call00001", name="look_up"),
    )
    assert first[1:4] == (0.0, False, False)
    assert last[1:4] == (0.5, True, False)
    assert last[4]["metrics"] == {
        "tool_calls": 1.0, "tool_malformed": 0.0, "tool_errors": 0.0, "speed": 2.0, "fine": 1.0,
    }  # fmt: skip
    assert last[4]["answer"] == "It is a hall."

    assert server.routes == ["seed_session", "look_up", "verify"]
    assert server.told[0][1] == ROW
    assert server.told[1][1] == {"word": "gym"}
    verified = server.told[2][1]
    response = verified.pop("response")
    assert verified == ROW
    assert [item["type"] for item in response["output"]] == [
        "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert response["output"][0]["content"][0]["text"] == "I look."
    assert response["output"][1]["call_id"] == response["output"][2]["call_id"] == "call00001"
    assert (response["status"], response["tools"][0]["name"]) == ("completed", "look_up")
    assert server.sessions == [None, "s1", "s1"]


def test_every_episode_has_cookies_of_its_own(serving, path):
    server = tools_server()

    async def main():
        async with opened(serving, server, path) as (spec, task):

            async def one():
                async with spec.make() as env:
                    await env.reset(options={"task": task})
                    await env.step(turn("", LOOK))
                    await env.step(turn("so"))

            await asyncio.gather(one(), one())

    asyncio.run(main())
    assert sorted(map(str, server.sessions)) == sorted(["None", "None", "s1", "s1", "s2", "s2"])


def test_a_tools_error_is_its_result(serving, path):
    async def broken(request):
        return web.Response(status=500, text="Internal Server Error")

    server = tools_server(look_up=broken)
    _, [first, last] = episode(serving, server, path, [turn("", LOOK), turn("so")])
    assert first[0].messages[0].text == "Internal Server Error"
    assert (last[1], last[4]["metrics"]["tool_errors"]) == (1.0, 1.0)


def test_no_tool_leads_elsewhere(serving, path):
    async def moved(request):
        return web.Response(status=307, headers={"Location": "/verify"}, text="moved")

    server = tools_server(look_up=moved)
    _, [first, _] = episode(serving, server, path, [turn("", LOOK), turn("so")])
    assert first[0].messages[0].text == "moved"
    assert server.routes == ["seed_session", "look_up", "verify"]


@pytest.mark.parametrize("name", ["verify", "seed_session", "../verify", "", "look_up/../verify", "http://x/y"])
def test_only_the_rows_tools_are_ever_called(serving, path, name):
    server = tools_server()
    _, [first, _] = episode(serving, server, path, [turn("t", ToolCall("call00001", name, {})), turn("so")])
    assert server.routes == ["seed_session", "verify"]
    assert "there is no tool" in first[0].messages[0].text


def test_a_call_that_cannot_be_read_is_told_to_the_policy_and_not_sent(serving, path):
    server = tools_server()
    broken = ToolCall("call00001", "look_up", {}, "the arguments are not JSON")
    _, [first, last] = episode(serving, server, path, [turn("<call>{", broken, content=""), turn("so")])
    assert first[0].messages[0].text == "Error: the arguments are not JSON"
    assert server.routes == ["seed_session", "verify"]
    said, *_ = output = server.told[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "message"]
    assert said["content"][0]["text"] == "<call>{"
    assert last[4]["metrics"]["tool_malformed"] == 1.0


def test_a_turn_that_was_cut_is_verified_without_its_calls(serving, path):
    server = tools_server(verify={"reward": 0.0})
    _, [last] = episode(serving, server, path, [turn("x", LOOK, stop=StopReason.LENGTH)])
    assert server.routes == ["seed_session", "verify"]
    assert last[1:4] == (0.0, True, False)
    assert server.told[-1][1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_last_turn_allowed_is_verified_and_truncated(serving, path):
    server = tools_server()
    _, [_, last] = episode(serving, server, path, [turn("", LOOK), turn("", LOOK)], max_turns=2)
    assert server.routes == ["seed_session", "look_up", "look_up", "verify"]
    assert last[1:4] == (1.0, False, True)


def test_a_long_result_is_cut(serving, path):
    server = tools_server(look_up={"found": "x" * 100})
    _, [first] = episode(serving, server, path, [turn("", LOOK)], max_result_chars=20)
    assert first[0].messages[0].text == '{"found": "xxxxxxxxx\n[truncated: 113 characters in all]'


# -- what is no verdict -----------------------------------------------------------------------------------


async def hangs_up(request):
    request.transport.abort()
    await asyncio.sleep(1)


async def hangs(request):
    await asyncio.sleep(30)


def status(code):
    async def answer(request):
        return web.Response(status=code, text="so it is")

    return answer


def said(text):
    async def answer(request):
        return web.Response(text=text)

    return answer


@pytest.mark.parametrize("route", ["seed_session", "verify"])
@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (hangs_up, "server_lost", True),
        (hangs, "server_timeout", True),
        (status(500), "server_error", True),
        (status(422), "server_error", False),
        (status(302), "server_error", False),
        (said("<html>"), "server_protocol", False),
        (said("[" * 100_000), "server_protocol", False),
        (said("[1]"), "server_protocol", False),
    ],
)
def test_what_keeps_the_server_from_answering_is_no_reward(serving, path, route, answer, kind, retryable):
    server = tools_server(**{route: answer})
    with pytest.raises(InvalidOutcome) as failure:
        episode(serving, server, path, [turn("so")], request_timeout=0.5)
    assert (failure.value.kind, failure.value.retryable) == (kind, retryable)
    assert server.routes.count(route) == 1


@pytest.mark.parametrize(
    ("verdict", "kind", "retryable"),
    [
        ({}, "server_protocol", False),
        ({"reward": None}, "server_protocol", False),
        ({"reward": "1"}, "server_protocol", False),
        ({"reward": float("nan")}, "server_protocol", False),
        ({"reward": 10**400}, "server_protocol", False),
        ({"reward": 0.0, "mask_sample": True}, "masked", False),
        ({"reward": 0.0, "failure_kind": "judge_unparseable", "failure_reason": "no verdict"}, "judge_unparseable",
         False),
        ({"reward": 0.0, "mask_sample": True, "failure_kind": "transport_timeout"}, "transport_timeout", True),
        ({"reward": 0.0, "mask_sample": True, "failure_kind": "mine:no disk"}, "mine_no_disk", False),
        ({"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "x"}, "judge_failed", True),
        ({"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_terminal": True}, "judge_failed", False),
    ],
)  # fmt: skip
def test_a_verdict_that_is_none_is_no_reward(serving, path, verdict, kind, retryable):
    with pytest.raises(InvalidOutcome) as failure:
        episode(serving, tools_server(verify=said(json.dumps(verdict))), path, [turn("so")])
    assert (failure.value.kind, failure.value.retryable) == (kind, retryable)


def test_a_remark_on_a_sample_that_was_measured_voids_nothing(serving, path):
    verdict = {"reward": 0.25, "mask_sample": False, "failure_kind": "provider_oom_killed"}
    _, [last] = episode(serving, tools_server(verify=verdict), path, [turn("so")])
    assert last[1] == 0.25


@pytest.mark.parametrize(("answer", "kind"), [(hangs_up, "server_lost"), (hangs, "server_timeout")])
def test_a_tool_call_is_never_sent_twice(serving, path, answer, kind):
    server = tools_server(look_up=answer)
    with pytest.raises(InvalidOutcome) as failure:
        episode(serving, server, path, [turn("", LOOK)], request_timeout=0.5)
    assert failure.value.kind == kind
    assert server.routes == ["seed_session", "look_up"]


def test_a_server_that_is_gone_is_tried_again_and_fails_the_episode(serving, path, monkeypatch):
    """Asked over a connection of its own: one that was kept would be lost with the server."""
    tries, send = [], HttpClient.send

    def counted(self, *arguments):
        tries.append(None)
        return send(self, *arguments)

    monkeypatch.setattr(HttpClient, "send", counted)
    monkeypatch.setattr(net, "KEEPALIVE", 0.0)

    async def main():
        async with serving(tools_server()) as url:
            spec = envgym.spec("nemo_gym", url=url, data={"path": path, "test_fraction": 0})
            await spec.ensure_setup()
            task = await spec.tasks("train").get(0)
        tries.clear()
        async with spec, spec.make() as env:
            await env.reset(options={"task": task})

    with pytest.raises(InvalidOutcome, match="Cannot connect") as failure:
        asyncio.run(main())
    assert len(tries) == 3
    assert (failure.value.kind, failure.value.retryable) == ("server_unreachable", True)


# -- reset, step ------------------------------------------------------------------------------------------


def gymnasium_server(*steps, **answers):
    rest = iter(steps)

    async def step(request):
        answer = next(rest)
        return await answer(request) if callable(answer) else answer

    return Server(**{"reset": {"observation": "You stand in a hall.", "info": {}}, "step": step, **answers})


def test_an_episode_of_the_gymnasium_flavour(serving, path):
    server = gymnasium_server(
        {
            "observation": "Go on.",
            "reward": 0.25,
            "info": {"tool_outputs": [{"call_id": "call00001", "output": "yes"}]},
        },
        {"observation": None, "reward": 1, "terminated": True, "info": {"steps": 2, "result": "win"}},
    )
    observation, [first, last] = episode(serving, server, path, [turn("I look.", LOOK), turn("out")])
    assert observation.messages[-1] == Message("user", "You stand in a hall.")
    assert first[0].messages == (
        Message("tool", (TextPart("yes"),), tool_call_id="call00001", name="look_up"),
        Message("user", "Go on."),
    )
    assert first[1:4] == (0.25, False, False)
    assert last[1:4] == (1.0, True, False)
    assert last[4]["metrics"] == {"steps": 2.0}
    assert server.routes == ["reset", "step", "step"]
    assert server.told[0][1] == ROW
    responses = [body["response"]["output"] for route, body in server.told if route == "step"]
    assert [[item["type"] for item in items] for items in responses] == [["message", "function_call"], ["message"]]
    assert server.sessions == [None, "s1", "s1"]


@pytest.mark.parametrize("outputs", [5, True, "yes", {"output": "yes"}, [5], [{"output": None}]])
def test_tool_outputs_of_another_form_are_no_reward(serving, path, outputs):
    server = gymnasium_server({"reward": 1, "terminated": True, "info": {"tool_outputs": outputs}})
    with pytest.raises(InvalidOutcome, match="tool_outputs hold") as failure:
        episode(serving, server, path, [turn("I look.", LOOK)])
    assert failure.value.kind == "server_protocol"


def test_an_episode_ends_at_the_turns_allowed(serving, path):
    server = gymnasium_server({"observation": "Go on.", "reward": 0.5})
    _, [last] = episode(serving, server, path, [turn("x")], max_turns=1)
    assert last[1:4] == (0.5, False, True)


def test_a_server_that_wants_it_is_told_of_the_end(serving, path):
    server = gymnasium_server({"reward": 1, "truncated": True}, close={})
    server.answers["reset"] = {"info": {"supports_explicit_close": True}}
    _, [last] = episode(serving, server, path, [turn("x")])
    assert last[1:4] == (1.0, False, True)
    assert server.routes == ["reset", "step", "close"]


def test_a_step_that_was_lost_is_sent_again_only_where_the_server_knows_it_by_its_id(serving, path):
    server = gymnasium_server(hangs_up, {"reward": 1, "terminated": True})
    server.answers["reset"] = {"info": {"supports_step_idempotency": True}}
    _, [last] = episode(serving, server, path, [turn("x")])
    assert last[1] == 1.0
    first, second = [body["_ng_step_request_id"] for route, body in server.told if route == "step"]
    assert first == second

    server = gymnasium_server(hangs_up, {"reward": 1, "terminated": True})
    with pytest.raises(InvalidOutcome, match="the connection broke"):
        episode(serving, server, path, [turn("x")])
    assert server.routes == ["reset", "step"]


# -- finding the server -----------------------------------------------------------------------------------


def head_server(config):
    async def head(request):
        if request.path != "/global_config_dict_yaml":
            return web.json_response({"status": "ok"})
        return web.json_response(config if isinstance(config, str) else json.dumps(config))

    return head


def entry(url, kind="resources_servers"):
    return {kind: {"mcqa": {"entrypoint": "app.py", "host": "0.0.0.0", "port": int(url.rpartition(":")[2])}}}


def test_a_server_is_found_by_its_name(serving, path):
    async def main():
        async with serving(tools_server()) as url:
            config = {"policy_api_key": "secret", "quiz": entry(url), "agent": entry(url, "responses_api_agents")}
            async with serving(head_server(config)) as head:
                data = {"path": path, "test_fraction": 0}
                for settings in ({}, {"server": "quiz"}):
                    async with envgym.spec("nemo_gym", head=head, data=data, **settings) as spec, spec.make() as env:
                        await env.reset(options={"task": await spec.tasks("train").get(0)})
                        assert (await env.step(turn("so")))[1] == 1.0
                with pytest.raises(ConfigError, match=r"no resources server 'quizz', only quiz\. Did you mean 'quiz'"):
                    await envgym.spec("nemo_gym", head=head, data=data, server="quizz").ensure_setup()

    asyncio.run(main())


def test_a_server_that_listens_everywhere_is_where_its_head_server_is(serving):
    async def main(host):
        config = {"quiz": {"resources_servers": {"mcqa": {"host": host, "port": 21001}}}}
        async with serving(head_server(config)) as head, HttpClient() as http:
            return await find_resources_server(head.replace("127.0.0.1", "localhost"), None, http)

    assert asyncio.run(main("0.0.0.0")) == "http://localhost:21001"
    assert asyncio.run(main("10.1.2.3")) == "http://10.1.2.3:21001"
    assert asyncio.run(main("fe80::1")) == "http://[fe80::1]:21001"


def test_what_a_config_refers_to_is_looked_up(serving):
    """A head server tells of its config as it was written."""

    async def main(**settings):
        config = {"quiz": {"resources_servers": {"mcqa": settings}}, "at": {"host": "box", "port": "${main_port}"}}
        config |= {"main_port": 21001, "loop": "${loop}"}
        async with serving(head_server(config)) as head, HttpClient() as http:
            return await find_resources_server(head, None, http)

    assert asyncio.run(main(host="${at.host}-${main_port}.lan", port="${at.port}")) == "http://box-21001.lan:21001"
    for port in ("${loop}", "${nowhere.port}"):
        with pytest.raises(ConfigError, match="none at all"):
            asyncio.run(main(host="box", port=port))


@pytest.mark.parametrize("config", ["not: [yaml", "text", "3"])
def test_what_is_no_head_server_is_named(serving, path, config):
    async def main():
        async with serving(head_server(config)) as head:
            await envgym.spec("nemo_gym", head=head, data={"path": path}).ensure_setup()

    with pytest.raises(ConfigError, match="not a head server of NeMo-Gym"):
        asyncio.run(main())


def test_what_is_no_resources_server_is_named(serving, path):
    async def main(server, **settings):
        async with serving(server) as url:
            await envgym.spec("nemo_gym", url=url, data={"path": path}, **settings).ensure_setup()

    with pytest.raises(ConfigError, match="it has neither /seed_session and /verify nor /reset and /step"):
        asyncio.run(main(Server(run={})))
    with pytest.raises(ConfigError, match="has no routes of the flow 'gymnasium', only 'tools'"):
        asyncio.run(main(tools_server(), flow="gymnasium"))
    with pytest.raises(ConfigError, match="not a usable URL"):
        asyncio.run(envgym.spec("nemo_gym", url="localhost:1", data={"path": path}).ensure_setup())


def test_a_server_that_is_down_is_one_line(path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EnvgymError, match="is the server running") as failure:
            asyncio.run(envgym.spec("nemo_gym", url=url, data={"path": path}).ensure_setup())
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "http://x", "head": "http://x"}, "give url or head, not both"),
        ({"server": "x"}, "set env.head"),
    ],
)
def test_settings_that_contradict_each_other(settings, says):
    with pytest.raises(ConfigError, match=says):
        envgym.spec("nemo_gym", **settings)


def test_without_a_server_the_settings_that_name_one_are_told():
    with pytest.raises(ConfigError, match=r"set env\.url, or env\.head and env\.server"):
        asyncio.run(envgym.spec("nemo_gym").ensure_setup())


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1", "127.0.0.1:http"])
def test_where_the_policy_answers_is_an_address(listen):
    with pytest.raises(ConfigError, match="the policy's address is HOST:PORT"):
        resolve({"env": "math_verify", "agent": {"name": "nemo_gym", "listen": listen}})
