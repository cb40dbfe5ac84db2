"""Held-out scores of GRPO with a tree and with a group of whole episodes, over sampled tokens and over seconds.

    .venv/bin/python benchmarks/tree.py [--environments guess locks] [--seeds 0 1 2] [--runs FOLDER]

Two environments of several turns whose reward comes at the end: `examples/guess.py` (five turns) and `tests/locks.py`
(ten). A policy that has learned their demonstrations, which are partly wrong, is trained by both at every seed. A step
of either samples the same tokens, about: 8 whole episodes per task, or 4 and 8 branches, which have half their turns
from others.

The script can be stopped at any moment and started again: a run whose result is in `benchmarks/results/tree.json` is
not run again. The figure and the table of `docs/training/branches.md` are made of that file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table

from envgym.cli import main as main_of_envgym
from envgym.run_folder import RunFolder

NAME = "tree"
PAGE = ROOT / "docs" / "training" / "branches.md"
FIGURE = PAGE.with_suffix(".png")
ENVIRONMENTS = {"guess": ROOT / "examples" / "guess.py", "locks": ROOT / "tests" / "locks.py"}
WARM = (
    "--recipe", "sft", "steps=150", "learner.lr=1e-3", "learner.betas=[0.9, 0.98]", "learner.warmup_steps=20",
    "learner.lr_schedule=linear", "rollout.tasks_per_step=32", "eval.every=0", "debug=true",
)  # fmt: skip
COMMON = (
    "learner=grpo", "learner.betas=[0.9, 0.95]", "rollout.tasks_per_step=8", "rollout.max_tokens=8",
    "engine.max_model_len=512", "engine.kind=transformers", "eval.greedy=false",
    "eval.tasks=96", "debug=true",
)  # fmt: skip
LENGTHS = {
    "guess": ("learner.lr=3e-4", "steps=16", "eval.every=4"),
    "locks": ("learner.lr=1e-4", "steps=8", "eval.every=2"),  # at three times this rate four steps solve it
}
ARMS = {
    "group": ("rollout.group_size=8",),
    "tree": ("rollout.group_size=4", "rollout.branches=8", "learner.advantage=tree"),
}
COLORS = {"group": "#9a9a9a", "tree": "#2171b5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=[*ENVIRONMENTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME, help="where the run folders are made")
    options = parser.parse_args()
    for env in options.environments:
        for seed in options.seeds:
            for arm in ARMS:
                name = f"{env}-{arm}-{seed}"
                if name not in read()["runs"]:
                    print(name, flush=True)
                    began = conditions(("torch", "transformers", "deepspeed"))
                    run = {**train(env, arm, seed, options.runs / name), "conditions": began}
                    stored = read()
                    stored["runs"][name] = {"env": env, "arm": arm, "seed": seed, **run}
                    store(NAME, stored)
    show(read()["runs"])


def read() -> dict[str, Any]:
    """What is stored by now."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text()) if path.exists() else {"common": COMMON, "lengths": LENGTHS, "runs": {}}


