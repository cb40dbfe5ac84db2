"""Filling the buffer: rounds of rollouts, their maximum, and the groups left for the next step."""

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.env import TaskList
from envgym.errors import RolloutFailed
from envgym.monitoring.metrics import check_failures
from envgym.rollout.buffer import MAX_ROUNDS, Buffer, fill_buffer
from envgym.rollout.config import FilterConfig, RolloutConfig
from envgym.tasks.task_set import TaskCursor
from envgym.types import Episode, Group, Outcome, Task

FILTER = FilterConfig(zero_variance=True, max_rounds=5)


class Rollouts:
    """Rolls out tasks and records the size of each round. `solves(task)` is the share of members with a reward of 1;
    None: all members fail."""

    def __init__(self, solves, members=4):
        self.solves, self.members, self.sizes, self.ids = solves, members, [], itertools.count()

    async def __call__(self, tasks, round_number):
        self.sizes.append(len(tasks))
        return [self.group(task) for task in tasks]

    def group(self, task):
        share = self.solves(task)
        episodes = [
            Episode("e", task, Outcome.fail("timeout", "slow"))
            if share is None
            else Episode("e", task, Outcome.finish(), reward=float(m < share * self.members))
            for m in range(self.members)
        ]
        return Group(f"g{next(self.ids)}", task, episodes)


def stage(filter=FILTER, tasks=8, size=100):
    """Settings, a buffer and a cursor over `size` tasks."""
    task_list = TaskList([task(number) for number in range(size)])
    buffer = Buffer(2, needs_reward=True, filter=filter)
    return RolloutConfig(tasks_per_step=tasks, filter=filter), buffer, TaskCursor(task_list, 0)


def task(number):
    return Task(str(number))


def fill(rollouts, config, buffer, cursor):
    return asyncio.run(fill_buffer(buffer, cursor, config, rollouts))


def solve_half(task):
    return 0.5


def test_a_step_without_dropped_groups_takes_one_round():
    config, buffer, cursor = stage()
    rollouts = Rollouts(solve_half)
    batch = fill(rollouts, config, buffer, cursor)
    assert (rollouts.sizes, batch.rounds, len(batch.groups), len(buffer)) == ([8], 1, 8, 8)
    assert batch.metrics() == {"filter/kept_share": 1.0, "filter/rounds": 1}


def test_the_size_of_later_rounds_follows_from_the_share_dropped_so_far():
    """One of four groups has a training signal: two of eight. The 6 missing at that share would need 24, but a round
    has at most a step's 8, which give two more; the same for the 4 missing then."""
    config, buffer, cursor = stage(FilterConfig(zero_variance=True, max_rounds=50))
    order = itertools.cycle([1.0, 0.5, 0.0, 1.0])
    rollouts = Rollouts(lambda task: next(order))
    batch = fill(rollouts, config, buffer, cursor)
    assert rollouts.sizes == [8, 8, 8, 8]
    assert batch.metrics() == {"filter/kept_share": 0.25, "filter/rounds": 4}
    assert len(buffer) == 8


def test_surplus_groups_come_first_in_the_next_step():
    config, buffer, cursor = stage()
    shares = itertools.chain([1.0] * 6, itertools.repeat(0.5))  # a bad start makes the second round large
    rollouts = Rollouts(lambda task: next(shares))
    batch = fill(rollouts, config, buffer, cursor)
    assert rollouts.sizes == [8, 8]
    accepted = [group.id for group in batch.groups[6:]]
    assert [group.id for group in buffer.take(8)] == accepted[:8]
    next_batch = fill(rollouts, config, buffer, cursor)
    assert rollouts.sizes == [8, 8, 6]
    assert [group.id for group in buffer.take(8)] == accepted[8:] + [group.id for group in next_batch.groups]


def test_after_the_maximum_of_rounds_a_step_has_fewer_groups():
    config, buffer, cursor = stage()
    rollouts = Rollouts(lambda task: 0.5 if task.id == "7" else 1.0)
    batch = fill(rollouts, config, buffer, cursor)
    assert batch.rounds == 5
    assert len(buffer) < 8


