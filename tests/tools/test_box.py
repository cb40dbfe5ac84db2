"""Calling tools: in parallel, under deadlines, whatever goes wrong told to the policy."""

import asyncio
import datetime
import enum
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import BaseModel

from envgym.errors import ConfigError, InvalidOutcome, NameNotFound
from envgym.tools import Tool, ToolBox, load_tool
from envgym.tools import tool as tool_module
from envgym.types import ImagePart, ToolCall


def answers(tools, *calls, **settings):
    """The texts of the results of calls, each (name, arguments), made in one turn; and the box."""
    box = ToolBox(tools, **settings)

    async def main():
        return await box.call([ToolCall(str(index), *call) for index, call in enumerate(calls)])

    messages = asyncio.run(main())
    assert [message.tool_call_id for message in messages] == [str(index) for index in range(len(calls))]
    assert [message.name for message in messages] == [call[0] for call in calls]
    assert {message.role for message in messages} <= {"tool"}
    return [message.text for message in messages], box


def counts(box):
    return [int(box.metrics[f"tool_{name}"]) for name in ("calls", "errors", "malformed", "timeouts")]


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def slowly(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


def blocking(seconds: float) -> str:
    time.sleep(seconds)
    return f"blocked {seconds}"


# -- results ----------------------------------------------------------------------------------------------


def test_calls_are_answered_in_order():
    texts, box = answers([add, slowly], ("slowly", {"seconds": 0.05}), ("add", {"a": 1, "b": "2"}))
    assert texts == ["slept 0.05", "3"]
    assert [spec.name for spec in box.specs] == ["add", "slowly"]
    assert counts(box) == [2, 0, 0, 0]
    assert box.metrics["tool_calls"] == 2


class Point(BaseModel):
    x: int


@dataclass
class Size:
    width: int


class Colour(enum.Enum):
    RED = "red"


class Odd:
    def __str__(self):
        return "odd"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ({"a": [1, "ü"]}, '{"a":[1,"ü"]}'),
        ((Point(x=1), Size(2), Colour.RED), '[{"x":1},{"width":2},"red"]'),
        (datetime.date(2024, 2, 29), '"2024-02-29"'),
        (Odd(), '"odd"'),
        ("half a pair \ud83d", "half a pair ?"),
    ],
)
def test_a_result_is_text_or_json(value, text):
    def get():
        return value

    assert answers([get], ("get", {}))[0] == [text]


def test_a_long_result_is_cut_and_says_so():
    def shout(n: int) -> str:
        return "a" * n

    texts, _ = answers([shout], ("shout", {"n": 100}), ("shout", {"n": 101}), max_chars=100)
    assert texts == ["a" * 100, "a" * 50 + "\n[truncated: 101 characters in all]\n" + "a" * 50]


# -- errors -----------------------------------------------------------------------------------------------


def broken(how: str) -> str:
    if how == "exit":
        sys.exit(3)
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "circle":
        circle = []
        circle.append(circle)
        return circle
    if how == "silent":
        raise TimeoutError
    raise ValueError("no such thing\nreally")


async def broken_async(how: str) -> str:
    return broken(how)


@pytest.mark.parametrize("tool", [broken, broken_async])
def test_what_a_tool_raises_is_its_result(tool):
    name = tool.__name__
    hows = ("plainly", "silent", "exit", "cancel", "circle")
    texts, box = answers([tool, add], *((name, {"how": how}) for how in hows), ("add", {"a": 1, "b": 1}))
    assert texts[:2] == ["Error: ValueError: no such thing\nreally", "Error: TimeoutError"]
    assert texts[2].startswith(("Error: RuntimeError: SystemExit", "Error: SystemExit"))
    assert texts[3].startswith(("Error: RuntimeError: CancelledError", "Error: the call was cancelled"))
    assert texts[4].startswith("Error: PydanticSerializationError: Error serializing to JSON: ValueError: Circular")
    assert texts[5] == "2"
    assert not any("Traceback" in text for text in texts)
    assert counts(box) == [6, 5, 0, 0]


