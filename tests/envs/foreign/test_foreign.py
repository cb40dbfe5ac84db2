"""Episodes that another framework's program runs: a real interpreter with a framework of one file, and our endpoint."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from envgym.envs.foreign import ForeignConfig, ForeignSpec
from envgym.envs.foreign.agent import ForeignAgent, ForeignAgentConfig
from envgym.envs.foreign.interpreter import ForeignInterpreter
from envgym.errors import ConfigError, InvalidOutcome
from envgym.processes.family import descendants
from envgym.types import Action, ToolCall

from tests.agents.test_external import Scripted  # isort: skip

pytestmark = pytest.mark.usefixtures("temporary")
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


class SumsConfig(ForeignConfig):
    does: str = ""
    name: str = "sums"
    count: int = 20


class Sums(ForeignSpec):
    Config = SumsConfig
    framework = "Sums"
    package = "pydantic==2"
    worker = Path(__file__).with_name("worker.py")


@pytest.fixture
def roll_out(roll_out_tasks):
    """`roll_out(renderer, engine, does, …)`: episodes of the program that does so."""

    def roll_out(renderer, engine, does="", *, count=1, **settings):
        spec, agent = (
            Sums("sums", does=does, python=sys.executable),
            ForeignAgent(renderer, ForeignAgentConfig(**settings)),
        )
        places = [index % 10 for index in range(count)]
        return roll_out_tasks(spec, agent, engine, places, context=512, max_tokens=128)

    return roll_out


def answers(renderer, text="it is {answer}"):
    """An engine that calls the tool, and then says what the tool returned."""

    def say(number, prompt):
        results = prompt.partition("<|im_start|>tool\n")[2]
        return f"it is {results.partition('<|im_end|>')[0]}" if results else CALL

    return Scripted(renderer, say)


def test_an_episode_is_one_row_of_exact_tokens(renderer, recording, check_episode, roll_out):
    engine = recording(answers(renderer))
    [episode] = roll_out(renderer, engine)
    assert not episode.failed, episode.outcome
    check_episode(episode, engine.answers)
    [row] = episode.rows
    assert [turn.reward for turn in row.turns] == [None, 1.0]
    assert (episode.reward, str(episode.outcome.status)) == (1.0, "completed")
    assert episode.metrics == {"calls": 2.0, "turns": 2.0, "reward_right": 1.0}
    assert [message.role for message in episode.messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("does", "kind", "says"),
    [
        ("die", "agent", "its process ended with signal 6"),
        ("raise", "agent", "RuntimeError: a bug of the framework"),
        ("fail", "verifier", "no file"),
        ("nan", "no_reward", "nan"),
        ("none", "no_reward", "None"),
    ],
)
def test_an_episode_that_went_wrong_is_a_failure_and_no_reward_of_zero(renderer, does, kind, says, roll_out):
    [episode] = roll_out(renderer, answers(renderer), does)
    assert (episode.failed, episode.outcome.reason, episode.reward) == (True, kind, None)
    assert says in episode.outcome.message


def test_a_truncated_episode_has_its_reward(renderer, roll_out):
    [episode] = roll_out(renderer, answers(renderer), "cut")
    assert (str(episode.outcome.status), episode.outcome.reason, episode.reward) == ("truncated", "environment", 1.0)


def test_a_policy_that_used_up_its_tokens_is_truncated(renderer, roll_out):
    """With the program's reward if it accepts a turn that was cut, without one if a request of it was refused."""
    [episode] = roll_out(renderer, answers(renderer), max_tokens=20)
    assert (str(episode.outcome.status), episode.outcome.reason, episode.reward) == ("truncated", "length", 0.0)
    length = len(renderer.tokenizer.encode(CALL, add_special_tokens=False)) + 1
    [episode] = roll_out(renderer, answers(renderer), max_tokens=length)
    assert (str(episode.outcome.status), episode.outcome.reason, episode.reward) == ("truncated", "tokens", None)
    assert [len(row.turns) for row in episode.rows] == [1]


@pytest.mark.parametrize("does", ["wait", pytest.param("block", marks=pytest.mark.slow)])
def test_an_episode_that_takes_too_long_is_ended(renderer, does, roll_out):
    start = time.monotonic()
    [episode] = roll_out(renderer, answers(renderer), does, timeout=1.0)
    assert time.monotonic() - start < 25
    assert (episode.failed, episode.outcome.reason) == (True, "agent")
    assert episode.outcome.message == "Sums: the episode took longer than 1.0 s"
    assert [len(row.turns) for row in episode.rows] == [1]  # what the policy sampled is in the record


def test_nothing_is_left_of_episodes(renderer, temporary, roll_out):
    before = descendants({os.getpid()})
    episodes = roll_out(renderer, answers(renderer), "leave", count=100)
    assert [episode.reward for episode in episodes] == [1.0] * 100
    assert descendants({os.getpid()}) <= before
    assert "sleep 4321" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    assert list(temporary.iterdir()) == []


