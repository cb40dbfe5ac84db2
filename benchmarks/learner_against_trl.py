"""Seconds of optimizer steps on sequences of log-normal lengths: envgym's workers and TRL's trainers.

    .venv/bin/python benchmarks/learner_against_trl.py [--methods grpo sft dpo] [--repeats 2]

TRL's side (`trl_side.py`) is its GRPOTrainer, SFTTrainer or DPOTrainer. Both sides get the same model of 35 million
parameters, the same sequences as token ids (GRPO's with rewards), float32, AdamW with the same settings and the same
number of threads, and make optimizer steps over all sequences; their first gradients have the same norm, which shows
that they do the same work. Only the learner is timed, not the generation; DPO's step includes its reference model's
pass, on both sides. TRL pads each batch to its longest sequence (GRPO: those of a step), as it does by default; envgym
sorts sequences by length and pads micro-batches. Each side runs in a separate process; the sides alternate, and a run's
first step is not counted. `memory` is the process's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table
from sides import PACKAGES, end_on_sigterm, run_to_end, trl_command

SIDES = {"ours": "envgym", "trl": "TRL"}
TABLES = {"learner_against_trl": ("grpo",), "offline_against_trl": ("sft", "dpo")}
"""Name of the stored result and of the page's table -> its methods."""
PROMPT, SIGMA, LONGEST = 16, 1.0, 512
VOCABULARY, LEARNING_RATE = 8192, 1e-5


@dataclass(frozen=True)
class Method:
    """The rows of a step: prompts, answers per prompt, their median length; sequences per batch of TRL's, and tokens
    per micro-batch of envgym's."""

    label: str
    prompts: int
    answers: int
    median_length: int
    batch_size: int
    budget: int


METHODS = {
    "grpo": Method("GRPO", 4, 8, 32, 8, 512),
    "sft": Method("SFT", 32, 1, 48, 8, 1024),
    "dpo": Method("DPO", 32, 2, 48, 4, 1024),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=3, help="of each run, of which the first is not counted")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OMP_NUM_THREADS")
    parser.add_argument("--side", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        job = json.loads(options.side)
        Path(job.pop("out")).write_text(json.dumps(measured(**job)))
        return
    end_on_sigterm()
    for name, methods in TABLES.items():
        if not set(methods) & set(options.methods):
            continue
        where = conditions(PACKAGES)
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder, "model"))
            figures = {method: compared(method, Path(folder), options) for method in methods}
        result = {"conditions": where, "threads": options.threads, "repeats": options.repeats, "methods": figures}
        publish(name, result, markdown(result))