def test_calls_that_cannot_be_made():
    calls = [
        ToolCall("0", "", error="the call is not JSON"),
        ToolCall("1", "ad", {"a": 1}),
        ToolCall("2", "add", {"a": 1}),
        ToolCall("3", "", {}),
    ]
    box = ToolBox([add])
    messages = asyncio.run(box.call(calls))
    assert [message.text for message in messages] == [
        "Error: the call is not JSON",
        "Error: there is no tool 'ad'. Did you mean 'add'?",
        "Error: add: argument 'b' is missing",
        "Error: there is no tool ''. There is add.",
    ]
    assert counts(box) == [4, 0, 4, 0]


def test_a_name_that_the_policy_makes_up_does_no_harm():
    [message] = asyncio.run(ToolBox([add]).call([ToolCall("", "\ud800" + "a" * 10_000, {})]))
    assert message.name == "?" + "a" * 63
    assert len(message.text.encode()) < 1200


def test_a_long_error_is_cut():
    def fail() -> None:
        raise ValueError("x" * 100_000)

    texts, _ = answers([fail], ("fail", {}))
    assert len(texts[0]) < 1100


def test_a_tool_can_say_that_the_episode_is_void():
    """The other calls of the turn are given up."""
    begun, ended = asyncio.Event(), []

    async def gone() -> None:
        await begun.wait()
        raise InvalidOutcome("tool_server", "gone", retryable=True)

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(InvalidOutcome, match="gone"):
        answers([gone, forever], ("forever", {}), ("gone", {}), timeout=1000)
    assert ended == [True]


# -- time -------------------------------------------------------------------------------------------------


def test_the_calls_of_a_turn_run_at_the_same_time():
    """Each waits for the two others."""
    on_the_loop, on_threads = asyncio.Barrier(3), threading.Barrier(3)

    async def meet() -> str:
        await on_the_loop.wait()
        return "met"

    def meet_blocking() -> str:
        on_threads.wait(60)
        return "met"

    texts, _ = answers([meet, meet_blocking], *[("meet", {})] * 3, *[("meet_blocking", {})] * 3)
    assert texts == ["met"] * 6


def test_not_all_of_hundreds_of_calls_run_at_once():
    running, most = 0, 0

    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    answers([count], *[("count", {})] * 100)
    assert 2 < most <= 16


@pytest.mark.parametrize("tool", [slowly, blocking])
def test_a_call_past_its_deadline_is_told_so(tool, monkeypatch):
    monkeypatch.setattr("envgym.tools.box.GRACE", 1000)  # these need no time to clean up, and are given none
    texts, box = answers([tool, add], (tool.__name__, {"seconds": 3}), ("add", {"a": 1, "b": 1}), timeout=0.2)
    assert texts == [f"Error: {tool.__name__} took longer than 0.2 s", "2"]
    assert counts(box) == [2, 0, 0, 1]


def test_a_tool_may_have_a_deadline_of_its_own():
    patient = Tool.from_function(slowly, name="patient", timeout=5)
    calls = [("patient", {"seconds": 0.3}), ("slowly", {"seconds": 0.3})]
    assert answers([patient, slowly], *calls, timeout=0.1)[0] == ["slept 0.3", "Error: slowly took longer than 0.1 s"]


def test_a_tool_that_will_not_be_cancelled_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("envgym.tools.box.GRACE", 0.1)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def main():
        box = ToolBox([stubborn], timeout=0.1)
        [message] = await box.call([ToolCall("", "stubborn")])
        left = asyncio.all_tasks() - {asyncio.current_task()}
        release.set()
        await asyncio.gather(*left)
        return message.text

    assert asyncio.run(main()) == "Error: stubborn took longer than 0.1 s"


def test_a_blocking_tool_never_blocks_the_loop():
    """Here it waits for what only the loop can give it."""
    begun, release = threading.Semaphore(0), threading.Event()

    def held() -> str:
        begun.release()
        return "released" if release.wait(60) else "left alone"

    async def main():
        call = asyncio.create_task(ToolBox([held], timeout=1000).call([ToolCall("", "held")] * 3))
        for _ in range(3):
            while not begun.acquire(blocking=False):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        release.set()
        return [message.text for message in await call]

    assert asyncio.run(main()) == ["released"] * 3


