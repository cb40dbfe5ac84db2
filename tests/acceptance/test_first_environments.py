"""Environments of people who had read the documentation only, and whom nobody had told what the starter was trained on.

The warm-up of runs on the starter was chosen with the first six. The second six were written afterwards, and nothing
was changed for them: see docs/get_started/starter.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def words_for(path: Path) -> list[str]:
    """150 steps of a size that fits into three minutes; or the default ones of a run that begins with the environment's
    demonstrations."""
    if "def demonstrations" in path.read_text():
        return ["--recipe", "sft_grpo"]
    return ["steps=150", "rollout.tasks_per_step=32"]


@pytest.mark.parametrize("six", ["first_environments", "second_environments"])
def test_most_of_the_first_environments_of_a_newcomer_are_learned(envgym, summary, store, tmp_path, six):
    results = {}
    for path in sorted((FOLDER / six).glob("*.py")):
        name = path.stem
        envgym("train", "--env", str(path), "--name", name, *words_for(path), "eval.greedy=false", timeout=1800)
        result = summary(name)
        scores = {when: result["eval"][when] for when in ("before", "after")}
        if "--recipe" in words_for(path):  # that is the score before the second stage
            envgym("eval", "--env", str(path), "--model", "starter", "--name", name, "eval.greedy=false")
            [scores["before"]] = json.loads((tmp_path / "evals" / name / "result.json").read_text())["envs"].values()
        results[name] = {"asks": path.read_text().splitlines()[0].strip('"'), **scores, "seconds": result["seconds"]}
        print(name, json.dumps(scores), flush=True)
    store(f"starter_{six}", environments=results)
    learned = [name for name, r in results.items() if r["after"]["score"] >= r["before"]["score"] + 0.3]
    assert len(learned) >= 4, results
