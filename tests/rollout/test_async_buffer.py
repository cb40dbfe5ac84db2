"""The supply of groups while the policy learns: how old they get, that none is lost, and what a resume plays again."""

import asyncio
import random

import pytest

from envgym.config.resolve import resolve
from envgym.env import TaskList
from envgym.errors import ConfigError
from envgym.rollout.async_buffer import AsyncRollouts, version_of
from envgym.rollout.buffer import Buffer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.filter import FilterConfig
from envgym.tasks.cursor import TaskCursor
from envgym.types import Episode, Group, Outcome, Task


class World:
    """A supply of tasks whose episodes take as long as a draw says, in steps of the event loop."""

    def __init__(self, staleness, *, needed=4, dropped=0.0, seed=0, n_tasks=1000, sigma=1.5):
        self.rng = random.Random(seed)
        self.dropped, self.sigma = dropped, sigma
        rounds = {"zero_variance": True, "max_rounds": 100}
        self.config = RolloutConfig(tasks_per_step=needed, max_staleness=staleness, filter=FilterConfig(**rounds))
        self.buffer = Buffer(1, needs_reward=True, filter=self.config.filter)
        self.cursor = TaskCursor(TaskList([Task(str(n)) for n in range(n_tasks)]), 0)
        self.supply = AsyncRollouts(self.buffer, self.cursor, self.config, self.play)
        self.begun, self.ended = [], []

    async def play(self, task, name):
        self.begun.append((task.id, name))
        for _ in range(1 + int(self.rng.lognormvariate(1.0, self.sigma))):
            await asyncio.sleep(0)
        self.ended.append(task.id)
        rewards = [1.0, 1.0] if self.rng.random() < self.dropped else [0.0, 1.0]
        return Group(name, task, [Episode("", task, Outcome.complete(), [], reward) for reward in rewards])

    async def steps(self, count):
        """Take and learn from steps, which takes some time; returns the groups of each with the version they met."""
        taken = []
        for _ in range(count):
            batch, groups = await self.supply.take()
            assert [group.id for group in batch.groups[: len(groups)]] == [group.id for group in groups]
            taken.append((self.supply.version, groups))
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            await self.supply.advance(self.supply.version + 1)
        return taken


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("dropped", [0.0, 0.6])
def test_nothing_is_older_than_the_bound_and_nothing_is_lost_or_learned_twice(staleness, dropped):
    async def main():
        world = World(staleness, dropped=dropped, seed=staleness)
        taken = await world.steps(60)
        await world.supply.close()
        return world, taken

    world, taken = asyncio.run(main())
    ages = [version - version_of(group.id) for version, groups in taken for group in groups]
    assert all(len(groups) == 4 for _, groups in taken)
    assert max(ages) <= staleness
    assert staleness == 0 or max(ages) > 0
    learned = [group.task.id for _, groups in taken for group in groups]
    assert len(learned) == len(set(learned)) == 240
    waiting = [group.task.id for group in world.buffer._groups]
    n_dropped = (
        world.buffer.filtered["solved"] if "solved" in world.buffer.filtered else sum(world.buffer.filtered.values())
    )
    assert len(world.ended) == len(learned) + len(waiting) + n_dropped
    assert (n_dropped > 0) == (dropped > 0)


def test_long_episodes_are_learned_from_as_often_as_they_are_played():
    """With a bound that threw away what came late they would be missing."""

    async def main():
        world = World(2, sigma=2.5)
        taken = await world.steps(100)
        await world.supply.close()
        return world, taken

    world, taken = asyncio.run(main())
    begun = [task for task, _ in world.begun]
    learned = {group.task.id for _, groups in taken for group in groups}
    assert set(begun[: 100 * 4 - 2 * 4]) <= learned  # all but those in play or waiting at the end


def test_at_no_staleness_nothing_is_begun_while_the_policy_learns():
    async def main():
        world = World(0)
        _, groups = await world.supply.take()
        begun = len(world.begun)
        await asyncio.sleep(0.01)
        assert (len(groups), begun, len(world.begun)) == (4, 4, 4)

    asyncio.run(main())


