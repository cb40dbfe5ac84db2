"""Bugs that are put into a run are named by an alarm within five steps, and runs without one raise none."""

import json

import pytest

from tests.alarms import clean_runs
from tests.alarms.bugs import ALARMS, BUGS, SEEDS, STEPS, SUMS, run, run_bug, store


def test_every_kind_of_bug_has_two_forms():
    assert {kind: sum(form.kind == kind for form in BUGS.values()) for kind in ALARMS} == dict.fromkeys(ALARMS, 2)


@pytest.mark.parametrize("name", ["mean_minus_reward", "sampling_has_a_copy_of_the_model"])
def test_a_bug_is_named(name, tmp_path):
    """One that the run survives, and one that ends it: its last step has no record but the alarms."""
    result = run_bug(name, SEEDS[0], tmp_path)
    named = result.names(BUGS[name].kind)
    assert named, result
    text = next(text for step, alarm, text in result.alarms if (step, alarm) == named[0])
    assert "look at" in text
    assert bool(result.error) == (name == "sampling_has_a_copy_of_the_model")


def test_a_run_without_a_bug_raises_none(tmp_path):
    result = run((*SUMS, "rollout.filter.zero_variance=true"), tmp_path, seed=7)
    assert (result.alarms, result.error, result.steps) == ((), "", STEPS)


@pytest.mark.slow
def test_every_bug_is_named_at_every_seed(tmp_path):
    """Writes the table's figures; a stored form is not run again."""
    assert [key for key, outcome in store(tmp_path).items() if not outcome["named"]] == []


@pytest.mark.slow
def test_runs_over_all_recipes_and_learners_raise_none():
    clean_runs.main([])
    outcomes = json.loads(clean_runs.STORED.read_text())["runs"]
    assert len(outcomes) >= 50
    assert {name: outcome["laws"] for name, outcome in outcomes.items() if outcome["laws"]} == {}
    assert {name: outcome["error"] for name, outcome in outcomes.items() if outcome["error"]} == {}
