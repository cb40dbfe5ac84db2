"""Memory that one long token sequence needs on a rank: alone, with sequence parallelism, with tensor parallelism.

    .venv/bin/python benchmarks/long_rows.py [--length 4096]

A rank first trains on a short sequence, after which it holds weights, gradients, optimizer state and the memory of
libraries. Then it trains on the long one; the growth of its peak memory is that of the long sequence: activations, and
the buffers of communication. On a CPU this is the memory of the process, which nothing else on the machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, conditions, fill_docs, store, table

from envgym.learner import RoleSpec, TrainSample
from envgym.processes.local import LocalRuntime
from envgym.types import Objective
from envgym.workers.config import WorkersConfig
from envgym.workers.group import WorkerGroup
from envgym.workers.spec import WorkerSpec

SHORT = 64  # tokens
VOCABULARY = 2048
CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "`sequence_parallel=2`": {"ranks": 2, "sequence_parallel": 2},
    "`tensor_parallel=2`": {"ranks": 2, "tensor_parallel": 2},
    "one rank, `gradient_checkpointing`": {"gradient_checkpointing": True},
    "`sequence_parallel=2`, `gradient_checkpointing`": {
        "ranks": 2,
        "sequence_parallel": 2,
        "gradient_checkpointing": True,
    },
    "`tensor_parallel=2`, `gradient_checkpointing`": {
        "ranks": 2,
        "tensor_parallel": 2,
        "gradient_checkpointing": True,
    },
}


def make_model(folder: str, length: int) -> str:
    """Save a Qwen3 of 25 million parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_row(length: int) -> TrainSample:
    ids = np.random.default_rng(length).integers(0, VOCABULARY, length)
    weights = np.ones(length, np.float32)
    weights[0] = 0.0
    return TrainSample(ids, weights, np.full(length, np.nan, np.float32), Objective.CROSS_ENTROPY)


async def measure(model: str, settings: dict[str, Any], length: int, logs: Path) -> dict[str, float]:
    """GiB of the fullest rank after a short sequence, and the GiB that a long one adds; the long sequence's loss."""
    runtime = LocalRuntime(logs)
    try:
        workers = WorkersConfig(tokens_per_microbatch=length, **settings)
        spec = WorkerSpec("actor", model, RoleSpec(trained=True), {"name": "sft"}, workers)
        group = await WorkerGroup.start(runtime, spec)
        said = []
        for size in (SHORT, SHORT, length):
            row = make_row(size)
            said.append(
                await group.accumulate([row], {Objective.CROSS_ENTROPY: float(row.loss_weights.sum())})
                | await group.step(1e-4)
            )
        await group.close()
    finally:
        await runtime.close()
    before, after = said[-2]["memory/max"], said[-1]["memory/max"]
    return {"at rest": before, "row": after - before, "loss": said[-1]["loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens of the long row")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, options.length)
        for name, settings in CASES.items():
            results[name] = asyncio.run(measure(model, settings, options.length, Path(folder, "logs")))
            print(name, results[name], flush=True)
    environment = conditions(("torch", "transformers", "deepspeed"))
    print(store("long_rows", {"length": options.length, "conditions": environment, "cases": results}))
    alone = results["one rank"]["row"]
    rows = [
        [name, f"{result['row']:.2f}", f"{result['row'] / alone:.2f}", f"{result['loss']:.5f}"]
        for name, result in results.items()
    ]
    header = [f"memory per rank of a sequence of {options.length} tokens", "GiB", "share", "loss"]
    fill_docs("long_rows", table(header, rows), ROOT / "docs" / "scale" / "sequence_and_tensor_parallelism.md")


if __name__ == "__main__":
    main()
