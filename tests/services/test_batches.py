"""What concurrent callers ask for is sent together, in an order that does not depend on who came first."""

import asyncio
import random

import pytest

from envgym.services.batches import Batcher


def test_callers_share_batches_in_a_fixed_order():
    async def main(order):
        sent = []

        async def send(items):
            sent.append(items)
            return [item * 10 for item in items]

        batcher = Batcher(send, size=64)
        results = await asyncio.gather(*(batcher.submit(item) for item in order))
        await batcher.close()
        assert results == [item * 10 for item in order]
        return sent

    items = list(range(50))
    shuffled = random.Random(0).sample(items, 50)
    assert asyncio.run(main(items)) == asyncio.run(main(shuffled)) == [sorted(items, key=repr)]


def test_a_batch_fills_while_another_is_sent_and_none_is_too_large():
    async def main():
        sizes, sending, begun, release = [], 0, asyncio.Event(), asyncio.Event()

        async def send(items):
            nonlocal sending
            sending += 1
            assert sending == 1
            sizes.append(len(items))
            begun.set()
            await release.wait()
            sending -= 1
            return items

        batcher = Batcher(send, size=8)
        first = asyncio.create_task(batcher.submit(0))
        await begun.wait()
        others = [asyncio.create_task(batcher.submit(item)) for item in range(1, 21)]
        await asyncio.sleep(0)  # all of them wait
        release.set()
        await asyncio.gather(first, *others)
        await batcher.close()
        return sizes

    assert asyncio.run(main()) == [1, 8, 8, 4]


def test_one_failure_is_its_own_and_a_callers_deadline_takes_nothing_from_the_others():
    async def main():
        gave_up = asyncio.Event()

        async def send(items):
            await gave_up.wait()
            return [ValueError("no") if item == 1 else item for item in items]

        batcher = Batcher(send, size=8)

        async def impatient():
            try:
                async with asyncio.timeout(0.02):
                    await batcher.submit(3)
            finally:
                gave_up.set()

        results = await asyncio.gather(*(batcher.submit(i) for i in range(3)), impatient(), return_exceptions=True)
        await batcher.close()
        return results

    zero, one, two, three = asyncio.run(main())
    assert (zero, two) == (0, 2)
    assert isinstance(one, ValueError)
    assert isinstance(three, TimeoutError)


def test_an_item_too_deep_for_an_order_fails_alone_and_the_batches_go_on():
    async def main():
        async def send(items):
            return [len(items)] * len(items)

        deep = []
        for _ in range(5000):
            deep = [deep]
        batcher = Batcher(send, size=8)
        for _ in range(2):
            wrong, *results = await asyncio.gather(
                *(batcher.submit(item) for item in (deep, 1, 2)), return_exceptions=True
            )
            assert isinstance(wrong, RecursionError)
            assert results == [2, 2]
        await batcher.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_tells_those_who_wait():
    async def main():
        begun = asyncio.Event()

        async def send(items):
            begun.set()
            await asyncio.Event().wait()

        batcher = Batcher(send, size=1)
        waiting = [asyncio.create_task(batcher.submit(item)) for item in range(3)]
        await begun.wait()
        await batcher.close()
        for task in waiting:
            with pytest.raises(Exception, match="was closed"):
                await asyncio.wait_for(task, 60)

    asyncio.run(main())