def test_files_go_with_their_episode(temporary):
    async def run():
        async with Sums("sums", does="leave", python=sys.executable) as spec:
            [folder] = temporary.iterdir()
            env = spec.make()
            await env.reset(seed=1)
            assert len(list(folder.iterdir())) == 1
            await env.step("the end")
            assert list(folder.iterdir()) == []
            await env.reset(seed=2)
            await env.close()
            async with asyncio.timeout(60):
                while list(folder.iterdir()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_nothing(number, temporary):
    """In mid-episode, with a program that ignores nothing and one that left a daemon."""
    program = textwrap.dedent("""
        import asyncio, sys
        from tests.envs.foreign.test_foreign import Sums
        async def main():
            spec = Sums("sums", does="leave", python=sys.executable)
            env = spec.make()
            await env.reset(seed=1)
            print("ready", flush=True)
            await asyncio.sleep(100)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"ready\n"
        family = descendants({run.pid})
        assert len(family) >= 5  # with server, keeper, episode and daemon
        run.send_signal(number)
    deadline = time.monotonic() + 20
    while list(temporary.iterdir()) or any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline, list(temporary.iterdir())
        time.sleep(0.1)


def test_an_interpreter_that_died_is_started_again():
    async def run():
        spec = Sums("sums", python=sys.executable)
        async with spec:
            task = await spec.tasks("train").get(0)
            running = asyncio.create_task(spec.run(task, {}, "http://127.0.0.1:9/v1", 1, 60))
            await asyncio.sleep(0)
            spec.interpreter._process.kill()
            with pytest.raises(InvalidOutcome, match="its interpreter ended") as failure:
                await running
            assert failure.value.retryable
            with pytest.raises(InvalidOutcome, match="Connection refused"):  # of a new one
                await spec.run(task, {}, "http://127.0.0.1:9/v1", 1, 60)

    asyncio.run(run())


def test_without_the_agent_each_request_is_an_observation():
    async def run():
        async with Sums("sums", python=sys.executable) as spec:
            env = spec.make()
            observation, _ = await env.reset(options={"task": await spec.tasks("train").get(3)})
            number = int(observation.messages[-1].text.partition(" ")[0])
            assert [tool.name for tool in observation.tools] == ["add"]
            action = Action(CALL, tool_calls=(ToolCall("1", "add", {}),), content="")
            observation, reward, terminated, _, _ = await env.step(action)
            assert [message.role for message in observation.messages] == ["tool"]
            assert (reward, terminated) == (None, False)
            observation, reward, terminated, truncated, info = await env.step(f"{number + 1}")
            assert (reward, terminated, truncated) == (1.0, True, False)
            assert info["metrics"] == {"turns": 2, "reward_right": 1.0}
            await env.reset(seed=2)  # and closes in mid-episode
            await env.close()

    asyncio.run(run())


def test_a_program_that_ended_before_its_request_was_answered_has_its_verdict():
    async def run():
        async with Sums("sums", does="hurry", python=sys.executable) as spec:
            env = spec.make()
            await env.reset(options={"task": await spec.tasks("train").get(3)})
            await asyncio.sleep(2)
            _, reward, terminated, truncated, _ = await env.step("late")
            assert (reward, terminated, truncated) == (0.25, False, True)
            await env.close()

    asyncio.run(run())


@pytest.mark.parametrize("ticks", [1, 4])
def test_an_interpreter_whose_start_is_cancelled_leaves_no_folder(ticks, temporary):
    async def run():
        settings = {"name": "sums", "count": 1, "does": ""}
        interpreter = ForeignInterpreter("sums", "pydantic==2", Path(sys.executable), Sums.worker, settings)
        starting = asyncio.create_task(interpreter.start())
        for _ in range(ticks):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(run())
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"python": None}, "set env.python=VENV/bin/python, of a virtual environment with Sums"),
        ({"python": "/nowhere/python"}, "/nowhere/python cannot be run: No such file or directory; set env.python"),
        ({"python": __file__}, "cannot be run"),
        ({"python": shutil.which("true")}, "its interpreter ended: it printed nothing"),
        ({"package": "pydantic==1"}, "Sums: env.python needs pydantic 1, and has 2."),
        ({"package": "sums==1"}, "and has none: install 'sums==1.*' in its virtual environment"),
        ({"name": "products"}, "Sums: there is no environment 'products': there is sums"),
    ],
)
def test_mistakes_are_one_line(settings, says, temporary, monkeypatch):
    async def run():
        spec = Sums("sums", **{"python": sys.executable, **settings})
        with pytest.raises(ConfigError) as error:
            await spec.ensure_setup()
        return str(error.value)

    if "package" in settings:
        settings = dict(settings)
        monkeypatch.setattr(Sums, "package", settings.pop("package"))

    text = asyncio.run(run())
    assert says in text
    assert "\n" not in text
    assert list(temporary.iterdir()) == []


def test_the_held_out_share():
    async def sizes(**settings):
        async with Sums("sums", python=sys.executable, **settings) as spec:
            return spec.tasks("train").size, spec.tasks("test").size

    assert asyncio.run(sizes(test_fraction=1)) == (0, 20)
    assert asyncio.run(sizes(test_fraction=0)) == (20, 0)
    assert asyncio.run(sizes(count=1)) == (1, 0)
    train, test = asyncio.run(sizes())
    assert train + test == 20
    assert test > 0
