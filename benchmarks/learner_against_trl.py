"""Seconds of one GRPO optimizer step on sequences of log-normal lengths: envgym's worker and TRL's GRPOTrainer.

    .venv/bin/python benchmarks/learner_against_trl.py [--repeats 2]

Both sides get the same model of 35 million parameters, the same prompts, completions and rewards, float32, AdamW with
the same settings and the same number of threads, and make optimizer steps over all sequences; their first gradients
have the same norm, which shows that they do the same work. Only the learner is timed, not the generation. TRL gets the
completions by `rollout_func` and pads those of a step to the longest, as it does by default; envgym sorts sequences by
length and pads micro-batches. envgym's time is that of splitting into micro-batches, `ModelWorker.accumulate` and
`step`. Each side runs in a separate process; the sides alternate, and a run's first step is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

TRL_PYTHON = ROOT / "benchmarks" / ".venv-trl" / "bin" / "python"
SIDES = {"ours": "envgym", "trl": "TRL"}
GROUPS, GROUP_SIZE, PROMPT, BATCH_SIZE = 4, 8, 16, 8
MEDIAN_LENGTH, SIGMA, LONGEST = 32, 1.0, 512
TOKENS_PER_MICROBATCH = 512
VOCABULARY, LEARNING_RATE = 8192, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=2, help="of each run, of which the first is not counted")
    parser.add_argument("--side", nargs=2, metavar=("MODEL", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measured(options.side[0], Path(options.side[1]), options.steps)))
        return
    where = conditions(["envgym", "torch", "transformers", "deepspeed"])
    where["versions"]["trl"] = trl_version()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"))
        turns, tokens = [], []
        for number in range(options.repeats):
            rows = Path(folder, f"rows-{number}.json")
            tokens.append(write_rows(rows, seed=number))
            turns.append({side: run(side, str(Path(folder, "model")), rows, options.steps) for side in SIDES})
    for turn in turns:
        norms = {side: turn[side]["norms"][0] for side in SIDES}
        assert abs(norms["ours"] / norms["trl"] - 1) < 0.01, f"the sides do different work: {norms}"
    ratios = sorted(turn["trl"]["step"] / turn["ours"]["step"] for turn in turns)
    result: dict[str, Any] = {
        "conditions": where,
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "job": {
            "rows": GROUPS * GROUP_SIZE,
            "tokens": median(tokens),
            "sigma": SIGMA,
            "repeats": options.repeats,
            "steps": options.steps,
        },
        "sides": {
            side: {name: median(turn[side][name] for turn in turns) for name in ("step", "computed")} for side in SIDES
        },
        "norms": {side: turns[0][side]["norms"][0] for side in SIDES},
        "ratio": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
    }
    path = store("learner_against_trl", result)
    text = markdown(result)
    fill_docs("learner_against_trl", text)
    print(f"{text}\n\nstored in {path}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    job, ratio = result["job"], result["ratio"]
    rows = [
        [
            SIDES[name],
            f"{side['step']:.2f}",
            f"{job['tokens'] / side['step']:.0f}",
            f"{side['computed']:,.0f}",
            f"{result['norms'][name]:.4f}",
        ]
        for name, side in result["sides"].items()
    ]
    what = (
        f"TRL takes {ratio['median']:.2f} times as long ({ratio['least']:.2f} to {ratio['greatest']:.2f} in "
        f"{job['repeats']} turns, each with different sequences): {job['rows']} per step with {job['tokens']:,.0f} "
        f"tokens, completions log-normal with sigma {job['sigma']}; OMP_NUM_THREADS {result['threads']}. "
    )
    header = ["learner", "optimizer step, s", "tokens of rows / s", "tokens computed with", "first gradient's norm"]
    return f"{table(header, rows)}\n\n{what}{conditions_in_words(result['conditions'])}"


def write_rows(path: Path, seed: int) -> int:
    """Write the prompts, completions and rewards of one step; returns their number of tokens."""
    import numpy as np

    rng = np.random.default_rng(seed)
    groups = {}
    for group in range(GROUPS):
        lengths = rng.lognormal(np.log(MEDIAN_LENGTH), SIGMA, GROUP_SIZE).clip(2, LONGEST).astype(int)
        groups[f"task {group}"] = {
            "prompt": rng.integers(300, VOCABULARY, PROMPT).tolist(),
            "completions": [rng.integers(300, VOCABULARY, length).tolist() for length in lengths],
            "rewards": rng.permutation([0.0, 1.0] * (GROUP_SIZE // 2)).tolist(),
        }
    path.write_text(json.dumps(groups))
    return sum(PROMPT + len(completion) for group in groups.values() for completion in group["completions"])


def make_model(folder: Path) -> None:
    """A model of random weights with a tokenizer, which TRL needs."""
    from envgym.models.fresh import FreshModelConfig, make_fresh_model

    size = FreshModelConfig(
        hidden_size=512, intermediate_size=1536, layers=9, heads=8, vocab_size=VOCABULARY, max_model_len=1024
    )
    make_fresh_model(folder, size, ["some words to learn merges from"], 0)


def run(side: str, model: str, rows: Path, steps: int) -> dict[str, Any]:
    """Run one side to its end; its figures, with the median of its counted steps as `step`."""
    if side == "trl":
        command = [str(TRL_PYTHON), str(ROOT / "benchmarks" / "trl_learner.py"), "--model", model, "--rows", str(rows)]
        command += ["--batch-size", str(BATCH_SIZE), "--lr", str(LEARNING_RATE), "--steps", str(steps)]
    else:
        command = [sys.executable, __file__, "--side", model, str(rows), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures | {"step": median(figures["seconds"][1:])}


def measured(model: str, path: Path, steps: int) -> dict[str, Any]:
    """envgym's side: seconds and gradient norms of optimizer steps on the rows; tokens computed with, padding
    included."""
    from envgym.learner import RoleSpec, TrainSample, trajectories
    from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn
    from envgym.workers.config import WorkersConfig
    from envgym.workers.micro_batches import cost, micro_batches
    from envgym.workers.model import ModelWorker
    from envgym.workers.spec import WorkerSpec

    # `sequence` aggregation and no KL are GRPO's defaults, as TRL's are here; TRL adds 1e-4 to the standard deviation.
    config = {"name": "grpo", "lr": LEARNING_RATE, "betas": (0.9, 0.95), "max_grad_norm": 1e9}
    settings = WorkersConfig(dtype="float32", tokens_per_microbatch=TOKENS_PER_MICROBATCH)
    worker = ModelWorker(WorkerSpec("actor", model, RoleSpec(trained=True), config, settings))
    worker.load()
    assert worker.learner is not None
    groups = []
    for name, group in json.loads(path.read_text()).items():
        rows = [
            Row(
                [Segment("prompt", group["prompt"]), Segment("action", completion)], turns=[Turn(None, StopReason.STOP)]
            )
            for completion in group["completions"]
        ]
        for row, said in zip(rows, worker.forward([TrainSample.from_row(row) for row in rows]), strict=True):
            row.segments[1].logprobs = said[PROMPT:].tolist()  # as sampled
        episodes = [
            Episode(f"{name}-{index}", Task(name), Outcome.finish(), [row], reward=reward, score=reward)
            for index, (row, reward) in enumerate(zip(rows, group["rewards"], strict=True))
        ]
        groups.append(Group(name, Task(name), episodes))
    learn_rows = worker.learner.prepare(trajectories(groups))
    normalizers = worker.learner.loss_normalizers(learn_rows)
    seconds, norms, computed = [], [], 0
    for _ in range(steps):
        began = time.perf_counter()
        [batches] = micro_batches(learn_rows, TOKENS_PER_MICROBATCH, 1)
        worker.accumulate(batches, normalizers)
        norms.append(worker.step(LEARNING_RATE)["grad_norm"])
        seconds.append(time.perf_counter() - began)
        computed = sum(cost(batch, packed=False) for batch in batches)
    worker.close()
    return {"seconds": seconds, "norms": norms, "computed": computed}


def trl_version() -> str:
    """The version of TRL in its own environment.

    Raises:
        SystemExit: there is none.
    """
    if not TRL_PYTHON.exists():
        raise SystemExit("TRL's own environment is missing: the first lines of benchmarks/trl_requirements.txt make it")
    code = "from importlib.metadata import version; print(version('trl'))"
    return subprocess.run([TRL_PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
