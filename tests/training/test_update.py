"""The loop's arithmetic: how a rollout is cut into optimizer steps, the learning rate of each, and their metrics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.config.schema import StageConfig
from envgym.errors import ConfigError
from envgym.learner import LearnerConfig, TrainSample
from envgym.training.update import aggregate_steps, cut, learning_rate, steps_of
from envgym.types import Objective


def rows_of(units):
    """A row for each number: the unit it belongs to."""
    ids, weights = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return [TrainSample(ids, weights, weights, Objective.POLICY_GRADIENT, microbatch_key=unit) for unit in units]


def units_of(parts):
    return [[row.microbatch_key for row in part] for part in parts]


@pytest.mark.parametrize(
    ("units", "parts", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2], 2, [[0, 1], [2]]),
        ([0, 0, 0, 1], 2, [[0, 0, 0], [1]]),
        ([5, 9], 4, [[5], [9]]),  # no more pieces than units
        ([0, 1, 0, 1], 2, [[0, 0], [1, 1]]),  # a unit's rows need not stand together
        ([0, 1, 2], 1, [[0, 1, 2]]),
    ],
)
def test_cut_by_hand(units, parts, expected):
    assert units_of(cut(rows_of(units), parts)) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12))
def test_cut_loses_nothing_keeps_units_whole_and_is_even(units, parts):
    rows = rows_of(units)
    pieces = cut(rows, parts)
    assert len(pieces) == min(parts, len(set(units)))
    assert sorted(id(row) for piece in pieces for row in piece) == sorted(map(id, rows))
    held = [set(piece) for piece in units_of(pieces)]
    assert sum(map(len, held)) == len(set(units))  # no unit in two pieces
    sizes = [len(units_here) for units_here in held]
    assert max(sizes) - min(sizes) <= 1


# -- learning rate ----------------------------------------------------------------------------------------


def rates(n, loop_steps, **settings):
    config = LearnerConfig(name="any", lr=1.0, **settings)
    return [learning_rate(config, step, loop_steps) for step in range(n)]


def test_constant():
    assert rates(4, 4) == [1, 1, 1, 1]


def test_warm_up_rises_to_the_peak_and_its_first_step_is_not_lost():
    assert rates(6, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_warm_up_may_be_a_share_of_all_optimizer_steps_rounded_up():
    """A tenth of 2 loop steps of 3 epochs of 4 mini-batches: 2.4 optimizer steps, so 3."""
    assert rates(4, 2, epochs=3, minibatches=4, warmup_ratio=0.1) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    by_steps = rates(24, 2, epochs=3, minibatches=4, warmup_steps=3, lr_schedule="cosine")
    assert rates(24, 2, epochs=3, minibatches=4, warmup_ratio=0.1, lr_schedule="cosine") == by_steps


def test_linear_falls_towards_its_share_of_the_peak():
    assert rates(5, 4, lr_schedule="linear", lr_min_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_falls_slowly_fast_slowly():
    assert rates(5, 4, lr_schedule="cosine", lr_min_ratio=0.0) == pytest.approx(
        [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0]
    )


def test_the_fall_begins_after_the_warm_up():
    assert rates(6, 6, warmup_steps=2, lr_schedule="linear", lr_min_ratio=0) == pytest.approx(
        [0.5, 1, 1, 0.75, 0.5, 0.25]
    )


def test_optimizer_steps_are_counted_not_loop_steps():
    """Two loop steps of two epochs of three mini-batches are twelve optimizer steps."""
    found = rates(12, 2, epochs=2, minibatches=3, lr_schedule="linear", lr_min_ratio=0)
    assert found == pytest.approx([1 - step / 12 for step in range(12)])


@given(
    st.integers(1, 20),
    st.integers(0, 30),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
    st.data(),
)
def test_always_between_zero_and_the_peak(loop_steps, warmup, schedule, ratio, data):
    step = data.draw(st.integers(0, 3 * loop_steps))  # also beyond the end, where a longer run goes on
    config = LearnerConfig(name="any", lr=1.0, warmup_steps=warmup, lr_schedule=schedule, lr_min_ratio=ratio)
    found = learning_rate(config, step, loop_steps)
    assert 0 < found <= 1 or ratio == 0
    if step >= warmup:
        assert found >= ratio - 1e-12


def test_a_learning_rate_of_0_stays_0():
    config = LearnerConfig(name="any", lr=0.0, warmup_steps=2, lr_schedule="cosine")
    assert {learning_rate(config, step, 5) for step in range(6)} == {0.0}


# -- what several optimizer steps log ---------------------------------------------------------------------


def test_what_optimizer_steps_log_becomes_one_number_each():
    logged = [
        {"loss": 1.0, "policy/ratio/max": 1.25, "policy/ratio/min": 0.5, "mismatch/mean_abs": 1e-6},
        {"loss": 2.0, "policy/ratio/max": 1.5, "policy/ratio/min": 0.25, "critic/loss": 4.0},
        {"loss": 6.0, "policy/ratio/max": 1.0, "policy/ratio/min": 1.0, "critic/loss": 2.0},
    ]
    assert aggregate_steps(logged) == {
        "loss": 3.0, "policy/ratio/max": 1.5, "policy/ratio/min": 0.25, "mismatch/mean_abs": 1e-6, "critic/loss": 3.0,
    }  # fmt: skip
    assert aggregate_steps([]) == {}


def test_epochs_are_steps_and_one_that_is_begun_is_taken_whole():
    def stage(**length):
        return StageConfig(env="any", learner="any", rollout={"tasks": 8}, **length)

    assert [steps_of(stage(epochs=1), n) for n in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert steps_of(stage(epochs=0.25), 64) == 2
    assert steps_of(stage(steps=3), None) == 3
    with pytest.raises(ConfigError, match="have no end"):
        steps_of(stage(epochs=1), None)
