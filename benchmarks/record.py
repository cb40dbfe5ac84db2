"""Shared steps of all benchmarks: record the conditions, store the numbers as JSON, and copy them to the docs.

The pages under `docs/` have no number typed by hand: a benchmark replaces the text between its two markers,
`<!-- NAME -->` and `<!-- /NAME -->`, with a table made from the JSON that it has just stored.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"


def conditions(packages: Iterable[str]) -> dict[str, Any]:
    """The conditions of a measurement: machine, cores, load, Python, versions of `packages`, commit and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in packages},
    }


def conditions_in_words(where: dict[str, Any]) -> str:
    """`conditions` as a sentence of the docs."""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return (
        f"Commit `{where['commit']}`, {where['date']}, {where['processor']}, {where['cores']} cores, load "
        f"{where['load_1min']} before the start; Python {where['python']}, {versions}."
    )


def commit() -> str:
    """The commit measured, marked `-dirty` where tracked files differ from it; `unknown` without a repository, so that
    the measurement is not lost."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return described.stdout.strip() or "unknown"


def installed(package: str) -> str:
    """The version of a package; `-` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def processor() -> str:
    """The processor's name as Linux reports it; other systems report only the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found.group(1) if found else platform.machine()


def store(name: str, result: dict[str, Any]) -> Path:
    """Write `result` to `benchmarks/results/NAME.json` and return the path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def fill_docs(name: str, text: str, page: Path = PAGE) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- /NAME -->` in `page`.

    Raises:
        SystemExit: the page does not hold the two markers exactly once.
    """
    written = page.read_text()
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if written.count(begin) != 1 or written.count(end) != 1:
        raise SystemExit(f"{page}: {begin} and {end} must each stand there once")
    before, rest = written.split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def publish(name: str, result: dict[str, Any], text: str, page: Path = PAGE) -> None:
    """Store a result, and put its text into the docs. Raises what `fill_docs` does."""
    path = store(name, result)
    fill_docs(name, text, page)
    print(f"\n{text}\n\nstored in {path}")
