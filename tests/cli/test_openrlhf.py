"""`envgym openrlhf`: what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DPO = ["train_dpo", "--pretrain", "org/model", "--dataset", "org/pairs", "--apply_chat_template"]


def translated(printed):
    """The words of the command that was printed, without the copy after it."""
    return shlex.split(printed.replace("\\\n", " ").partition("\nmkdir ")[0])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_a_dry_run_prints_a_command_that_can_be_pasted(run):
    done = run("openrlhf", *DPO, "--use_wandb", "s3cret", "--packing_samples", "--dry-run")
    assert done.returncode == 0
    assert "s3cret" not in done.stdout + done.stderr
    assert "note: --packing_samples is ignored: sequences are packed if that is faster" in done.stderr
    assert "mkdir -p ckpt/ && cp -r ckpt/checkpoints_dpo/model/. ckpt/" in done.stdout
    words = translated(done.stdout)
    assert words[:3] == ["WANDB_API_KEY=…", "envgym", "train"]
    shown = run("config", *words[3:])
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "beta: 0.1" in shown.stdout
    assert not Path("ckpt").exists()


def test_help_says_what_becomes_of_flags(run):
    assert "train_ppo_ray" in run("openrlhf", "--help").stdout
    assert run("openrlhf").returncode == 2
    shown = run("openrlhf", "train_dpo", "--help").stdout
    assert "learner.beta" in shown
    assert "ignored: sequences are packed" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train_pdo"], "there is no program 'train_pdo'. Did you mean 'train_dpo'?"),
        (["rlhf:train_dpo"], "train_dpo: which settings? Give --config FILE"),
        (["rlhf:train_dpo", "--config", "none.yaml"], "config file none.yaml does not exist"),
        ([*DPO[:4], "missing.jsonl"], "there is no file or folder missing.jsonl"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_left(run, tmp_path, words, said):
    done = run("openrlhf", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("envgym: error: ")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_of_a_launchers_ranks_the_first_runs_with_all_of_them(run, monkeypatch):
    def launched(rank):
        for name, value in {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)

    launched("1")
    done = run("openrlhf", *DPO)
    assert (done.returncode, done.stdout) == (0, "")  # it leaves at once
    launched("0")
    assert "workers.ranks=4" in run("openrlhf", *DPO, "--dry-run").stdout
    assert "RANK" not in os.environ, "the ranks that we start would take themselves for the launcher's"


def test_launchers_over_several_machines_are_refused(run, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    done = run("openrlhf", *DPO)
    assert done.returncode == 2
    assert "start Ray on them" in done.stderr


def test_in_a_job_of_a_ray_cluster_workers_are_its_actors(run, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "--runtime ray" in run("openrlhf", *DPO, "--dry-run").stdout


def test_the_module_is_what_deepspeed_starts(tmp_path):
    words = [sys.executable, "-m", "envgym.openrlhf", "--local_rank=0", *DPO, "--dry-run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "learner.beta=0.1" in done.stdout


@pytest.mark.timeout(600)
def test_a_run_leaves_a_model_where_it_was_told_and_goes_on_where_it_stopped(start, tmp_path, tiny_model):
    rows = [{"input": f"{n} + 1?", "output": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["openrlhf", "train_sft", "--pretrain", tiny_model, "--dataset", "rows.jsonl", "--output_key", "output",
             "--max_epochs", "1", "--train_batch_size", "4", "--max_len", "64", "--param_dtype", "bf16",
             "--save_path", "saved", "--load_checkpoint"]  # fmt: skip
    done = start(*words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "envgym train" in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").dtype.itemsize == 2
    again = start(*words, OMP_NUM_THREADS="1")
    assert (again.returncode, [path.name for path in (tmp_path / "ckpt").iterdir()]) == (0, ["checkpoints_sft"])
    anew = start(*words[:-1], "--dry-run")
    assert "name=checkpoints_sft-2" in anew.stdout  # nothing is overwritten


def test_a_folder_without_a_run_is_not_resumed(run, tmp_path):
    (tmp_path / "ckpt" / "checkpoints_dpo").mkdir(parents=True)
    done = run("openrlhf", *DPO, "--load_checkpoint", "--dry-run")
    assert done.returncode == 0
    assert "--resume" not in done.stdout
    assert "name=checkpoints_dpo-2" in done.stdout
