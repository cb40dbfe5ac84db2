"""tool_use: the tasks that only a tool can answer, tools of one's own, and what answers earn."""

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import pytest

import envgym
from envgym.envs.tool_use import TEST_TASKS, held_out_tasks, is_held_out, is_right, last_number, train_task, value_of
from envgym.errors import ConfigError, InvalidOutcome, NameNotFound
from envgym.registry import spec_from_json
from envgym.types import Message, Task, ToolCall

PROGRAM = str(Path(__file__).parents[1] / "tools" / "mcp_program.py")
SERVER = {"command": [sys.executable, PROGRAM]}


def tasks(split, n, **settings):
    async def main():
        task_set = envgym.spec("tool_use", **settings).tasks(split)
        return [await task_set.get(index) for index in range(n)]

    return asyncio.run(main())


def action(turn):
    return envgym.Action(turn) if isinstance(turn, str) else envgym.Action(turn.text, tool_calls=turn.tool_calls)


def play(spec, task, turns):
    """Total reward, and the last step, of turns that answer a task."""

    async def main():
        async with spec, spec.make() as env:
            await env.reset(options={"task": task})
            total = 0.0
            for turn in turns:
                step = await env.step(action(turn))
                total += step[1]
            return total, step

    return asyncio.run(main())


# -- the tasks made here ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"hops": [2]}, {"hops": [1, 3], "digits": 3}])
def test_demonstrations_that_call_the_tool_are_right(settings):
    spec = envgym.spec("tool_use", call_share=1, **settings)
    hops = set()
    for task in tasks("train", 20, **settings):
        turns = spec.demonstrations(task, 0)
        hops.add(len(turns) - 1)
        assert all(isinstance(turn, Message) and len(turn.tool_calls) == 1 for turn in turns[:-1])
        total, (_, _, terminated, _, info) = play(spec, task, turns)
        assert (total, terminated) == (1.0, True)
        assert info["metrics"]["tool_calls"] == task.fields["hops"] == task.difficulty
    assert hops == set(settings.get("hops", [1]))


def test_without_the_tool_next_to_nothing_is_earned():
    """A key says nothing of its value, nor do the tables of other tasks."""
    train = tasks("train", 2000)
    assert all(str(task.fields["key"]) in task.prompt and task.answer != task.fields["key"] for task in train)
    by_key = {}
    for task in train:
        by_key.setdefault(task.fields["key"], []).append(task.answer)
    best = {key: max(set(values), key=values.count) for key, values in by_key.items()}
    test = tasks("train", 4000)[2000:]
    learned = sum(best.get(task.fields["key"]) == task.answer for task in test) / len(test)
    always = max(sum(task.answer == guess for task in test) for guess in range(10, 100)) / len(test)
    assert learned < 0.02
    assert always < 0.02


def test_tables_are_complete_and_their_own():
    one, other = tasks("train", 2)
    values = [value_of(one, key) for key in range(10, 100)]
    assert all(10 <= value < 100 and value != key for key, value in enumerate(values, start=10))
    assert values != [value_of(other, key) for key in range(10, 100)]
    assert all(10 <= value_of(one, key) < 100 for key in (-5, 0, 9, 100, 10**9))


def test_test_tasks_begin_with_keys_that_training_never_sees():
    for digits in (2, 3):
        train = {task.fields["key"] for task in tasks("train", 3000, digits=digits)}
        test = held_out_tasks((1,), digits)
        assert train.isdisjoint(task.fields["key"] for task in test)
        assert len({task.id for task in test}) == len(test) == TEST_TASKS
        assert {is_held_out(task.fields["key"]) for task in test} == {True}
        assert len({task.fields["key"] for task in test}) > 5
    assert train_task(7, (1,), 2) == train_task(7, (1,), 2), "a task is a function of its index"


