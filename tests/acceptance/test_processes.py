"""Runs with `rollout.processes`: their bytes, and their processes' end. `test_kills.py` kills any of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.weight_files import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENVGYM = Path(sys.executable).with_name("envgym")
COMMON = (
    "rollout.tasks_per_step=8", "rollout.group_size=2", "rollout.processes=2", "eval.every=0",
    "checkpoint.every=1", "checkpoint.keep=1", "learner.warmup_steps=1",
)  # fmt: skip


@pytest.mark.parametrize("words", [("--runtime", "local"), ("--runtime", "ray")], ids=["local", "ray"])
@pytest.mark.parametrize("env", ["math_verify", "tool_use"])
def test_a_deterministic_run_has_the_bytes_of_a_single_process(envgym, tmp_path, env, words):
    settings = ("deterministic=true", "steps=3", "rollout.tasks_per_step=4", "rollout.group_size=4", "eval.every=0")
    envgym("train", "--env", env, *settings, "--name", "one")
    envgym("train", "--env", env, *settings, *words, "rollout.processes=2", "--name", "two")
    assert weights(tmp_path / "runs" / "one") == weights(tmp_path / "runs" / "two")
    assert (tmp_path / "runs" / "two" / "logs" / "rollout-1.log").exists()


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