def train(env: str, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train the environment's warm policy. Returns the curve: held-out scores, each with the tokens sampled and the
    seconds of training before it."""
    warm, source = folder.parent / f"{env}-warm", ("--env", str(ENVIRONMENTS[env]))
    if (RunFolder(warm).read_summary() or {}).get("status") != "completed":
        shutil.rmtree(warm, ignore_errors=True)
        envgym("train", *source, *WARM, f"runs_dir={warm.parent}", "--name", warm.name)
    shutil.rmtree(folder, ignore_errors=True)
    words = ("--model", str(warm), f"runs_dir={folder.parent}", "--name", folder.name, f"seed={seed}")
    envgym("train", *source, *words, *COMMON, *LENGTHS[env], *ARMS[arm])
    records = RunFolder(folder).read_metrics()
    tokens = accumulate(record.get("tokens/sampled", 0) for record in records)
    seconds = accumulate(record.get("seconds/step", 0.0) for record in records)
    points = [
        {"step": record["step"], "tokens": n_tokens, "seconds": round(n_seconds, 1), "score": record["eval/score"]}
        for record, n_tokens, n_seconds in zip(records, tokens, seconds, strict=True)
        if "eval/score" in record
    ]
    alarms = [name for record in records for name in record.get("alarms", [])]
    return {"points": points, "alarms": alarms}


def envgym(*words: str) -> None:
    """Run the program in this process, whose libraries need not be loaded again for each of many short runs."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main_of_envgym(words)
    if status:
        raise SystemExit(f"envgym {' '.join(words)}\n{output.getvalue()[-2000:]}")


def show(runs: dict[str, Any]) -> None:
    """Draw the figure and fill the table of the docs."""
    rows = []
    for env in ENVIRONMENTS:
        for arm in ARMS:
            curves = [run["points"] for run in runs.values() if (run["env"], run["arm"]) == (env, arm)]
            if not curves:
                continue
            last = [curve[-1] for curve in curves]
            rows.append([
                f"`{ENVIRONMENTS[env].relative_to(ROOT)}`, {arm}",
                f"{len(curves)}",
                f"{fmean(curve[0]['score'] for curve in curves):.3f}",
                *(" ".join(f"{curve[half(curve)]['score']:.3f}" for curve in group) for group in [curves]),
                " ".join(f"{point['score']:.3f}" for point in last),
                f"{fmean(mean_score(curve) for curve in curves):.3f}",
                f"{fmean(point['tokens'] for point in last):,.0f}",
                f"{fmean(point['seconds'] for point in last):.0f}",
            ])  # fmt: skip
    header = ["environment", "seeds", "before", "after half the steps", "after", "mean of the curve", "tokens sampled",
              "seconds"]  # fmt: skip
    draw(runs)
    began = conditions_in_words(next(iter(runs.values()))["conditions"])
    picture = f"![Held-out scores over sampled tokens and over seconds]({FIGURE.name})"
    fill_docs(NAME, "\n\n".join([picture, table(header, rows), began]), PAGE)


def half(curve: Sequence[dict[str, Any]]) -> int:
    """The index of the point at half of a curve's steps."""
    return len(curve) // 2


def mean_score(curve: Sequence[dict[str, Any]]) -> float:
    """The mean score over the sampled tokens, by trapezoids."""
    areas = [(b["tokens"] - a["tokens"]) * (a["score"] + b["score"]) / 2 for a, b in pairwise(curve)]
    return sum(areas) / curve[-1]["tokens"]


def draw(runs: dict[str, Any]) -> None:
    """A line of panels per environment: scores over tokens, and over seconds, of every seed, and their mean."""
    import matplotlib.figure as figures

    environments = [env for env in ENVIRONMENTS if any(run["env"] == env for run in runs.values())]
    size = (9.6, 3.1 * len(environments) + 0.5)
    figure = figures.Figure(figsize=size, dpi=110, layout="constrained")
    panels = figure.subplots(len(environments), 2, sharey=True, squeeze=False)
    for env, line in zip(environments, panels, strict=True):
        for axis, panel in zip(("tokens", "seconds"), line, strict=True):
            for arm, color in COLORS.items():
                curves = [run["points"] for run in runs.values() if (run["env"], run["arm"]) == (env, arm)]
                for curve in curves:
                    panel.plot(
                        [p[axis] for p in curve], [p["score"] for p in curve], color=color, linewidth=0.8, alpha=0.5
                    )
                columns = list(zip(*curves, strict=True))
                means = [[fmean(p[key] for p in column) for column in columns] for key in (axis, "score")]
                panel.plot(*means, color=color, linewidth=2.2, label=arm)
            panel.set_title(f"{env}, over {axis}", loc="left", fontsize=11, fontweight="bold")
            panel.set_ylim(0, 1.02)
            panel.grid(axis="y", color="#e5e5e5")
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=11)
    figure.savefig(FIGURE)


if __name__ == "__main__":
    main()
