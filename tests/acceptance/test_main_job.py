"""The main job: a real policy learns a real environment through the real stack, and a control does not."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "results"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_starter_learns_sums(seed, envgym, summary, store, tmp_path):
    envgym("train", "--env", "math_verify", "--name", "main", f"seed={seed}")
    result = summary("main")
    before, after = result["eval"]["before"], result["eval"]["after"]
    store(
        f"main_job_seed_{seed}",
        before=before,
        after=after,
        greedy_before=result["eval"]["greedy_before"]["score"],
        greedy_after=result["eval"]["greedy_after"]["score"],
        steps=result["steps"],
        seconds=result["seconds"],
        max_abs_logprob=result["mismatch"]["max_abs_logprob"],
    )
    if seed == 0:  # the picture of docs/get_started/starter.md
        shutil.copy(tmp_path / "runs" / "main" / "curve.png", RESULTS / "main_job.png")
    assert before["n_tasks"] == after["n_tasks"] == 512
    assert before["score"] <= 0.5
    assert after["score"] >= 0.95
    assert result["mismatch"]["max_abs_logprob"] < 1e-4
    assert result["failures"] == {}
    assert result["seconds"]["total"] < 240


def test_a_control_that_cannot_learn_does_not(envgym, summary, store):
    # Deterministic, so that the same held-out episodes are sampled before and after.
    envgym(
        "train", "--env", "math_verify", "--name", "control", "learner.lr=0", "steps=10", "deterministic=true"
    )  # fmt: skip
    result = summary("control")
    before, after = result["eval"]["before"], result["eval"]["after"]
    store("main_job_control", before=before, after=after)
    low, high = before["ci95"]
    assert low <= after["score"] <= high


def test_problems_from_the_users_own_file_are_learned(envgym, summary, store, tmp_path):
    """Subtraction in words, with field names of the user's, taught and then reinforced by a recipe of two stages."""
    rng = random.Random(0)
    lines = set()
    while len(lines) < 1500:
        have, give = rng.randint(11, 60), rng.randint(1, 10)
        name, thing = rng.choice(("Tom", "Ada", "Lin")), rng.choice(("apples", "books", "coins"))
        lines.add(
            f'{{"problem_text": "{name} has {have} {thing} and gives {give} away. How many are left?", '
            f'"left": {have - give}, "source": "made up"}}'
        )
    (tmp_path / "subtraction.jsonl").write_text("\n".join(sorted(lines)) + "\n")
    envgym(
        "train", "--env", "math_verify", "--recipe", "sft_grpo", "--name", "own",
        "data.path=subtraction.jsonl", "data.prompt=problem_text", "data.answer=left",
    )  # fmt: skip
    result = summary("own")
    before, after = result["eval"]["before"], result["eval"]["after"]
    store("own_data", before=before, after=after, seconds=result["seconds"])
    assert after["ci95"][0] > before["ci95"][1]
