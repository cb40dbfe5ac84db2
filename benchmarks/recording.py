"""Cost of recording data for `envgym view` in addition to the rollouts: per-token training data, and times.

    .venv/bin/python benchmarks/recording.py

In one run of the main job, every other block of five steps writes neither `learned/` nor `events/`. Each block's median
step is compared with that of the block before it. The first step of a block is excluded, because the previous block may
still be writing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from record import ROOT, conditions, conditions_in_words, fill_docs, store

from envgym.run_folder import RunFolder
from envgym.workers.group import WorkerGroup

BLOCK = 5
WORDS = ["train", "--env", "math_verify", "eval.every=0", "learner.update_epochs=1", "learner.minibatches=1"]
PHASES = ("step", "rollout", "learn")


def is_recorded(step: int) -> bool:
    """True for a step, from 1 on, whose data are all written."""
    return (step - 1) // BLOCK % 2 == 1


def train(steps: int) -> int:
    """The main job, in the current folder."""
    from envgym.cli import main as command

    accumulated_logprobs, append_events, count = (
        WorkerGroup.accumulated_logprobs,
        RunFolder.append_events,
        itertools.count(1),
    )

    async def some_logprobs(self: WorkerGroup) -> list[Any]:
        return await accumulated_logprobs(self) if is_recorded(next(count)) else []

    def some_events(self: RunFolder, step: int, events: Iterable[Mapping[str, Any]]) -> None:
        if is_recorded(step):
            append_events(self, step, events)

    WorkerGroup.accumulated_logprobs, RunFolder.append_events = some_logprobs, some_events  # type: ignore[method-assign]
    return command([*WORDS, f"steps={steps}", "name=run"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.exit(train(options.steps))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", "--steps", str(options.steps)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder, "runs", "run")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        written = {int(path.stem.removeprefix("step_")) for path in (run / "learned").iterdir()}
        sizes = {name: sum(path.stat().st_size for path in (run / name).iterdir()) for name in ("learned", "events")}
    of_step = {record["step"]: record for record in records if record["step"] > 0}
    assert written == {step for step in of_step if is_recorded(step)}
    figures: dict[str, Any] = {f"{name}_kib_a_step": size / len(written) / 1024 for name, size in sizes.items()}
    for phase in PHASES:
        medians = [
            statistics.median(of_step[step][f"seconds/{phase}"] for step in range(first + 1, first + BLOCK))
            for first in range(1 + 2 * BLOCK, options.steps - BLOCK + 2, BLOCK)  # the first two blocks warm up
        ]
        ratios = [recorded / plain for plain, recorded in zip(medians[::2], medians[1::2], strict=False)]
        low, _, high = statistics.quantiles(ratios, n=4)
        figures[phase] = {"ratio": statistics.median(ratios), "quartiles": [low, high], "pairs": len(ratios)}
    print(json.dumps(figures, indent=2))
    where = conditions(["pyarrow"])
    store("recording", {"conditions": where, **figures})
    report(figures, where)


def report(figures: dict[str, Any], where: dict[str, Any]) -> None:
    """Write the figures into the page of the docs."""
    step = figures["step"]
    low, high = step["quartiles"]
    text = (
        "    .venv/bin/python benchmarks/recording.py\n\n"
        f"A step with both takes {step['ratio']:.3f} times as long as one without (quartiles {low:.3f} to {high:.3f} "
        f"over {step['pairs']} pairs of blocks of the main job, 512 episodes per step). They take "
        f"{figures['learned_kib_a_step']:.0f} and {figures['events_kib_a_step']:.0f} KiB per step.\n\n"
        f"{conditions_in_words(where)}"
    )
    fill_docs("recording", text, ROOT / "docs" / "training" / "viewer.md")


if __name__ == "__main__":
    main()
