"""Tools of real MCP servers: as a process, over HTTP; dying, hanging, and leaving nothing behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from envgym.errors import ConfigError, InvalidOutcome, MissingDependency
from envgym.processes.family import guard_command
from envgym.tools import McpServer, ToolBox
from envgym.types import ToolCall
from tests.running import is_running

PROGRAM = str(Path(__file__).with_name("mcp_program.py"))


def stdio(*flags, **settings):
    return McpServer(command=[sys.executable, PROGRAM, *flags], **settings)


class HttpServer:
    """The program as an HTTP server on loopback, which can be killed and started anew."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self):
        # Under the guard, so that it ends even where the tests are killed.
        command = guard_command([sys.executable, PROGRAM, "--port", str(self.port)])
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("the server did not start")

    def kill(self):
        self.process.send_signal(signal.SIGHUP)  # to the guard, which ends once the server has
        self.process.wait(10)


@pytest.fixture(scope="module")
def http():
    server = HttpServer()
    yield server
    server.kill()


@pytest.fixture(params=["stdio", "http"])
def server(request):
    return stdio() if request.param == "stdio" else McpServer(url=request.getfixturevalue("http").url)


async def ask(box, tool, **arguments):
    [message] = await box.call([ToolCall("", tool, arguments)])
    return message.text


async def sleeping(box):
    """A call that has reached the server and does not end."""
    before = await ask(box, "slept")
    call = asyncio.create_task(ask(box, "sleep", seconds=600))
    async with asyncio.timeout(60):
        while await ask(box, "slept") == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return call


def gone(pid, seconds=60.0):
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def with_session(server, play, **settings):
    """What `play(box, session)` returns, of one session with `server`."""

    async def main():
        async with server.session() as session:
            result = await play(ToolBox(session.tools, **settings), session)
        assert not session.alive
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left"
        return result

    threads = set(threading.enumerate())
    result = asyncio.run(main())
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)  # asyncio's own, which waited for the process, ends a moment after it said so
    assert set(threading.enumerate()) <= threads, "no thread is left"
    return result


def test_pictures_in_results_are_pictures(server):
    async def play(box, session):
        async def look(*kinds):
            [message] = await box.call([ToolCall("", "look", {"kinds": list(kinds)})])
            return message

        return await look("red", "red"), await look("red", "broken"), await look("text"), await look(*["red"] * 17)

    message, broken, text, many = with_session(server, play)
    assert [getattr(part, "text", "") for part in message.content] == ["See:", "", "", "That is all."]
    assert [(image.width, image.height, image.read()[:4]) for image in message.images] == [(6, 4, b"\x89PNG")] * 2
    assert broken.text.startswith("Error: the file of an image cannot be read (")
    assert text.text == "Error: the file of an image cannot be read (it is no image)"
    assert many.text == "Error: the result has 17 images, more than 16"
    [message, *_] = with_session(server, play, with_images=False)
    assert (message.text, message.images) == ("See:[image 6 x 4][image 6 x 4]That is all.", ())


# -- what a server offers ---------------------------------------------------------------------------------


def test_its_tools_are_called_like_any_other(server):
    async def play(box, session):
        assert session.alive
        spec = next(spec for spec in box.specs if spec.name == "add")
        assert spec.description == "Add two numbers."
        assert spec.parameters["properties"] == {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "sign": {"type": "string", "enum": ["+", "-"], "default": "+"},
        }
        texts = [
            await ask(box, "add", a=1, b=2),
            await ask(box, "add", a=1, b=2, sign="-"),
            await ask(box, "add", a=1),
            await ask(box, "add", a="one", b=2),
            await ask(box, "fail", why="key"),
        ]
        return texts, box.metrics

    texts, metrics = with_session(server, play)
    assert texts[:2] == ["3", "-1"]
    for text, why in zip(texts[2:4], ("b\n  Field required", "a\n  Input should be a valid integer"), strict=True):
        assert text.startswith("Error: Error executing tool add:")
        assert why in text, "the server's own check"
    assert texts[4] == "Error: Error executing tool fail: there is no key\nand never was"
    assert metrics == {"tool_calls": 5, "tool_errors": 3, "tool_malformed": 0, "tool_timeouts": 0}


