"""Tables of an evaluation's result: what `envgym eval` prints, and `result.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envgym.config.words import dotted_keys
from envgym.monitoring.report import aligned, counts, duration, score, tasks_behind, with_interval

AT_K = ("pass@k", "pass^k", "majority@k")
DESCRIPTIONS = ("env", "agent", "settings", "fingerprints", "envs")
"""Keys of an environment's result that describe it."""


def evaluation_text(result: Mapping[str, Any], folder: Path) -> str:
    """The table and the lines below it, from `result.json`. `folder`: where the episodes are, or their file."""
    envs = result["envs"]
    return f"{aligned(_rows(envs), right=True)}\n\n{aligned(_lines(result, folder))}"


def _rows(envs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The header and a row per environment, and per member of a mixture. Empty columns are omitted."""
    items = [(name, env) for part, result in envs.items() for name, env in _with_members(part, result)]
    k = max((int(k) for _, env in items for k in env["pass@k"]), default=1)
    columns: dict[str, list[str]] = {
        "score": [score(env) if env["score"] is not None else "none" for _, env in items],
        "reward": [with_interval(env["reward"]) if has_only_rewards(env) else "" for _, env in items],
        "success": [
            "" if (rate := env["success"]["rate"]) in (env["score"], None) else f"{rate:.3f}" for _, env in items
        ],
        **{
            name.replace("k", str(k)): [_number(env.get(name, {}).get(str(k))) for _, env in items]
            for name in AT_K
            if k > 1
        },
        "tasks": [str(tasks_behind(env)) for _, env in items],
        "failed": [_share(sum(env["failures"].values()), env["n_episodes"]) for _, env in items],
        "unscored": [_share(env["unscored"], env["n_episodes"]) for _, env in items],
        "truncated": [_share(env["truncated"], env["n_episodes"]) for _, env in items],
        "tokens": [_per_episode(env["tokens"], env["n_episodes"] - _n_excluded(env)) for _, env in items],
        "turns": ["" if env["turns"] is None else f"{env['turns']:.1f}" for _, env in items],
        "p50 s": ["" if env["seconds"] is None else f"{env['seconds']['p50']:.2f}" for _, env in items],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    body = zip([name for name, _ in items], *filled.values(), strict=True)
    return [["environment", *filled], *map(list, body)]


def has_only_rewards(env: Mapping[str, Any]) -> bool:
    """True if an environment's episodes have rewards but no scores."""
    return env["score"] is None and "reward" in env and env["reward"]["score"] is not None


def _with_members(name: str, env: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, env), *((f"  {member}", result) for member, result in env.get("envs", {}).items())]


def _lines(result: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Label and text of the lines about the whole evaluation."""
    label, target = ("suite", result["suite"]) if result["suite"] else ("env", next(iter(result["envs"])))
    weighed = [env for env in result["envs"].values() if env["weight"]]
    lines = [("model", result["model"])]
    is_mean = len(weighed) > 1
    weights = {env["weight"] for env in weighed}
    method = f"mean of {len(weighed)} environments{'' if len(weights) == 1 else ' by their weights'}"
    size = f"{result['n_tasks']} tasks, {sum(env['n_episodes'] for env in weighed)} episodes"
    lines.append((label, target))
    if result["score"] is None:
        missing = [name for name, env in result["envs"].items() if env["weight"] and env["score"] is None]
        problem = f"none: no episode of {', '.join(missing)} was scored"
        if all(has_only_rewards(result["envs"][name]) for name in missing):
            problem = f"none: {', '.join(missing)} gives none, and its rewards are not all in [0, 1]"
        lines.append(("score", problem))
    else:
        lines.append(("score", f"{score(result)}   95% interval, {f'{method}, ' if is_mean else ''}{size}"))
    for name, env in result["envs"].items():
        for k, count in env["tasks_at_k"].items():
            if 0 < count < env["n_tasks"]:
                lines.append(
                    ("note", f"{name}: {count} of {env['n_tasks']} tasks have the {k} finished episodes for k={k}")
                )
    if result["failures"]:
        n_excluded = sum(map(_n_excluded, result["envs"].values()))
        fate = f"{n_excluded} excluded from every score, the others have a reward (rollout.failed_reward)"
        if n_excluded == sum(result["failures"].values()):
            fate = "excluded from every score"
        lines.append(("failed", f"{counts(result['failures'])}   {fate}"))
    lines.append(("time", f"{duration(result['seconds'])}, {result['tokens']:,} tokens sampled"))
    lines.append(("file" if folder.is_file() else "folder", str(folder)))
    return lines


def _n_excluded(env: Mapping[str, Any]) -> int:
    """Failed episodes without a reward. Results of earlier versions have no others."""
    return int(sum(env["failures"].values()) - env.get("rewarded_failures", 0))


def _per_episode(total: int, count: int) -> str:
    return f"{total / count:.0f}" if count else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _share(part: int, total: int) -> str:
    return f"{part / total:.0%}" if part else ""


def flat_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per environment: its name and its numbers, nested ones by dotted keys (`success.rate`, `pass@k.4`)."""
    rows = []
    for name, env in result["envs"].items():
        low, high = env.get("ci95") or (None, None)
        numbers = dotted_keys({key: value for key, value in env.items() if key not in DESCRIPTIONS})
        row = {"environment": name, "ci95_low": low, "ci95_high": high}
        rows.append(row | {key: value for key, value in numbers if isinstance(value, int | float | None)})
    return rows


def csv_table(result: Mapping[str, Any]) -> str:
    """The rows of `flat_rows` as CSV."""
    rows, text = flat_rows(result), io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
