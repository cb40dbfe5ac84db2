"""Cost and gain of each setting of the workers on this machine's GPUs, and a check that training stays the same.

Each setting trains on the same batches; the losses of every step are compared with those of the first case of the same
optimizer and number format. A setting that this machine cannot run is listed with the reason.

    python benchmarks/gpu_deepspeed.py --model path/or/hub-id --ranks 8
    python benchmarks/gpu_deepspeed.py --cases zero3,compile_zero3 --layers 12 --width 1024

Without `--model` the model has random weights. The script also runs on a CPU, where it measures little.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from record import conditions, store, table

from envgym.errors import EnvgymError
from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.types import Objective, Row
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.group import WorkerGroup

VOCABULARY = 32000
MUON = {"optimizer": "muon", "muon_lr": 1e-3}


@dataclass(frozen=True)
class Case:
    """Settings of the workers and of the learner; `like` names the case with which its losses must agree."""

    workers: dict[str, Any]
    like: str = "zero1"
    learner: dict[str, Any] = field(default_factory=dict)


CASES = {
    "zero1": Case({"zero_stage": 1}),
    "zero2": Case({"zero_stage": 2}),
    "zero3": Case({"zero_stage": 3}),
    "checkpointing": Case({"zero_stage": 2, "gradient_checkpointing": True}),
    "offload_optimizer_zero1": Case({"zero_stage": 1, "offload_optimizer": True}),
    "offload_optimizer_zero2": Case({"zero_stage": 2, "offload_optimizer": True}),
    "offload_optimizer_zero3": Case({"zero_stage": 3, "offload_optimizer": True}),
    "offload_parameters": Case({"zero_stage": 3, "offload_parameters": True}),
    "offload_all": Case({"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "compile_zero1": Case({"zero_stage": 1, "compile": True}),
    "compile_zero2": Case({"zero_stage": 2, "compile": True}),
    "compile_zero3": Case({"zero_stage": 3, "compile": True}),
    "tensor_parallel": Case({"zero_stage": 1, "tensor_parallel": 2}),
    "sequence_parallel": Case({"zero_stage": 2, "sequence_parallel": 2}),
    "muon_zero1": Case({"zero_stage": 1}, "muon_zero1", MUON),
    "muon_zero2": Case({"zero_stage": 2}, "muon_zero1", MUON),
    "muon_zero3": Case({"zero_stage": 3}, "muon_zero1", MUON),
    "muon_offload": Case({"zero_stage": 2, "offload_optimizer": True}, "muon_zero1", MUON),
    "average": Case({"zero_stage": 3}, learner={"ema_decay": 0.99}),
    "float16_zero1": Case({"zero_stage": 1, "dtype": "float16"}, "float16_zero1"),
    "float16_zero2": Case({"zero_stage": 2, "dtype": "float16"}, "float16_zero1"),
    "float16_zero3": Case({"zero_stage": 3, "dtype": "float16"}, "float16_zero1"),
}


def make_model(folder: str, options: argparse.Namespace) -> str:
    """Save a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(1, options.width // 64)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=options.width // heads,
        max_position_embeddings=options.length,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows(n: int, length: int, seed: int) -> list[Row]:
    """Rows of up to `length` tokens, each following from the one before it, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(n):
        size = int(rng.integers(length // 2, length + 1))
        ids = (rng.integers(0, 1000) + 7 * np.arange(size)) % 1000
        weights = np.ones(size, np.float32)
        weights[0] = 0.0
        nothing = np.full(size, np.nan, np.float32)
        rows.append(Row.from_arrays(ids, weights, nothing, Objective.CROSS_ENTROPY, microbatch_key=index))
    return rows


async def measure(case: Case, model: str, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Train with the settings of a case: losses of every step, seconds and tokens per second of those after the
    first."""
    settings = {"ranks": options.ranks, "tokens_per_microbatch": options.tokens_per_microbatch, **case.workers}
    learner = {"name": "sft", "lr": options.lr, **case.learner}
    runtime = LocalRuntime(logs)
    try:
        workers = WorkersConfig.model_validate(settings)
        group = await WorkerGroup.start(runtime, WorkerSpec("actor", model, RoleSpec(trained=True), learner, workers))
        logged, seconds, tokens = [], [], []
        for step in range(options.steps):
            rows = make_rows(options.rows, options.length, step)
            total = sum(float(row.loss_weights.sum()) for row in rows)
            began = time.perf_counter()
            logged.append(await group.accumulate(rows, {Objective.CROSS_ENTROPY: total}) | await group.step(options.lr))
            seconds.append(time.perf_counter() - began)
            tokens.append(sum(len(row.token_ids) for row in rows))
        device = group.info.device
        await group.close()
    finally:
        await runtime.close()
    return {
        "device": device,
        "loss": [step["loss"] for step in logged],
        "skipped": sum(step.get("overflow", 0.0) for step in logged),
        "memory": max(step.get("memory/max", 0.0) for step in logged),
        "seconds_per_step": float(np.median(seconds[1:] or seconds)),
        "tokens_per_second": float(sum(tokens[1:] or tokens) / sum(seconds[1:] or seconds)),
    }


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return float(max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True)))


def row_of(name: str, case: Case, results: dict[str, dict[str, Any]]) -> list[str]:
    """A line of the table."""
    result, expected = results[name], results.get(case.like, {})
    if "refused" in result:
        return [name, result["refused"], "", "", "", ""]
    difference = f"{largest_difference(result['loss'], expected['loss']):.1e}" if "loss" in expected else ""
    return [
        name,
        f"{result['loss'][-1]:.4f}",
        difference,
        f"{result['seconds_per_step']:.3f}",
        f"{result['tokens_per_second']:.0f}",
        f"{result['memory']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas; by default all")
    parser.add_argument("--model", help="Hugging Face folder or hub id; by default one is made")
    parser.add_argument("--layers", type=int, default=12, help="of the model that is made")
    parser.add_argument("--width", type=int, default=1024, help="of the model that is made")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="rows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the longest row")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1e-4)
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}: {', '.join(CASES)}")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(folder, options)
        for name in names:
            try:
                results[name] = asyncio.run(measure(CASES[name], model, options, Path(folder, "logs")))
            except EnvgymError as error:
                results[name] = {"refused": str(error)}
            print(name, results[name], flush=True)
    asked = {key: value for key, value in vars(options).items() if key != "cases"}
    environment = conditions(("torch", "transformers", "deepspeed"))
    path = store("gpu_deepspeed", {"options": asked, "conditions": environment, "cases": results})
    header = ["case", "last loss", "largest difference", "s/step", "tokens/s", "GiB"]
    print(table(header, [row_of(name, CASES[name], results) for name in names]))
    print(path)


if __name__ == "__main__":
    main()
