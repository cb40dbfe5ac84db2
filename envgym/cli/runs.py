"""`envgym runs`: the run folders there are, with what came of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envgym.disk import holder

from .errors import Invocation
from .parser import Parser


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "runs",
        "[runs_dir=FOLDER]",
        "List run folders, newest first: status, steps, and held-out score before and after.",
        "envgym runs",
    )
    folder = Path(parser.parse_with_folder(arguments, "runs_dir")[1])
    runs = [path for path in folder.glob("*/") if (path / "config.yaml").is_file()] if folder.is_dir() else []
    if not runs:
        print(f"no runs in {folder}")
        return 0
    runs.sort(key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
    from envgym.monitoring.report import aligned

    print(aligned([("RUN", "STATUS", "STEPS", "BEFORE", "AFTER"), *map(_row, runs)]))
    return 0


def _row(run: Path) -> tuple[str, ...]:
    """A run of several stages has a summary once the last has ended; until then the one it came to tells."""
    files = [*run.glob("metrics.jsonl"), *run.glob("*/metrics.jsonl")]
    last = max(files, key=lambda path: path.stat().st_mtime, default=run / "metrics.jsonl")
    if (where := holder(run)) is not None:
        return run.name, f"runs on {where}", _steps_so_far(last), "", ""
    summary = _read_summary(run / "summary.json")
    if summary is None:
        summary = _read_summary(last.parent / "summary.json")
        if summary is None or summary.get("status") == "completed":
            return run.name, "unfinished", _steps_so_far(last), "", ""
    from envgym.monitoring.report import score

    scores = summary.get("eval") or {}
    return (
        run.name,
        str(summary.get("status", "?")),
        str(summary.get("steps", "")),
        *(score(scores[when]) if scores.get(when) else "" for when in ("before", "after")),
    )


def _read_summary(path: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or not one of ours
        return None
    return summary if isinstance(summary, dict) else None


def _steps_so_far(metrics: Path) -> str:
    """A run that was killed, or goes on, has no summary; its metrics still tell how far it came."""
    for line in reversed(metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []):
        try:
            return str(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short by the kill
    return "0"
