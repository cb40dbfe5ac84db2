"""Evaluating as people do it: a suite with the starter through vLLM, one that is killed in the middle, and a run's best
checkpoint beside the policy it began with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envgym.jobs.folder import JobFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENVGYM = Path(sys.executable).with_name("envgym")


def result_of(folder, name):
    return json.loads((folder / "evals" / name / "result.json").read_text())


def test_the_smoke_suite_takes_under_a_minute_with_the_starter(envgym, tmp_path, store):
    envgym("model", "starter")
    began = time.monotonic()
    printed = envgym("eval", "--suite", "smoke", "--model", "starter", "--name", "smoke").stdout
    seconds = time.monotonic() - began
    result = result_of(tmp_path, "smoke")
    store("eval_smoke", seconds=seconds, n_episodes=result["n_episodes"], score=result["score"], ci95=result["ci95"],
          failures=result["failures"])  # fmt: skip
    assert {name.partition("/")[0] for name in result["envs"]} == {"arithmetic", "reasoning", "tool_use", "multi_turn"}
    assert all(env["n_tasks"] for env in result["envs"].values()), printed
    assert set(result["failures"]) <= {"prompt_too_long"}  # puzzles longer than the starter's context
    assert seconds < 60


def test_a_suite_killed_in_the_middle_goes_on_where_it_was(envgym, tmp_path, store):
    words = ["eval", "--suite", "arithmetic:full", "--model", "starter", "--name", "killed", "eval.samples=2"]
    child = subprocess.Popen([ENVGYM, *words], cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    journal = JobFolder(tmp_path / "evals/killed").journal
    deadline = time.monotonic() + 300
    while not journal.path.exists() or journal.path.read_bytes().count(b"\n") < 1200:
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    before = journal.originals()
    envgym("eval", "--resume", "killed")
    after, result = journal.originals(), result_of(tmp_path, "killed")
    assert len(after) == result["n_episodes"] == 4 * 512 * 2
    assert len(journal.path.read_text().splitlines()) == len(after)
    assert {place: after[place] for place in before} == before
    store("eval_killed", kept=len(before), played_after=len(after) - len(before), score=result["score"])


def test_the_best_checkpoint_is_compared_with_the_policy_the_run_began_with(envgym, tmp_path, store):
    envgym("train", "--env", "math_verify", "--name", "first", "steps=20", "eval.every=10", "eval.tasks=128",
           "checkpoint.every=10", "checkpoint.best=eval/score")  # fmt: skip
    for name, model in (("before", "starter"), ("after", "runs/first/checkpoints/best")):
        envgym("eval", "--env", "math_verify", "--model", model, "--name", name, "eval.greedy=false", "eval.tasks=256")
    compared = json.loads(envgym("compare", "before", "after", "--json", "--fail-below", "0.1").stdout)
    store("eval_compared", **{key: compared[key] for key in ("difference", "ci95", "p_value", "better", "worse")})
    assert compared["ci95"][0] > 0.1
    assert compared["p_value"] < 0.001
