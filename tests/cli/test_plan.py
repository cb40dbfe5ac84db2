"""`envgym plan`: where a run's processes would go, what they need, and what does not fit."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from envgym.cli import main
from envgym.placement import memory
from envgym.placement.plan import busy_processes

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


def test_rollouts_get_as_many_processes_as_their_engines_keep_half_busy(plan):
    def line(*words):
        return re.search(r"^rollouts of .*$", plan("--gpus", "8", "workers.ranks=4", *words)[1], re.MULTILINE)[0]

    assert line("rollout.max_tokens=512") == (
        "rollouts of 3,000 tokens/s, in 1 turn of 256 tokens, keep 0.01 processes busy: rollout.processes=0"
    )
    fast = line("--engine-rate", "30000", "engine.count=8", "rollout.max_tokens=20", "--turns", "20")
    busy = float(re.search(r"240,000 tokens/s, in 20 turns of 10 tokens, keep (\S+)", fast)[1])
    assert busy == pytest.approx(240_000 * (20 * 4.6e-4 + 400 * (1.3e-7 + 20 * 1.1e-8)) / 200, abs=0.01)
    assert fast.endswith(f"rollout.processes={math.ceil(2 * busy)}")
    assert "in 5 turns of 512 tokens" in line("agent.max_turns=5")
    assert plan("--engine-rate", "0")[0] == 2


def test_the_time_of_a_turn_is_what_the_benchmark_measured(plan):
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "controller.json"
    for case in json.loads(results.read_text())["cases"]:
        tokens = case["tokens"] / 2 / case["turns"]  # sampled per turn
        rate = case["trajectories"] * case["tokens"] / 2 / case["whole"]
        assert busy_processes(case["turns"], tokens, rate) == pytest.approx(1, rel=0.5), case


def weights(header, size=None):
    """The begin of a safetensors file with this header, whose size it says is `size`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
MALFORMED = {
    "no JSON": "{",
    "no text": b"\xff\xfe\x00",
    "empty": "",
    "a list": "[]",
    "a deep list": "[" * 100_000,
    "no object for the text": {**QWEN_7B, "text_config": [1]},
    "a missing size": {name: size for name, size in QWEN_7B.items() if name != "vocab_size"},
    "a text": {**QWEN_7B, "hidden_size": "3584"},
    "a negative size": {**QWEN_7B, "num_hidden_layers": -28},
    "zero": {**QWEN_7B, "num_attention_heads": 0},
    "a fraction": {**QWEN_7B, "vocab_size": 1.5},
    "a truth": {**QWEN_7B, "vocab_size": True},
    "a huge size": {**QWEN_7B, "hidden_size": 10**400},
    "a list of sizes": {**QWEN_7B, "intermediate_size": [1, 2]},
    "a folder": None,
    "a pipe": "pipe",
    "no end": "/dev/zero",
    "weights without a header": (QWEN_7B, b""),
    "weights without an end": (QWEN_7B, weights(b"{" * 9, 2**63)),
    "weights of a list": (QWEN_7B, weights([1])),
    "weights without a shape": (QWEN_7B, weights({"a": {"dtype": "F32"}})),
    "weights of a text": (QWEN_7B, weights({"a": {**TENSOR, "shape": ["a"]}})),
    "a pointer to weights": (QWEN_7B, b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_folder_that_holds_no_model_is_one_line(tmp_path, capsys, name):
    config, content = MALFORMED[name], None
    if isinstance(config, tuple):
        config, content = config
        (tmp_path / "model.safetensors").write_bytes(content)
    file = tmp_path / "config.json"
    if config is None:
        file.mkdir()
    elif config == "pipe":
        os.mkfifo(file)
    elif config == "/dev/zero":
        file.symlink_to(config)
    else:
        file.write_bytes(config if isinstance(config, bytes) else (
            config if isinstance(config, str) else json.dumps(config)).encode())  # fmt: skip
    status = main(["plan", "--env", "math_verify", "--model", str(tmp_path), "--gpus", "2"])
    [line] = capsys.readouterr().err.splitlines()
    assert (status, "mistake in envgym" in line) == (2, False)
    assert line.startswith("envgym: error: ")
    assert str(tmp_path) in line


def test_a_config_of_a_billion_layers_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "BUILDING", (2.0, 2**32))
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "model_type": "qwen2", "num_hidden_layers": 10**9}))
    status = main(["plan", "--env", "math_verify", "--model", str(tmp_path), "--gpus", "2"])
    assert (status, "would need" in capsys.readouterr().err) == (2, True)
