"""verifiers' environments: its real engine plays them, with our endpoint as the model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import envgym
from envgym.envs.verifiers import VerifiersSpec
from envgym.errors import ConfigError, InvalidOutcome
from envgym.processes.family import descendants

from tests.agents.test_external import Scripted  # isort: skip


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def question(prompt):
    """The last thing that the user said."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def answer(number, prompt):
    """Says the next number."""
    return str(int(question(prompt).partition(" ")[0]) + 1)


def add(number, prompt):
    """Calls the tool, and says what it returned."""
    results = prompt.partition("<|im_start|>tool\n")[2]
    if results:
        return f"it is {results.partition('<|im_end|>')[0]}"
    a, b = question(prompt).split(" + ")
    return call("abacus_add", a=int(a), b=int(b))


def leftovers(temporary):
    """Files that an episode may have left: in the temporary folders, and in the home folder other than our cache."""
    files = {*temporary.iterdir(), *Path("/tmp").glob("vf-port-*"), *Path(os.environ["HOME"]).glob("*/*")}
    return {str(file) for file in files if file.name != "envgym"}


def test_the_reward_is_the_weighted_sum_and_each_is_a_metric(roll_out, renderer, recording, check_episode):
    engine = recording(Scripted(renderer, lambda number, prompt: "x" * 30 if number else answer(number, prompt)))
    episodes = roll_out("riddles", engine, [0, 0], args={"count": 2})
    for episode in episodes:
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)
        assert [message.role for message in episode.messages] == ["system", "user", "assistant"]
    assert sorted(episode.reward for episode in episodes) == [-0.5, 2.0]
    [right] = [episode for episode in episodes if episode.reward == 2.0]
    assert (right.task.id, str(right.outcome.status)) == ("0", "completed")
    expected = {"reward_right": 1.0, "reward_long": 0.0, "characters": 1.0, "calls": 1.0}
    assert right.metrics == expected


