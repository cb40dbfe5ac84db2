"""What an evaluation leaves for other programs: a table, and logs that `inspect view` shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.disk import write_atomically
from envgym.types import Group

from .folder import EvalFolder
from .inspect_log import write_inspect_logs


def write_exports(folder: EvalFolder, result: Mapping[str, Any], groups: Mapping[str, Sequence[Group]]) -> None:
    """Write `result.csv` and the logs."""
    write_atomically(folder.csv_file, table(result))
    write_inspect_logs(folder.inspect, result, groups)


def table(result: Mapping[str, Any]) -> str:
    """A line for each environment, as CSV."""
    rows = [_row(name, env) for name, env in result["envs"].items()]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(name: str, env: Mapping[str, Any]) -> dict[str, Any]:
    low, high = env["ci95"] or (None, None)
    seconds = env["seconds"] or {}
    return {
        "env": name,
        "weight": env["weight"],
        "score": env["score"],
        "reward": env.get("reward", env)["score"],
        "ci95_low": low,
        "ci95_high": high,
        "stderr": env["stderr"],
        "success_rate": env["success"]["rate"],
        "n_tasks": env["n_tasks"],
        "n_episodes": env["n_episodes"],
        "failed": sum(env["failures"].values()),
        "unscored": env["unscored"],
        "truncated": env["truncated"],
        **{
            f"{kind}={k}": value
            for kind in ("pass@k", "pass^k", "majority@k")
            for k, value in env.get(kind, {}).items()
        },
        "tokens": env["tokens"],
        "turns": env["turns"],
        "seconds_p50": seconds.get("p50"),
        "seconds_p95": seconds.get("p95"),
    }
