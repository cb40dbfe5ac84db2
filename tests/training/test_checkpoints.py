"""The best checkpoint: the metric that chooses it. The durations of phases."""

import contextlib
import math
from types import SimpleNamespace

import pytest

from envgym.config.resolve import resolve
from envgym.config.schema import CheckpointConfig
from envgym.errors import ConfigError
from envgym.training import checkpoints as module
from envgym.training.checkpoints import BestMetric, Progress


def metric_of(setting):
    return BestMetric(CheckpointConfig(best=setting))


def best_steps(setting, values, name="eval/score", progress=None):
    """The steps whose value was the best so far; the first of `values` is measured before the first step."""
    metric, progress = metric_of(setting), progress or Progress()
    steps = []
    for progress.step, value in enumerate(values):
        progress.record = {"step": progress.step, "reward/mean": 0.5}
        if value != "none":
            progress.record[name] = value
        if metric.update(progress):
            steps.append(progress.step)
            assert progress.best == {"metric": name, "value": value, "step": progress.step}
    return steps


def test_a_value_must_be_better_and_not_from_before_the_first_step():
    assert best_steps("eval/score", [0.9, 0.2, 0.1, 0.2, 0.3, 0.3]) == [1, 4]


@pytest.mark.parametrize(("setting", "name"), [("eval/loss", "eval/loss"), ("-eval/score", "eval/score")])
def test_a_loss_or_a_metric_with_a_minus_is_best_at_its_minimum(setting, name):
    assert best_steps(setting, [0.0, 0.5, 0.6, 0.4, 0.4], name) == [1, 3]


def test_steps_without_the_metric_or_without_a_number_are_skipped():
    assert best_steps("eval/score", [0.0, "none", None, math.nan, math.inf, 0.1, "none", 0.2]) == [5, 7]


def test_an_earlier_best_value_counts_unless_it_is_another_metrics():
    earlier_best = {"metric": "eval/score", "value": 0.5, "step": 7}
    assert best_steps("eval/score", [0.0, 0.4, 0.6], progress=Progress(best=earlier_best)) == [2]
    assert best_steps("loss", [9.0, 0.4, 0.6], "loss", progress=Progress(best=earlier_best)) == [1]


def test_a_score_that_the_environment_does_not_have_is_an_immediate_error():
    record = {"step": 0, "eval/score": None, "eval/reward": -0.5}
    with pytest.raises(ConfigError, match=r"no held-out episode has a score .* name eval/reward"):
        metric_of("eval/score").update(Progress(record=record))
    assert not metric_of("eval/reward").update(Progress(record=record))
    del record["eval/reward"]  # all episodes failed: a later evaluation may have a score
    assert not metric_of("eval/score").update(Progress(record=record))


def test_without_a_metric_there_is_no_best():
    assert best_steps(None, [0.1, 0.2]) == []


@pytest.mark.parametrize(
    ("setting", "step", "suggestion"),
    [("eval/scor", 0, "eval/score"), ("reward/maen", 1, "reward/mean"), ("eval_score", 1, "eval/score")],
)
def test_an_unknown_metric_is_an_immediate_error(setting, step, suggestion):
    metric, progress = metric_of(setting), Progress(record={"step": 0, "eval/score": 0.1})
    if step:
        assert not metric.update(progress)
        progress.step, progress.record = 1, {"step": 1, "reward/mean": 0.5}
    with pytest.raises(ConfigError, match=rf"no metric '{setting}' that is a number. Did you mean '{suggestion}'\?"):
        metric.update(progress)


def test_a_metric_is_a_number():
    with pytest.raises(ConfigError, match=r"no metric 'eval/ci95' that is a number"):
        metric_of("eval/ci95").update(Progress(record={"eval/ci95": [0.1, 0.2], "eval/score": 0.1}))


def test_a_metric_of_evaluations_needs_them():
    with pytest.raises(ConfigError, match=r"checkpoint.best=-eval/loss is measured by evaluations: set eval.every"):
        resolve({"env": "math_verify", "checkpoint": {"best": "-eval/loss"}, "eval": {"every": 0}})
    resolve({"env": "math_verify", "checkpoint": {"best": "reward/mean"}, "eval": {"every": 0}})


@pytest.mark.parametrize("wrong", ["", "-", "two words", "--eval/score"])
def test_an_invalid_name_of_a_metric_is_an_error(wrong):
    with pytest.raises(ConfigError, match=r"checkpoint\.best"):
        resolve({"env": "math_verify", "checkpoint": {"best": wrong}})


def test_the_durations_of_a_phase_add_up_even_if_it_fails(monkeypatch):
    clock = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))
    progress = Progress()
    for step in (1, 2):
        progress.record = {"step": step}
        with progress.timed("sync"):
            clock += 2.0
        with contextlib.suppress(OSError), progress.timed("sync"):
            clock += 3.0
            raise OSError("lost")
        assert progress.record == {"step": step, "seconds/sync": 5.0}
    assert progress.seconds == {"sync": 10.0}
