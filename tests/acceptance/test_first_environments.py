"""Environments of somebody who had read the documentation only, and whom nobody had told what the starter was trained
on. Nothing was tuned for them afterwards: see docs/get_started/starter.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "first_environments"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def words_for(path: Path) -> list[str]:
    """150 steps of a size that fits into three minutes; or the default ones of a run that begins with the environment's
    demonstrations."""
    if "def demonstrations" in path.read_text():
        return ["--recipe", "sft_grpo"]
    return ["steps=150", "rollout.tasks_per_step=32"]


def test_most_of_the_first_environments_of_a_newcomer_are_learned(envgym, summary, store):
    results = {}
    for path in sorted(FOLDER.glob("*.py")):
        name = path.stem
        envgym("train", "--env", str(path), "--name", name, *words_for(path), "eval.greedy=false", timeout=1800)
        result = summary(name)
        scores = {when: result["eval"][when] for when in ("before", "after")}
        results[name] = {"asks": path.read_text().splitlines()[0].strip('"'), **scores, "seconds": result["seconds"]}
        print(name, json.dumps(scores), flush=True)
    store("starter_first_environments", environments=results)
    learned = [name for name, r in results.items() if r["after"]["score"] >= r["before"]["score"] + 0.3]
    assert len(learned) >= 4, results
