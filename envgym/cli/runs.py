"""`envgym runs`: a list of run folders with their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envgym.disk import lock_holder
from envgym.errors import printable_line

from .errors import Invocation
from .parser import Parser

UNFINISHED = "unfinished"
"""Status of a run that was killed."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """List run folders, newest first: status, steps, and held-out score before and after.

    usage: [runs_dir=FOLDER]
    example: envgym runs
    """
    parser = Parser("runs", main)
    folder = Path(parser.parse_with_folder(arguments, "runs_dir")[1])
    runs = [path for path in folder.glob("*/") if (path / "config.yaml").is_file()] if folder.is_dir() else []
    if not runs:
        print(f"no runs in {printable_line(str(folder))}")
        return 0
    runs.sort(key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
    from envgym.monitoring.report import aligned

    rows = [_row(run) for run in runs]
    print(aligned([("RUN", "STATUS", "STEPS", "BEFORE", "AFTER"), *rows]))
    if unfinished := [row[0] for row in rows if row[1] == UNFINISHED]:
        print(f"\nresume with: envgym train --resume {unfinished[0]}")
    return 0


def _row(run: Path) -> tuple[str, ...]:
    try:
        cells = _cells(run)
    except Exception as error:  # an untrusted run may contain anything; the others stay in the list
        cells = f"unreadable ({type(error).__name__}; see: envgym view)", "", "", ""
    return tuple(printable_line(cell) for cell in (run.name, *cells))


def _cells(run: Path) -> tuple[str, ...]:
    """The cells of a run's row, from its summary or, before the last of several stages ended, the latest stage's. A run
    that is running or was killed has no summary: its steps are those of the latest stage's metrics."""
    from envgym.monitoring.report import score
    from envgym.view.sources import Source

    files = [*run.glob("metrics.jsonl"), *run.glob("*/metrics.jsonl")]
    last = max(files, key=lambda path: path.lstat().st_mtime, default=run / "metrics.jsonl").parent
    run_source, stage_source = (Source(folder.name, "run", folder, (run.resolve(),)) for folder in (run, last))
    process = lock_holder(run)
    summary = {} if process else run_source.summary()
    if not process and not summary and stage_source.summary().get("status", "completed") != "completed":
        summary = stage_source.summary()
    if not summary:
        steps = max((record["step"] for _, record in stage_source.records()), default=0)
        return f"runs on {process}" if process else UNFINISHED, str(steps), "", ""
    scores = summary.get("eval") or {}
    return (
        str(summary.get("status", "?")),
        str(summary.get("steps", "")),
        *(score(scores[moment]) if scores.get(moment) else "" for moment in ("before", "after")),
    )