def test_without_a_filter_only_groups_short_of_members_are_replaced():
    config, buffer, cursor = stage(FilterConfig())
    outcomes = itertools.chain([None, None, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [None, 1.0], itertools.repeat(1.0))
    rollouts = Rollouts(lambda task: next(outcomes))
    fill(rollouts, config, buffer, cursor)
    assert rollouts.sizes == [8, 2, 1]
    outcomes = itertools.chain([1.0], itertools.repeat(None))
    failing = Rollouts(lambda task: next(outcomes))
    config, buffer, cursor = stage(FilterConfig())
    batch = fill(failing, config.model_copy(update={"max_failed_share": 1.0}), buffer, cursor)
    assert batch.rounds == MAX_ROUNDS
    assert "complete enough" in batch.explain_no_groups(config)


@pytest.mark.parametrize(
    ("filter", "limit", "shares", "sizes"),
    [
        (FilterConfig(), 0.5, [0.5] * 3 + [None] * 100, [8]),  # 5 of 8 groups failed
        (FILTER, 0.5, [0.5] * 3 + [None] * 100, [8]),
        (FilterConfig(), 0.7, [0.5] * 3 + [None] * 100, [8, 5]),  # 5 of 8, then 10 of 13
    ],
)
def test_no_further_round_if_too_many_episodes_failed(filter, limit, shares, sizes):
    config, buffer, cursor = stage(filter)
    config = config.model_copy(update={"max_failed_share": limit})
    order = iter(shares)
    rollouts = Rollouts(lambda task: next(order))
    batch = fill(rollouts, config, buffer, cursor)
    assert rollouts.sizes == sizes
    with pytest.raises(RolloutFailed, match="episodes failed"):
        check_failures(batch.groups, limit)


def test_as_many_failed_episodes_as_are_allowed_are_replaced():
    config, buffer, cursor = stage(FilterConfig())
    order = iter([0.5] * 4 + [None] * 4 + [0.5] * 4)
    rollouts = Rollouts(lambda task: next(order))
    batch = fill(rollouts, config, buffer, cursor)
    assert (rollouts.sizes, len(buffer)) == ([8, 4], 8)
    check_failures(batch.groups, config.max_failed_share)


@pytest.mark.parametrize("filter", [FILTER, FilterConfig()])
def test_no_second_round_if_every_episode_failed(filter):
    config, buffer, cursor = stage(filter)
    batch = fill(Rollouts(lambda task: None), config, buffer, cursor)
    assert (batch.rounds, len(batch.groups), len(buffer)) == (1, 8, 0)


def test_no_second_round_if_no_episode_has_a_reward_and_the_error_names_it():
    class Unrewarded(Rollouts):
        def group(self, task):
            return Group(f"g{next(self.ids)}", task, [Episode("e", task, Outcome.finish()) for _ in range(4)])

    config, buffer, cursor = stage(FilterConfig())
    batch = fill(Unrewarded(None), config, buffer, cursor)
    assert (batch.rounds, len(buffer)) == (1, 0)
    assert "no episode has a reward: the environment gave none" in batch.explain_no_groups(config)


def test_the_error_of_a_step_without_groups_has_the_reason():
    config, buffer, cursor = stage()
    batch = fill(Rollouts(lambda task: 1.0), config, buffer, cursor)
    message = batch.explain_no_groups(config)
    assert message.startswith("rollout.filter dropped all 40 groups of 5 rounds: the tasks are all too hard")


@given(st.integers(1, 9), st.floats(0, 1), st.integers(1, 6), st.integers(0, 9), st.integers(0, 4))
def test_no_accepted_group_is_lost_or_trained_on_twice_even_over_a_resume(
    through_a_checkpoint, tasks, share, max_rounds, seed, stop
):
    """Every group that the filter accepts is taken once, in order; a resumed run takes the same groups as one that was
    not interrupted."""
    filter = FilterConfig(zero_variance=True, max_rounds=max_rounds)

    def solved_share(task):  # depends on the task alone, as in a deterministic run
        return 0.5 if random.Random(f"{seed} {task.id}").random() < share else 0.0

    def take_steps(config, buffer, cursor, count):
        steps, accepted = [], []
        for _ in range(count):
            batch = fill(Rollouts(solved_share), config, buffer, cursor)
            accepted += [group.task.id for group in batch.groups if solved_share(group.task)]
            assert batch.n_buffered == sum(bool(solved_share(group.task)) for group in batch.groups)
            step = [group.task.id for group in buffer.take(config.tasks_per_step)]
            assert len(step) == config.tasks_per_step or batch.rounds == max_rounds
            steps.append(step)
        return steps, accepted

    config, buffer, cursor = stage(filter, tasks)
    uninterrupted, accepted = take_steps(config, buffer, cursor, 6)
    assert [id for step in uninterrupted for id in step] + [group.task.id for group in buffer.take(99)] == accepted

    config, buffer, cursor = stage(filter, tasks)
    first_steps, _ = take_steps(config, buffer, cursor, stop)
    buffer_state, cursor_state = through_a_checkpoint((buffer.state(), cursor.state()))
    config, buffer, cursor = stage(filter, tasks)
    buffer.load_state(buffer_state)
    cursor.load_state(cursor_state)
    last_steps, _ = take_steps(config, buffer, cursor, 6 - stop)
    assert first_steps + last_steps == uninterrupted


@pytest.mark.parametrize("settings", [{"min_score": 0.5, "max_score": 0.5}, {"max_score": 1.5}, {"max_rounds": 0}])
def test_a_filter_that_no_group_can_pass_is_an_error(settings):
    with pytest.raises(ValueError):  # noqa: PT011
        FilterConfig(**settings)
