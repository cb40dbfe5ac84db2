"""Calls that several wait for: one call, one result, and an end that nobody's giving up hurries."""

import asyncio

import pytest

from envgym.net.shared_calls import SharedCalls


class Server:
    """Answers each call once `ready` is set."""

    def __init__(self):
        self.asked = 0
        self.ready = asyncio.Event()

    async def answer(self):
        self.asked += 1
        await self.ready.wait()
        return self.asked


def test_what_is_being_asked_for_is_asked_for_once_and_afterwards_anew():
    async def main():
        server, calls = Server(), SharedCalls()
        waiting = [asyncio.create_task(calls.result(key, server.answer)) for key in ("a", "a", "b")]
        await asyncio.sleep(0)
        assert "a" in calls
        assert "c" not in calls
        server.ready.set()
        assert await asyncio.gather(*waiting) == [1, 1, 2]
        assert server.asked == 2
        assert "a" not in calls
        assert await calls.result("a", server.answer) == 3

    asyncio.run(main())


def test_one_who_gives_up_leaves_the_others_their_result():
    async def main():
        server, calls = Server(), SharedCalls()
        first, second = [asyncio.create_task(calls.result("a", server.answer)) for _ in range(2)]
        await asyncio.sleep(0)
        first.cancel()
        server.ready.set()
        assert await second == 1
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())


def test_calls_that_are_cancelled_raise_what_their_askers_name():
    async def main():
        server, calls = Server(), SharedCalls()
        named = asyncio.create_task(calls.result("a", server.answer, closed=ConnectionError("closed here")))
        plain = asyncio.create_task(calls.result("a", server.answer))
        await asyncio.sleep(0)
        await calls.close()
        with pytest.raises(ConnectionError, match="closed here"):
            await named
        with pytest.raises(asyncio.CancelledError):
            await plain
        assert "a" not in calls

    asyncio.run(main())