def test_calls_run_at_the_same_time(server):
    async def play(box, session):
        return [message.text for message in await box.call([ToolCall(str(i), "meet") for i in range(3)])]

    assert with_session(server, play) == ["met"] * 3


def test_a_call_that_hangs_is_told_so_and_the_session_goes_on(server):
    async def play(box, session):
        return await ask(box, "sleep", seconds=600), await ask(box, "add", a=1, b=1)

    assert with_session(server, play, timeout=0.5) == ("Error: sleep took longer than 0.5 s", "2")


def test_each_session_has_a_state_of_its_own(server):
    async def main():
        async with server.session() as one, server.session() as other:
            boxes = [ToolBox(one.tools), ToolBox(other.tools)]
            await ask(boxes[0], "note", word="a")
            return [await ask(box, "note", word="b") for box in boxes]

    assert asyncio.run(main()) == ["a\nb", "b"]


def test_only_some_of_its_tools():
    async def main(only):
        async with stdio(only=only).session() as session:
            return [tool.spec.name for tool in session.tools]

    assert asyncio.run(main(["pid", "add"])) == ["pid", "add"]
    with pytest.raises(ConfigError, match=r"has no tool 'ad'. Did you mean 'add'\?"):
        asyncio.run(main(["ad"]))


OF_TASKS = """
import json, sys
KINDS = ("forbidden", "optional", "required")
for line in sys.stdin:
    asked = json.loads(line)
    tools = [
        {"name": name, "inputSchema": {"type": "object"}, "execution": {"taskSupport": support} if support else None}
        for name, support in zip(("none", *KINDS), (None, *KINDS))
    ]
    answer = {"tools": tools} if asked["method"] == "tools/list" else {
        "protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}
    }
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer}), flush=True)
"""


def test_a_tool_that_runs_as_a_task_alone_is_not_offered():
    async def main(only):
        async with McpServer(command=[sys.executable, "-c", OF_TASKS], only=only).session() as session:
            return [tool.spec.name for tool in session.tools]

    assert asyncio.run(main(None)) == ["none", "forbidden", "optional"]
    with pytest.raises(ConfigError, match="has no tool 'required'"):
        asyncio.run(main(["required"]))


def test_secrets_come_from_the_environment(http, monkeypatch):
    monkeypatch.setenv("SHOP_TOKEN", "s3cret")
    monkeypatch.delenv("NO_TOKEN", raising=False)

    async def main():
        async with McpServer(url=http.url, headers={"x-token": "Bearer ${SHOP_TOKEN}"}).session() as session:
            header = await ask(ToolBox(session.tools), "header", name="x-token")
        async with stdio(env={"TOKEN": "${SHOP_TOKEN}", "COLOUR": "red"}).session() as session:
            box = ToolBox(session.tools)
            variables = [await ask(box, "variable", name=name) for name in ("TOKEN", "COLOUR", "SHOP_TOKEN")]
        return header, variables

    assert asyncio.run(main()) == ("Bearer s3cret", ["s3cret", "red", "none"])
    with pytest.raises(ConfigError, match="there is no environment variable NO_TOKEN"):
        asyncio.run(stdio(env={"TOKEN": "${NO_TOKEN}"}).session().start())


def test_what_a_server_prints_beside_its_messages_does_not_matter(capfd):
    async def play(box, session):
        return await ask(box, "add", a=1, b=1)

    assert with_session(stdio("--chatty"), play) == "2"
    assert capfd.readouterr() == ("", "")


# -- servers that fail ------------------------------------------------------------------------------------


