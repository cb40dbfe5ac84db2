"""data.few_shot: training tasks with right answers before every prompt, and never one that is held out."""

import asyncio
import json

import pytest

import envgym
from envgym.errors import ConfigError, DataError
from envgym.types import Message

FINAL = {"box": r"\boxed{7}", "####": "#### 7", "last_number": "The answer is 7", "The answer is": "The answer is 7"}


def problem(number):
    total = number + 4
    answer = f"It is {number} + 4 = <<{number}+4={total}>>{total}.\n#### {total}"
    return {"question": f"What is {number} + 4?", "answer": answer}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Six problems to train on and two that are held out, of which the training file has one too."""
    train = [problem(number) for number in range(7)]
    test = write(tmp_path / "test.jsonl", [problem(3), problem(9)])
    return {"path": write(tmp_path / "train.jsonl", train), "test_path": test}


def observations(env, data, split="test", **settings):
    """The messages that every task begins with."""

    async def main():
        async with envgym.spec(env, data=data, **settings) as spec:
            tasks, first = spec.tasks(split), []
            for number in range(tasks.size):
                async with spec.make() as instance:
                    observation, _ = await instance.reset(seed=number, options={"task": await tasks.get(number)})
                first.append(observation)
            return first

    return asyncio.run(main())


def questions(observation):
    return [message.text.partition("\n")[0] for message in observation.messages if message.role == "user"]


def test_every_prompt_shows_the_same_training_tasks_first_with_their_working(data):
    first, second = observations("gsm8k", data | {"few_shot": 3})
    assert [message.role for message in first.messages] == ["user", "assistant"] * 3 + ["user"]
    assert questions(first)[:-1] == questions(second)[:-1]
    assert (questions(first)[-1], questions(second)[-1]) == ("What is 3 + 4?", "What is 9 + 4?")
    number = int(questions(first)[0].removeprefix("What is ").removesuffix(" + 4?"))
    assert first.messages[0].text.endswith("Put the final answer in \\boxed{}.")
    assert first.messages[1].text == f"It is {number} + 4 = {number + 4}.\n\\boxed{{{number + 4}}}"


def test_no_held_out_task_is_ever_shown(data):
    for seed in range(20):
        for observation in observations("gsm8k", data | {"few_shot": 6, "few_shot_seed": seed}):
            assert sorted(questions(observation)[:-1]) == [f"What is {number} + 4?" for number in (0, 1, 2, 4, 5, 6)]


def test_a_training_task_is_no_example_of_itself(data):
    for observation in observations("gsm8k", data | {"few_shot": 5}, split="train"):
        assert len(set(questions(observation))) == 6


def test_the_seed_draws_others_and_the_same_one_the_same(data):
    seeds = [data | {"few_shot": 2, "few_shot_seed": seed} for seed in (0, 0, 1, 2, 3)]
    drawn = [questions(observations("gsm8k", settings)[0]) for settings in seeds]
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn}) > 2


@pytest.mark.parametrize("read", FINAL)
def test_the_final_answer_has_the_form_that_is_read(read, tmp_path):
    data = {"path": write(tmp_path / "a.jsonl", [problem(3)]), "test_path": write(tmp_path / "b.jsonl", [problem(9)])}
    [observation] = observations("gsm8k", data | {"few_shot": 1}, read=read)
    assert observation.messages[1].text == f"It is 3 + 4 = 7.\n{FINAL[read]}"


def test_worked_answers_earn_1(benchmark_data):
    async def main():
        async with envgym.spec("gsm8k", data={"folder": str(benchmark_data)}) as spec:
            tasks, rewards = spec.tasks("train"), []
            for number in range(100):
                task = await tasks.get(number)
                async with spec.make() as env:
                    await env.reset(seed=0, options={"task": task})
                    rewards.append((await env.step(spec.worked_answer(task)[0]))[1])
            return rewards

    assert asyncio.run(main()) == [1.0] * 100


def test_options_and_system_messages_are_shown_once_and_in_their_place(tmp_path):
    rows = [{"question": f"Which is {n}?", "choices": [str(n), "none"], "answer": "A"} for n in range(4)]
    data = {"path": write(tmp_path / "a.jsonl", rows[:3]), "test_path": write(tmp_path / "b.jsonl", rows[3:])}
    [observation] = observations("multiple_choice", data | {"few_shot": 2, "system": "Be brief."})
    assert [message.role for message in observation.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert "A. " in observation.messages[1].text
    assert observation.messages[2] == Message("assistant", r"\boxed{A}")


SUM = {"text": "Add.", "code": "def add(a, b):\n    return a + b", "test_list": ["assert add(1, 2) == 3"] * 3}
TWICE = {"prompt": "def twice(x):\n", "canonical_solution": "    return 2 * x\n", "entry_point": "twice",
         "test": "def check(candidate):\n    assert candidate(3) == 6\n"}  # fmt: skip


def test_mbpp_shows_the_three_of_its_paper(tmp_path):
    rows = [{**SUM, "task_id": n, "text": f"Add {n}."} for n in (1, 2, 3, 4, 11, 601)]
    data = {"path": (path := write(tmp_path / "mbpp.jsonl", rows)), "test_path": path}
    [observation] = observations("mbpp", data | {"few_shot": 3})
    assert [text.split("task: ")[1][:6] for text in questions(observation)] == ["Add 2.", "Add 3.", "Add 4.", "Add 11"]
    assert observation.messages[1].text == f"```python\n{SUM['code']}\n```"
    with pytest.raises(
        DataError, match=r"data.few_shot=4: environment mbpp has 3 training tasks to take examples from"
    ):
        observations("mbpp", data | {"few_shot": 4})


def test_selected_rows_that_are_held_out_are_no_examples(data):
    with pytest.raises(DataError, match=r"data.few_shot=1: environment gsm8k has 0 training tasks|nothing to train on"):
        observations("gsm8k", data | {"few_shot": 1, "few_shot_select": {"question": ["What is 3 + 4?"]}})


def test_raw_text_is_continued(tmp_path):
    test = write(tmp_path / "b.jsonl", [TWICE | {"prompt": "def f(x):\n"}])
    data = {"path": write(tmp_path / "a.jsonl", [TWICE]), "test_path": test}
    [observation] = observations("code", data | {"few_shot": 1}, completion=True)
    assert observation.text == "def twice(x):\n    return 2 * x\n\ndef f(x):\n"
    assert not observation.messages


def test_a_set_without_training_rows_is_refused(tmp_path):
    path = write(tmp_path / "svamp.jsonl", [{"Body": "a", "Question": "b", "Answer": 1.0, "ID": 1}])
    with pytest.raises(
        DataError, match=r"environment svamp has 0 training tasks to take examples from, and a held-out"
    ):
        observations("svamp", {"test_path": path, "few_shot": 2})
    rows = write(tmp_path / "more.jsonl", [{"Body": "c", "Question": "d", "Answer": 2.0, "ID": 2}])
    assert len(observations("svamp", {"path": rows, "test_path": path, "few_shot": 1})[0].messages) == 3


def test_answers_of_several_turns_are_refused(data, monkeypatch):
    from envgym.envs.math_verify import MathVerify

    monkeypatch.setattr(MathVerify, "worked_answer", lambda self, task: ["One.", "Two."])
    with pytest.raises(ConfigError, match=r"data.few_shot: an example has one turn, and a right answer in gsm8k more"):
        observations("gsm8k", data | {"few_shot": 1})


@pytest.mark.parametrize("settings", [{"concurrency": 1}, {"processes": 1}])
def test_examples_take_no_slot_and_are_shown_by_instances_in_processes(settings, data):
    first, _ = observations("gsm8k", data | {"few_shot": 2}, **settings)
    assert len(first.messages) == 5
