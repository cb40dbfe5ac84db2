"""Reinforcement over several turns, and with tools; and the controls that cannot have either."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
ALIKE = ("engine.max_model_len=512", "steps=60")
"""What the starter brings along, for a policy that was trained from it."""

CASES = {
    # Without more than one turn there is one guess in thirty.
    "turns": (
        ("--env", "examples/guess.py:Guess", "--recipe", "sft_grpo"),
        ("--env", "examples/guess.py:Guess", "agent.max_turns=1", "learner.lr=3e-4", "rollout.max_tokens=16"),
    ),
    # The multi-turn agent offers no tools; the answer can then only be guessed, one in ninety.
    "tools": (
        ("--recipe", "examples/tools.yaml"),
        (
            "--env",
            "tool_use",
            "agent=multi_turn",
            "learner.lr=1e-4",
            "rollout.max_tokens=64",
            "rollout.tasks_per_step=32",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_small_policy_learns_what_its_control_cannot(case, envgym, summary, store, tmp_path):
    """Both are reinforced from the same policy, which demonstrations have left half able."""
    words, without = CASES[case]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    envgym("train", *words, "--name", "run", timeout=1800)
    warm = str(tmp_path / "runs" / "run" / "1-sft" / "model")
    envgym("train", *without, "--model", warm, "--name", "control", *ALIKE, timeout=1800)
    learned, control = summary("run"), summary("control")
    before, after = learned["eval"]["before"], learned["eval"]["after"]
    store(
        f"learns_with_{case}",
        before=before,
        after=after,
        control_before=control["eval"]["before"],
        control_after=control["eval"]["after"],
        seconds=learned["seconds"],
        control_seconds=control["seconds"],
        mismatch=learned["mismatch"],
        failures=learned["failures"],
    )
    assert after["ci95"][0] > before["ci95"][1] + 0.1
    assert control["eval"]["after"]["score"] < after["score"] / 2
    assert learned["mismatch"]["max_abs_logprob"] < 1e-3
    assert learned["failures"] == {}