def test_a_server_that_dies_voids_the_episode():
    async def play(box, session):
        with pytest.raises(InvalidOutcome, match=r"mcp_program.py died: out of paper") as error:
            await ask(box, "die")
        assert (error.value.kind, error.value.retryable) == ("tool_server", True)
        with pytest.raises(InvalidOutcome, match="has ended: out of paper"):
            await ask(box, "add", a=1, b=1)

    with_session(stdio(), play)


def test_a_server_that_is_killed_during_a_call():
    async def play(box, session):
        pid = int(await ask(box, "pid"))
        call = await sleeping(box)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InvalidOutcome, match="died"):
            await call

    with_session(stdio(), play, timeout=1000)


@pytest.mark.parametrize("during_a_call", [True, False])
def test_an_http_server_that_is_killed_and_comes_back(during_a_call):
    http = HttpServer()

    async def play(box, session):
        assert await ask(box, "add", a=1, b=1) == "2"
        call = await sleeping(box) if during_a_call else None
        http.kill()
        http.start()  # but the session is lost
        with pytest.raises(InvalidOutcome) as error:
            await (call or ask(box, "add", a=1, b=1))
        assert (error.value.kind, error.value.retryable) == ("tool_server", True)

    async def play_again(box, session):
        return await ask(box, "add", a=1, b=1)

    try:
        server = McpServer(url=http.url)
        with_session(server, play)
        assert with_session(server, play_again) == "2"
    finally:
        http.kill()


def test_a_server_that_does_not_start():
    with pytest.raises(InvalidOutcome, match=r"cannot be used: no licence found") as error:
        asyncio.run(stdio("--die").session().start())
    assert error.value.retryable
    with pytest.raises(InvalidOutcome, match=r"was not ready after 1 s"):
        asyncio.run(stdio("--hang", start_timeout=1).session().start())
    assert not left_over(), "the one that hangs is killed"


def test_a_server_that_is_not_there():
    with pytest.raises(InvalidOutcome, match=r"http://127.0.0.1:9/mcp cannot be used: All connection attempts failed"):
        asyncio.run(McpServer(url="http://127.0.0.1:9/mcp").session().start())
    with pytest.raises(ConfigError, match="there is no program 'no-such-server'"):
        asyncio.run(McpServer(command=["no-such-server"]).session().start())


def test_an_address_that_is_no_server(http):
    with pytest.raises(InvalidOutcome, match="cannot be used: Not Found"):
        asyncio.run(McpServer(url=http.url.replace("/mcp", "/other")).session().start())


def test_mistakes_in_settings():
    for wrong, message in (
        ({}, "either a command or a url"),
        ({"command": ["x"], "url": "y"}, "either a command or a url"),
        ({"url": "x", "env": {"A": "b"}}, "env belongs to a server with a command"),
        ({"command": ["x"], "headers": {"A": "b"}}, "headers belong to a server with a url"),
        ({"command": []}, "at least 1 item"),
    ):
        with pytest.raises(ValidationError, match=message):
            McpServer(**wrong)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingDependency, match=r"mcp_program.py needs .*-m pip install 'mcp"):
        asyncio.run(stdio().session().start())


def test_a_session_belongs_to_its_event_loop():
    """An environment that runs on a thread has a loop for every call."""
    sessions = []

    async def start():
        sessions.append(stdio().session())
        await sessions[0].start()

    async def call():
        await ask(ToolBox(sessions[0].tools), "pid")

    asyncio.run(start())
    with pytest.raises(InvalidOutcome, match="belongs to another event loop"):
        asyncio.run(call())
    assert not left_over()


# -- nothing is left --------------------------------------------------------------------------------------


def left_over(seconds=60.0):
    """Servers on standard streams that this process started and that run on."""

    def running():
        children = psutil.Process().children(recursive=True)
        return [
            child
            for child in children
            if is_running(child.pid) and {PROGRAM, "--port"} & set(child.cmdline()) == {PROGRAM}
        ]

    deadline = time.monotonic() + seconds
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    return running()


