"""The loop's arithmetic: mini-batches, learning rates, metrics of several optimizer steps, the steps of a stage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.config.resolve import resolve
from envgym.config.schema import StageConfig
from envgym.errors import ConfigError
from envgym.learner import LearnerConfig
from envgym.training.step import (
    aggregate_steps,
    evaluation_interval,
    fit_steps,
    learning_rate,
    sampling_difference,
    split_minibatches,
    steps_of,
)
from envgym.types import Objective, Row, Segment


def samples_of(keys):
    """A sample for each microbatch key."""
    ids, weights = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return [Row.from_arrays(ids, weights, weights, Objective.POLICY_GRADIENT, microbatch_key=key) for key in keys]


def keys_of(minibatches):
    return [[sample.microbatch_key for sample in batch] for batch in minibatches]


@pytest.mark.parametrize(
    ("keys", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2], 2, [[0, 1], [2]]),
        ([0, 0, 0, 1], 2, [[0, 0, 0], [1]]),
        ([5, 9], 4, [[5], [9]]),  # no more mini-batches than keys
        ([0, 1, 0, 1], 2, [[0, 0], [1, 1]]),  # samples with the same key need not be adjacent
        ([0, 1, 2], 1, [[0, 1, 2]]),
    ],
)
def test_minibatches_by_hand(keys, count, expected):
    assert keys_of(split_minibatches(samples_of(keys), count)) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12))
def test_minibatches_lose_no_sample_split_no_key_and_are_even(keys, count):
    samples = samples_of(keys)
    minibatches = split_minibatches(samples, count)
    assert len(minibatches) == min(count, len(set(keys)))
    assert sorted(id(sample) for batch in minibatches for sample in batch) == sorted(map(id, samples))
    key_sets = [set(batch) for batch in keys_of(minibatches)]
    assert sum(map(len, key_sets)) == len(set(keys))  # no key in two mini-batches
    sizes = [len(key_set) for key_set in key_sets]
    assert max(sizes) - min(sizes) <= 1


# -- the size of a step -----------------------------------------------------------------------------------


def fitted(n_tasks, **rollout):
    """The recipe's step size on `n_tasks` rows, the steps of its epoch, and what is said."""
    settings = {"data": {"path": "org/rows"}, **({"rollout": rollout} if rollout else {})}
    stage, notes = resolve(settings, recipe="sft").stages[0], []
    fit_steps(stage, n_tasks, notes.append)
    return stage.rollout.tasks_per_step, steps_of(stage, n_tasks), notes


@pytest.mark.parametrize(
    ("n_tasks", "size", "steps"),
    [(200, 20, 10), (25, 2, 13), (9, 1, 9), (1, 1, 1), (2304, 230, 11), (2305, 256, 10), (100_000, 256, 391)],
)
def test_an_epoch_of_fewer_than_ten_steps_gets_smaller_ones_and_says_so(n_tasks, size, steps):
    *fit, notes = fitted(n_tasks)
    assert fit == [size, steps]
    assert len(notes) == (size < 256)
    if notes:
        assert f"{n_tasks} training tasks are fewer than 10 steps of 256: rollout.tasks_per_step={size}" in notes[0]


def test_a_size_that_the_user_has_set_stays():
    assert fitted(200, tasks_per_step=256) == (256, 1, [])
    assert fitted(200, tasks_per_step=100, min_steps_per_epoch=4)[:2] == (50, 4)


def test_other_recipes_keep_their_steps():
    stage = resolve({"env": "math_verify", "data": {"path": "org/rows"}}).stages[0]
    fit_steps(stage, 3, None)
    assert stage.rollout.tasks_per_step == 64


# -- learning rate ----------------------------------------------------------------------------------------


def rates(n, training_steps, **settings):
    config = LearnerConfig(name="any", lr=1.0, **settings)
    return [learning_rate(config, step, training_steps) for step in range(n)]


def test_constant():
    assert rates(4, 4) == [1, 1, 1, 1]


