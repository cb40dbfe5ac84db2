"""Copy what `python -m tests.kills` has stored to the page on trust."""

from __future__ import annotations

import json

from record import ROOT, fill_docs, table


def main() -> None:
    stored = json.loads((ROOT / "tests" / "results" / "kills.json").read_text())
    rows = []
    for name, part in stored.items():
        killed = ", ".join(f"{victim} {count}" for victim, count in part["killed"].items())
        seconds = " / ".join(f"{part['seconds'][name]:.1f}" for name in ("median", "p90", "most"))
        figures = (part["kills"], part["steps"], part["tasks"], part["failed_episodes"])
        rows.append([name, killed, *map(str, figures), seconds])
    header = [
        "run",
        "killed",
        "kills",
        "steps",
        "tasks",
        "failed episodes",
        "seconds: median / 90 % / most",
    ]
    total = sum(part["kills"] for part in stored.values())
    recovering = sum(part["while_recovering"] for part in stored.values())
    text = (
        f"{total} kills, {recovering} of them while the run still recovered from the last. `tests/results/kills.json`."
    )
    fill_docs("kills", f"{table(header, rows)}\n\n{text}", ROOT / "docs" / "trust.md")


if __name__ == "__main__":
    main()
