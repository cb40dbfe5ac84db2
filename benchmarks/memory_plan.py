"""Memory that `envgym plan` estimates for a rank, compared with the memory measured.

    .venv/bin/python benchmarks/memory_plan.py [--tokens 2048] [--sizes 40M,61M,118M]

Two ranks on a CPU in float32 train for three steps, for each size of model and ZeRO stage 0, 2 and 3. The measured
memory is the peak resident memory of rank 0, minus that after the import of the libraries. The plan's buffers and
activations were fitted to other sizes (4, 17, 29 and 98 million parameters).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import conditions, conditions_in_words, fill_docs, store, table

SIZES = {"40M": (512, 10, 2048, 9000), "61M": (640, 9, 2176, 12000), "118M": (1024, 8, 2816, 16384)}
"""Width, layers, feed-forward width, vocabulary."""
STAGES = (0, 2, 3)
ROW = 256
"""Tokens of a sequence."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, rank, port, stage = options.rank
        measure(folder, int(rank), port, int(stage), options.tokens)
        return
    where = conditions(["envgym", "torch", "deepspeed"])
    rows = []
    for name in options.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), *SIZES[name])
            for stage in STAGES:
                planned, measured = plan(Path(folder), stage, options.tokens), run(folder, stage, options.tokens)
                rows.append({"size": name, "stage": stage, "planned": planned, "measured": measured})
                print(f"{name} ZeRO {stage}: planned {planned / 2**20:.0f} MiB, measured {measured / 2**20:.0f}")
    result: dict[str, Any] = {"conditions": where, "job": {"tokens": options.tokens, "ranks": 2}, "rows": rows}
    path = store("memory_plan", result)
    text = markdown(result)
    fill_docs("memory_plan", text)
    print(f"{text}\n\nstored in {path}")


def markdown(result: dict[str, Any]) -> str:
    head = ["parameters", "ZeRO stage", "planned, MiB", "measured, MiB", "planned / measured"]
    rows = [
        [
            row["size"], str(row["stage"]), f"{row['planned'] / 2**20:,.0f}", f"{row['measured'] / 2**20:,.0f}",
            f"{row['planned'] / row['measured']:.2f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return f"{table(head, rows)}\n\n{conditions_in_words(result['conditions'])}"


def make_model(folder: Path, hidden: int, layers: int, inner: int, vocabulary: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def plan(folder: Path, stage: int, tokens: int) -> float:
    from envgym.launch.memory import ModelSizes, rank_memory
    from envgym.learner import LearnerConfig
    from envgym.workers.config import WorkersConfig

    sizes = ModelSizes.from_folder(folder)
    assert sizes is not None
    settings = WorkersConfig(ranks=2, zero_stage=stage, tokens_per_microbatch=tokens)
    return rank_memory(sizes, settings, LearnerConfig(name="sft"), on_gpu=False).total


def run(folder: str, stage: int, tokens: int) -> int:
    """Peak memory of rank 0, in bytes."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--tokens", str(tokens), "--rank", folder]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen([*command, str(rank), port, str(stage)], stdout=pipe, stderr=pipe, text=True, env=environ)
        for rank in range(2)
    ]
    said = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(said[0][1][-2000:] + said[1][1][-2000:])
    measured: int = json.loads(said[0][0].splitlines()[-1])
    return measured


def measure(folder: str, rank: int, port: str, stage: int, tokens: int) -> None:
    """Be a rank: train for three steps, and print the peak memory above that of the libraries."""
    import numpy as np
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    from envgym.learner import RoleSpec, TrainSample
    from envgym.types import Row, Segment, int_array
    from envgym.workers import zero
    from envgym.workers.config import WorkersConfig
    from envgym.workers.model import ModelWorker
    from envgym.workers.spec import WorkerSpec

    zero.muon_library(torch.device("cpu"))  # which ZeRO imports
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted anew
    settings = WorkersConfig(ranks=2, zero_stage=stage, tokens_per_microbatch=tokens)
    worker = ModelWorker(WorkerSpec("actor", folder, RoleSpec(trained=True), {"name": "sft"}, settings), rank)
    vocabulary = worker.load(f"127.0.0.1:{port}").vocabulary
    generator = np.random.default_rng(rank)
    rows = []
    for _ in range(tokens // ROW):
        sample = TrainSample.from_row(
            Row([Segment("action", int_array(generator.integers(3, vocabulary, ROW).tolist()))])
        )
        rows.append(replace(sample, loss_weights=np.ones(ROW, np.float32)))
    assert worker.learner is not None
    for _ in range(3):
        worker.accumulate([rows], worker.learner.loss_normalizers(rows))
        worker.step(1e-4)
    print(_status("VmHWM") - before, flush=True)
    os._exit(0)  # the other rank may be gone


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