def test_warm_up_rises_to_the_peak_and_its_first_step_is_not_zero():
    assert rates(6, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_warm_up_may_be_a_share_of_all_optimizer_steps_rounded_up():
    """A tenth of 2 training steps of 3 epochs of 4 mini-batches: 2.4 optimizer steps, so 3."""
    assert rates(4, 2, update_epochs=3, minibatches=4, warmup_ratio=0.1) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    by_steps = rates(24, 2, update_epochs=3, minibatches=4, warmup_steps=3, lr_schedule="cosine")
    assert rates(24, 2, update_epochs=3, minibatches=4, warmup_ratio=0.1, lr_schedule="cosine") == by_steps


def test_linear_falls_towards_its_share_of_the_peak():
    assert rates(5, 4, lr_schedule="linear", lr_min_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_falls_slowly_fast_slowly():
    assert rates(5, 4, lr_schedule="cosine", lr_min_ratio=0.0) == pytest.approx(
        [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0]
    )


def test_the_decay_starts_after_the_warm_up():
    assert rates(6, 6, warmup_steps=2, lr_schedule="linear", lr_min_ratio=0) == pytest.approx(
        [0.5, 1, 1, 0.75, 0.5, 0.25]
    )


def test_optimizer_steps_are_counted_not_training_steps():
    """Two training steps of two epochs of three mini-batches are twelve optimizer steps."""
    twelve_rates = rates(12, 2, update_epochs=2, minibatches=3, lr_schedule="linear", lr_min_ratio=0)
    assert twelve_rates == pytest.approx([1 - step / 12 for step in range(12)])


@given(
    st.integers(1, 20),
    st.integers(0, 30),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
    st.data(),
)
def test_always_between_zero_and_the_peak(training_steps, warmup, schedule, ratio, data):
    step = data.draw(st.integers(0, 3 * training_steps))  # also beyond the end: a resumed run may be longer
    config = LearnerConfig(name="any", lr=1.0, warmup_steps=warmup, lr_schedule=schedule, lr_min_ratio=ratio)
    rate = learning_rate(config, step, training_steps)
    assert 0 < rate <= 1 or ratio == 0
    if step >= warmup:
        assert rate >= ratio - 1e-12


def test_a_learning_rate_of_0_stays_0():
    config = LearnerConfig(name="any", lr=0.0, warmup_steps=2, lr_schedule="cosine")
    assert {learning_rate(config, step, 5) for step in range(6)} == {0.0}


# -- metrics of several optimizer steps -------------------------------------------------------------------


def test_metrics_of_several_optimizer_steps_become_one_number_each():
    logged = [
        {"loss": 1.0, "policy/ratio/max": 1.25, "policy/ratio/min": 0.5, "mismatch/mean_abs": 1e-6},
        {"loss": 2.0, "policy/ratio/max": 1.5, "policy/ratio/min": 0.25, "critic/loss": 4.0},
        {"loss": 6.0, "policy/ratio/max": 1.0, "policy/ratio/min": 1.0, "critic/loss": 2.0},
    ]
    assert aggregate_steps(logged) == {
        "loss": 3.0, "policy/ratio/max": 1.5, "policy/ratio/min": 0.25, "mismatch/mean_abs": 1e-6, "critic/loss": 3.0,
    }  # fmt: skip
    assert aggregate_steps([]) == {}


def test_epochs_are_training_steps_rounded_up():
    def stage(**length):
        return StageConfig(env="any", learner="any", rollout={"tasks_per_step": 8}, **length)

    assert [steps_of(stage(epochs=1), n) for n in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert steps_of(stage(epochs=0.25), 64) == 2
    assert steps_of(stage(steps=3), None) == 3
    with pytest.raises(ConfigError, match="have no end"):
        steps_of(stage(epochs=1), None)


def test_evaluations_are_so_many_steps_apart_or_an_epoch():
    def stage(every):
        return StageConfig(env="any", learner="any", rollout={"tasks_per_step": 8}, eval={"every": every})

    assert [evaluation_interval(stage(every), 20) for every in (0, 7, "epoch")] == [0, 7, 3]
    assert evaluation_interval(stage(5), None) == 5
    with pytest.raises(ConfigError, match=r"eval\.every=epoch"):
        evaluation_interval(stage("epoch"), None)


def test_sampler_and_trainer_are_compared_where_the_weights_sampled():
    """By hand: differences of 0.25 and 0.75; a prompt has no number, other rows are of older weights or not passed."""
    current, older, unseen = (
        Row([Segment("prompt", [1]), Segment("action", [2, 3], logprobs=[-1, -2])]) for _ in "abc"
    )
    assert sampling_difference([current]) is None
    older.is_on_policy = False
    current.last_outputs, older.last_outputs = np.float32([9, -1.25, -1.25]), np.float32([0, 9, 9])
    assert sampling_difference([current, older, unseen]) == 0.5
    current.last_outputs[1] = np.nan
    assert np.isnan(sampling_difference([current]))
