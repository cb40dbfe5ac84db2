"""Tokens per second that a worker trains on, compared with bare torch on the same tokens with the same model.

    .venv/bin/python benchmarks/learner_throughput.py [--repeats 5]

One optimizer step of supervised fine-tuning, in float32. envgym's side is `ModelWorker.accumulate` and `step`, through
DeepSpeed on one rank, with the entropies and the gradient norm that a run logs. Bare torch is the model's own forward
with all logits, `cross_entropy`, `backward` and `AdamW` on the same micro-batches, made beforehand. All sequences are
equally long and all their tokens are in the loss, so skipping padding or prompts gains nothing. The sides alternate,
step by step, in one process; the first round is not counted.

With the smaller vocabulary the logits of a micro-batch are small enough to stay in memory; with the larger one envgym
makes them in slices, and again for the backward pass.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

# layers and vocabulary of two models of 30 million parameters or more
MODELS = {"kept logits": (9, 8192), "logits in slices": (6, 32768)}
HIDDEN_SIZE, INTERMEDIATE_SIZE, HEADS = 512, 1536, 8
ROWS, LENGTH, TOKENS_PER_MICROBATCH = 12, 256, 1536
LEARNING_RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    where = conditions(["envgym", "torch", "transformers", "deepspeed"])
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    cases = {name: measured(layers, vocabulary, options.repeats) for name, (layers, vocabulary) in MODELS.items()}
    job = {"rows": ROWS, "length": LENGTH, "tokens_per_microbatch": TOKENS_PER_MICROBATCH, "repeats": options.repeats}
    result = {"conditions": where, "threads": threads, "job": job, "cases": cases}
    publish("learner_throughput", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    rows = [
        [
            f"{case['parameters'] / 1e6:.0f} M parameters, {case['vocabulary']:,} words: {name}",
            f"{case['ours']:.0f}",
            f"{case['bare']:.0f}",
            "{median:.2f} ({least:.2f} to {greatest:.2f})".format(**case["ratio"]),
        ]
        for name, case in result["cases"].items()
    ]
    job = result["job"]
    what = (
        f"Medians of {job['repeats']} steps of {job['rows']} rows of {job['length']} tokens, in micro-batches of "
        f"{job['tokens_per_microbatch']}, OMP_NUM_THREADS {result['threads']}. "
    )
    header = ["model", "envgym, tokens/s", "bare torch, tokens/s", "envgym / bare (min to max)"]
    return f"{table(header, rows)}\n\n{what}{conditions_in_words(result['conditions'])}"


def measured(layers: int, vocabulary: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of both sides on a model of that size, and their ratio within a turn."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from envgym.learner import RoleSpec
    from envgym.types import Objective, Row
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.micro_batches import micro_batches
    from envgym.workers.model import ModelWorker

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN_SIZE // HEADS,
        tie_word_embeddings=True,
    )
    learner = {"name": "sft", "lr": LEARNING_RATE, "betas": (0.9, 0.95), "max_grad_norm": 1e9}
    settings = WorkersConfig(dtype="float32", tokens_per_microbatch=TOKENS_PER_MICROBATCH)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        worker = ModelWorker(WorkerSpec("actor", folder, RoleSpec(trained=True), learner, settings))
        info = worker.load()
        bare = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    rng = np.random.default_rng(0)
    weights = np.ones(LENGTH, np.float32)
    weights[0] = 0.0
    rows = [
        Row.from_arrays(
            token_ids=rng.integers(vocabulary, size=LENGTH),
            loss_weights=weights,
            old_logprobs=np.full(LENGTH, np.nan, np.float32),
            objective=Objective.CROSS_ENTROPY,
            microbatch_key=index,
            episode_index=index,
        )
        for index in range(ROWS)
    ]
    [batches] = micro_batches(rows, TOKENS_PER_MICROBATCH, 1)
    normalizers = worker.learner.loss_normalizers(rows)
    tensors = [torch.from_numpy(np.stack([row.token_ids for row in batch])) for batch in batches]
    n_targets = ROWS * (LENGTH - 1)

    def ours() -> float:
        numerator, denominator = worker.accumulate(batches, normalizers)["loss"]
        worker.step(LEARNING_RATE)
        return numerator / denominator

    def plain() -> float:
        total = 0.0
        for ids in tensors:
            logits = bare(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            (loss / n_targets).backward()
            total += loss.item() / n_targets
        optimizer.step()
        optimizer.zero_grad()
        return total

    turns = []
    for _ in range(1 + repeats):
        seconds, losses = {}, {}
        for side, step in (("ours", ours), ("bare", plain)):
            began = time.perf_counter()
            losses[side] = step()
            seconds[side] = time.perf_counter() - began
        assert abs(losses["ours"] / losses["bare"] - 1) < 1e-3, f"the sides compute different losses: {losses}"
        turns.append(seconds)
    worker.close()
    turns = turns[1:]
    ratios = sorted(turn["bare"] / turn["ours"] for turn in turns)
    tokens = ROWS * LENGTH
    return {
        "parameters": info.n_parameters,
        "vocabulary": vocabulary,
        "ours": tokens / median(turn["ours"] for turn in turns),
        "bare": tokens / median(turn["bare"] for turn in turns),
        "ratio": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
    }


if __name__ == "__main__":
    main()
