"""Runs with `rollout.processes`: their bytes, their asynchronous form, and kills of any of their processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.learned_tasks import check_learned_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENVGYM = Path(sys.executable).with_name("envgym")
KILLS = int(os.environ.get("ENVGYM_KILLS", "20"))
TASKS = 8
COMMON = (
    f"rollout.tasks_per_step={TASKS}", "rollout.group_size=2", "rollout.processes=2", "eval.every=0",
    "checkpoint.every=1", "checkpoint.keep=1", "learner.warmup_steps=1",
)  # fmt: skip


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def worker(run: subprocess.Popen[bytes], log: str) -> psutil.Process | None:
    """The run's worker whose output goes to the file `log`, if it lives."""
    for process in psutil.Process(run.pid).children():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{log}"):
                return process
        except OSError:
            continue
    return None


def kill_at_random(folder: Path, words: tuple[str, ...], victims: tuple[str, ...]) -> Iterator[str]:
    """Start a run, kill one of its processes at a random moment, resume it if it ended by that, and so on. Yields whom
    it killed. The run is the caller's to end."""
    drawn, command, run = random.Random(KILLS), ["train", *words, "--name", "killed"], None
    metrics = folder / "runs" / "killed" / "metrics.jsonl"
    for number in range(KILLS):
        victim = victims[number % len(victims)]
        if run is None or run.poll() is not None:
            if (folder / "runs" / "killed" / "config.yaml").exists():
                command = ["train", "--resume", "killed"]
            run = subprocess.Popen([str(ENVGYM), *command], cwd=folder, stdout=subprocess.DEVNULL)
            steps, deadline = metrics.read_text().count("\n") if metrics.exists() else 0, time.monotonic() + 300
            while victim != "controller" and (not metrics.exists() or metrics.read_text().count("\n") <= steps):
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        time.sleep(drawn.uniform(1.0, 6.0))
        assert run.poll() is None, f"the run ended before {victim} could be killed"
        if victim == "controller":
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
        elif (process := worker(run, f"{victim}.log")) is not None:
            process.send_signal(signal.SIGKILL)
            if victim.startswith("actor"):
                assert run.wait(60) == 2
        else:
            victim = "nobody"
        yield victim
    assert run is not None
    if run.poll() is None:
        run.send_signal(signal.SIGKILL)
        run.wait()


@pytest.mark.parametrize("words", [("--runtime", "local"), ("--runtime", "ray")], ids=["local", "ray"])
@pytest.mark.parametrize("env", ["math_verify", "tool_use"])
def test_a_deterministic_run_has_the_bytes_of_a_single_process(envgym, tmp_path, env, words):
    settings = ("deterministic=true", "steps=3", "rollout.tasks_per_step=4", "rollout.group_size=4", "eval.every=0")
    envgym("train", "--env", env, *settings, "--name", "one")
    envgym("train", "--env", env, *settings, *words, "rollout.processes=2", "--name", "two")
    assert weights(tmp_path / "runs" / "one") == weights(tmp_path / "runs" / "two")
    assert (tmp_path / "runs" / "two" / "logs" / "rollout-1.log").exists()


def test_a_deterministic_run_with_random_kills_has_the_same_bytes(envgym, tmp_path, store):
    words = ("--env", "math_verify", "deterministic=true", "steps=100000", *COMMON)
    killed = Counter(kill_at_random(tmp_path, words, ("rollout-0", "controller", "rollout-1", "actor-0")))
    runs = tmp_path / "runs"
    steps = max(json.loads(line)["step"] for line in (runs / "killed" / "metrics.jsonl").read_text().splitlines()) + 3
    envgym("train", "--resume", "killed", f"steps={steps}")
    envgym("train", *words, f"steps={steps}", "rollout.processes=0", "--name", "whole")
    assert weights(runs / "killed") == weights(runs / "whole")
    store("processes_killed_deterministic", killed=dict(killed), steps=steps, weights=weights(runs / "whole"))


def test_an_asynchronous_run_with_random_kills_learns_from_every_task_once(envgym, tmp_path, store):
    words = ("--env", "math_verify", "rollout.max_staleness=1", "steps=100000", *COMMON)
    victims = ("rollout-0", "engine", "controller", "rollout-1", "actor-0")
    killed = Counter(kill_at_random(tmp_path, words, victims))
    runs = tmp_path / "runs"
    metrics = runs / "killed" / "metrics.jsonl"
    steps = max(json.loads(line)["step"] for line in metrics.read_text().splitlines()) + 3
    envgym("train", "--resume", "killed", f"steps={steps}")
    trained = check_learned_once(runs / "killed", "math_verify", steps=steps, tasks=TASKS, max_staleness=1)
    store("processes_killed_asynchronous", killed=dict(killed), steps=steps, tasks=trained)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_no_process_outlives_the_run(tmp_path, number):
    words = ["train", "--env", "math_verify", "steps=100000", *COMMON, "--name", "killed"]
    run = subprocess.Popen([str(ENVGYM), *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    metrics, deadline = tmp_path / "runs" / "killed" / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 4  # the engine, the actor and two that roll out
    run.send_signal(number)
    run.wait(60)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
