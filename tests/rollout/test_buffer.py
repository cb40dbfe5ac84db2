"""The buffer of finished groups, and its filter."""

import pytest

from envgym.errors import RunError
from envgym.rollout.buffer import Buffer
from envgym.rollout.config import FilterConfig
from envgym.types import Episode, Group, Outcome, Task


def group(id, *rewards):
    """A group with an episode for each reward; an `Outcome` instead of a reward makes a failed one."""
    episodes = [
        Episode("e", Task("t"), reward, member=index)
        if isinstance(reward, Outcome)
        else Episode("e", Task("t"), Outcome.finish(), reward=reward, member=index)
        for index, reward in enumerate(rewards)
    ]
    return Group(id, Task("t"), episodes)


TIMEOUT, BROKEN = Outcome.fail("timeout", "too slow"), Outcome.fail("environment", "KeyError")


def ids(groups):
    return [group.id for group in groups]


def test_failed_members_leave_and_the_others_stay():
    buffer = Buffer(2, needs_reward=True)
    original = group("a", 1.0, TIMEOUT, 0.0, BROKEN)
    buffer.add([original])
    [buffered] = buffer.take(1)
    assert [(episode.member, episode.reward) for episode in buffered.episodes] == [(0, 1.0), (2, 0.0)]
    assert buffer.failures == {"timeout": 1, "environment": 1}
    assert len(original.episodes) == 4  # the rollout itself is unchanged


def test_a_group_that_is_too_small_is_dropped_and_counted_with_its_failures():
    buffer = Buffer(2, needs_reward=True)
    buffer.add([group("a", 1.0, TIMEOUT), group("b", 1.0, 1.0), group("c", BROKEN, BROKEN), group("d", 1.0, None)])
    assert ids(buffer.take(9)) == ["b"]
    assert buffer.dropped_groups == 3
    assert buffer.failures == {"timeout": 1, "environment": 2}


def test_retried_attempts_are_counted(through_a_checkpoint):
    buffer = Buffer(2, needs_reward=True)
    retried = group("a", 1.0, 0.0)
    retried.superseded, retried.refills = group("a", TIMEOUT, BROKEN).episodes, 1
    buffer.add([retried])
    restored = Buffer(2, needs_reward=True)
    restored.load_state(through_a_checkpoint(buffer.state()))
    for copy in (buffer, restored):
        assert (copy.failures, copy.n_retried, copy.refills) == ({"timeout": 1, "environment": 1}, 2, 1)


def test_episodes_without_a_reward_stay_if_none_is_needed():
    buffer = Buffer(1, needs_reward=False)
    buffer.add([group("a", None), group("b", TIMEOUT)])
    assert ids(buffer.take(9)) == ["a"]


def test_groups_that_are_not_taken_carry_over_in_order():
    buffer = Buffer(1, needs_reward=True)
    buffer.add([group(id, 1.0) for id in "abc"])
    assert ids(buffer.take(2)) == ["a", "b"]
    assert len(buffer) == 1
    buffer.add([group("d", 1.0)])
    assert ids(buffer.take(9)) == ["c", "d"]
    assert ids(buffer.take(1)) == []


def test_the_state_goes_through_a_file_and_does_not_change_later(through_a_checkpoint):
    buffer = Buffer(2, needs_reward=True)
    buffer.add([group("a", 1.0, 0.0), group("b", 1.0, TIMEOUT), group("c", 0.0, 0.0)])
    state = buffer.state()
    buffer.add([group("x", 1.0, 1.0), group("y", BROKEN, BROKEN)])  # not in the state
    buffer.take(2)
    restored = Buffer(2, needs_reward=True)
    restored.load_state(through_a_checkpoint(state))
    assert (restored.failures, restored.dropped_groups) == ({"timeout": 1}, 1)
    restored.add([group("d", 1.0, TIMEOUT)])
    assert (restored.failures, restored.dropped_groups) == ({"timeout": 2}, 2)
    assert ids(restored.take(9)) == ["a", "c"]


# -- dynamic filtering ------------------------------------------------------------------------------------


def scored(id, *scores):
    """A group whose rewards all differ, so that a filter can only use the scores."""
    episodes = [
        Episode("e", Task("t"), Outcome.finish(), reward=10.0 + index, score=score)
        for index, score in enumerate(scores)
    ]
    return Group(id, Task("t"), episodes)


def filter_groups(groups, **settings):
    """The ids of the accepted groups, and the counts of the dropped ones."""
    buffer = Buffer(2, needs_reward=True, filter=FilterConfig(**settings))
    assert buffer.add(groups) == len(buffer)
    return ids(buffer.take(9)), dict(buffer.filtered)


FLAT, MIXED, EASY, HARD = (
    scored("flat", 0.5, 0.5), scored("mixed", 0.0, 1.0), scored("easy", 1.0, 0.8), scored("hard", 0.2, 0.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "names", "filtered"),
    [
        ({}, ["flat", "mixed", "easy", "hard"], {}),
        ({"zero_variance": True}, ["mixed", "easy", "hard"], {"zero_variance": 1}),
        ({"min_score": 0.1}, ["flat", "mixed", "easy"], {"score_range": 1}),  # the bounds themselves are outside
        ({"max_score": 0.9}, ["flat", "mixed", "hard"], {"score_range": 1}),
        ({"min_score": 0.0, "max_score": 0.5}, ["hard"], {"score_range": 3}),
        (
            {"zero_variance": True, "min_score": 0.1, "max_score": 0.9},
            ["mixed"],
            {"zero_variance": 1, "score_range": 2},
        ),
    ],
)
def test_groups_without_a_training_signal_are_dropped_and_counted_by_reason(settings, names, filtered):
    assert filter_groups([FLAT, MIXED, EASY, HARD], **settings) == (names, filtered)


def test_failed_members_do_not_count_for_the_filter():
    """Two equal rewards and a failure have no variance; a group too small by failures is not counted as filtered."""
    assert filter_groups([group("a", 1.0, 1.0, TIMEOUT)], zero_variance=True) == ([], {"zero_variance": 1})
    assert filter_groups([group("b", 1.0, TIMEOUT)], zero_variance=True) == ([], {})


def test_rewards_replace_missing_scores_but_have_no_range():
    rewards = [group("flat", 3.0, 3.0), group("mixed", 3.0, -2.0)]
    assert filter_groups(rewards, zero_variance=True) == (["mixed"], {"zero_variance": 1})
    with pytest.raises(RunError, match=r"the environment gives none .* use rollout.filter.zero_variance alone"):
        filter_groups(rewards, max_score=0.5)


def test_counts_of_filtered_groups_survive_a_resume(through_a_checkpoint):
    buffer = Buffer(2, needs_reward=True, filter=FilterConfig(zero_variance=True))
    buffer.add([FLAT, MIXED, EASY])
    restored = Buffer(2, needs_reward=True, filter=FilterConfig(zero_variance=True))
    restored.load_state(through_a_checkpoint(buffer.state()))
    assert (ids(restored.take(9)), restored.filtered) == (["mixed", "easy"], {"zero_variance": 1})
