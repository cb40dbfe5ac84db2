"""After a SIGKILL of any one process of a run, none of its family lives, and the command says what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from envgym.episodes.files import read_episodes

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
                "rollout.tasks_per_step=16", "rollout.group_size=4", "rollout.max_tokens=16", "eval.every=0", *words,
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
    ("worker", "words"), [("actor-0", ()), ("actor-1", ("workers.ranks=2", "workers.zero_stage=2"))]
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


@pytest.mark.parametrize("words", [(), ("engine.count=2",)], ids=["the only one", "one of two"])
def test_an_engine_that_is_killed_is_replaced(words, start, store, tmp_path):
    """In mid-run; the run goes on, loses no group and ends by Ctrl-C as if nothing had happened."""
    program, family = start(*words)
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    name = "engine-1" if words else "engine"
    worker_with_log(family, f"{name}.log").send_signal(signal.SIGKILL)
    at, began = metrics.read_text().count("\n"), time.monotonic()
    log = tmp_path / "runs" / "run" / "logs" / f"{name}.log"
    while log.read_text().count("init engine") < 2 or metrics.read_text().count("\n") < at + 5:
        assert program.poll() is None, program.stderr.read()
        assert time.monotonic() < began + 200
        time.sleep(0.1)
    seconds = time.monotonic() - began
    program.send_signal(signal.SIGINT)
    program.communicate()
    assert program.returncode == 130
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert all(record["episodes"] == 64 for record in records[1:])
    assert max(record["sync/max_abs"] for record in records) < 1e-3
    store(f"engine_killed_{len(words) + 1}", seconds=seconds, steps=len(records) - 1)


def test_a_run_is_stopped_from_another_terminal(start, tmp_path):
    program, family = start("rollout.max_staleness=1")
    listed = subprocess.run([ENVGYM, "runs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"(process {program.pid})" in listed.stdout
    stopped = subprocess.run([ENVGYM, "stop", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert stopped.returncode == 0
    assert "resume it with: envgym train --resume runs/run" in stopped.stdout
    assert program.wait(30) == 130
    wait_for_the_end_of(family, LIMIT)
    kept = sorted((tmp_path / "runs" / "run" / "checkpoints").iterdir())[-1]
    steps = int(kept.name.removeprefix("step_"))
    resumed = [ENVGYM, "train", "--resume", "run", f"steps={steps + 2}"]
    subprocess.run(resumed, cwd=tmp_path, check=True, timeout=200)
    records = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps + 3))
    assert max(record.get("staleness/max", 0) for record in records) <= 1
    played = read_episodes(tmp_path / "runs" / "run")
    tasks = Counter((episode.group_id, episode.task.id) for episode in played)
    assert set(tasks.values()) == {4}
    assert len(tasks) == 16 * (steps + 2)
