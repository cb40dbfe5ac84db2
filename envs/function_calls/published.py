"""The single-turn rows of the Berkeley Function Calling Leaderboard, from the files of its package `bfcl-eval`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envgym.errors import DataError
from envgym.tasks.rows import open_rows

from .comparison import ANY

CATEGORIES = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple",
    "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
"""Categories of one turn whose functions are Python's."""


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of every category that has a file `BFCL_vN_CATEGORY.json`, with the answers of `possible_answer/`.

    Raises `DataError` for a question without its answer."""
    for category in CATEGORIES:
        for path in sorted(folder.glob(f"BFCL_v*_{category}.json")):
            if path.stem.split("_", 2)[2] != category:
                continue
            answers = {}
            if "relevance" not in category:
                answers = {row["id"]: row["ground_truth"] for row in open_rows(folder / "possible_answer" / path.name)}
            default = ANY if category.endswith("_relevance") else []
            for row in open_rows(path):
                if "relevance" not in category and row["id"] not in answers:
                    raise DataError(f"{path}: there is no answer to {row['id']} in possible_answer/{path.name}")
                yield {
                    "id": row["id"], "category": category, "question": row["question"][0],
                    "functions": row["function"], "answer": answers.get(row["id"], default),
                }  # fmt: skip
