"""`envgym runs`: a list of run folders with their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser
from envgym.disk import lock_holder
from envgym.errors import printable

if TYPE_CHECKING:
    from envgym.view.sources import Source

SUMMARY = "list run folders with their results"


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
    from envgym.view.sources import Source

    try:
        cells = _cells(run, lambda folder: Source(folder.name, "run", folder, (run.resolve(),)))
    except Exception as error:  # an untrusted run may contain anything; the others stay in the list
        cells = f"unreadable ({type(error).__name__}; see: envgym view)", "", "", ""
    return tuple(printable(cell) for cell in (run.name, *cells))


def _cells(run: Path, source: Callable[[Path], Source]) -> tuple[str, ...]:
    """The cells of a run's row, from its summary or, before the last of several stages ended, the latest stage's."""
    files = [*run.glob("metrics.jsonl"), *run.glob("*/metrics.jsonl")]
    last = max(files, key=lambda path: path.lstat().st_mtime, default=run / "metrics.jsonl").parent
    if (process := lock_holder(run)) is not None:
        return f"runs on {process}", _steps_so_far(source(last)), "", ""
    summary = source(run).summary()
    if not summary:
        summary = source(last).summary()
        if summary.get("status", "completed") == "completed":
            return "unfinished", _steps_so_far(source(last)), "", ""
    from envgym.monitoring.report import score

    scores = summary.get("eval") or {}
    return (
        str(summary.get("status", "?")),
        str(summary.get("steps", "")),
        *(score(scores[moment]) if scores.get(moment) else "" for moment in ("before", "after")),
    )


def _steps_so_far(stage: Source) -> str:
    """The last step in a stage's metrics, for a run without a summary because it was killed or is still running."""
    return str(max((record["step"] for _, record in stage.records()), default=0))
