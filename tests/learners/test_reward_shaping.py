"""Penalties for length, what a truncated answer keeps, and the clip: tables by hand."""

import pytest

from envgym.learners.advantages import overlong_penalty, shaped_reward, stopped_improperly
from envgym.learners.grpo import GRPO, GRPOConfig
from envgym.learners.policy_gradient import ShapingConfig
from envgym.types import Episode, Group, Outcome, Row, Segment, Task, Turn, number_rows

TRUNCATED = Outcome.truncate("length")


def episode(reward, n_tokens=4, outcome=None, feedback=0):
    segments = [Segment("prompt", [1] * 9), Segment("action", [2], logprobs=[-1.0])]
    segments += [Segment("feedback", [3] * feedback)] if feedback else []
    segments += [Segment("action", [4] * (n_tokens - 1), logprobs=[-1.0] * (n_tokens - 1))]
    row = Row(segments, turns=[Turn(0.0, "stop"), Turn(reward, "stop")])
    return Episode("e", Task("t"), outcome or Outcome.finish(), rows=[row], reward=reward)


@pytest.mark.parametrize(
    ("n_tokens", "penalty"),
    [(0, 0), (60, 0), (61, 0.025), (80, 0.5), (90, 0.75), (100, 1), (101, 1), (10_000, 1)],
)
def test_the_overlong_penalty_rises_over_its_buffer(n_tokens, penalty):
    """DAPO with a length of 100 and a buffer of 40."""
    assert overlong_penalty(n_tokens, 100, 40, 1.0) == pytest.approx(penalty)
    assert overlong_penalty(n_tokens, 100, 40, 0.5) == pytest.approx(penalty / 2)


def test_length_is_of_action_tokens_alone():
    config = ShapingConfig(overlong_length=10, overlong_buffer=4)
    assert shaped_reward(episode(1.0, n_tokens=6, feedback=500), config) == 1.0
    assert shaped_reward(episode(1.0, n_tokens=8, feedback=500), config) == 0.5


@pytest.mark.parametrize(
    ("reward", "coefficient", "kept"),
    [(1.0, 1.0, 1.0), (1.0, 0.5, 0.5), (1.0, 0.0, 0.0), (1.0, -0.5, -0.5), (-2.0, 0.5, -1.0), (0.0, -0.5, -0.5)],
)
def test_what_a_truncated_episode_keeps(reward, coefficient, kept):
    assert stopped_improperly(reward, coefficient) == kept
    config = ShapingConfig(stop_properly=coefficient)
    assert shaped_reward(episode(reward, outcome=TRUNCATED), config) == kept
    assert shaped_reward(episode(reward), config) == reward


def test_penalties_come_before_the_clip():
    """5 - 1 = 4, half of it 2, clipped to 1.5; in another order it would be 0.25 or 1."""
    config = ShapingConfig(clip=(-1, 1.5), overlong_length=4, overlong_buffer=2, stop_properly=0.5)
    assert shaped_reward(episode(5.0, outcome=TRUNCATED), config) == 1.5
    assert shaped_reward(episode(-3.0), config) == -1.0


def test_the_clip_is_of_the_raw_reward_not_of_what_a_group_makes_of_it():
    """Rewards 0, 1 and 100, clipped to 1: two that are right, however far above the limit one of them is."""
    learner = GRPO(GRPOConfig(name="grpo", shaping={"clip": (0, 1)}, advantage_eps=0))
    rows = learner.prepare(number_rows([Group("g", Task("t"), [episode(reward) for reward in (0.0, 1.0, 100.0)])]))
    std = (2 / 9 + 1 / 9) ** 0.5
    expected = [-2 / 3 / std, 1 / 3 / std, 1 / 3 / std]
    assert [row.arrays["advantages"][-1] for row in rows] == pytest.approx(expected)


def test_overlong_episodes_are_compared_with_but_not_trained_on():
    learner = GRPO(GRPOConfig(name="grpo", shaping={"overlong_filter": True}, advantage_eps=0))
    episodes = [episode(0.0), episode(1.0), episode(2.0, outcome=TRUNCATED)]
    rows = learner.prepare(number_rows([Group("g", Task("t"), episodes)]))
    assert [float(row.arrays["advantages"][-1]) for row in rows] == [-1.0, 0.0, 0.0]
    assert [row.loss_weights.any() for row in rows] == [True, True, False]


def test_by_default_the_reward_is_as_it_came():
    for outcome in (Outcome.finish(), TRUNCATED):
        assert shaped_reward(episode(123.0, n_tokens=50, outcome=outcome), ShapingConfig()) == 123.0
