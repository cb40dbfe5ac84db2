"""math_verify: what earns the reward, and that hostile answers cost nobody else anything."""

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envgym
from envgym.env import EnvSpec
from envgym.envs.math_verify import grader, held_out_tasks, train_task
from envgym.envs.math_verify.answers import grade_by_text, looks_costly
from envgym.errors import CallTimeout, ConfigError, MissingDependency, WorkerError
from envgym.processes.pool import Processes
from envgym.processes.runtime import message_of
from envgym.rewards.final_answers import boxed, reference
from envgym.types import Task
from tests.running import is_running

TOWER = "9^{9^{9^{9}}}"


def play(answers, gold, **config):
    """The (score, metrics) of answers to one task, all given at the same time."""

    async def one(spec, text):
        env = spec.make()
        await env.reset(options={"task": Task("t", "q", gold)})
        _, reward, terminated, _, info = await env.step(envgym.Action(text))
        assert terminated
        assert reward == info["score"]
        return reward, info["metrics"]

    async def main():
        async with envgym.spec("math_verify", **config) as spec:
            return await asyncio.gather(*(one(spec, text) for text in answers))

    return asyncio.run(main())


def box(answer):
    return rf"\boxed{{{answer}}}"


# -- reading answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("42", None),
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {x}", "x"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{" * 20_000, None),
        (r"\boxed", None),
        (r"\boxed{½}", "½"),
    ],
)
def test_the_last_box_is_the_answer(text, content):
    assert boxed(text) == content


@given(st.text(alphabet="\\{}boxed1", max_size=40))
@settings(deadline=None)
def test_what_is_boxed_has_balanced_braces(text):
    content = boxed(text)
    if content is not None:
        plain = content.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        assert plain.count("{") == plain.count("}")


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("6 * 7 = <<6*7=42>>42\n#### 42", "42"),
        (r"so \boxed{\frac12}", r"\frac12"),
        (42, "42"),
        (0.5, "0.5"),
        (" x ", "x"),
    ],
)
def test_reference_answers(answer, final):
    assert reference(answer) == final


@given(st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20))
@settings(deadline=None)
def test_whole_numbers_are_judged_at_once(a, b):
    assert grade_by_text(str(a), str(b)) is (a == b)
    assert grade_by_text(f"{a:,}", f"{a}.000") is True


# -- tasks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operations", [("+",), ("+", "-", "*")])
def test_sums_are_right_and_the_held_out_ones_are_never_trained_on(operations):
    train = [train_task(index, operations, 2) for index in range(2000)]
    test = held_out_tasks(operations, 2)

    def problem(task):
        a, operation, b = task.prompt.removeprefix("What is ").removesuffix("?").split()
        assert eval(f"{a} {operation} {b}") == task.answer
        return operation, frozenset((int(a), int(b)))

    assert {problem(task) for task in train}.isdisjoint(problem(task) for task in test)
    assert len({task.prompt for task in test}) == len({task.id for task in test}) == 512
    assert len({task.prompt for task in train}) > 1000
    assert train_task(1999, operations, 2) == train[1999], "a task is a function of its index"


def test_the_test_tasks_are_the_same_everywhere():
    """They are hashed and drawn without anything that changes between processes; this pins them."""
    assert [task.prompt for task in held_out_tasks(("+",), 2)[:3]] == [
        "What is 62 + 43?", "What is 29 + 6?", "What is 8 + 43?",
    ]  # fmt: skip
    assert 0 < len(held_out_tasks(("+",), 1)) < 30, "there are only so many one-digit sums"


