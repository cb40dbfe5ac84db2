"""Copy the stored results of `tests/acceptance/test_attack.py` to the page on trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from record import ROOT, fill_docs, table

PAGE = ROOT / "docs" / "trust.md"
RESULTS = ROOT / "tests" / "results"


def source(stored: dict[str, Any]) -> str:
    """The commit and the date of a result, and its file."""
    item = stored["item"]
    return f"Commit `{stored['commit'][:12]}`, {stored['date'][:10]}; `tests/results/{item}.json`."


def planted(path: Path) -> str:
    """The weaknesses that were found in planted environments, each with the number of cheats that show it."""
    stored = json.loads(path.read_text())
    figures = stored["figures"]
    environments = figures["environments"]
    weak = sorted(name for name in environments if name.startswith("weak/"))
    n_sound = len(environments) - len(weak)
    rows = [
        [
            name.removeprefix("weak/"),
            str(len(cheats)),
            cheats[0] if cheats else "not found",
            f"{environments[name]['blind']:.2f}",
        ]
        for name in weak
        for cheats in [environments[name]["weak"]]
    ]
    false = ", ".join(figures["false"]) or "none"
    text = f"Found: {figures['found']} of {len(weak)} weak ones. Of {n_sound} sound ones called weak: {false}."
    return "\n\n".join([table(["weakness", "cheats", "the first one", "blind play"], rows), f"{text} {source(stored)}"])


def shipped() -> str:
    """The attacks on what ships."""
    stored = json.loads((RESULTS / "attack_shipped.json").read_text())
    rows = []
    for name, row in stored["figures"]["environments"].items():
        right = "none" if row["demonstrations"] is None else f"{row['demonstrations']:.2f}"
        rows.append([f"`{name}`", str(row["cheats"]), str(len(row["weak"])), f"{row['blind']:.2f}", right])
    header = ["environment", "cheats", "that pay or hang", "blind play", "demonstrations"]
    return "\n\n".join([table(header, rows), source(stored)])


def main() -> None:
    for path in sorted(RESULTS.glob("attack_*.json")):
        if path.stem != "attack_shipped":
            fill_docs(path.stem, planted(path), PAGE)
    fill_docs("attack_shipped", shipped(), PAGE)


if __name__ == "__main__":
    main()