def test_a_stubborn_server_and_its_children_are_ended():
    async def play(box, session):
        return int(await ask(box, "pid")), int(await ask(box, "child"))

    pid, child = with_session(stdio("--stubborn"), play)
    assert gone(pid)
    assert gone(child)


@pytest.mark.parametrize("end", ["close", "cancel", "die", "stubborn"])
def test_daemons_of_a_server_are_ended(end):
    async def main():
        session = stdio(*(["--stubborn"] if end == "stubborn" else [])).session()
        await session.start()
        pids = [int(pid) for pid in (await ask(ToolBox(session.tools), "daemon")).splitlines()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        if end == "die":
            with pytest.raises(InvalidOutcome, match="died: out of paper"):
                await ask(ToolBox(session.tools), "die")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01 if end == "cancel" else 60):
                await session.close()
        return pids

    assert all(map(gone, asyncio.run(main())))


def test_a_server_s_names_make_no_endless_message():
    many = OF_TASKS.replace('"none"', '"n" * 3_000_000')

    async def main():
        async with McpServer(command=[sys.executable, "-c", many], only=["x"]).session():
            pass

    with pytest.raises(ConfigError, match=r"has no tool 'x'. It has nnn.* … n*, forbidden, optional.$") as error:
        asyncio.run(main())
    assert len(str(error.value)) <= 10_000


def test_a_session_that_is_cancelled_while_it_starts():
    async def main():
        session = stdio("--hang").session()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await session.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert not left_over()


def test_a_session_that_is_cancelled_while_it_closes():
    async def main():
        session = stdio("--stubborn").session()
        await session.start()
        pid = int(await ask(ToolBox(session.tools), "pid"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.close()
        return pid

    assert gone(asyncio.run(main()))


def test_a_session_that_is_never_closed():
    """The program ends, or its loop does, in the middle of an episode."""

    async def main():
        session = stdio().session()
        await session.start()
        asyncio.get_running_loop().session = session  # so that it is not collected either
        return int(await ask(ToolBox(session.tools), "pid"))

    assert gone(asyncio.run(main()))


def test_sessions_of_cancelled_episodes_leave_nothing():
    async def episode(pids):
        async with stdio().session() as session:
            box = ToolBox(session.tools)
            pids.append(int(await ask(box, "pid")))
            await ask(box, "sleep", seconds=60)

    async def main():
        pids = []
        episodes = [asyncio.create_task(episode(pids)) for _ in range(4)]
        while len(pids) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for task in episodes:
            task.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        assert all(task.cancelled() for task in episodes)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return pids

    assert all(map(gone, asyncio.run(main())))


def test_a_server_dies_with_a_parent_that_is_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, json, sys\n"
        "from envgym.tools import McpServer, ToolBox\n"
        "from envgym.types import ToolCall\n"
        "async def main():\n"
        f"    server = McpServer(command=[sys.executable, {PROGRAM!r}, '--stubborn'])\n"
        "    async with server.session() as session:\n"
        "        names = ['pid', 'daemon']\n"
        "        messages = await ToolBox(session.tools).call([ToolCall('', name) for name in names])\n"
        "        print(json.dumps([int(pid) for m in messages for pid in m.text.split()]), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    pids = json.loads(parent.stdout.readline())
    assert len(pids) == 3
    assert all(map(is_running, pids))
    parent.kill()
    parent.communicate(timeout=10)
    assert all(map(gone, pids))


def test_regular_expressions_of_a_server_freeze_nothing():
    """Those of its result, which the library would match."""
    slow = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}}}
    tool = {"name": "read", "inputSchema": slow, "outputSchema": slow}
    text = "a" * 40 + "!"
    result = {"content": [{"type": "text", "text": "it is read"}], "structuredContent": {"text": text}}
    program = str(Path(__file__).with_name("mcp_stranger.py"))
    server = McpServer(command=[sys.executable, program, json.dumps([tool]), json.dumps(result)])

    async def play(box, session):
        return [await ask(box, "read", text=text) for _ in range(3)]

    assert with_session(server, play) == ["it is read"] * 3
