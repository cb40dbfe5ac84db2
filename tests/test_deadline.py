"""Deadlines that stand still while a rate limit is waited for."""

import asyncio
import contextlib

import pytest

from envgym.deadline import Deadline, standing_still


async def waiting(seconds):
    with standing_still():
        await asyncio.sleep(seconds)


async def under(deadline):
    async with deadline:
        await asyncio.sleep(0.15)
        await waiting(0.2)
        await asyncio.sleep(0.15)


def test_what_is_waited_for_does_not_count_and_the_rest_does():
    async def main():
        async with Deadline(0.2), Deadline(0.2):
            await waiting(0.3)
            await asyncio.gather(waiting(0.1), waiting(0.3))  # at once, in tasks of their own
            await asyncio.sleep(0.05)
        deadline = Deadline(0.2)
        with pytest.raises(TimeoutError):
            await under(deadline)
        assert deadline.expired()

    asyncio.run(main())


def test_what_outlives_the_deadline_around_it_does_no_harm():
    async def main():
        async with Deadline(0.05):
            left = asyncio.create_task(waiting(0.1))
            await asyncio.sleep(0)
        await left
        with contextlib.suppress(TimeoutError):
            async with Deadline(0.01):
                late = asyncio.create_task(_late())
                await asyncio.sleep(1)
        await late

    asyncio.run(main())


async def _late():
    await asyncio.sleep(0.05)
    await waiting(0.01)