def test_a_tool_is_called_in_one_row_of_exact_tokens(roll_out, renderer, recording, check_episode, temporary):
    before = leftovers(temporary)
    engine = recording(Scripted(renderer, add))
    [episode] = roll_out("abacus", engine, [3])
    assert not episode.failed, episode.outcome
    check_episode(episode, engine.answers)
    [row] = episode.rows
    assert [turn.reward for turn in row.turns] == [None, pytest.approx(1 + 0.1 * len("it is 43") / 30)]
    assert [message.role for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert leftovers(temporary) == before  # uv would have made a virtual environment in the home folder


@pytest.mark.slow
def test_the_environment_may_be_the_user_for_several_turns(roll_out, renderer, recording, check_episode):
    def count(number, prompt):
        return "4" if "And then?" not in prompt else "3"

    engine = recording(Scripted(renderer, count))
    [episode] = roll_out("countdown", engine, limit=3)
    assert not episode.failed, episode.outcome
    check_episode(episode, engine.answers)
    assert (episode.reward, [len(row.turns) for row in episode.rows]) == (1.0, [2])


def test_an_agent_that_used_up_its_turns_is_truncated_with_its_reward(roll_out, renderer):
    [episode] = roll_out("abacus", Scripted(renderer, add), [3], options={"agent": {"max_turns": 1}})
    assert (str(episode.outcome.status), episode.outcome.reason, episode.reward) == ("truncated", "environment", 0.0)


FAILURES = {
    "setup": ("verifier", "TaskError: task setup: FileNotFoundError: no file"),
    "harness": ("agent", "HarnessError: harness 'faults' exited 4: no more chat"),
    "raise": ("verifier", "RuntimeError: a bug of the reward"),
    "nan": ("no_reward", "{'right': nan} has a value that is missing or not finite"),
    "empty": ("no_reward", "no rewards"),
    "late": ("verifier", "the time is over (scoring_timeout)"),
    "exit": ("agent", "its process ended with status 3"),
}
"""The kind and the message by the fault of the task."""


def test_an_episode_that_went_wrong_is_a_failure_and_no_reward_of_zero(roll_out, renderer):
    places = range(1, 1 + len(FAILURES))
    episodes = roll_out("faults", Scripted(renderer, lambda number, prompt: "yes"), [0, *places])
    sound, *others = episodes
    assert (sound.failed, sound.reward) == (False, 1.0)
    for episode, (fault, (kind, says)) in zip(others, FAILURES.items(), strict=True):
        outcome = (episode.failed, episode.outcome.reason, episode.reward)
        assert (fault, outcome) == (fault, (True, kind, None)), episode.outcome
        assert says in episode.outcome.message
        assert "\n" not in episode.outcome.message


def test_an_episode_that_takes_too_long_is_ended(roll_out, renderer, temporary):
    engine = Scripted(renderer, lambda number, prompt: "yes")
    [episode] = roll_out("faults", engine, [8], agent={"timeout": 5})
    assert episode.outcome.message == "verifiers: the episode took longer than 5.0 s"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("name", ["faults", pytest.param("abacus", marks=pytest.mark.slow)])
def test_a_policy_that_is_gone_is_a_failure(specify, name):
    async def run():
        async with specify(name) as spec:
            task = await spec.tasks("train").get(0)
            with pytest.raises(InvalidOutcome, match="ProviderError: All connection attempts failed") as failure:
                await spec.run(task, {}, "http://127.0.0.1:9/v1", 1, 60)
            return failure.value

    failure = asyncio.run(run())
    assert (failure.kind, failure.retryable) == ("policy_unreachable", True)


def test_rows_of_the_users_take_the_place_of_the_tasks(specify, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "7 + 1", "answer": "8"}, {"prompt": "8 + 1"}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    async def run():
        async with specify("riddles", data={"path": str(file), "test_fraction": 0}) as spec:
            env = spec.make()
            tasks = [await spec.tasks("train").get(number) for number in range(2)]
            observation, _ = await env.reset(options={"task": tasks[0]})
            *_, info = await env.step("8")
            with pytest.raises(InvalidOutcome, match="the row is no task of riddles: answer: Field required"):
                await env.reset(options={"task": tasks[1]})
            await env.close()
            return observation.messages[-1].text, info["metrics"]["reward_right"]

    assert asyncio.run(run()) == ("7 + 1", 1.0)


MISTAKES = {
    "nothing": (
        {"target": "nothing"},
        "ImportError: nothing needs the module nothing, and it is not installed beside verifiers",
    ),
    "args": (
        {"target": "riddles", "args": {"size": 1}},
        "ValueError: riddles does not take these settings: taskset.size: Extra inputs are not permitted",
    ),
    "options": (
        {"target": "riddles", "options": {"agent": {"max_turns": "few"}}},
        "ValueError: riddles does not take these settings: agent.max_turns: Input should be a valid integer",
    ),
    "endless": (
        {"target": "countdown"},
        "ValueError: the tasks of countdown have no end: set env.limit to the number to take",
    ),
    "seats": (
        {"target": "riddles", "options": {"id": "user-sim"}},
        "ValueError: riddles has 2 agents (assistant, user), and the policy plays one: give the others a model",
    ),
    "no taskset": (
        {"target": "json"},
        "ValueError: json cannot be loaded: TypeError: taskset module 'json' exports no",
    ),
    "harness": (
        {"target": "riddles", "options": {"agent": {"harness": {"id": "none"}}}},
        "ImportError: riddles needs the module none, and it is not installed beside verifiers",
    ),
}


def test_mistakes_are_one_line(verifiers_package):
    """In one interpreter, which takes seconds to load verifiers."""
    program = textwrap.dedent("""
        import importlib.util, json, sys
        spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
        worker = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(worker)
        for text in sys.argv[2:]:
            try:
                print(worker.load(json.loads(text)))
            except Exception as error:
                print(f"{type(error).__name__}:", *str(error).split())
    """)
    words = [json.dumps(settings) for settings, _ in MISTAKES.values()]
    command = [verifiers_package[0], "-c", program, VerifiersSpec.worker, *words]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.splitlines()
    for line, (_, says) in zip(lines, MISTAKES.values(), strict=True):
        assert line.startswith(says)


def test_another_interpreter_is_named(specify):
    async def run(name, **settings):
        with pytest.raises(ConfigError) as error:
            await envgym.spec(f"verifiers:{name}", **settings).ensure_setup()
        return str(error.value)

    assert "set env.python=VENV/bin/python" in asyncio.run(run("riddles"))
    text = asyncio.run(run("riddles", python=sys.executable))
    needs = "env.python needs verifiers 0.4, and has none: install 'verifiers==0.4.*' in its virtual environment"
    assert text == f"verifiers: {needs}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_left_of_episodes(roll_out, renderer, temporary):
    """100 whose task left a daemon and a folder, and some whose tools ran in processes of their own."""
    before, files = descendants({os.getpid()}), leftovers(temporary)
    episodes = roll_out("faults", Scripted(renderer, lambda number, prompt: "yes"), [9] * 100)
    episodes += roll_out("abacus", Scripted(renderer, add), range(8))
    assert {episode.failed for episode in episodes} == {False}
    assert descendants({os.getpid()}) <= before
    assert "sleep 4321" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    assert leftovers(temporary) == files


def test_a_killed_run_leaves_nothing(verifiers_package, temporary):
    """In mid-episode, while the tool's server and the agent's program run."""
    files = leftovers(temporary)
    program = textwrap.dedent("""
        import asyncio, sys, envgym
        async def main():
            env = envgym.spec("verifiers:abacus", python=sys.argv[1]).make()
            await env.reset(seed=1)
            print("ready", flush=True)
            await asyncio.sleep(100)
        asyncio.run(main())
    """)
    command = [sys.executable, "-c", program, verifiers_package[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"ready\n"
        family = descendants({run.pid})
        assert len(family) >= 5  # with server, keeper, episode, tool and agent
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while leftovers(temporary) != files or any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline, leftovers(temporary)
        time.sleep(0.1)


def test_nothing_of_verifiers_is_imported():
    code = "import sys, envgym, envgym.envs.verifiers, envgym.envs.verifiers.export; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"verifiers", "openai", "mcp", "transformers"}.isdisjoint(name.split(".")[0] for name in modules)
