"""Tokens per second of SFT and DPO on sequences of log-normal lengths: envgym's workers and TRL's trainers.

    .venv/bin/python benchmarks/offline_against_trl.py [--repeats 2]

TRL's side is its SFTTrainer and DPOTrainer. Both sides get the same model of 35 million parameters, the same sequences
as token ids, float32, AdamW with the same settings and the same number of threads, and make optimizer steps over all
sequences; their first gradients have the same norm, which shows that they do the same work. DPO's step includes its
reference model's pass, on both sides. TRL pads each batch to its longest sequence, as it does by default; envgym sorts
sequences by length, or packs them. Each side runs in a separate process; the sides alternate, and a run's first step is
not counted. `memory` is the process's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from learner_against_trl import LEARNING_RATE, TRL_PYTHON, VOCABULARY, make_model, trl_version
from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

NAME = "offline_against_trl"
SIDES = {"ours": "envgym", "trl": "TRL"}
METHODS = {"sft": "SFT", "dpo": "DPO"}
ROWS, PROMPT, BATCH_SIZE = 32, 16, {"sft": 8, "dpo": 4}
MEDIAN_LENGTH, SIGMA, LONGEST = 48, 1.0, 512
TOKENS_PER_MICROBATCH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=3, help="of each run, of which the first is not counted")
    parser.add_argument("--side", nargs=3, metavar=("METHOD", "MODEL", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        method, model, path = options.side
        print(json.dumps(measured(method, model, Path(path), options.steps)))
        return
    where = conditions(["envgym", "torch", "transformers", "deepspeed"])
    where["versions"]["trl"] = trl_version()
    methods: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"))
        for method in METHODS:
            turns, tokens = [], []
            for number in range(options.repeats):
                rows = Path(folder, f"{method}-{number}.json")
                tokens.append(write_rows(rows, number, answers=2 if method == "dpo" else 1))
                turns.append({side: run(side, method, f"{folder}/model", rows, options.steps) for side in SIDES})
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
            methods[method] = {
                "tokens": median(tokens),
                "sides": sides,
                "ratio": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
            }
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    result = {"conditions": where, "threads": threads, "repeats": options.repeats, "methods": methods}
    path = store(NAME, result)
    text = markdown(result)
    fill_docs(NAME, text)
    print(f"{text}\n\nstored in {path}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    lines = [
        [
            METHODS[method],
            SIDES[name],
            f"{side['step']:.2f}",
            f"{side['tokens_per_second']:,.0f}",
            f"{side['peak'] / 1024:,.0f}",
            f"{side['above'] / 1024:,.0f}",
            f"{side['norm']:.4f}",
        ]
        for method, found in result["methods"].items()
        for name, side in found["sides"].items()
    ]
    header = [
        "method", "side", "optimizer step, s", "tokens of rows / s", "memory, MiB", "of it in training, MiB",
        "first gradient's norm",
    ]  # fmt: skip
    ratios = "; ".join(
        f"{METHODS[method]} {found['ratio']['median']:.2f} ({found['ratio']['least']:.2f} to "
        f"{found['ratio']['greatest']:.2f})"
        for method, found in result["methods"].items()
    )
    what = (
        f"TRL takes, times as long: {ratios}; {result['repeats']} turns, each with different sequences: {ROWS} per "
        f"step, answers log-normal with sigma {SIGMA}; OMP_NUM_THREADS {result['threads']}. "
    )
    return f"{table(header, lines)}\n\n{what}{conditions_in_words(result['conditions'])}"


def write_rows(path: Path, seed: int, answers: int) -> int:
    """Write the prompts and answers of one step; returns their number of tokens, with the prompt counted once per
    answer."""
    import numpy as np

    rng = np.random.default_rng(seed)

    def answer() -> list[int]:
        length = int(np.clip(rng.lognormal(np.log(MEDIAN_LENGTH), SIGMA), 2, LONGEST))
        return [int(token) for token in rng.integers(300, VOCABULARY, length)]

    rows = [
        {"prompt": rng.integers(300, VOCABULARY, PROMPT).tolist(), "answers": [answer() for _ in range(answers)]}
        for _ in range(ROWS)
    ]
    path.write_text(json.dumps(rows))
    return sum(PROMPT + len(answer) for row in rows for answer in row["answers"])


def run(side: str, method: str, model: str, rows: Path, steps: int) -> dict[str, Any]:
    """Run one side to its end; its figures, with the median of its counted steps as `step`."""
    if side == "trl":
        command = [str(TRL_PYTHON), str(ROOT / "benchmarks" / "trl_offline.py"), "--method", method, "--model", model]
        command += ["--rows", str(rows), "--batch-size", str(BATCH_SIZE[method]), "--lr", str(LEARNING_RATE)]
    else:
        command = [sys.executable, __file__, "--side", method, model, str(rows)]
    done = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures | {"step": median(figures["seconds"][1:])}


def measured(method: str, model: str, path: Path, steps: int) -> dict[str, Any]:
    """envgym's side: seconds and gradient norms of optimizer steps on the rows, and the peak memory in KiB."""
    from envgym.learner import RoleSpec, trajectories
    from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, StopReason, Task, Turn
    from envgym.workers.config import WorkersConfig
    from envgym.workers.micro_batches import micro_batches
    from envgym.workers.model import ModelWorker
    from envgym.workers.spec import WorkerSpec

    config = {"name": method, "lr": LEARNING_RATE, "betas": (0.9, 0.95), "max_grad_norm": 1e9}
    settings = WorkersConfig(dtype="float32", tokens_per_microbatch=TOKENS_PER_MICROBATCH)
    worker = ModelWorker(WorkerSpec("actor", model, RoleSpec(trained=True), config, settings))
    worker.load()
    reference = None
    if method == "dpo":
        reference = ModelWorker(WorkerSpec("reference", model, RoleSpec(), settings=settings))
        reference.load()
    assert worker.learner is not None
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def groups() -> list[Group]:
        found = []
        for number, row in enumerate(json.loads(path.read_text())):
            episodes = [
                Episode(
                    f"{number}-{member}", Task(str(number)), Outcome.finish(),
                    [Row([Segment("prompt", row["prompt"]), Segment("action", answer)], Objective.CROSS_ENTROPY,
                         turns=[Turn(1.0 - member, StopReason.STOP)])],
                    reward=1.0 - member,
                )
                for member, answer in enumerate(row["answers"])
            ]  # fmt: skip
            found.append(Group(str(number), Task(str(number)), episodes))
        return found

    seconds, norms = [], []
    for _ in range(steps):
        given = trajectories(groups())
        began = time.perf_counter()
        if reference is not None:
            samples = worker.learner.samples_to_score(given)
            for sample, said in zip(samples, reference.forward(samples), strict=True):
                sample.arrays["reference"] = said
        rows = worker.learner.prepare(given)
        [batches] = micro_batches(rows, TOKENS_PER_MICROBATCH, 1)
        worker.accumulate(batches, worker.learner.loss_normalizers(rows))
        norms.append(worker.step(LEARNING_RATE)["grad_norm"])
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker.close()
    return {"seconds": seconds, "norms": norms, "peak": peak, "above": peak - loaded}


if __name__ == "__main__":
    main()
