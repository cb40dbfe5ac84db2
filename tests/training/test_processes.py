"""Training with `rollout.processes`: what a run leaves is what a single process leaves."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from envgym.cli import main
from tests.programs import LETTERS

SETTINGS = (
    "rollout.tasks_per_step=4", "rollout.group_size=2", "rollout.max_tokens=8", "eval.tasks=4", "eval.greedy=false",
    "eval.every=1", "checkpoint.every=1", "engine.kind=transformers", "learner.kl.coef=0", "learner.lr=1e-3",
    "deterministic=true",
)  # fmt: skip
TIMES = ("seconds/", "tokens/per_second", "tflops", "mfu", "memory/")


def lasting(name):
    """The metrics, the episodes and the weights of a run, without times."""
    folder = Path("runs", name)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in record.items() if not key.startswith(TIMES)} for record in records]
    files = sorted([*folder.glob("rollouts/*.parquet"), *folder.glob("held_out/*.parquet")])
    episodes = [pq.read_table(file).drop_columns(["seconds"]).to_pylist() for file in files]
    return metrics, episodes, (folder / "model" / "model.safetensors").read_bytes()


def test_a_deterministic_run_is_that_of_a_single_process_and_resumes_with_another_number(
    tmp_path, monkeypatch, tiny_model, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(LETTERS)
    words = ["train", "--env", "letters.py", "--model", str(tiny_model), *SETTINGS]
    assert main([*words, "steps=3", "--name", "single"]) == 0
    assert main([*words, "steps=2", "rollout.processes=2", "--name", "several"]) == 0
    assert (tmp_path / "runs" / "several" / "logs" / "rollout-1.log").exists()
    assert main(["train", "--resume", "several", "steps=3", "rollout.processes=1"]) == 0
    assert "rollout.processes=1 (was 2)" in capsys.readouterr().out
    single, several = lasting("single"), lasting("several")
    assert [record["step"] for record in several[0]] == [0, 1, 2, 3]
    assert several == single


def test_processes_do_not_go_with_debug(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(LETTERS)
    assert main(["train", "--env", "letters.py", "rollout.processes=2", "debug=true", "steps=1"]) == 2
    assert capsys.readouterr().err.endswith(
        "debug=true runs everything inside the controller: set rollout.processes=0\n"
    )


@pytest.mark.parametrize("count", ["-1", "many"])
def test_a_wrong_number_is_refused(tmp_path, monkeypatch, capsys, count):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--env", "math_verify", f"rollout.processes={count}"]) == 2
    assert "rollout.processes" in capsys.readouterr().err


def test_an_environment_that_listens_is_refused(capsys):
    words = ["--env", "http://127.0.0.1:8080/x", "env.listen=127.0.0.1:9000", "env.allow=[127.0.0.1]"]
    assert main(["config", *words]) == 0
    assert main(["config", *words, "rollout.processes=2"]) == 2
    assert "cannot listen at the one address 127.0.0.1:9000 (env.listen)" in capsys.readouterr().err
