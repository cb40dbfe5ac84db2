"""After a SIGKILL of any one process of a run, none of its family lives, and the command says what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVGYM = Path(sys.executable).with_name("envgym")
LIMIT = 10.0
"""Seconds after which nobody may live."""

GRADED = """
from envgym.envs.math_verify import MathVerify, MathVerifyEnv

class Episode(MathVerifyEnv):
    async def step(self, action):
        await self.spec.grade("x + 1", "1 + x")  # has the grading processes work; random weights box nothing
        return await super().step(action)

class Graded(MathVerify):
    env_class = Episode
"""


def alive(process: psutil.Process) -> bool:
    """Whether it runs still; one that has ended and only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_the_end_of(family: list[psutil.Process], seconds: float) -> float:
    """Seconds until none of them lived; fails after `seconds`, naming those that do."""
    started = time.monotonic()
    while survivors := [process for process in family if alive(process)]:
        assert time.monotonic() < started + seconds, survivors
        time.sleep(0.02)
    return round(time.monotonic() - started, 2)


def worker_with_log(family: list[psutil.Process], log: str) -> psutil.Process:
    """The worker whose output goes to the file `log`."""
    [found] = [p for p in family[1:] if os.readlink(f"/proc/{p.pid}/fd/1").endswith(f"/{log}")]
    return found


@pytest.fixture
def start(tmp_path, tiny_model):
    """start(*words) -> the command in mid-training (after its second step), and its family, itself first."""
    running = []

    def run(*words: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        (tmp_path / "graded.py").write_text(GRADED)
        program = subprocess.Popen(
            [
                ENVGYM, "train", "--env", "graded.py:Graded", "--model", tiny_model, "--name", "run", "steps=100000",
                "rollout.tasks=16", "rollout.group_size=4", "rollout.max_tokens=16", "eval.every=0", *words,
            ],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(program)
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert program.poll() is None, program.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        controller = psutil.Process(program.pid)
        return program, [controller, *controller.children(recursive=True)]

    yield run
    for program in running:
        program.kill()
        program.wait()
        program.stderr.close()


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_the_controller_is_killed(runtime, start, store):
    _, family = start("--runtime", runtime)
    assert len(family) >= 4  # it, the engine, the actor, and a grading process of the environment
    family[0].kill()
    seconds = wait_for_the_end_of(family, LIMIT)
    store(f"no_survivors_controller_{runtime}", processes=len(family), seconds=seconds)


@pytest.mark.parametrize(
    ("worker", "words"), [("engine", ()), ("actor-0", ()), ("actor-1", ("workers.ranks=2", "workers.zero_stage=2"))]
)
def test_a_worker_is_killed(worker, words, start, store, tmp_path):
    program, family = start(*words)
    worker_with_log(family, f"{worker}.log").send_signal(signal.SIGKILL)
    seconds = wait_for_the_end_of(family, LIMIT)
    _, stderr = program.communicate()
    assert program.returncode == 2
    [line] = stderr.splitlines()
    assert re.match(rf"envgym: error: {worker} was killed by SIGKILL", line)
    assert f"runs/run/logs/{worker}.log" in line
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] >= 2
    store(f"no_survivors_{worker}", processes=len(family), seconds=seconds, said=line)
