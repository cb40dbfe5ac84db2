"""The coding environment: what an answer earns, what comes back after a failed attempt, and whose fault things are."""

import ast
import asyncio
import json

import pytest

from envgym.envs.code import Code, last_block
from envgym.envs.code.problems import held_out_tasks
from envgym.errors import ConfigError, DataError, InvalidOutcome
from envgym.types import Action, Message, Task

TESTS = [{"call": "double", "args": [number], "expected": 2 * number} for number in range(1, 5)]
TASK = Task("t", "Write double(x).", "def double(x):\n    return 2 * x", {"tests": TESTS})
RIGHT = "```python\ndef double(x):\n    return x + x\n```"
HALF = "```python\ndef double(x):\n    return 2 * x if x < 3 else 0\n```"


def play(*answers, task=TASK, **config):
    """The results of the steps that these answers lead to, and the first observation."""

    async def main():
        async with Code("code-v0", **config) as spec, spec.make() as env:
            observation, _ = await env.reset(options={"task": task}, seed=0)
            steps = []
            for answer in answers:
                steps.append(await env.step(Action(answer)))
                if steps[-1][2]:
                    break
            return observation, steps

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "reward", "expected"),
    [
        (RIGHT, 1, {"tests_passed": 1}),
        (f"First I thought ```python\nexit()\n``` but no:\n{RIGHT}\nDone.", 1, {}),
        (RIGHT.replace("python", "Python3"), 1, {}),
        ("def double(x): return x * 2", 1, {}),
        (HALF, 0, {"tests_passed": 0.5, "error": 0}),
        ("", 0, {"answered": 0, "tests_passed": 0}),
        ("```python\n```", 0, {"answered": 0}),
        ("I do not know.", 0, {"answered": 1, "error": 1}),
        ("while True: pass", 0, {"timeout": 1}),
        ("x = [0] * 10**10", 0, {"memory": 1}),
        ("while True: print(0)", 0, {"output": 1}),
    ],
)
def test_what_an_answer_earns(answer, reward, expected):
    limits = {"cpu_seconds": 0.5, "output_kb": 16, "memory_mb": 256}
    _, [(_, earned, terminated, truncated, info)] = play(answer, limits=limits)
    assert (earned, info["score"], terminated, truncated) == (reward, reward, True, False)
    assert expected.items() <= info["metrics"].items()
    assert info["metrics"]["timeout"] == expected.get("timeout", 0)


def test_the_share_that_passes_can_be_paid():
    _, [(_, reward, _, _, info)] = play(HALF, reward="share")
    assert (reward, info["score"]) == (0.5, 0)


def test_the_instruction_is_part_of_the_problem():
    observation, _ = play(RIGHT)
    [message] = observation.messages
    assert message.text == "Write double(x).\n\nAnswer with Python code in one ```python block."
    observation, _ = play(RIGHT, instruction="")
    assert observation.messages[0].text == "Write double(x)."


def test_a_failed_attempt_comes_back_with_what_failed():
    _, steps = play("", HALF, RIGHT, "never asked", attempts=4)
    (first, *no_reward), (second, *_), (_, reward, terminated, _, info) = steps
    assert no_reward == [None, False, False, {}]
    assert first.messages[0].text.startswith("There was no code in the answer.")
    assert second.messages[0].text.startswith("Test 3 of 4 failed: double(3) returned 0, expected 6")
    assert (reward, terminated) == (1, True)
    assert info["metrics"]["attempts"] == 3


