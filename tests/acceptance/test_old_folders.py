"""Runs, evaluations and episodes that earlier commits wrote: resumed, shown, scored, viewed and compared.

`tests/data/old_folders/make.py` wrote the archives, each at the commit that it is named after.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from envgym.cli import main
from envgym.episodes.files import read_episodes
from envgym.view.server import Answers

ARCHIVES = Path(__file__).parents[1] / "data" / "old_folders"
ENVGYM = Path(sys.executable).with_name("envgym")
RUNS = {"synchronous": 2, "asynchronous": 2, "lora": 2, "ppo": 2, "pipeline": 1, "epochs": 4}
"""The runs of an archive, and the steps that each took."""


@pytest.fixture(scope="module", params=["d1a8625"])
def unpacked(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("old_folders")
    with tarfile.open(ARCHIVES / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def folder(unpacked, tmp_path, monkeypatch):
    """The archive's files as a test may change them, in the working directory."""
    copy = tmp_path / "old"
    shutil.copytree(unpacked, copy)
    monkeypatch.chdir(copy)
    return copy


def resume(name, *words):
    """Resume a run in a process of its own, as a user would."""
    command = [str(ENVGYM), "train", "--resume", f"runs/{name}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def check_resumed(name, steps):
    """The run took `steps` steps in all, each once, and its weights moved."""
    summary = json.loads(Path("runs", name, "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", steps)
    trained = Path("runs", name, "3-ppo" if name == "pipeline" else "")
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))


def test_a_run_is_resumed(folder):
    """By epochs, and without an engine; its configuration holds `steps` too."""
    before = Path("runs/epochs/model/model.safetensors").read_bytes()
    resume("epochs", "steps=6")
    check_resumed("epochs", 6)
    assert Path("runs/epochs/model/model.safetensors").read_bytes() != before


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(RUNS))
def test_every_kind_of_run_is_resumed(folder, name):
    steps = RUNS[name] + 2
    resume(name, f"steps={steps}")
    check_resumed(name, steps)


def test_they_are_listed_and_shown(folder, capsys):
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    for name, steps in RUNS.items():
        assert any(line.split()[:3] == [name, "completed", str(steps)] for line in listed.splitlines())
    for name in ("synchronous", "asynchronous", "lora", "ppo"):
        assert main(["show", f"runs/{name}", "--step", "2"]) == 0
        assert "reward 0." in capsys.readouterr().out
    assert main(["show", "evals/after"]) == 0
    assert "4 of 8 episodes" in capsys.readouterr().out


def test_they_are_viewed_and_exported(folder, capsys):
    answers = Answers([Path("runs"), Path("evals"), Path("episodes.jsonl")])
    listed = {entry["id"] for entry in answers("index")}
    assert listed > {f"runs/{name}" for name in RUNS if name != "pipeline"}
    assert listed > {"runs/pipeline/3-ppo", "evals/before", "evals/after", "episodes.jsonl"}
    for name in ("synchronous", "asynchronous", "lora", "ppo", "epochs"):
        assert answers(f"run|runs/{name}")["state"] == "completed"
        assert answers(f"metrics|runs/{name}|0")["records"]
        assert name == "epochs" or answers(f"list|runs/{name}|1|0|9")["total"] == 8  # a replay keeps no rollouts
    assert main(["export", "runs/synchronous", "--out", "run.html"]) == 0
    assert "24 of 24 episodes with their tokens" in capsys.readouterr().out
    assert main(["export", "episodes.parquet", "--out", "episodes.html"]) == 0
    assert "16 of 16 episodes" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["episodes.jsonl", "episodes.parquet", "runs/synchronous", "evals/before"])
def test_their_episodes_are_scored_again_as_they_were(folder, source, capsys):
    assert main(["score", source, "--env", "letters.py", "--out", "again.jsonl"]) == 0
    assert "changed  0 episodes" in capsys.readouterr().out
    again = {episode.id: episode.score for episode in read_episodes(Path("again.jsonl"))}
    before = {episode.id: episode.score for episode in read_episodes(Path(source))}
    assert len(before) >= 8
    assert again == pytest.approx(before)


def test_evaluations_are_compared(folder, capsys):
    assert main(["compare", "before", "after"]) == 0
    printed = capsys.readouterr().out
    assert "-0.058 [-0.196, +0.080]" in printed
    assert "note" not in printed


@pytest.mark.slow
def test_another_grader_is_noted(folder, capsys):
    """`sums` was graded by the archive's `math_verify`; the same tasks are graded by today's."""
    words = ["eval", "--env", "math_verify", "--model", "tiny", "--name", "today", "eval.tasks=8", "eval.greedy=false"]
    words += ["rollout.max_tokens=6", "engine.max_model_len=128"]  # as `make.py` evaluated it
    done = subprocess.run([str(ENVGYM), *words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert main(["compare", "sums", "today"]) == 0
    assert re.search(r"math_verify: the environment.s code .*differ", capsys.readouterr().out)
