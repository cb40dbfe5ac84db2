"""An episode's action tokens as one sequence: which they are, where turns end and where rewards land."""

import numpy as np
import pytest

from envgym.learners.advantages import ActionTokens
from envgym.types import Episode, Outcome, Row, Segment, Task, Turn


def action(n, **more):
    return Segment("action", [7] * n, logprobs=[-1.0] * n, **more)


def action_tokens(*rows, reward=None, outcome=None, credit="turn"):
    """The action tokens of an episode of rows, each given as (segments, rewards of its turns)."""
    made = [Row(segments, turns=[Turn(paid, "stop") for paid in rewards]) for segments, rewards in rows]
    total = sum(paid or 0.0 for _, rewards in rows for paid in rewards)
    episode = Episode("e", Task("t"), outcome or Outcome.finish(), rows=made, reward=total)
    return ActionTokens.from_episode(episode, total if reward is None else reward, credit)


TWO_ROWS = (
    ([Segment("prompt", [1, 2]), action(2), Segment("feedback", [3] * 4), action(1)], [0.5, None]),
    ([Segment("prompt", [1, 2, 3]), action(3)], [2.0]),
)


def test_steps_and_turns_of_several_rows():
    steps = action_tokens(*TWO_ROWS)
    assert len(steps) == 6
    assert [indices.tolist() for indices in steps.token_indices] == [[2, 3, 8], [3, 4, 5]]
    assert steps.turn_ends == [2, 3, 6]
    assert steps.rewards == [0.5, 0.0, 2.0]
    assert not steps.truncated
    assert action_tokens(*TWO_ROWS, outcome=Outcome.truncate("turns")).truncated


def test_rewards_land_on_the_last_token_of_their_turn():
    assert action_tokens(*TWO_ROWS).token_rewards().tolist() == [0, 0.5, 0, 0, 0, 2.0]


def test_with_credit_by_episode_the_episode_is_one_turn():
    steps = action_tokens(*TWO_ROWS, credit="episode")
    assert (steps.turn_ends, steps.rewards) == ([6], [2.5])
    assert steps.token_rewards().tolist() == [0, 0, 0, 0, 0, 2.5]


def test_what_shaping_took_is_the_last_turns():
    steps = action_tokens(*TWO_ROWS, reward=1.5)
    assert steps.rewards == [0.5, 0.0, 1.0]
    assert sum(steps.rewards) == steps.reward == 1.5


def test_a_turn_without_a_token_pays_on_the_token_before_it():
    segments = [Segment("prompt", [1]), action(2), Segment("feedback", [3]), action(0)]
    steps = action_tokens((segments, [0.25, 1.0]))
    assert steps.turn_ends == [2, 2]
    assert steps.token_rewards().tolist() == [0, 1.25]


def test_tokens_without_weight_are_no_steps():
    """Their turn's reward lands on the step before."""
    segments = [Segment("prompt", [1]), action(2), action(2, loss_weights=[1.0, 0.0]), action(1, loss_weights=[0.0])]
    steps = action_tokens((segments, [1.0, 2.0, 4.0]))
    assert [indices.tolist() for indices in steps.token_indices] == [[1, 2, 3]]
    assert steps.turn_ends == [2, 3, 3]
    assert steps.token_rewards().tolist() == [0, 1.0, 6.0]


def test_the_first_token_of_a_row_is_predicted_by_nothing():
    steps = action_tokens(([action(3)], [1.0]))
    assert [indices.tolist() for indices in steps.token_indices] == [[1, 2]]
    assert steps.turn_ends == [2]


@pytest.mark.parametrize("rewards", [[], [1.0, 2.0]])
def test_a_row_with_other_numbers_of_turns_than_of_actions_is_one_turn(rewards):
    segments = [Segment("prompt", [1]), action(2), Segment("feedback", [3]), action(1), action(1)]
    steps = action_tokens((segments, rewards), reward=3.0)
    assert steps.turn_ends == [4]
    assert steps.rewards == [3.0]


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_an_episode_without_rows_has_no_steps(credit):
    steps = action_tokens(reward=1.0, credit=credit)
    assert len(steps) == 0
    assert steps.token_rewards().tolist() == []
    assert steps.read("old_logprobs").tolist() == []


def test_arrays_are_read_and_written_at_the_steps():
    steps = action_tokens(*TWO_ROWS)
    for row, start in zip(steps.rows, (0, 100), strict=True):
        row.arrays["critic"] = np.arange(start, start + len(row), dtype=np.float32)
    assert steps.read("critic").tolist() == [2, 3, 8, 103, 104, 105]
    assert steps.read("critic", -1).tolist() == [1, 2, 7, 102, 103, 104]
    assert steps.read("old_logprobs").tolist() == [-1.0] * 6
    steps.write("mine", np.arange(1.0, 7.0))
    assert steps.rows[0].arrays["mine"].tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 3]
    assert steps.rows[1].arrays["mine"].tolist() == [0, 0, 0, 4, 5, 6]
    assert steps.rows[0].arrays["mine"].dtype == np.float32