def test_the_last_attempt_decides():
    _, steps = play(HALF, HALF, attempts=2, reward="share")
    assert [(reward, terminated) for _, reward, terminated, _, _ in steps] == [(None, False), (0.5, True)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\n```python\nb\n```", "b"),
        ("```python\na\n```\n```text\nb\n```", "a"),
        ("so ```python\na\n``` no, ```PYTHON3 \nb\n``` yes", "b"),
        ("```\na\n```", "a"),
        ("```\na\n```\nor\n```text\nb\n```", "b"),
        ("```\na\n```\nor\n```text\nb", "b"),
        ("```py\na\n\n  b", "a\n\n  b"),
        ("text\n  ```python\na = '```'\n  ```", "a = '```'"),
        ("```python\na```", "a"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_last_python_block_counts(text, code):
    assert last_block(text).rstrip() == code


def test_a_block_in_an_item_of_a_list_is_read_without_its_indentation():
    text = "1. The function:\n   ```python\n   def f():\n       return 1\n   ```\n2. That is all."
    assert last_block(text) == "def f():\n    return 1\n"
    assert last_block("So: ```python\n    return 1\n```") == "    return 1\n"  # the body of a function


# -- tasks ------------------------------------------------------------------------------------------------


def test_the_shipped_solutions_pass_and_empty_ones_do_not():
    """Every eighth held-out task, by its demonstration and by a function that returns nothing."""

    async def main():
        async with Code("code-v0", n_tests=5) as spec:

            async def reward(task, answer):
                async with spec.make() as env:
                    await env.reset(options={"task": task})
                    return (await env.step(Action(answer)))[1]

            tasks = [await spec.tasks("test").get(index) for index in range(0, 256, 8)]
            shown = [reward(task, spec.demonstrations(task, 0)[0]) for task in tasks]
            empty = [reward(task, task.answer.partition("\n")[0] + " pass") for task in tasks[::4]]
            return await asyncio.gather(*shown), await asyncio.gather(*empty)

    shown, empty = asyncio.run(main())
    assert shown == [1] * 32
    assert empty == [0] * 8


@pytest.fixture
def rows(tmp_path):
    """write(rows) -> settings that read tasks from a file of them."""

    def write(rows):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path)}

    return write


FUNCTION = "def f(x): return x + 1"


@pytest.mark.parametrize(
    ("solution", "row"),
    [
        ("code", {"code": FUNCTION, "test_list": ["assert f(1) == 2", "assert f(0) == 1"]}),
        ("solution", {"solution": FUNCTION, "tests": [{"args": [1], "expected": 2}], "entry_point": "f"}),
        (
            "canonical_solution",
            {
                "canonical_solution": FUNCTION,
                "test": "def check(candidate):\n    assert candidate(1) == 2",
                "entry_point": "f",
            },
        ),
        ("answer", {"answer": "print(int(input()) + 1)", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}),
    ],
)
def test_tasks_from_a_file(solution, row, rows):
    """The forms that common collections of problems have."""
    data = rows([{**row, "prompt": f"p{i}"} for i in range(8)])

    async def main():
        async with Code("code-v0", data={**data, "answer": solution}) as spec, spec.make() as env:
            assert spec.tasks("train").size + spec.tasks("test").size == 8
            await env.reset(seed=0)
            [shown] = spec.demonstrations(env.task, 0)
            return (await env.step(Action(shown)))[1]

    assert asyncio.run(main()) == 1


BEGINNING = 'from math import floor\n\n\ndef whole(x):\n    """x without what is behind its point."""\n'
BEGUN = Task("t", BEGINNING, "    return floor(x)", {"entry_point": "whole", "tests": [{"args": [2.5], "expected": 2}]})


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("```python\n    return floor(x)\n```", 1),
        ("    return floor(x)", 1),
        ("```python\ndef whole(x):\n    return floor(x)\n```", 1),
        ("```python\nfrom __future__ import annotations\ndef whole(x: List) -> Any:\n    return int(x)\n```", 1),
        ("```python\n    pass\n```", 0),
        ("```python\n```", 0),
        ("I do not know.", 0),
    ],
)
def test_a_prompt_that_begins_the_program_is_part_of_it(answer, reward):
    assert play(answer, task=BEGUN)[1][0][1] == reward
    asked = Task("t", (Message("system", "Be brief."), Message("user", BEGINNING)), None, BEGUN.fields)
    assert play(answer, task=asked)[1][0][1] == reward


def test_what_a_row_sets_up_runs_after_the_program_and_before_the_tests():
    code = "from dataclasses import *\n\n@dataclass\nclass Node:\n    size: int\n\ndef value(node): return node.size"
    fields = {"test_list": ["assert value(root) == floor(2.5)"], "test_setup_code": "root = Node(2)"}
    task = Task("t", "Write value(node).", code, {**fields, "test_imports": ["from math import floor"]})
    assert play(code, task=task)[1][0][1] == 1
    assert play(code.replace("node.size", "3"), task=task)[1][0][1] == 0


