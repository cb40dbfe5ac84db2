"""`envgym plan`: where a run's processes would go, what they need, and what does not fit."""

import json
import re

import pytest

from envgym.cli import main

QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path, capsys):
    """Run the command for a model of seven billion parameters, of which only the config is here."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))

    def run(*words):
        status = main(["plan", "--env", "math_verify", "--model", str(tmp_path), *words])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_plan_says_where_and_how_much_and_starts_nothing(plan, tmp_path):
    words = ("workers.ranks=4", "workers.zero_stage=3", "workers.gradient_checkpointing=true")
    status, out, _ = plan("--gpus", "8", *words, "engine.tensor_parallel=2")
    assert status == 0
    assert "micro-batches of 16,384 tokens" in out
    engine, actor = (next(line for line in out.splitlines() if line.startswith(part)) for part in ("engine", "actor"))
    assert re.match(r"engine +1 +machine 0 +4,5 +72\.00 +weights 7\.0", engine)  # 7.6 billion in 16 bits, on two
    assert re.match(r"actor +4 +machine 0 +0 1 2 3 +\d+\.\d\d +weights 3\.5", actor)  # on four
    assert "gradients 7.09, optimizer 21.28" in actor
    assert "machine 0, GPU 5" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_what_does_not_fit_is_one_line_and_an_exit_status(plan):
    status, out, err = plan("--gpus", "2", "--gpu-memory", "24")
    assert status == 2
    assert "of 24.00 GiB" in out
    assert re.match(r"envgym: error: machine 0, GPU \d would need \d+\.\d\d GiB for actor, and has 24\.00: raise", err)
    status, _, err = plan("--gpus", "2", "colocate=none", "workers.ranks=4")
    assert (status, "actor needs 4 GPUs" in err or "engine needs 1 GPU" in err) == (2, True)
    assert plan("--gpus", "0")[0] == 2


def test_taking_turns_needs_the_larger_of_the_two(plan):
    words = ("workers.ranks=4", "workers.zero_stage=3")
    alone = plan("--gpus", "5", *words, "colocate=none")[1]
    actor = float(re.search(r"^actor .*? (\d+\.\d\d) +weights", alone, re.MULTILINE)[1])

    def of_gpu_0(colocate):
        return float(re.search(r"machine 0, GPU 0 +(\d+\.\d\d) GiB", plan("--gpus", "4", *words, colocate)[1])[1])

    assert of_gpu_0("colocate=auto") == pytest.approx(actor + 40.0, abs=0.02)
    assert of_gpu_0("colocate=all") == pytest.approx(max(actor, 68.0), abs=0.02)


def test_machines_that_are_there_are_planned_for_and_a_model_that_is_not_here_is_said(capsys, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["plan", "--env", "math_verify", "--model", "somebody/model"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^actor +1 +this machine +- +\? +the model's sizes are unknown", out, re.MULTILINE)
    assert re.search(r"^this machine +\d+\.\d\d GiB +of \d+\.\d\d GiB$", out, re.MULTILINE)


def test_every_stage_is_planned_with_the_model_that_it_begins_with(plan, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1 + 1", "chosen": "2", "rejected": "3"}\n')
    data = [f"stages.{stage}.data.path={tmp_path / 'pairs.jsonl'}" for stage in ("sft", "rm", "ppo")]
    assert main(["plan", "--recipe", "rlhf", "--model", str(tmp_path), *data, "--gpus", "8"]) == 2  # no ZeRO
    out = capsys.readouterr().out
    assert re.findall(r"^stage \d, (\w+)$", out, re.MULTILINE) == ["sft", "rm", "ppo"]
    assert re.findall(r"^(\w+) .* weights (\d+\.\d\d)", out, re.MULTILINE) == [
        ("actor", "14.18"), ("actor", "14.18"), ("engine", "14.18"), ("actor", "14.18"), ("reference", "14.18"),
        ("critic", "14.18"), ("reward", "14.18"),
    ]  # fmt: skip
