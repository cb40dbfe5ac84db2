"""The groups on their way to the learner."""

import pickle

from envgym.buffer import Buffer
from envgym.types import Episode, Group, Outcome, Task


def group(id, *rewards):
    """A group with an episode for each reward; an `Outcome` in a reward's place is a failure's."""
    episodes = [
        Episode("e", Task("t"), reward, member=index)
        if isinstance(reward, Outcome)
        else Episode("e", Task("t"), Outcome.completed(), reward=reward, member=index)
        for index, reward in enumerate(rewards)
    ]
    return Group(id, Task("t"), episodes)


TIMEOUT, BROKEN = Outcome.failed("timeout", "too slow"), Outcome.failed("environment", "KeyError")


def ids(groups):
    return [group.id for group in groups]


def test_failed_members_leave_and_the_others_stay():
    buffer = Buffer(2, needs_reward=True)
    original = group("a", 1.0, TIMEOUT, 0.0, BROKEN)
    buffer.add([original])
    [taken] = buffer.take(1)
    assert [(episode.member, episode.reward) for episode in taken.episodes] == [(0, 1.0), (2, 0.0)]
    assert buffer.failures == {"timeout": 1, "environment": 1}
    assert len(original.episodes) == 4  # what was rolled out is written down as it was


def test_a_group_that_is_too_small_is_dropped_and_counted_with_its_failures():
    buffer = Buffer(2, needs_reward=True)
    buffer.add([group("a", 1.0, TIMEOUT), group("b", 1.0, 1.0), group("c", BROKEN, BROKEN), group("d", 1.0, None)])
    assert ids(buffer.take(9)) == ["b"]
    assert buffer.dropped_groups == 3
    assert buffer.failures == {"timeout": 1, "environment": 2}


def test_episodes_without_a_reward_stay_where_none_is_needed():
    buffer = Buffer(1, needs_reward=False)
    buffer.add([group("a", None), group("b", TIMEOUT)])
    assert ids(buffer.take(9)) == ["a"]


def test_what_is_not_taken_carries_over_in_order():
    buffer = Buffer(1, needs_reward=True)
    buffer.add([group(id, 1.0) for id in "abc"])
    assert ids(buffer.take(2)) == ["a", "b"]
    assert len(buffer) == 1
    buffer.add([group("d", 1.0)])
    assert ids(buffer.take(9)) == ["c", "d"]
    assert ids(buffer.take(1)) == []


def test_state_goes_through_a_file_and_is_a_picture_of_its_moment():
    buffer = Buffer(2, needs_reward=True)
    buffer.add([group("a", 1.0, 0.0), group("b", 1.0, TIMEOUT), group("c", 0.0, 0.0)])
    state = buffer.state()
    buffer.add([group("x", 1.0, 1.0), group("y", BROKEN, BROKEN)])  # what comes later is not in the picture
    buffer.take(2)
    restored = Buffer(2, needs_reward=True)
    restored.load_state(pickle.loads(pickle.dumps(state)))
    assert (restored.failures, restored.dropped_groups) == ({"timeout": 1}, 1)
    restored.add([group("d", 1.0, TIMEOUT)])
    assert (restored.failures, restored.dropped_groups) == ({"timeout": 2}, 2)
    assert ids(restored.take(9)) == ["a", "c"]
