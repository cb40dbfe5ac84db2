"""Playing tasks until a step has its groups: rounds, their bound, and what is left for the next step."""

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.env import TaskList
from envgym.rollout.buffer import MAX_ROUNDS, Buffer, fill_buffer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.filter import FilterConfig
from envgym.tasks.cursor import TaskCursor
from envgym.types import Episode, Group, Outcome, Task

FILTER = FilterConfig(zero_variance=True, max_rounds=5)


class Play:
    """Plays tasks as `solves` says, a share of the members that solve them, and remembers the size of each round."""

    def __init__(self, solves, members=4):
        self.solves, self.members, self.sizes, self.ids = solves, members, [], itertools.count()

    async def __call__(self, tasks, round):
        self.sizes.append(len(tasks))
        return [self.group(task) for task in tasks]

    def group(self, task):
        solved = self.solves(task)
        episodes = [
            Episode("e", task, Outcome.fail("timeout", "slow"))
            if solved is None
            else Episode("e", task, Outcome.complete(), reward=float(m < solved * self.members))
            for m in range(self.members)
        ]
        return Group(f"g{next(self.ids)}", task, episodes)


def stage(filter=FILTER, tasks=8, size=100):
    """Settings, a buffer and a cursor over `size` tasks."""
    tasks_there_are = TaskList([task(number) for number in range(size)])
    buffer = Buffer(2, needs_reward=True, filter=filter)
    return RolloutConfig(tasks_per_step=tasks, filter=filter), buffer, TaskCursor(tasks_there_are, 0)


def task(number):
    return Task(str(number))


def filled(play, config, buffer, cursor):
    return asyncio.run(fill_buffer(buffer, cursor, config, play))


def half(task):
    return 0.5


def test_a_step_that_loses_nothing_takes_one_round():
    config, buffer, cursor = stage()
    play = Play(half)
    batch = filled(play, config, buffer, cursor)
    assert (play.sizes, batch.rounds, len(batch.groups), len(buffer)) == ([8], 1, 8, 8)
    assert batch.metrics() == {"filter/kept_share": 1.0, "filter/rounds": 1}


def test_later_rounds_ask_for_as_many_as_the_losses_so_far_make_likely():
    """Of four groups one teaches something: two of eight; then 6 missing at a share of a quarter are 24, at most a
    whole step's 8, of which two more; of the 4 missing the same."""
    config, buffer, cursor = stage(FilterConfig(zero_variance=True, max_rounds=50))
    order = itertools.cycle([1.0, 0.5, 0.0, 1.0])
    play = Play(lambda task: next(order))
    batch = filled(play, config, buffer, cursor)
    assert play.sizes == [8, 8, 8, 8]
    assert batch.metrics() == {"filter/kept_share": 0.25, "filter/rounds": 4}
    assert len(buffer) == 8


def test_what_is_accepted_beyond_the_steps_need_is_the_next_steps_first():
    config, buffer, cursor = stage()
    first = itertools.chain([1.0] * 6, itertools.repeat(0.5))  # a bad start makes the second round large
    play = Play(lambda task: next(first))
    batch = filled(play, config, buffer, cursor)
    assert play.sizes == [8, 8]
    accepted = [group.id for group in batch.groups[6:]]
    assert [group.id for group in buffer.take(8)] == accepted[:8]
    again = filled(play, config, buffer, cursor)
    assert play.sizes == [8, 8, 6]
    assert [group.id for group in buffer.take(8)] == accepted[8:] + [group.id for group in again.groups]


def test_rounds_are_bounded_and_the_step_goes_on_with_what_there_is():
    config, buffer, cursor = stage()
    play = Play(lambda task: 0.5 if task.id == "7" else 1.0)
    batch = filled(play, config, buffer, cursor)
    assert batch.rounds == 5
    assert len(buffer) < 8


