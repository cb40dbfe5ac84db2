"""The best checkpoint is that of the step at which a chosen metric was best."""

import contextlib
import math
from types import SimpleNamespace

import pytest

from envgym.config.resolve import resolve
from envgym.config.schema import CheckpointConfig
from envgym.errors import ConfigError
from envgym.training import checkpoints as module
from envgym.training.checkpoints import BestMetric, Progress


def metric_of(wanted):
    return BestMetric(CheckpointConfig(best=wanted))


def steps_kept(wanted, values, name="eval/score", progress=None):
    """The steps, of those with `values` (from the measurement before the first one), that were the best so far."""
    metric, progress = metric_of(wanted), progress or Progress()
    kept = []
    for progress.step, value in enumerate(values):
        progress.record = {"step": progress.step, "reward/mean": 0.5}
        if value != "none":
            progress.record[name] = value
        if metric.improves(progress):
            kept.append(progress.step)
            assert progress.best == {"metric": name, "value": value, "step": progress.step}
    return kept


def test_only_a_better_value_counts_and_never_that_of_before_the_first_step():
    assert steps_kept("eval/score", [0.9, 0.2, 0.1, 0.2, 0.3, 0.3]) == [1, 4]


@pytest.mark.parametrize(("wanted", "name"), [("eval/loss", "eval/loss"), ("-eval/score", "eval/score")])
def test_of_a_loss_and_behind_a_minus_the_least_is_the_best(wanted, name):
    assert steps_kept(wanted, [0.0, 0.5, 0.6, 0.4, 0.4], name) == [1, 3]


def test_steps_without_the_metric_or_with_no_number_are_passed_over():
    assert steps_kept("eval/score", [0.0, "none", None, math.nan, math.inf, 0.1, "none", 0.2]) == [5, 7]


def test_the_best_so_far_is_what_the_progress_says_unless_it_is_of_another_metric():
    before = {"metric": "eval/score", "value": 0.5, "step": 7}
    assert steps_kept("eval/score", [0.0, 0.4, 0.6], progress=Progress(best=before)) == [2]
    assert steps_kept("loss", [9.0, 0.4, 0.6], "loss", progress=Progress(best=before)) == [1]


def test_a_score_that_the_environment_does_not_have_is_told_at_once():
    record = {"step": 0, "eval/score": None, "eval/reward": -0.5}
    with pytest.raises(ConfigError, match=r"no held-out episode has a score .* name eval/reward"):
        metric_of("eval/score").improves(Progress(record=record))
    assert not metric_of("eval/reward").improves(Progress(record=record))
    del record["eval/reward"]  # all failed: it may be known another time
    assert not metric_of("eval/score").improves(Progress(record=record))


def test_without_a_metric_there_is_no_best():
    assert steps_kept(None, [0.1, 0.2]) == []


@pytest.mark.parametrize(
    ("wanted", "step", "meant"),
    [("eval/scor", 0, "eval/score"), ("reward/maen", 1, "reward/mean"), ("eval_score", 1, "eval/score")],
)
def test_an_unknown_metric_is_told_at_once(wanted, step, meant):
    metric, progress = metric_of(wanted), Progress(record={"step": 0, "eval/score": 0.1})
    if step:
        assert not metric.improves(progress)
        progress.step, progress.record = 1, {"step": 1, "reward/mean": 0.5}
    with pytest.raises(ConfigError, match=rf"no metric '{wanted}' that is a number. Did you mean '{meant}'\?"):
        metric.improves(progress)


def test_what_is_no_number_is_no_metric():
    with pytest.raises(ConfigError, match=r"no metric 'eval/ci95' that is a number"):
        metric_of("eval/ci95").improves(Progress(record={"eval/ci95": [0.1, 0.2], "eval/score": 0.1}))


def test_a_metric_of_evaluations_needs_them():
    with pytest.raises(ConfigError, match=r"checkpoint.best=-eval/loss is measured by evaluations: set eval.every"):
        resolve({"env": "math_verify", "checkpoint": {"best": "-eval/loss"}, "eval": {"every": 0}})
    resolve({"env": "math_verify", "checkpoint": {"best": "reward/mean"}, "eval": {"every": 0}})


@pytest.mark.parametrize("wrong", ["", "-", "two words", "--eval/score"])
def test_what_cannot_be_a_metric_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"checkpoint\.best"):
        resolve({"env": "math_verify", "checkpoint": {"best": wrong}})


def test_what_a_phase_takes_is_added_up_over_its_turns_also_where_one_fails(monkeypatch):
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    progress = Progress()
    for step in (1, 2):
        progress.record = {"step": step}
        with progress.timed("sync"):
            now += 2.0
        with contextlib.suppress(OSError), progress.timed("sync"):
            now += 3.0
            raise OSError("lost")
        assert progress.record == {"step": step, "seconds/sync": 5.0}
    assert progress.seconds == {"sync": 10.0}
