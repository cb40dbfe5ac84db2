"""Several engines as one: who is asked, and what becomes of one that dies."""

import asyncio
import contextlib
import os
import signal

import pytest

from envgym.engine import EngineInfo, Generation, Request, SamplingParams
from envgym.engines import pool as engines
from envgym.engines.pool import MOST_FAILURES, EngineClient, EnginePool
from envgym.errors import InvalidOutcome, WorkerDied, WorkerError
from envgym.processes import local
from envgym.processes.cancellation import Deadline
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import WorkerHandle
from envgym.processes.supervisor import MOST_DEATHS
from envgym.types import ImagePart, PlacedImage, StopReason


class Fake(WorkerHandle):
    """An engine that answers once it is let, and may die or fail."""

    def __init__(self, number):
        self.number, self.asked, self.let = number, [], asyncio.Event()
        self.error = None
        self.loaded, self.closed = [], False
        self.let.set()

    async def generate(self, request):
        self.asked.append(request.id)
        await self.let.wait()
        if self.error is not None:
            raise self.error
        return Generation([1], [0.0], StopReason.STOP, ())

    async def info(self):
        return EngineInfo("fake 1.0", 64)

    async def score(self, token_ids):
        if isinstance(self.error, WorkerDied):
            raise self.error
        return [float(self.number)]

    async def send(self, message):
        method, args, _ = message
        if isinstance(self.error, WorkerError):
            raise self.error
        self.loaded.append((method, *args))

    async def steps(self):
        return 1

    async def close(self):
        self.closed = True


class World:
    """A pool of fakes, and those that were started in place of others."""

    def __init__(self, count=2, *, starts=True, **settings):
        self.fakes = [Fake(number) for number in range(count)]
        self.starts = starts
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.notes = []
        self.pool = EnginePool(self.start, self.fakes, note=self.notes.append, **settings)

    async def start(self, number):
        await self.may_start.wait()
        if not self.starts:
            raise WorkerError("no room")
        self.fakes.append(Fake(number))
        return self.fakes[-1]

    async def ask(self, *ids):
        await asyncio.gather(*(self.pool.generate(Request(id, (1,), SamplingParams(4))) for id in ids))

    @property
    def asked(self):
        return [fake.asked for fake in self.fakes]


def turns(group, members=4, turn=0):
    return [f"step/{group}:{member:03d}:0.{turn:04d}" for member in range(members)]


def test_a_group_begins_on_one_engine_and_a_conversation_stays_there():
    async def main():
        world = World()
        await world.ask(*turns(0))
        first = next(index for index, asked in enumerate(world.asked) if asked)
        assert sorted(world.asked[first]) == turns(0)
        assert world.asked[1 - first] == []
        await world.ask(*turns(0, turn=1))
        assert sorted(world.asked[first]) == sorted([*turns(0), *turns(0, turn=1)])

    asyncio.run(main())


def test_load_is_spread_though_a_group_is_large():
    async def main():
        world = World()
        for fake in world.fakes:
            fake.let.clear()
        asking = asyncio.create_task(world.ask(*turns(0, members=64)))
        await asyncio.sleep(0.01)
        counts = sorted(map(len, world.asked))
        assert sum(counts) == 64
        assert counts[0] >= 16
        for fake in world.fakes:
            fake.let.set()
        await asking

    asyncio.run(main())


def test_deterministic_requests_go_round():
    async def main():
        world = World(round_robin=True)
        await world.ask(*turns(0), *turns(1))
        assert world.asked == [[*turns(0)[::2], *turns(1)[::2]], [*turns(0)[1::2], *turns(1)[1::2]]]

    asyncio.run(main())


def test_what_a_dead_engine_was_at_fails_and_another_takes_its_place():
    async def main():
        world = World()
        await world.ask(*turns(0, members=1))
        victim = next(fake for fake in world.fakes if fake.asked)
        victim.error, joined = WorkerDied("engine-0 was killed by SIGKILL"), []

        async def join(client):
            joined.append(client)

        world.pool.join = join
        with pytest.raises(InvalidOutcome, match="was killed by SIGKILL") as failure:
            await world.ask(*turns(0, members=1, turn=1))
        assert failure.value.retryable
        assert failure.value.kind == "engine"
        with pytest.raises(InvalidOutcome, match="engine of the earlier turns has died"):  # no episode has two engines
            await world.ask(*turns(0, members=1, turn=2))
        await world.ask(*turns(0, members=1))  # an evaluation's episode of the same id
        await asyncio.sleep(0.01)
        assert victim.closed
        assert joined == [world.fakes[2]]
        assert [member.client.number for member in world.pool.members] == [0, 1]
        assert world.notes == ["engine-0 was killed by SIGKILL; starting another"]
        await world.ask(*(id for group in range(1, 20) for id in turns(group)))
        assert world.fakes[2].asked

    asyncio.run(main())


def test_one_that_dies_while_models_have_the_gpus_is_replaced_when_the_others_are_awake():
    async def main():
        world = World(count=2)
        events = []

        async def join(engine):
            events.extend([*engine.loaded, "weights"])

        world.pool.join = join
        await world.pool.sleep(1)
        world.fakes[0].error = WorkerDied("engine-0 was killed by SIGKILL")
        await world.pool.wake("weights")
        await asyncio.sleep(0.01)
        assert world.fakes[0].closed
        assert len(world.fakes) == 2  # there is no memory for a third
        world.may_start.clear()
        await world.pool.wake("cache")
        await asyncio.sleep(0.01)
        sleeping = asyncio.create_task(world.pool.sleep(2))
        await asyncio.sleep(0.01)
        assert ("sleep", 2) not in world.fakes[1].loaded  # nor for the models, before the third sleeps too
        world.may_start.set()
        await sleeping
        assert events == [("sleep", 1), ("wake", "weights"), "weights"]
        assert world.fakes[2].loaded == [("sleep", 1), ("wake", "weights"), ("wake", "cache"), ("sleep", 2)]

    asyncio.run(main())