def test_without_a_filter_only_what_fell_short_is_played_again():
    config, buffer, cursor = stage(FilterConfig())
    outcomes = itertools.chain([None, None, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [None, 1.0], itertools.repeat(1.0))
    play = Play(lambda task: next(outcomes))
    filled(play, config, buffer, cursor)
    assert play.sizes == [8, 2, 1]
    outcomes = itertools.chain([1.0], itertools.repeat(None))
    broken = Play(lambda task: next(outcomes))
    config, buffer, cursor = stage(FilterConfig())
    batch = filled(broken, config, buffer, cursor)
    assert batch.rounds == MAX_ROUNDS
    assert "complete enough" in batch.explain_no_groups(config)


@pytest.mark.parametrize("filter", [FILTER, FilterConfig()])
def test_what_fails_in_every_episode_is_not_played_again(filter):
    config, buffer, cursor = stage(filter)
    batch = filled(Play(lambda task: None), config, buffer, cursor)
    assert (batch.rounds, len(batch.groups), len(buffer)) == (1, 8, 0)


def test_episodes_without_a_reward_are_not_played_again_and_that_is_said():
    class Unrewarded(Play):
        def group(self, task):
            return Group(f"g{next(self.ids)}", task, [Episode("e", task, Outcome.complete()) for _ in range(4)])

    config, buffer, cursor = stage(FilterConfig())
    batch = filled(Unrewarded(None), config, buffer, cursor)
    assert (batch.rounds, len(buffer)) == (1, 0)
    assert "no episode has a reward: the environment gave none" in batch.explain_no_groups(config)


def test_a_step_without_any_group_says_why():
    config, buffer, cursor = stage()
    batch = filled(Play(lambda task: 1.0), config, buffer, cursor)
    said = batch.explain_no_groups(config)
    assert said.startswith("rollout.filter dropped all 40 groups of 5 rounds: the tasks are all too hard")


@given(st.integers(1, 9), st.floats(0, 1), st.integers(1, 6), st.integers(0, 9), st.integers(0, 4))
def test_nothing_accepted_is_lost_nor_learned_twice_also_over_a_resume(
    through_a_checkpoint, tasks, share, max_rounds, seed, stop
):
    """Every group that the filter keeps comes out once, in order; a run restored from a step's state continues with
    the same groups as the one that was not stopped."""
    filter = FilterConfig(zero_variance=True, max_rounds=max_rounds)

    def chance(task):  # of the task alone, as in a run that repeats itself
        return 0.5 if random.Random(f"{seed} {task.id}").random() < share else 0.0

    def steps(config, buffer, cursor, count):
        taken, accepted = [], []
        for _ in range(count):
            batch = filled(Play(chance), config, buffer, cursor)
            accepted += [group.task.id for group in batch.groups if chance(group.task)]
            assert batch.n_buffered == sum(bool(chance(group.task)) for group in batch.groups)
            step = [group.task.id for group in buffer.take(config.tasks_per_step)]
            assert len(step) == config.tasks_per_step or batch.rounds == max_rounds
            taken.append(step)
        return taken, accepted

    config, buffer, cursor = stage(filter, tasks)
    taken, accepted = steps(config, buffer, cursor, 6)
    assert [id for step in taken for id in step] + [group.task.id for group in buffer.take(99)] == accepted

    config, buffer, cursor = stage(filter, tasks)
    before, _ = steps(config, buffer, cursor, stop)
    of_buffer, of_cursor = through_a_checkpoint((buffer.state(), cursor.state()))
    config, buffer, cursor = stage(filter, tasks)
    buffer.load_state(of_buffer)
    cursor.load_state(of_cursor)
    after, _ = steps(config, buffer, cursor, 6 - stop)
    assert before + after == taken


@pytest.mark.parametrize("settings", [{"min_score": 0.5, "max_score": 0.5}, {"max_score": 1.5}, {"max_rounds": 0}])
def test_settings_that_nothing_can_pass_are_refused(settings):
    with pytest.raises(ValueError):  # noqa: PT011
        FilterConfig(**settings)