def test_tasks_from_a_file_with_worked_answers(tmp_path):
    path = tmp_path / "gsm.jsonl"
    rows = [{"question": f"q{i}", "answer": f"{i}+1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))

    async def main():
        async with envgym.spec("math_verify", data={"path": str(path)}, instruction="") as spec:
            assert spec.tasks("train").size + spec.tasks("test").size == 40
            env = spec.make()
            observation, _ = await env.reset(seed=0)
            right = reference(env.task.answer)
            assert [message.text for message in observation.messages] == [env.task.prompt]
            assert spec.demonstrations(env.task, 0)[0].strip("= .").removeprefix("The answer is ") in (
                right,
                box(right),
            )
            return (await env.step(envgym.Action(box(right))))[1]

    assert asyncio.run(main()) == 1.0


def test_the_instruction_joins_the_last_user_message():
    async def main(prompt, **config):
        env = envgym.make("math_verify", **config)
        observation, _ = await env.reset(options={"task": Task("t", prompt, 1)})
        await env.spec.close()
        return [(message.role, message.text) for message in observation.messages]

    chat = (envgym.Message("system", "s"), envgym.Message("user", "q"))
    assert asyncio.run(main(chat, instruction="Box it.")) == [("system", "s"), ("user", "q\nBox it.")]
    assert asyncio.run(main("q", instruction="")) == [("user", "q")]
    assert asyncio.run(main(chat[:1], instruction="Box it.")) == [("system", "s"), ("user", "Box it.")]


def test_demonstrations_are_right_and_boxed_as_often_as_asked():
    spec = envgym.spec("math_verify", boxed_share=0.4)
    task = Task("t", "What is 20 + 3?", 23)
    answers = [spec.demonstrations(task, seed) for seed in range(2000)]
    assert all(len(answer) == 1 for answer in answers)
    texts = [answer[0] for answer in answers]
    assert set(texts) == {r"\boxed{23}", "The answer is 23.", "= 23", "23"}
    assert 0.36 < sum(boxed(text) is not None for text in texts) / 2000 < 0.44
    assert spec.demonstrations(task, 7) == answers[7]


def test_demonstrations_of_own_problems_are_all_boxed(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 20 + 3?", "answer": "23"}\n')
    task = Task("t", "What is 20 + 3?", 23)
    of_sums, of_file = envgym.spec("math_verify"), envgym.spec("math_verify", data=str(tmp_path / "mine.jsonl"))
    assert len({of_sums.demonstrations(task, seed)[0] for seed in range(100)}) == 4
    assert {of_file.demonstrations(task, seed)[0] for seed in range(100)} == {r"\boxed{23}"}


def test_mistakes_in_settings():
    with pytest.raises(ConfigError, match=r"unknown key 'digit'. Did you mean 'digits'\?"):
        envgym.spec("math_verify", digit=3)
    with pytest.raises(ConfigError, match="key 'operations"):
        envgym.spec("math_verify", operations=["/"])
    with pytest.raises(ConfigError, match="splits train and test, not 'valid'"):
        envgym.spec("math_verify").tasks("valid")


def test_without_math_verify_setup_says_what_to_install(monkeypatch):
    spec = envgym.spec("math_verify")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"-m pip install 'math-verify"):
        asyncio.run(spec.ensure_setup())


# -- grading ---------------------------------------------------------------------------------------------


def test_only_a_right_answer_in_a_box_earns():
    answers = {
        box("68"): 1, box("68.0"): 1, box("67"): 0, "68": 0, "The answer is 68.": 0, r"\boxed{}": 0,
        box(r"\frac{136}{2}"): 0, box("60+8"): 0, box("+068"): 1, box("½"): 0, box("六十八"): 0, box("\ud800\0\n"): 0,
    }  # fmt: skip
    results = play(list(answers), 68)
    assert [reward for reward, _ in results] == list(answers.values())
    assert results[3][1] == {"answered": 0.0, "grader_timeout": 0.0, "grader_crash": 0.0}
    assert results[0][1]["answered"] == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("x^2+1", "1+x^2", 1), ("0.5", r"\frac{1}{2}", 1), (r"\{1,2\}", r"\{2,1\}", 1), ("½", "½", 1),
        (r"\sqrt{8}", r"2\sqrt{2}", 1), ("x+1", "x+2", 0), ("1000", "1,000", 1), ("3.1415926", "3.1415927", 1),
    ],
)  # fmt: skip
def test_equal_mathematics_is_equal(gold, answer, right):
    assert play([box(answer)], gold)[0][0] == right


def rows_of_the_docs():
    """(problem, reference, answer, whether it is right) of the tables in the documentation."""
    text = (Path(__file__).parents[2] / "docs" / "environments" / "math_verify.md").read_text()
    for line in text.partition("## What counts as right")[2].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("| ") or "`" not in line:
            continue
        problem, reference, right, wrong = cells if not cells[0].startswith("`") else ("", *cells[:3])
        for answers, earns in ((right, True), (wrong, False)):
            for answer in re.findall("`([^`]+)`", answers):
                yield problem, reference.strip("`"), answer, earns