def test_one_that_answers_only_errors_counts_as_dead():
    async def main():
        world = World(count=1)
        world.fakes[0].error = InvalidOutcome("engine", "out of blocks", retryable=True)
        for number in range(MOST_FAILURES):
            with pytest.raises(InvalidOutcome):
                await world.ask(*turns(number, members=1))
        await world.ask(*turns(99))
        assert len(world.fakes) == 2
        assert "16 requests in a row have failed (out of blocks)" in world.notes[0]

    asyncio.run(main())


def test_an_engine_that_refuses_requests_does_not_count_as_dead():
    async def main():
        world = World(count=1)
        world.fakes[0].error = InvalidOutcome("engine", "vLLM refuses a request: a temperature of 3")
        for number in range(3 * MOST_FAILURES):
            with pytest.raises(InvalidOutcome):
                await world.ask(*turns(number, members=1))
        assert len(world.fakes) == 1
        assert world.notes == []

    asyncio.run(main())


def test_where_none_is_left_requests_wait_and_their_clocks_stand_still():
    async def main():
        world = World(count=1)
        world.may_start.clear()
        world.fakes[0].error = WorkerDied("engine was killed")
        with pytest.raises(InvalidOutcome):
            await world.ask(*turns(0, members=1))

        async def limited():
            async with Deadline(0.05):
                await world.ask(*turns(1, members=1))

        waiting = asyncio.create_task(limited())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        world.may_start.set()
        await waiting
        assert world.fakes[1].asked

    asyncio.run(main())


def test_weights_go_to_all_and_all_are_probed():
    async def main():
        world = World(count=3)
        await world.pool.load(lambda engine: engine.load_bucket(1))
        assert [fake.loaded for fake in world.fakes] == [[("load_bucket", 1)]] * 3
        world.fakes[1].error = WorkerDied("gone")
        assert await world.pool.probe((1, 2)) == [[0.0], [2.0]]

    asyncio.run(main())


def test_an_engine_that_has_half_of_the_weights_leaves_the_pool():
    async def main():
        world = World(count=2)
        world.fakes[1].error = WorkerError("bucket 1 of the weights has changed on its way")
        await world.pool.load(lambda engine: engine.load_bucket(1))
        await asyncio.sleep(0.01)
        assert [fake.loaded for fake in world.fakes] == [[("load_bucket", 1)], [], []]
        assert world.notes == ["bucket 1 of the weights has changed on its way; starting another"]

    asyncio.run(main())


def test_a_pool_that_cannot_be_mended_says_so():
    async def main(world, deaths):
        for number in range(deaths):
            for fake in world.fakes:
                fake.error = fake.error or WorkerDied("it died")
            with pytest.raises(InvalidOutcome):
                await world.ask(*turns(number, members=1))
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerDied) as failure:
            await world.ask(*turns(99, members=1))
        return str(failure.value)

    async def no_start():
        return await main(World(count=1, starts=False), 1)

    async def many_deaths():
        return await main(World(count=1), MOST_DEATHS + 1)

    assert asyncio.run(no_start()) == "it died; another one could not be started: no room"
    assert "9 engines have died" in asyncio.run(many_deaths())


class Stepping:
    """An engine that answers after some steps, in a process of its own."""

    def __init__(self):
        self.taken = 0

    def pid(self):
        return os.getpid()

    def steps(self):
        return self.taken

    async def generate(self, request):
        for _ in range(request.sampling.max_tokens):
            await asyncio.sleep(0.01)
            self.taken += 1
        return Generation([1], [0.0], StopReason.STOP, ())


def test_a_frozen_engine_beside_one_that_moves_is_replaced_with_little_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(engines, "PATIENCE", 10**9)  # alone it would be waited for as good as for ever
    monkeypatch.setattr(local, "CLOSE_TIMEOUT", 0.2)
    runtime, notes = LocalRuntime(tmp_path), []

    async def start(number):
        return EngineClient(await runtime.start(f"{__name__}:Stepping", {}, name=f"engine-{number}"))

    async def main():
        pool = await EnginePool.start(start, 2, note=notes.append)
        frozen = await pool.members[0].client.call(lambda engine: engine.pid())
        os.kill(frozen, signal.SIGSTOP)

        async def asked(group):
            with contextlib.suppress(InvalidOutcome):
                await pool.generate(Request(turns(group)[0], (1,), SamplingParams(20)))

        group = 0
        while not notes or len(pool.members) < 2:
            group += 1
            asking = [asyncio.create_task(asked(group * 10 + number)) for number in range(2)]
            await asyncio.gather(*asking)
        assert [member.number for member in pool.members] == [0, 1]
        assert await pool.members[0].client.call(lambda engine: engine.pid()) != frozen
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert "the engine has taken no step" in notes[0]


def test_an_engine_that_takes_no_images_gets_none():
    """As those of other packages that are written for texts, and transformers: they would answer without them."""

    async def main():
        world = World(1)
        image = PlacedImage(ImagePart("a" * 64, 8, 8, "image/png"), 0, 1)
        with pytest.raises(
            InvalidOutcome, match=r"the engine \(fake 1.0\) takes no images here: set engine.kind=vllm"
        ) as error:
            await world.pool.generate(Request("r", (1,), SamplingParams(4), images=(image,)))
        assert error.value.kind == "images"
        assert world.asked == [[]]
        await world.ask("r")

    asyncio.run(main())
