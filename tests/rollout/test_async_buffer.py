"""Asynchronous rollouts: the staleness limit, no group lost or trained on twice, resuming."""

import asyncio
import random

import pytest

from envgym.config.resolve import resolve
from envgym.env import TaskList
from envgym.errors import ConfigError, RunError
from envgym.rollout.async_buffer import AsyncRollouts, version_of
from envgym.rollout.buffer import Buffer
from envgym.rollout.config import FilterConfig, RolloutConfig
from envgym.tasks.task_set import TaskCursor
from envgym.types import Episode, Group, Outcome, Task


class World:
    """Asynchronous rollouts whose episodes take a random number of turns of the event loop."""

    def __init__(self, staleness, *, step_size=4, drop_rate=0.0, seed=0, n_tasks=1000, sigma=1.5, min_score=None):
        self.rng = random.Random(seed)
        self.drop_rate, self.sigma = drop_rate, sigma
        rounds = {"zero_variance": True, "max_rounds": 100, "min_score": min_score}
        self.config = RolloutConfig(tasks_per_step=step_size, max_staleness=staleness, filter=FilterConfig(**rounds))
        self.buffer = Buffer(1, needs_reward=True, filter=self.config.filter)
        self.cursor = TaskCursor(TaskList([Task(str(n)) for n in range(n_tasks)]), 0)
        self.rollouts = AsyncRollouts(self.buffer, self.cursor, self.config, self.roll_out)
        self.started, self.finished = [], []

    async def roll_out(self, task, name):
        self.started.append((task.id, name))
        for _ in range(1 + int(self.rng.lognormvariate(1.0, self.sigma))):
            await asyncio.sleep(0)
        self.finished.append(task.id)
        rewards = [1.0, 1.0] if self.rng.random() < self.drop_rate else [0.0, 1.0]
        return Group(name, task, [Episode("", task, Outcome.finish(), [], reward) for reward in rewards])

    async def steps(self, count):
        """Take training steps of random duration; returns the policy version and the groups of each."""
        steps = []
        for _ in range(count):
            batch, groups = await self.rollouts.take()
            assert [group.id for group in batch.groups[: len(groups)]] == [group.id for group in groups]
            steps.append((self.rollouts.version, groups))
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            await self.rollouts.advance(self.rollouts.version + 1)
        return steps


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("drop_rate", [0.0, 0.6])
def test_no_group_exceeds_the_staleness_limit_is_lost_or_trained_on_twice(staleness, drop_rate):
    async def main():
        world = World(staleness, drop_rate=drop_rate, seed=staleness)
        steps = await world.steps(60)
        await world.rollouts.close()
        return world, steps

    world, steps = asyncio.run(main())
    ages = [version - version_of(group.id) for version, groups in steps for group in groups]
    assert all(len(groups) == 4 for _, groups in steps)
    assert max(ages) <= staleness
    assert staleness == 0 or max(ages) > 0
    trained_on = [group.task.id for _, groups in steps for group in groups]
    assert len(trained_on) == len(set(trained_on)) == 240
    buffered = [group.task.id for group in world.buffer._groups]
    n_dropped = (
        world.buffer.filtered["solved"] if "solved" in world.buffer.filtered else sum(world.buffer.filtered.values())
    )
    assert len(world.finished) == len(trained_on) + len(buffered) + n_dropped
    assert (n_dropped > 0) == (drop_rate > 0)


def test_long_episodes_are_trained_on_as_often_as_short_ones():
    """If late groups were discarded, they would be missing."""

    async def main():
        world = World(2, sigma=2.5)
        steps = await world.steps(100)
        await world.rollouts.close()
        return world, steps

    world, steps = asyncio.run(main())
    started = [task for task, _ in world.started]
    trained_on = {group.task.id for _, groups in steps for group in groups}
    assert set(started[: 100 * 4 - 2 * 4]) <= trained_on  # all but those in flight or buffered at the end


def test_a_filter_that_cannot_judge_a_group_ends_the_run():
    async def main():
        world = World(1, min_score=0.1)
        with pytest.raises(RunError, match="need scores"):
            await asyncio.wait_for(world.rollouts.take(), 10)

    asyncio.run(main())