def test_what_the_docs_say_is_right_and_nothing_else_earns():
    rows = list(rows_of_the_docs())
    assert len(rows) > 100

    async def main():
        async with envgym.spec("math_verify", grader_timeout=60) as spec:
            return await asyncio.gather(*(spec.grade(answer, gold, problem) for problem, gold, answer, _ in rows))

    verdicts = asyncio.run(main())
    assert [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct != row[-1]] == []


@given(
    st.integers(0, 10**18),
    st.integers(0, 10**18),
    st.sampled_from(["+", "-", r"\cdot", "*", r"\times", r"\div", "/", "^"]),
)
@settings(deadline=None)
def test_a_sum_copied_from_the_problem_earns_nothing(a, b, operation):
    """In every way of writing it, whatever it comes to."""
    problem = f"What is {a} {operation} {b}?"
    for copy in (f"{a} {operation} {b}", f"{a}{operation}{b}", f"x = {a}{operation}{b}", rf"({a}{operation}{b})"):
        for gold in {a + b, a - b, a * b} - {a, b}:
            assert grade_by_text(copy, str(gold), problem) is False


HOSTILE = [
    box(TOWER), box("100000000!"), box("((9^{999})^{999})^{999}"), box("{" * 400 + "1" + "}" * 400),
    box("(" * 300 + "1" + ")" * 300), box(r"\frac{1}{" * 50 + "x" + "}" * 50), box("1e999999999"),
    box("1" * 100_000), box("x" * 100_000), "{" * 100_000, box(r"\sqrt{" * 100), "a" * 100_000,
]  # fmt: skip


def test_hostile_answers_end_by_their_deadline_and_earn_nothing():
    results = play(HOSTILE, "x+5", grader_timeout=0.5)
    assert [reward for reward, _ in results] == [0.0] * len(HOSTILE)
    assert results[0][1]["grader_timeout"] == 1.0
    assert not any(metrics["grader_timeout"] for _, metrics in results[-5:]), "what is too long is not parsed"


def test_hundreds_of_hostile_answers_delay_no_good_one():
    """Good answers that need the library are behind 200 towers that take their whole deadline each."""

    async def main():
        async with envgym.spec("math_verify", grader_timeout=20) as spec:
            assert (await spec.grade("1+x", "x+1")).correct  # a process is ready
            hostile = [asyncio.ensure_future(spec.grade(f"{n}{TOWER}", "x+5")) for n in range(200)]
            good = [await spec.grade(f"x^2+{n}", f"{n}+x^2") for n in range(50)]
            ended = sum(task.done() for task in hostile)
            for task in hostile:
                task.cancel()
            outcomes = await asyncio.gather(*hostile, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[ended:])
            return good, ended

    good, ended = asyncio.run(main())
    assert all(verdict.correct for verdict in good)
    assert ended < 20


def test_a_hanging_answer_holds_up_only_its_own_process():
    """An answer that hangs without looking costly takes one of two processes; the other goes on."""
    sneaky = "((9^{999})^{999})^{999}"
    assert not looks_costly(sneaky)

    async def main():
        async with envgym.spec("math_verify", grader_timeout=1.5) as spec:
            order = []

            async def grade(name, answer, gold):
                verdict = await spec.grade(answer, gold)
                order.append(name)
                return verdict

            verdicts = await asyncio.gather(
                grade("hanging", sneaky, "x+5"), *(grade("good", f"x+{n}", f"{n}+x") for n in range(20))
            )
            return order, verdicts

    order, verdicts = asyncio.run(main())
    assert order == ["good"] * 20 + ["hanging"]
    assert verdicts[0].failure == "timeout"
    assert all(verdict.correct for verdict in verdicts[1:])


def test_equal_questions_are_graded_once(monkeypatch):
    """Eight members of a group give one hostile answer: one deadline passes, not eight."""
    asked, call = [], Processes.call

    async def counted(self, *args, **limits):
        asked.append(args)
        return await call(self, *args, **limits)

    monkeypatch.setattr(Processes, "call", counted)

    async def main():
        async with envgym.spec("math_verify", grader_timeout=0.5) as spec:
            return await asyncio.gather(*(spec.grade(TOWER, "x+5") for _ in range(8)))

    assert {verdict.failure for verdict in asyncio.run(main())} == {"timeout"}
    assert len(asked) == 1


