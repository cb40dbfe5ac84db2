"""Which tasks come next, and the groups on their way to the learner."""

import asyncio
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.buffer import Buffer, TaskCursor
from envgym.env import ListTasks, SeedTasks
from envgym.errors import RunError
from envgym.types import Episode, Group, Outcome, Task


def task_set(n):
    return ListTasks([Task(str(index)) for index in range(n)])


def take(cursor, *counts):
    """The ids of the tasks that come next, in bites of `counts`."""
    return [task.id for count in counts for task in asyncio.run(cursor.next(count))]


@given(st.integers(1, 20), st.lists(st.integers(0, 15), min_size=1, max_size=8))
def test_an_epoch_has_every_task_once_however_it_is_cut(n, counts):
    ids = take(TaskCursor(task_set(n), seed=0), *counts)
    assert ids == take(TaskCursor(task_set(n), seed=0), sum(counts))
    for start in range(0, len(ids), n):
        epoch = ids[start : start + n]
        assert len(set(epoch)) == len(epoch)
    assert set(ids[:n]) == {str(i) for i in range(n)} or len(ids) < n


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    first, second = take(TaskCursor(task_set(50), 0), 50), take(TaskCursor(task_set(50), 0), 50, 50)[50:]
    other = take(TaskCursor(task_set(50), 1), 50)
    assert len({tuple(order) for order in (first, second, other, sorted(first, key=int))}) == 4


def test_a_set_without_end_is_taken_in_order():
    assert take(TaskCursor(SeedTasks("train"), 0), 2, 1) == ["seed-0", "seed-1", "seed-2"]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 20))
def test_a_restored_cursor_goes_on_where_the_other_stood(n, before, after):
    cursor = TaskCursor(task_set(n), 3)
    take(cursor, before)
    restored = TaskCursor(task_set(n), 3)
    take(restored, 5)  # wherever it stood itself
    restored.load_state(json.loads(json.dumps(cursor.state())))
    assert take(restored, after) == take(cursor, after)


def test_an_environment_without_training_tasks_is_said_at_once():
    with pytest.raises(RunError, match="no training tasks"):
        TaskCursor(task_set(0), 0)


# -- the buffer -------------------------------------------------------------------------------------------


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
