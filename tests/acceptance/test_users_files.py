"""What users write themselves (a learner, an environment, a script) and what they serve works like what ships."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import envgym as library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ENVGYM = Path(sys.executable).with_name("envgym")
SMALL = ("rollout.tasks_per_step=8", "rollout.group_size=4", "eval.tasks=16")


def test_a_learner_and_an_environment_in_files_of_the_users_own(envgym, summary, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    envgym(
        "train", "--learner", "examples/reinforce.py:Reinforce", "--env", "examples/reverse.py", "--name", "own",
        "steps=4", *SMALL,
    )  # fmt: skip
    result = summary("own")
    assert (result["status"], result["steps"], result["failures"]) == ("completed", 4, {})
    records = [json.loads(line) for line in (tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "reward/mean", "grad_norm"} <= set(records[1])


def test_the_example_from_python(tmp_path, monkeypatch, capsys):
    """The script as it stands, but for its length."""
    train = library.train
    monkeypatch.setattr(library, "train", lambda settings: train({**settings, "steps": 2, "eval.tasks": 16}))
    monkeypatch.chdir(tmp_path)
    script = ROOT / "examples" / "train.py"
    exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__"})
    assert re.search(r"held-out score 0\.\d+ -> \d\.\d+, 95% interval \(", capsys.readouterr().out)


def test_a_served_environment_is_trained_on_and_a_run_evaluated(envgym, summary, tmp_path):
    with subprocess.Popen(
        [ENVGYM, "serve", "math_verify", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline()).group()
            envgym("train", "--env", url, "--name", "served", "steps=2", *SMALL)
        finally:
            server.terminate()
    result = summary("served")
    assert (result["status"], result["steps"], result["failures"]) == ("completed", 2, {})
    assert result["eval"]["before"]["score"] > 0

    printed = envgym("eval", "--env", "math_verify", "--model", "runs/served", "eval.tasks=64").stdout
    assert 0.1 < score_of(printed) < 0.9  # two steps change little


def test_the_starter_is_evaluated(envgym, store):
    printed = envgym("eval", "--env", "math_verify", "--model", "starter").stdout
    assert "512 tasks, 512 episodes" in printed
    assert 0.1 < score_of(printed) <= 0.5
    store("eval_starter", score=score_of(printed))


@pytest.mark.parametrize(
    "words", [("--recipe", "sft_grpo"), ("--learner", "sft", "agent=replay")], ids=["stages", "demonstrations"]
)
def test_what_a_run_says_to_type_next_evaluates_its_policy(words, envgym, tiny_model):
    printed = envgym(
        "train", "--env", "math_verify", "--model", str(tiny_model), "--name", "own", *words, "steps=1",
        "rollout.max_tokens=8", *SMALL,
    ).stdout  # fmt: skip
    program, *following = shlex.split(re.search(r"^next +(.+)$", printed, re.MULTILINE).group(1))
    assert program == "envgym"
    assert "16 tasks, 16 episodes" in envgym(*following).stdout


def score_of(printed: str) -> float:
    return float(re.search(r"^score +(\S+)", printed, re.MULTILINE).group(1))