def test_at_staleness_0_no_task_starts_during_training():
    async def main():
        world = World(0)
        _, groups = await world.rollouts.take()
        n_started = len(world.started)
        await asyncio.sleep(0.01)
        assert (len(groups), n_started, len(world.started)) == (4, 4, 4)

    asyncio.run(main())


def test_a_step_waits_for_groups_at_the_staleness_limit():
    async def main():
        world = World(1, step_size=2)
        may_finish = asyncio.Event()
        roll_out = world.rollouts._roll_out

        async def straggling(task, name):
            if name.endswith("-00000000"):
                await may_finish.wait()
            return await roll_out(task, name)

        world.rollouts._roll_out = straggling
        _, first = await world.rollouts.take()
        await world.rollouts.advance(1)
        taking = asyncio.create_task(world.rollouts.take())
        await asyncio.sleep(0.02)
        assert not taking.done()
        may_finish.set()
        _, second = await taking
        assert "step-000001-00000000" not in [group.id for group in first]
        assert second[0].id == "step-000001-00000000"
        await world.rollouts.close()

    asyncio.run(main())


def test_a_resumed_run_rolls_out_tasks_in_flight_again_and_trains_on_each_once():
    async def main(stop_after):
        world = World(2)
        steps = await world.steps(stop_after)
        state = {name: part.state() for name, part in
                 {"supply": world.rollouts, "buffer": world.buffer, "cursor": world.cursor}.items()}  # fmt: skip
        assert state["supply"]["in_play"]
        await world.rollouts.close()
        resumed = World(2, seed=9)
        resumed.cursor.load_state(state["cursor"])
        resumed.buffer.load_state(state["buffer"])
        resumed.rollouts.load_state(state["supply"], stop_after)
        steps += await resumed.steps(30)
        await resumed.rollouts.close()
        return [group.task.id for _, groups in steps for group in groups], [task for task, _ in world.started]

    for stop_after in range(1, 12):
        trained_on, started = asyncio.run(main(stop_after))
        assert len(trained_on) == len(set(trained_on))
        assert set(started) <= set(trained_on)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resumed_run_keeps_the_staleness_limit_and_a_second_checkpoint_the_unstarted_tasks(staleness):
    async def main():
        world = World(staleness, seed=3)
        await world.steps(8)
        states = [{name: part.state() for name, part in
                   {"supply": world.rollouts, "buffer": world.buffer, "cursor": world.cursor}.items()}]  # fmt: skip
        await world.rollouts.close()
        resumed = World(staleness, seed=4)
        resumed.cursor.load_state(states[0]["cursor"])
        resumed.buffer.load_state(states[0]["buffer"])
        resumed.rollouts.load_state(states[0]["supply"], 8)
        states.append({"supply": resumed.rollouts.state()})
        steps = await resumed.steps(20)
        await resumed.rollouts.close()
        return states, [version - version_of(group.id) for version, groups in steps for group in groups]

    (first, second), ages = asyncio.run(main())
    assert [group.task.id for group in first["supply"]["in_play"]]
    assert [group.task.id for group in second["supply"]["in_play"]] == [
        group.task.id for group in first["supply"]["in_play"]
    ]
    assert second["supply"]["count"] == first["supply"]["count"]
    assert max(ages) == staleness


def test_an_error_of_a_rollout_is_raised_by_the_step():
    async def main():
        world = World(1)

        async def broken(task, name):
            raise RuntimeError("the engine is gone")

        world.rollouts._roll_out = broken
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await world.rollouts.take()

    asyncio.run(main())


def test_samples_of_older_policies_need_a_correction():
    stale = {"rollout": {"max_staleness": 1}, "env": "math_verify"}
    resolve({**stale, "learner": {"name": "grpo"}})  # its ratio is to the policy that sampled
    resolve({**stale, "learner": {"name": "grpo", "minibatches": 2, "old_logprobs": "rollout"}})
    resolve({**stale, "learner": {"name": "rloo", "correction": {"kind": "tis", "high": 2.0}}})
    for learner in ({"name": "grpo", "minibatches": 2}, {"name": "rloo", "policy_loss": "reinforce"}):
        with pytest.raises(ConfigError, match=r"max_staleness=1: learner .* would treat samples of older policies"):
            resolve({**stale, "learner": learner})
    with pytest.raises(ConfigError, match="a deterministic run has no episodes in flight during training"):
        resolve({**stale, "deterministic": True})
