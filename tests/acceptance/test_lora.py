"""LoRA and QLoRA in reinforcement learning on the starter: an adapter of a sixth of its size learns the task."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_an_adapter_learns_math_verify(envgym, summary, store, tmp_path, quantize):
    envgym(
        "train", "--env", "math_verify", "--name", "lora", "lora.rank=16", f"lora.quantize={quantize}",
        "learner.lr=3e-3", "learner.kl.coef=0.01", "steps=20", "eval.tasks=256",
    )  # fmt: skip
    result, run = summary("lora"), tmp_path / "runs" / "lora"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    envgym("model", "merge", str(run / "adapter"), "merged")
    left, merged = load_file(run / "model/model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    difference = max(float((left[name] - merged[name]).abs().max()) for name in left)
    adapter = load_file(run / "adapter/adapter_model.safetensors")
    store(
        f"lora_{quantize}",
        score_before=result["eval"]["before"]["score"],
        score_after=result["eval"]["after"]["score"],
        ci95_before=result["eval"]["before"]["ci95"],
        ci95_after=result["eval"]["after"]["ci95"],
        mismatch_max=result["mismatch"]["max_abs_logprob"],
        sync_max=max(record["sync/max_abs"] for record in records),
        seconds=result["seconds"],
        parameters=sum(tensor.numel() for tensor in left.values()),
        adapter_parameters=sum(tensor.numel() for tensor in adapter.values()),
        merged_by_command_differs=difference,
    )
    assert result["eval"]["after"]["ci95"][0] > result["eval"]["before"]["ci95"][1] + 0.2
    assert result["mismatch"]["max_abs_logprob"] < 1e-4
    assert max(record["sync/max_abs"] for record in records) < 1e-4
    assert difference < 1e-6
    assert torch.equal(left["model.norm.weight"], merged["model.norm.weight"])
