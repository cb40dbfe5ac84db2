"""The result of a run or an evaluation as text, and a plot of its curve."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from envgym.errors import needs, printable_line

PICTURE = "curve.png"
WINDOW_SHARE = 0.1
"""Window of the averaged curve, as a share of all steps."""

Evaluation = Mapping[str, Any]
Line = tuple[str, str]
"""The subject of a line, and its text."""


def duration(seconds: float) -> str:
    """`42 s`, `3 min 07 s`, `2 h 05 min`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def score(evaluation: Evaluation) -> str:
    """`0.912 [0.885, 0.934]`: the mean and its 95% interval; metrics on recorded episodes with their names."""
    if "score" in evaluation:
        if evaluation["score"] is not None:
            return with_interval(evaluation)
        reward = evaluation.get("reward")
        if reward is None or reward["score"] is None:
            return "no episode was scored"
        return f"no score, reward {with_interval(reward)}"
    return "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in evaluation.items() if "/" in name)


def tasks_behind(evaluation: Evaluation) -> int:
    """The number of tasks behind `score`."""
    reward: Mapping[str, int] = evaluation.get("reward", {})
    return int(evaluation["n_tasks"] or reward.get("n_tasks", 0))


def with_interval(mean: Mapping[str, Any]) -> str:
    """`0.912 [0.885, 0.934]`, from the content of `Mean.as_dict`."""
    if mean["ci95"] is None:
        return f"{mean['score']:.3f}"
    low, high = mean["ci95"]
    return f"{mean['score']:.3f} [{low:.3f}, {high:.3f}]"


def summary_lines(summary: Mapping[str, Any]) -> list[Line]:
    """The result of a run, or its last stage, from `summary.json` with `run` (its folder) and, if drawn, `picture`."""
    seconds, tokens, evals = summary["seconds"], summary["tokens"], summary["eval"]
    stages = summary.get("stages", [])
    last = f" of {stages[-1]}, the last of {len(stages)} stages," if stages else ""
    lines = [("run", f"{summary['status']}: {summary['steps']} steps{last} in {duration(seconds['total'])}")]
    for name, first, last in (("held-out", "before", "after"), ("greedy", "greedy_before", "greedy_after")):
        parts = [f"{label} {score(evals[key])}" for label, key in (("before", first), ("after", last)) if key in evals]
        if parts:
            latest = evals[last if last in evals else first]
            intervals = ", 95% intervals" if "score" in latest else ""
            lines.append((name, f"{'  ->  '.join(parts)}   {tasks_behind(latest)} tasks{intervals}"))
    lines += _members(evals.get("after", evals.get("before", {})))
    if best := summary.get("best"):
        lines.append(("best", f"{best['metric']} {best['value']:.4g} at step {best['step']}   checkpoints/best"))
    lines.append(("time", _split(seconds)))
    lines.append(("tokens", f"{tokens['sampled']:,} sampled, {tokens['trained']:,} trained"))
    if tokens["sampled"] and "mismatch" in summary:
        max_mismatch = summary["mismatch"]["max_abs_logprob"]
        lines.append(("mismatch", f"{max_mismatch:.1e} nats at most between inference engine and trainer"))
    if summary["failures"]:
        lines.append(("failures", counts(summary["failures"])))
    if summary.get("alarms"):
        lines.append(("alarms", f"{counts(summary['alarms'])}   what each means: docs/training/monitor.md"))
    lines.append(("folder", summary["run"]))
    if summary.get("picture"):
        lines.append(("picture", str(summary["picture"])))
    lines.append(("look", f"envgym view {summary['run']}"))
    lines.append(("next", _next_command(summary)))
    return lines


def _next_command(summary: Mapping[str, Any]) -> str:
    """The command that looks at what a run has changed: an evaluation or, without held-out tasks or rewards, answers of
    the policy; of a reward model, its rewards; of a rollout or of scoring, the episodes."""
    run = summary["run"]
    if "file" in summary:
        return f"envgym show {summary['file']}"
    if summary.get("head") == "scalar":
        return f"envgym serve-reward-model --model {run}"
    if summary.get("held_out_tasks") != 0 and summary.get("gives_rewards") is not False:
        return f"envgym eval --config {run}/config.yaml --model {run}"
    agent = "agent=single_turn " if summary.get("gives_rewards") is False else ""  # not that of the recordings
    split = "train" if summary.get("held_out_tasks") == 0 else "test"
    command = f"envgym rollout --config {run}/config.yaml --model {run} {agent}--split {split} --tasks 0:8"
    return f"{command} --out {run}/answers.jsonl && envgym show {run}/answers.jsonl"