def compared(method: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of both sides on one method, and how many times as long TRL takes."""
    turns, tokens = [], []
    for number in range(options.repeats):
        rows = folder / f"{method}-{number}.json"
        tokens.append(write_rows(rows, METHODS[method], seed=number))
        turns.append({side: run(side, method, folder / "model", rows, options) for side in SIDES})
    for turn in turns:
        norms = {side: turn[side]["norms"][0] for side in SIDES}
        assert abs(norms["ours"] / norms["trl"] - 1) < 0.01, f"the sides do different work: {norms}"
    ratios = sorted(turn["trl"]["step"] / turn["ours"]["step"] for turn in turns)
    sides = {
        side: {
            "step": median(turn[side]["step"] for turn in turns),
            "tokens_per_second": median(n / turn[side]["step"] for n, turn in zip(tokens, turns, strict=True)),
            "peak": median(turn[side]["peak"] for turn in turns),
            "above": median(turn[side]["above"] for turn in turns),
            "norm": turns[0][side]["norms"][0],
        }
        for side in SIDES
    }
    ratio = {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]}
    return {"tokens": median(tokens), "sides": sides, "ratio": ratio}


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    lines = [
        [
            METHODS[method].label,
            SIDES[name],
            f"{side['step']:.2f}",
            f"{side['tokens_per_second']:,.0f}",
            f"{side['peak'] / 1024:,.0f}",
            f"{side['above'] / 1024:,.0f}",
            f"{side['norm']:.4f}",
        ]
        for method, figures in result["methods"].items()
        for name, side in figures["sides"].items()
    ]
    header = [
        "method", "side", "optimizer step, s", "tokens of rows / s", "memory, MiB", "of it in training, MiB",
        "first gradient's norm",
    ]  # fmt: skip
    ratios = "; ".join(
        f"{METHODS[method].label} {{median:.2f}} ({{least:.2f}} to {{greatest:.2f}})".format(**figures["ratio"])
        for method, figures in result["methods"].items()
    )
    job = (
        f"TRL takes, times as long: {ratios}; {result['repeats']} turns, each with different sequences: 32 per "
        f"step, answers log-normal with sigma {SIGMA}; OMP_NUM_THREADS {result['threads']}. "
    )
    return f"{table(header, lines)}\n\n{job}{conditions_in_words(result['conditions'])}"


def write_rows(path: Path, method: Method, seed: int) -> int:
    """Write the prompts, answers and rewards of one step; returns their number of tokens, with the prompt counted once
    per answer."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def answer() -> list[int]:
        length = int(np.clip(rng.lognormal(np.log(method.median_length), SIGMA), 2, LONGEST))
        return [int(token) for token in rng.integers(300, VOCABULARY, length)]

    rows = [
        {
            "prompt": rng.integers(300, VOCABULARY, PROMPT).tolist(),
            "answers": [answer() for _ in range(method.answers)],
            "rewards": ([1.0, 0.0] * method.answers)[: method.answers],
        }
        for _ in range(method.prompts)
    ]
    path.write_text(json.dumps(rows))
    return sum(PROMPT + len(answer) for row in rows for answer in row["answers"])


def make_model(folder: Path) -> None:
    """A model of random weights with a tokenizer, which TRL needs."""
    from envgym.models.fresh import FreshModelConfig, make_fresh_model

    size = FreshModelConfig(
        hidden_size=512, intermediate_size=1536, layers=9, heads=8, vocab_size=VOCABULARY, max_model_len=1024
    )
    make_fresh_model(folder, size, ["some words to learn merges from"], 0)


def run(side: str, method: str, model: Path, rows: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side to its end; its figures, with the median of its counted steps as `step`."""
    out = rows.with_suffix(f".{side}")
    job = {"method": method, "model": str(model), "rows": str(rows), "steps": options.steps, "out": str(out)}
    if side == "trl":
        start = trl_command("learn", batch_size=METHODS[method].batch_size, lr=LEARNING_RATE, **job)
    else:
        start = [sys.executable, __file__, "--side", json.dumps(job)]
    run_to_end(side, start, rows.parent, options.threads)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures | {"step": median(figures["seconds"][1:])}


def measured(method: str, model: str, rows: str, steps: int) -> dict[str, Any]:
    """envgym's side: seconds and gradient norms of optimizer steps on the rows, and the peak memory in KiB."""
    from envgym.learner import RoleSpec
    from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, StopReason, Task, Turn, number_rows
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.micro_batches import micro_batches
    from envgym.workers.model import ModelWorker

    # `sequence` aggregation and no KL are GRPO's defaults, as TRL's are here; TRL adds 1e-4 to the standard deviation.
    config = {"name": method, "lr": LEARNING_RATE, "betas": (0.9, 0.95), "max_grad_norm": 1e9}
    budget = METHODS[method].budget
    settings = WorkersConfig(dtype="float32", tokens_per_microbatch=budget)
    worker = ModelWorker(WorkerSpec("actor", model, RoleSpec(trained=True), config, settings))
    worker.load()
    assert worker.learner is not None
    reference = None
    if method == "dpo":
        reference = ModelWorker(WorkerSpec("reference", model, RoleSpec(), settings=settings))
        reference.load()
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    objective = Objective.POLICY_GRADIENT if method == "grpo" else Objective.CROSS_ENTROPY

    def episode(group: str, member: int, prompt: list[int], answer: list[int], reward: float) -> Episode:
        row = Row(
            [Segment("prompt", prompt), Segment("action", answer)], objective,
            turns=[Turn(None if method == "grpo" else reward, StopReason.STOP)],
        )  # fmt: skip
        return Episode(f"{group}-{member}", Task(group), Outcome.finish(), [row], reward=reward, score=reward)

    groups = []
    for number, row in enumerate(json.loads(Path(rows).read_text())):
        members = enumerate(zip(row["answers"], row["rewards"], strict=True))
        episodes = [episode(str(number), member, row["prompt"], *pair) for member, pair in members]
        groups.append(Group(str(number), Task(str(number)), episodes))
    if method == "grpo":
        sampled = [row for group in groups for episode in group.episodes for row in episode.rows]
        for row, logprobs in zip(sampled, worker.forward(sampled), strict=True):
            row.segments[1].logprobs = logprobs[PROMPT:].tolist()

    seconds, norms = [], []
    for _ in range(steps):
        given = number_rows(groups)
        began = time.perf_counter()
        if reference is not None:
            scored = worker.learner.rows_to_score(given)
            for row, logprobs in zip(scored, reference.forward(scored), strict=True):
                row.arrays["reference"] = logprobs
        learned = worker.learner.prepare(given)
        [batches] = micro_batches(learned, budget, 1)
        worker.accumulate(batches, worker.learner.loss_normalizers(learned))
        norms.append(worker.step(LEARNING_RATE)["grad_norm"])
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker.close()
    return {"seconds": seconds, "norms": norms, "peak": peak, "above": peak - loaded}


if __name__ == "__main__":
    main()
