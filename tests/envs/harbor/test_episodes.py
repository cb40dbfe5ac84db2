"""Harbor's tasks in envgym: exact tokens, demonstrations, checks, and nothing that is left behind."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from envgym.envs.harbor import HarborAgent, HarborAgentConfig, HarborSpec
from envgym.errors import ConfigError
from envgym.processes.family import descendants
from envgym.types import Action

from tests.agents.test_external import Scripted  # isort: skip

COMMAND = json.dumps({"name": "bash", "arguments": {"command": "echo ready > answer.txt; echo written"}})
CALL = f"<tool_call>\n{COMMAND}\n</tool_call>"


def spec_of(package, path, **settings):
    return HarborSpec(f"harbor:{path}", python=package[0], place="local", **settings)


@pytest.fixture
def roll_out(roll_out_tasks):
    """`roll_out(spec, renderer, engine, count, …)`: episodes of the first task."""

    def roll_out(spec, renderer, engine, count=1, **settings):
        agent = HarborAgent(renderer, HarborAgentConfig(**settings))
        return roll_out_tasks(spec, agent, engine, [0] * count, context=16384, max_tokens=512)

    return roll_out


def solve(number, prompt):
    return "done" if "written" in prompt.partition("<|im_start|>tool")[2] else CALL


def test_an_episode_is_one_row_of_exact_tokens(
    harbor_package, make_task, renderer, recording, check_episode, temporary, roll_out
):
    engine = recording(Scripted(renderer, solve))
    [episode] = roll_out(spec_of(harbor_package, make_task()), renderer, engine)
    assert not episode.failed, episode.outcome
    check_episode(episode, engine.answers)
    [row] = episode.rows
    assert [turn.reward for turn in row.turns] == [None, 1.0]
    assert episode.metrics["reward_reward"] == 1.0
    assert [message.text for message in episode.messages if message.role == "tool"] == ["written"]
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not shutil.which("tmux", path="/usr/local/bin:/usr/bin:/bin"), reason="tmux is not installed")
def test_terminus_2_has_our_tokens(harbor_package, make_task, renderer, recording, check_episode, roll_out):
    commands = [{"keystrokes": "echo ready > answer.txt\n", "duration": 1}]
    answer = {"analysis": "", "plan": "", "commands": commands}

    def say(number, prompt):
        return json.dumps(answer if number == 0 else answer | {"commands": [], "task_complete": True})

    engine = recording(Scripted(renderer, say))
    [episode] = roll_out(spec_of(harbor_package, make_task()), renderer, engine, program="terminus-2")
    assert not episode.failed, episode.outcome
    check_episode(episode, engine.answers)
    assert (episode.reward, len(engine.answers)) == (1.0, 3)


def test_solutions_are_demonstrations(harbor_package, make_task):
    files = {"solution/solve.sh": "#!/bin/bash\npython3 /solution/more.py\n"}
    path = make_task().parent
    make_task("scripts", files=files)

    async def run():
        async with spec_of(harbor_package, path, test_fraction=0) as spec:
            tasks = {task.id: task for task in [await spec.tasks("train").get(index) for index in range(2)]}
            env = spec.make()
            await env.reset(options={"task": tasks["ready"]})
            call, end = spec.demonstrations(tasks["ready"], 0)
            await env.step(Action("", tool_calls=call.tool_calls, content=""))
            _, reward, terminated, _, _ = await env.step(end)
            assert (reward, terminated) == (1.0, True)
            with pytest.raises(ConfigError, match="the solution of scripts is no single script"):
                spec.demonstrations(tasks["scripts"], 0)
            assert "conftest.py" in spec.forgery(tasks["ready"])
            await env.close()

    asyncio.run(run())


def test_mistakes_are_one_line(harbor_package, make_task):
    path = make_task(image="FROM alpine:3\n")

    async def run(spec):
        with pytest.raises(ConfigError) as error:
            await spec.ensure_setup()
        return str(error.value)

    text = asyncio.run(run(spec_of(harbor_package, path)))
    needs = "it needs the image alpine:3: a container engine (env.place=docker or podman)"
    assert text == f"Harbor: ready: {needs}"
    text = asyncio.run(run(HarborSpec(f"harbor:{path}")))
    assert "set env.python=VENV/bin/python, of a virtual environment with Harbor" in text
    text = asyncio.run(run(HarborSpec(f"harbor:{path}", python=sys.executable)))
    needs = "env.python needs harbor 0.25, and has none: install 'harbor==0.25.*' in its virtual environment"
    assert text == f"Harbor: {needs}"
    for program in ("oracle", "nop"):
        with pytest.raises(ValidationError, match=f"{program} never asks the policy.* `envgym envs check` plays them"):
            HarborAgentConfig(program=program)


def test_a_path_is_no_address_to_be_saved(run):
    done = run("envs", "add", "tasks", "harbor:tasks", "--project")
    assert (done.returncode, done.stdout) == (2, "")
    says = "harbor:tasks is no address of a server, and needs no name here: --env harbor:tasks"
    assert done.stderr == f"envgym: error: {says}\n"


def mounts():
    return sorted(Path("/proc/self/mounts").read_text().splitlines())


def left_by(family, temporary):
    """Processes, files of episodes, and mounts below the folder."""
    processes = [pid for pid in family if Path(f"/proc/{pid}").exists()]
    return processes + list(temporary.iterdir()) + [line for line in mounts() if str(temporary) in line]


@pytest.mark.slow
def test_nothing_is_left_of_100_episodes(harbor_package, make_task, renderer, temporary, roll_out):
    daemon = json.dumps(
        {"name": "bash", "arguments": {"command": "setsid sleep 4321 & echo ready > answer.txt; echo written"}}
    )
    before, sockets = descendants({os.getpid()}), len(os.listdir("/proc/self/fd"))
    mounted = mounts()
    engine = Scripted(renderer, lambda number, prompt: solve(number, prompt).replace(COMMAND, daemon))
    episodes = roll_out(spec_of(harbor_package, make_task()), renderer, engine, count=100)
    assert [episode.reward for episode in episodes] == [1.0] * 100
    assert descendants({os.getpid()}) <= before
    assert "sleep 4321" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    assert (list(temporary.iterdir()), mounts()) == ([], mounted)
    assert len(os.listdir("/proc/self/fd")) <= sockets + 8


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_killed_in_mid_episode_leaves_nothing(harbor_package, make_task, temporary, number):
    program = textwrap.dedent("""
        import asyncio, sys
        from envgym.envs.harbor import HarborSpec
        from envgym.types import Action, ToolCall
        async def main():
            spec = HarborSpec("harbor:" + sys.argv[1], python=sys.argv[2], place="local")
            env = spec.make()
            await env.reset(seed=1)
            call = ToolCall("1", "bash", {"command": "setsid sleep 4321 & sleep 4321 & mkdir a; chmod 0 a; echo $!"})
            await env.step(Action("", tool_calls=(call,), content=""))
            print("ready", flush=True)
            await asyncio.sleep(100)
        asyncio.run(main())
    """)
    words = [sys.executable, "-c", program, make_task(), harbor_package[0]]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        family = descendants({run.pid})
        while [name_of(pid) for pid in family].count("sleep") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            family = descendants({run.pid})
        run.send_signal(number)
    deadline = time.monotonic() + 60
    while left := left_by(family, temporary):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_nothing_of_harbor_is_imported():
    program = "import sys, envgym.envs.harbor; print({'harbor', 'litellm', 'httpx'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