def test_a_step_waits_for_what_may_not_get_older():
    async def main():
        world = World(1, needed=2)
        slow = asyncio.Event()
        play = world.supply._roll_out

        async def straggling(task, name):
            if name.endswith("-00000000"):
                await slow.wait()
            return await play(task, name)

        world.supply._roll_out = straggling
        _, first = await world.supply.take()
        await world.supply.advance(1)
        taking = asyncio.create_task(world.supply.take())
        await asyncio.sleep(0.02)
        assert not taking.done()
        slow.set()
        _, second = await taking
        assert "step-000001-00000000" not in [group.id for group in first]
        assert second[0].id == "step-000001-00000000"
        await world.supply.close()

    asyncio.run(main())


def test_a_resumed_run_plays_again_what_was_in_play_and_learns_from_each_task_once():
    async def main(stop_after):
        world = World(2)
        taken = await world.steps(stop_after)
        state = {name: part.state() for name, part in
                 {"supply": world.supply, "buffer": world.buffer, "cursor": world.cursor}.items()}  # fmt: skip
        assert state["supply"]["in_play"]
        await world.supply.close()
        resumed = World(2, seed=9)
        resumed.cursor.load_state(state["cursor"])
        resumed.buffer.load_state(state["buffer"])
        resumed.supply.load_state(state["supply"], stop_after)
        taken += await resumed.steps(30)
        await resumed.supply.close()
        return [group.task.id for _, groups in taken for group in groups], [task for task, _ in world.begun]

    for stop_after in range(1, 12):
        learned, begun = asyncio.run(main(stop_after))
        assert len(learned) == len(set(learned))
        assert set(begun) <= set(learned)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resumed_run_keeps_the_bound_on_age_and_a_second_checkpoint_keeps_what_has_not_begun(staleness):
    async def main():
        world = World(staleness, seed=3)
        await world.steps(8)
        states = [{name: part.state() for name, part in
                   {"supply": world.supply, "buffer": world.buffer, "cursor": world.cursor}.items()}]  # fmt: skip
        await world.supply.close()
        resumed = World(staleness, seed=4)
        resumed.cursor.load_state(states[0]["cursor"])
        resumed.buffer.load_state(states[0]["buffer"])
        resumed.supply.load_state(states[0]["supply"], 8)
        states.append({"supply": resumed.supply.state()})
        taken = await resumed.steps(20)
        await resumed.supply.close()
        return states, [version - version_of(group.id) for version, groups in taken for group in groups]

    (first, second), ages = asyncio.run(main())
    assert [group.task.id for group in first["supply"]["in_play"]]
    assert [group.task.id for group in second["supply"]["in_play"]] == [
        group.task.id for group in first["supply"]["in_play"]
    ]
    assert second["supply"]["count"] == first["supply"]["count"]
    assert max(ages) == staleness


def test_an_error_of_a_flight_is_that_of_the_step():
    async def main():
        world = World(1)

        async def broken(task, name):
            raise RuntimeError("the engine is gone")

        world.supply._roll_out = broken
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await world.supply.take()

    asyncio.run(main())


def test_samples_of_older_policies_want_a_correction():
    stale = {"rollout": {"max_staleness": 1}, "env": "math_verify"}
    resolve({**stale, "learner": {"name": "grpo"}})  # its ratio is to the policy that sampled
    resolve({**stale, "learner": {"name": "grpo", "minibatches": 2, "old_logprobs": "rollout"}})
    resolve({**stale, "learner": {"name": "rloo", "correction": {"kind": "tis", "high": 2.0}}})
    for learner in ({"name": "grpo", "minibatches": 2}, {"name": "rloo", "policy_loss": "reinforce"}):
        with pytest.raises(ConfigError, match=r"max_staleness=1: learner .* would treat samples of older policies"):
            resolve({**stale, "learner": learner})
    with pytest.raises(ConfigError, match="a deterministic run has no episodes in flight during training"):
        resolve({**stale, "deterministic": True})