COLLECTIONS = {
    "mbpp": {
        "text": "Write a function that adds one.",
        "code": "def f(x): \r\n\treturn x + 1",
        "task_id": 1,
        "test_setup_code": "",
        "test_list": ["assert f(1) == 2"],
        "challenge_test_list": [],
    },
    "humaneval": {
        "task_id": "a/1",
        "prompt": 'from typing import Any\n\n\ndef f(x: Any) -> Any:\n    """x and one."""\n',
        "entry_point": "f",
        "canonical_solution": "    return x + 1\n",
        "test": "def check(candidate):\n    assert candidate(1) == 2",
    },
}


@pytest.mark.parametrize("collection", COLLECTIONS)
def test_rows_of_well_known_collections_need_no_settings(collection, rows):
    row = COLLECTIONS[collection]
    asked = "text" if "text" in row else "prompt"
    data = rows([{**row, asked: row[asked].replace("one", f"one ({number})", 1)} for number in range(8)])
    assert asyncio.run(rewards_of_references(data)) == [(1, 0)] * 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("mbpp", 974)])
def test_every_reference_program_earns_one_and_an_emptied_one_nothing(name, count, benchmark_data):
    found = asyncio.run(rewards_of_references({"path": str(benchmark_data / f"{name}.jsonl")}))
    assert len(found) == count
    assert [(number, rewards) for number, rewards in enumerate(found) if rewards != (1, 0)] == []


async def rewards_of_references(data):
    """What each task's demonstration earns, and the same program with the bodies of its functions emptied."""

    async with Code("code-v0", data=data) as spec:
        free = asyncio.Semaphore(8)

        async def reward(task, answer):
            async with free, spec.make() as env:
                await env.reset(options={"task": task}, seed=0)
                return (await env.step(Action(answer)))[1]

        splits = [spec.tasks("train"), spec.tasks("test")]
        tasks = [await split.get(index) for split in splits for index in range(split.size)]
        shown = [spec.demonstrations(task, 0)[0] for task in tasks]
        right = asyncio.gather(*map(reward, tasks, shown))
        empty = asyncio.gather(*map(reward, tasks, [emptied(last_block(answer)) for answer in shown]))
        return list(zip(await right, await empty, strict=True))


def emptied(code):
    program = ast.parse(code)
    for node in ast.walk(program):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(program)


@pytest.mark.parametrize(
    ("row", "config", "says"),
    [
        ({"prompt": "p", "answer": "x"}, {}, "has no tests in tests, test_list"),
        ({"prompt": "p", "answer": "x", "tests": ["assert 1"]}, {"tests": "checks"}, "has no tests in checks"),
        ({"prompt": "p", "answer": "x", "tests": [5]}, {}, "a test that cannot be used, 5"),
    ],
)
def test_rows_without_usable_tests_are_found_at_setup(row, config, says, rows):
    data = rows([{**row, "prompt": f"p{i}"} for i in range(4)])

    async def main():
        async with Code("code-v0", data=data, **config):
            pass

    with pytest.raises(DataError, match=says):
        asyncio.run(main())


def test_a_task_without_a_solution_has_no_demonstration():
    with pytest.raises(DataError, match="no solution to show"):
        Code("code-v0").demonstrations(Task("t", "p", None), 0)


def test_demonstrations_vary_with_the_seed_and_are_read_as_code():
    task = held_out_tasks(5)[0]
    shown = {Code("code-v0").demonstrations(task, seed)[0] for seed in range(20)}
    assert len(shown) == 3
    assert {last_block(text).rstrip() for text in shown} == {task.answer}


def test_settings_that_cannot_be():
    for wrong in ({"attempts": 0}, {"reward": "some"}, {"limits": {"memory_mb": 1}}, {"limits": {"cpu": 1}}):
        with pytest.raises(ConfigError):
            Code("code-v0", **wrong)


# -- trouble ----------------------------------------------------------------------------------------------


def test_trouble_of_the_sandbox_is_no_wrong_answer(monkeypatch):
    """Its supervisors die before they say anything."""
    from envgym.sandbox import sandbox

    monkeypatch.setattr(sandbox.wire, "pack", lambda *_: b"\0\0\0\1\0\0\0\0?")
    with pytest.raises(InvalidOutcome) as error:
        play(RIGHT)
    assert (error.value.kind, error.value.retryable) == ("sandbox", True)