def test_threads_that_hang_are_bounded_and_end(monkeypatch):
    monkeypatch.setattr(tool_module, "MAX_OVERDUE", 4)
    monkeypatch.setattr(tool_module, "_overdue", [])
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "tool hang"]

    async def main():
        box = ToolBox([hang, add], timeout=0.05)
        monkeypatch.setattr("envgym.tools.box.GRACE", 0.05)
        for _ in range(4):
            [message] = await box.call([ToolCall("", "hang")])
            assert message.text == "Error: hang took longer than 0.05 s"
        with pytest.raises(InvalidOutcome, match="4 tool calls are running past their deadline") as error:
            await box.call([ToolCall("", "hang")])
        assert error.value.kind == "tool_stuck"
        assert len(threads()) == 4
        release.set()
        for thread in threads():
            await asyncio.to_thread(thread.join, 10)
        [message] = await ToolBox([add]).call([ToolCall("", "add", {"a": 1, "b": 2})])
        assert message.text == "3", "and all is well again"

    asyncio.run(main())


def test_nothing_is_left_where_the_turn_is_cancelled():
    """Whoever plays the episode stops waiting: its deadline, or Ctrl-C."""
    started, cleaned = [], []

    async def wait() -> None:
        started.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ToolBox([wait, blocking]).call(
                    [*[ToolCall("", "wait")] * 3, ToolCall("", "blocking", {"seconds": 0.3})]
                )
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert (len(started), len(cleaned), others) == (3, 3, set())

    asyncio.run(main())
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("tool ") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_tool_that_blocks_for_ever_does_not_keep_the_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, time\n"
        "from envgym.tools import ToolBox\n"
        "from envgym.types import ImagePart, ToolCall\n"
        "def hang() -> None: time.sleep(600)\n"
        "print(asyncio.run(ToolBox([hang], timeout=0.1).call([ToolCall('', 'hang')]))[0].text)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "Error: hang took longer than 0.1 s\n"


# -- finding tools ----------------------------------------------------------------------------------------


def test_two_tools_of_one_name():
    with pytest.raises(ConfigError, match="two tools have the name 'add': rename one of them"):
        ToolBox([add, Tool.from_function(add)])


def test_tools_are_found_by_name(tmp_path):
    (tmp_path / "shop.py").write_text(
        "import envgym\n"
        "def price(item: str) -> int:\n    '''The price.'''\n    return len(item)\n"
        "slow = envgym.Tool.from_function(price, name='slow', timeout=3)\n"
        "number = 3\n"
    )
    price = load_tool(f"{tmp_path}/shop.py:price")
    assert asyncio.run(price.run({"item": "abc"})) == 3
    assert load_tool(f"{tmp_path}/shop.py:slow").timeout == 3
    with pytest.raises(NameNotFound, match=r"shop.py defines no 'prize'. Did you mean 'price'\?"):
        load_tool(f"{tmp_path}/shop.py:prize")
    with pytest.raises(ConfigError, match=r"shop.py:number is not usable as tool: it must be a function"):
        load_tool(f"{tmp_path}/shop.py:number")
    with pytest.raises(NameNotFound, match="names no tool"):
        load_tool(f"{tmp_path}/shop.py")
    with pytest.raises(ConfigError, match=r"tool 'dumps': parameter 'obj' needs a type"):
        load_tool("json:dumps")


def test_what_the_policy_is_told_is_json():
    assert json.loads(json.dumps([spec.as_dict() for spec in ToolBox([add, slowly]).specs]))


def test_a_result_may_be_a_picture_or_texts_and_pictures():
    picture = ImagePart.from_value(np.zeros((4, 6, 3), np.uint8))

    def draw() -> object:
        return picture

    def show() -> object:
        return ["x" * 8, picture, {"a": 1}]

    def contents(max_chars, **settings):
        box = ToolBox([draw, show], max_chars=max_chars, **settings)
        calls = [ToolCall("0", "draw", {}), ToolCall("1", "show", {})]
        return [[getattr(p, "text", "") or p for p in message.content] for message in asyncio.run(box.call(calls))]

    assert contents(15) == [[picture], ["x" * 8, picture, '{"a":1}']]
    assert contents(14) == [[picture], ['xxxxxxx\n[truncated: 15 characters in all]\n{"a":1}', picture]]
    assert contents(99, with_images=False) == [["[image 6 x 4]"], ['xxxxxxxx[image 6 x 4]{"a":1}']]
