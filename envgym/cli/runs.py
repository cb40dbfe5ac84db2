"""`envgym runs`: the run folders there are, with what came of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envgym.disk import holder
from envgym.errors import printable
from envgym.monitoring.report import aligned, score
from envgym.view.sources import Source

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
    print(aligned([("RUN", "STATUS", "STEPS", "BEFORE", "AFTER"), *map(_row, runs)]))
    return 0


def _row(run: Path) -> tuple[str, ...]:
    try:
        cells = _cells(run)
    except Exception as error:  # a stranger's run may hold anything, and takes no other from the list
        cells = f"unreadable ({type(error).__name__}; see: envgym view)", "", "", ""
    return tuple(printable(cell) for cell in (run.name, *cells))


def _cells(run: Path) -> tuple[str, ...]:
    """A run of several stages has a summary once the last has ended; until then the one it came to tells."""

    def source(folder: Path) -> Source:
        return Source(folder.name, "run", folder, (run.resolve(),))

    files = [*run.glob("metrics.jsonl"), *run.glob("*/metrics.jsonl")]
    last = max(files, key=lambda path: path.lstat().st_mtime, default=run / "metrics.jsonl").parent
    if (where := holder(run)) is not None:
        return f"runs on {where}", _steps_so_far(source(last)), "", ""
    summary = source(run).summary()
    if not summary:
        summary = source(last).summary()
        if summary.get("status", "completed") == "completed":
            return "unfinished", _steps_so_far(source(last)), "", ""
    scores = summary.get("eval") or {}
    return (
        str(summary.get("status", "?")),
        str(summary.get("steps", "")),
        *(score(scores[when]) if scores.get(when) else "" for when in ("before", "after")),
    )


def _steps_so_far(stage: Source) -> str:
    """A run that was killed, or goes on, has no summary; its metrics still tell how far it came."""
    return str(max((record["step"] for _, record in stage.records()), default=0))