def test_what_could_not_be_graded_is_graded_anew_and_what_could_is_kept(monkeypatch):
    """A deadline that passes on a busy machine is no verdict on the answer."""
    asked = []

    class Busy:
        def __init__(self, *args, **kwargs):
            pass

        async def start(self):
            pass

        async def call(self, call, **limits):
            asked.append(message_of(call)[1][0])
            if len(asked) == 1:
                raise CallTimeout("busy")
            if len(asked) == 2:
                raise WorkerError("it did not start")
            return True

        async def close(self):
            pass

    monkeypatch.setattr(grader, "Processes", Busy)

    async def main():
        async with envgym.spec("math_verify", grader_processes=1) as spec:
            late = await spec.grade("1+x", "x+1")
            with pytest.raises(WorkerError):
                await spec.grade("1+x", "x+1")
            return late, await spec.grade("1+x", "x+1"), await spec.grade("1+x", "x+1")

    late, graded, again = asyncio.run(main())
    assert (late.correct, late.failure) == (False, "timeout")
    assert (graded.correct, graded.failure) == (again.correct, again.failure) == (True, "")
    assert asked == ["1+x"] * 3


def sum_of_many(names):
    return "+".join(f"x_{{{name}}}" for name in names)


def rewards_or_failures(spec, gold, answers):
    """The reward of each answer, all given at the same time, or the failure of its episode."""

    async def one(answer):
        env = spec.make()
        await env.reset(options={"task": Task("t", "q", gold)})
        return (await env.step(envgym.Action(box(answer))))[1]

    return asyncio.gather(*map(one, answers), return_exceptions=True)


@pytest.mark.parametrize(("patience", "rewarded"), [(1000, 12), (0.04, 0)])
def test_right_answers_that_wait_for_each_other_are_right_or_fail(monkeypatch, patience, rewarded):
    """A burst of costly ones waits much longer than grading one may take; no wait is a reward of zero."""
    names = [f"{n}" for n in range(10, 50)]
    answers = [sum_of_many(random.Random(n).sample(names, len(names))) for n in range(12)]
    assert all(map(looks_costly, answers))

    async def main():
        async with envgym.spec("math_verify", grader_timeout=5.0) as spec:
            assert (await spec.grade("1+x", "x+1")).correct
            monkeypatch.setattr(grader, "PATIENCE", patience)
            return await rewards_or_failures(spec, sum_of_many(names), answers)

    outcomes = asyncio.run(main())
    assert outcomes.count(0.0) == 0
    assert outcomes.count(1.0) >= rewarded
    failures = [outcome for outcome in outcomes if outcome != 1.0]
    assert all((failure.kind, failure.retryable) == ("timeout", True) for failure in failures)
    assert bool(failures) == (rewarded == 0)


def test_a_process_that_gets_no_time_fails_the_episode_and_does_not_judge_the_answer(monkeypatch):
    """The deadline is one of CPU time; the process is stopped, as on a machine that others use."""
    monkeypatch.setattr(grader, "PATIENCE", 2)

    async def main():
        async with envgym.spec("math_verify", grader_processes=1, grader_timeout=1.0) as spec:
            assert (await spec.grade("1+x", "x+1")).correct
            [(_, child)] = processes()
            os.kill(child, signal.SIGSTOP)
            return await rewards_or_failures(spec, "x+2", ["2+x"]), await spec.grade("2+x", "x+2")

    [failure], again = asyncio.run(main())
    assert (failure.kind, failure.retryable) == ("timeout", True)
    assert again.correct


@pytest.mark.parametrize("whole", [False, True])
def test_a_killed_process_is_replaced_and_its_answer_tried_again(whole):
    """What grades is killed, alone or together with the process that would replace it."""

    async def main():
        async with envgym.spec("math_verify", grader_processes=1, grader_timeout=20) as spec:
            assert (await spec.grade("1+x", "x+1")).correct
            [(template, child)] = processes()
            os.kill(child, signal.SIGSTOP)  # so that the answer is surely in its hands when it dies
            graded = asyncio.ensure_future(spec.grade("2+x", "x+2"))
            await asyncio.sleep(0)
            os.kill(template if whole else child, signal.SIGKILL)
            verdict = await graded
            [(template_after, child_after)] = processes()
            assert child_after != child
            assert (template_after != template) == whole
            return verdict

    assert asyncio.run(main()).correct