def _members(evaluation: Evaluation) -> list[Line]:
    """The scores of a mixture's members."""
    envs = evaluation.get("envs", {})
    return [(f"  {name}", f"{score(result)}   {tasks_behind(result)} tasks") for name, result in envs.items()]


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """The rows as lines of aligned columns: all to the left, or all but the first to the `right`. Their texts may be a
    stranger's."""
    rows = [[printable_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *(">" if right else "<" for _ in widths[1:])]
    columns = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    return "\n".join("  ".join(columns).format(*row).rstrip() for row in rows)


def lines_html(lines: Sequence[Line], picture: Path | None = None) -> str:
    """Labelled lines as a table, above the PNG file `picture`, if it exists."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in lines
    )
    image = ""
    if picture is not None and picture.is_file():
        data = b64encode(picture.read_bytes()).decode()
        image = f'<img style="max-width:640px" src="data:image/png;base64,{data}">'
    return f"<table>{rows}</table>{image}"


def plot(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path | None:
    """Draw `curve.png` of one stage in its folder from the `records` of its metrics; None without a step.

    It has the reward of each step (and its moving average), the held-out score of each evaluation with its 95%
    interval, and the score before training as a dashed line. For a supervised stage it has the loss instead.
    """
    key = "reward/mean" if any("reward/mean" in record for record in records) else "loss"
    curve = [(record["step"], record[key]) for record in records if key in record]
    if not curve:
        return None
    with needs("matplotlib", "train", "drawing a run"):
        import matplotlib.figure as figures

    figure = figures.Figure(figsize=(12, 7), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    steps, values = zip(*curve, strict=True)
    name = "training reward" if key == "reward/mean" else "training loss"
    axes.plot(steps, values, color="#9ecae1", linewidth=1.2, label=f"{name}, each step")
    axes.plot(steps, centered_mean(values), color="#2171b5", linewidth=2.4, label=f"{name}, averaged over steps")
    _draw_evaluations(axes, records)
    axes.set_title(folder.resolve().name, loc="left", fontsize=16, fontweight="bold", pad=14)
    axes.set_xlabel("step", fontsize=13)
    axes.set_ylabel("reward, score" if key == "reward/mean" else "loss", fontsize=13)
    axes.set_xlim(0, max(steps))
    if key == "reward/mean" and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.02)  # the full scale, so that a rise looks as large as it is
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=12)
    axes.legend(loc="best", frameon=False, fontsize=12)
    path = folder / PICTURE
    figure.savefig(path)
    return path


def centered_mean(values: Sequence[float]) -> list[float]:
    """The moving average over a window centered at each value, narrower at the ends, so that the curve has no lag."""
    radius = int(len(values) * WINDOW_SHARE / 2)
    reaches = [min(radius, index, len(values) - 1 - index) for index in range(len(values))]
    return [fmean(values[index - reach : index + reach + 1]) for index, reach in enumerate(reaches)]


def _draw_evaluations(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    measured = [record for record in records if record.get("eval/score") is not None]
    if not measured:
        return
    steps = [record["step"] for record in measured]
    scores = [record["eval/score"] for record in measured]
    low, high = zip(*(record["eval/ci95"] or (math.nan, math.nan) for record in measured), strict=True)
    axes.fill_between(steps, low, high, color="#e6550d", alpha=0.15, linewidth=0)
    style = {"color": "#e6550d", "linewidth": 2, "markersize": 8, "clip_on": False}
    axes.plot(steps, scores, "o-", **style, label="held-out score, 95% interval")
    if steps[0] == 0:
        axes.axhline(scores[0], color="#636363", linestyle="--", linewidth=1.4, label="held-out score before training")
    text = {"textcoords": "offset points", "fontsize": 13, "fontweight": "bold", "color": "#a63603"}
    text["bbox"] = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
    for step, value in {steps[0]: scores[0], steps[-1]: scores[-1]}.items():
        side, offset = ("left", (10, -20)) if step == 0 else ("right", (-10, -24))
        axes.annotate(f"{value:.3f}", (step, value), xytext=offset, ha=side, **text)


def _split(seconds: Mapping[str, float]) -> str:
    """The phases' shares of the total time; `other` is the rest, such as ending the workers."""
    total = seconds["total"]
    if not total:
        return "none"
    phases = {name: phase_seconds for name, phase_seconds in seconds.items() if name != "total" and phase_seconds}
    phases["other"] = max(0.0, total - sum(phases.values()))
    return "  ".join(f"{name} {phase_seconds / total:.0%}" for name, phase_seconds in phases.items())


def counts(numbers: Mapping[str, int]) -> str:
    """`timeout 2, engine 1`."""
    return ", ".join(f"{kind} {count}" for kind, count in numbers.items())