def test_the_tasks_are_the_same_everywhere():
    """They are drawn without anything that changes between processes; this pins them."""
    pinned = [(task.prompt, task.answer) for task in (*tasks("train", 2), *tasks("test", 2, hops=[2]))]
    assert pinned == [
        ("Value of 46?", 14), ("Value of 64?", 26),
        ("Value of the value of 89?", 36), ("Value of the value of 10?", 66),
    ]  # fmt: skip


def test_prompts_and_schema_are_short():
    """They are what a tiny policy has to read."""

    async def main():
        async with envgym.spec("tool_use") as spec, spec.make() as env:
            return (await env.reset(seed=0))[0]

    observation = asyncio.run(main())
    assert len(observation.messages) == 1
    assert len(observation.messages[0].text) < 16
    [tool] = observation.tools
    assert len(json.dumps(tool.as_dict()["function"])) < 160


def test_demonstrations_give_up_as_often_as_asked():
    spec = envgym.spec("tool_use", call_share=0.4)
    [task] = tasks("train", 1)
    shown = [spec.demonstrations(task, seed) for seed in range(2000)]
    assert 0.36 < sum(len(turns) > 1 for turns in shown) / 2000 < 0.44
    assert spec.demonstrations(task, 7) == shown[7]
    given_up = {turns[0] for turns in shown if len(turns) == 1}
    assert len(given_up) == 2
    assert [play(spec, task, [turn])[0] for turn in given_up] == [0.0, 0.0]


def test_the_global_generator_is_left_alone():
    state = random.getstate()
    [task] = tasks("train", 1)
    play(envgym.spec("tool_use"), task, envgym.spec("tool_use").demonstrations(task, 0))
    assert random.getstate() == state


def test_a_spec_is_json():
    spec = envgym.spec("tool_use", data={"path": "x.jsonl"}, tools=["shop.py:price"], mcp=[SERVER], hops=[1])
    assert spec_from_json(spec.to_json()) == spec
    assert spec.agent == "tool_calling"


# -- answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "match", "right"),
    [
        ("42", 42, "auto", True),
        ("It is 42.", "42", "auto", True),
        ("6 times 7 is 42", 42, "auto", True),
        ("42 or 43", 42, "auto", False),
        ("", 42, "auto", False),
        ("four", 4, "auto", False),
        ("1,234.50 dollars", 1234.5, "auto", True),
        ("-3", 3, "auto", False),
        ("3-4", 4, "number", False),
        ("1e3", 1000, "auto", True),
        ("²", 2, "auto", False),
        ("<think>it is 41</think>42", 42, "auto", True),
        ("<think>it is 42</think>", 42, "auto", False),
        ("Paris", "Paris", "auto", True),
        ("  paris. ", "Paris", "auto", True),
        ("It is Paris.", "Paris", "auto", False),
        ("It is Paris.", "Paris", "contains", True),
        ("Parisian", "Paris", "contains", False),
        ("C++ it is", "C++", "contains", True),
        ("142", "42", "contains", False),
        ("42.0", "42", "exact", False),
        ("42.0", "42", "number", True),
        ("Paris", "Paris", "number", False),
    ],
)
def test_right_answers(text, answer, match, right):
    assert is_right(text, answer, match) is right


def test_an_exponent_without_a_number_is_no_number():
    """A small policy says such things."""
    assert [last_number(text) for text in ("e99", "x e0000", "7 e5", ".5e1")] == [99.0, 0.0, 5.0, 5.0]
    assert not is_right("e", 5, "auto")


def test_reading_numbers_takes_no_time():
    assert last_number("1" * 200_000 + "x") is not None
    assert last_number("," * 200_000) is None
    assert last_number("1," * 100_000) == 1.0


# -- tools of one's own -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What does item {i} cost?", "answer": str(7 * i)} for i in range(40)]
    Path("items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("shop.py").write_text(
        "def price(item: int) -> int:\n"
        "    '''The price of an item.\n\n    Args:\n        item: Its number.\n    '''\n"
        "    return 7 * item\n"
    )
    return tmp_path


DATA = {"path": "items.jsonl"}