def processes():
    """The grading processes: the one that is kept, and its child, where it has one."""
    kept = [process for process in psutil.Process().children() if "envgym.processes.child" in process.cmdline()]
    return [(process.pid, *(child.pid for child in process.children())) for process in kept]


def test_costly_answers_make_nobody_wait_longer_than_a_slice():
    """Answers that look like any other and would take for ever come first; honest ones are graded before one ends."""
    slow = "((9^{999})^{999})^{999}"

    async def main():
        async with envgym.spec("math_verify", grader_timeout=20.0) as spec:
            hostile = [asyncio.ensure_future(spec.grade(f"{n}{slow}", "x+5")) for n in range(1, 5)]
            await asyncio.sleep(0)
            good = [await spec.grade(f"x^2+{n}", f"{n}+x^2") for n in range(2)]
            ended = [task for task in hostile if task.done()]
            for task in hostile:
                task.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)
            return good, ended

    good, ended = asyncio.run(main())
    assert all(verdict.correct for verdict in good)
    assert ended == []


def test_an_honest_answer_that_takes_more_than_a_slice_is_right(monkeypatch):
    monkeypatch.setattr(grader, "SLICE", 0.001)

    async def main():
        async with envgym.spec("math_verify", grader_timeout=60) as spec:
            return await spec.grade("(a+b+c)(a-b)", "(a-b)(c+b+a)")

    assert asyncio.run(main()).correct


def test_processes_that_cannot_start_are_an_error_and_no_verdict(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        async with envgym.spec("math_verify") as spec:
            await spec.grade("1+x", "x+1")

    with pytest.raises(WorkerError, match="grading processes do not start: ImportError: half installed"):
        asyncio.run(main())


def test_a_spec_serves_one_event_loop_after_another():
    spec = envgym.spec("math_verify")
    asyncio.run(spec.ensure_setup())
    for n in range(3):
        assert asyncio.run(spec.grade(f"{n}+x", f"x+{n}")).correct
    asyncio.run(spec.close())
    asyncio.run(spec.ensure_setup())
    assert asyncio.run(spec.grade("1+y", "y+1")).correct
    asyncio.run(spec.close())


def test_teardown_ends_every_process_at_once_also_those_that_hang():
    """Long before the deadline of an answer, and that of this test."""

    async def main(spec):
        async with spec:
            await asyncio.gather(spec.grade("1+x", "x+1"), spec.grade("y^{1000}", "x"))  # a child of either kind
            hanging = [asyncio.ensure_future(spec.grade(f"{n}{TOWER}", "x+5")) for n in range(5)]
            await spec.grade("2+x", "x+2")
            pids = [pid for pair in processes() for pid in pair]
        outcomes = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(outcome, WorkerError) for outcome in outcomes)
        return pids

    pids = asyncio.run(main(envgym.spec("math_verify", grader_timeout=1000)))
    assert len(pids) >= 3
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a grading process outlived the grader by a minute"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_nothing_is_left_when_the_parent_is_killed():
    script = f"""
import asyncio, envgym, psutil
async def main():
    async with envgym.spec("math_verify", grader_timeout=1000) as spec:
        await asyncio.gather(spec.grade("1+x", "x+1"), spec.grade("y^{1000}", "x"))
        hanging = asyncio.ensure_future(spec.grade({TOWER!r}, "x+5"))
        await spec.grade("2+x", "x+2")
        print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
        await hanging
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) >= 3
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a grading process outlived its parent by a minute"
        time.sleep(0.02)


def test_a_spec_is_json_and_an_env_is_cheap():
    spec = envgym.spec("math_verify", digits=3, data={"path": "x.jsonl", "prompt": "q"})
    rebuilt = envgym.registry.spec_from_json(spec.to_json())
    assert rebuilt == spec
    assert isinstance(rebuilt, EnvSpec)
    assert rebuilt.config.data.prompt == ("q",)
    random_state = random.getstate()
    spec.make()
    assert random.getstate() == random_state, "the global generator is left alone"