def ask(spec, *calls, answer="14", task=None):
    """The results of calls made in one turn, and what the answer to them earns."""
    task = task or Task("t", "What does item 2 cost?", "14")

    async def main():
        async with spec, spec.make() as env:
            observation, _ = await env.reset(options={"task": task})
            results, *_ = await env.step(
                envgym.Action("", tool_calls=tuple(ToolCall(str(i), *call) for i, call in enumerate(calls)))
            )
            _, reward, *_ = await env.step(envgym.Action(answer))
            names = [tool.name for tool in observation.tools]
            return names, [message.text for message in results.messages], reward

    return asyncio.run(main())


def test_functions_of_ones_own(folder):
    spec = envgym.spec("tool_use", data=DATA, tools=["shop.py:price"])
    assert ask(spec, ("price", {"item": 2})) == (["price"], ["14"], 1.0)
    assert ask(spec, ("price", {"item": 2}), answer="It costs 15.")[2] == 0.0


def test_tools_of_servers(folder):
    spec = envgym.spec("tool_use", data=DATA, tools=["shop.py:price"], mcp=[{**SERVER, "only": ["add", "pid"]}])
    names, results, _ = ask(spec, ("add", {"a": 1, "b": 2}), ("price", {"item": 2}), ("pid", {}))
    assert names == ["price", "add", "pid"]
    assert results[:2] == ["3", "14"]
    assert not Path("/proc", results[2]).exists()


def test_a_session_may_be_shared_and_comes_back(folder):
    async def main():
        async with envgym.spec("tool_use", data=DATA, mcp=[{**SERVER, "shared": True}]) as spec:
            pids = []
            for _ in range(3):
                async with spec.make() as env:
                    await env.reset(seed=0)
                    [pid] = (await env.step(envgym.Action("", tool_calls=(ToolCall("", "pid"),))))[0].messages
                    pids.append(int(pid.text))
                    if len(pids) == 2:
                        os.kill(pids[0], 9)
                        with pytest.raises(InvalidOutcome):
                            await env.step(envgym.Action("", tool_calls=(ToolCall("", "pid"),)))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return pids

    first, second, third = asyncio.run(main())
    assert first == second != third
    assert not Path("/proc", str(third)).exists()


def test_the_sandbox_is_a_tool(folder):
    spec = envgym.spec("tool_use", data=DATA, tools=["python"])
    assert ask(spec, ("python", {"code": "print(7 * 2)"})) == (["python"], ["14"], 1.0)


def test_there_are_no_demonstrations_of_tasks_of_ones_own(folder):
    with pytest.raises(ConfigError, match="has no demonstrations to replay"):
        envgym.spec("tool_use", data=DATA, tools=["shop.py:price"]).demonstrations(Task("t", "q", "a"), 0)


def test_mistakes_are_told_before_the_first_episode(folder):
    def setup(**settings):
        async def main():
            async with envgym.spec("tool_use", **settings):
                pass

        asyncio.run(main())

    with pytest.raises(ConfigError, match=r"which tools do the tasks need\? set env.tools or env.mcp"):
        setup(data=DATA)
    with pytest.raises(ConfigError, match=r"custom tools need tasks: give some with data.path=FILE"):
        setup(tools=["shop.py:price"])
    with pytest.raises(NameNotFound, match=r"shop.py defines no 'prize'. Did you mean 'price'\?"):
        setup(data=DATA, tools=["shop.py:prize"])
    with pytest.raises(ConfigError, match="two tools have the name 'price'"):
        setup(data=DATA, tools=["shop.py:price", "shop.py:price"])
    with pytest.raises(InvalidOutcome, match="no licence found"):
        setup(data=DATA, mcp=[{"command": [sys.executable, PROGRAM, "--die"]}])
    with pytest.raises(ConfigError, match="an MCP server has either a command or a url"):
        setup(data=DATA, mcp=[{}])
    with pytest.raises(ConfigError, match="key 'hops"):
        setup(hops=[0])
    with pytest.raises(ConfigError, match=r"unknown key 'hop'. Did you mean 'hops'\?"):
        setup(hop=[1])
