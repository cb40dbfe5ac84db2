"""Waiting that heeds the user's wish to stop."""

import asyncio

import pytest

from envgym.stop import Stop, Stopped


def test_work_that_is_done_first_is_what_comes():
    async def body():
        return await Stop().unless(asyncio.sleep(0, "done"))

    assert asyncio.run(body()) == "done"


def test_work_is_cancelled_where_the_stop_comes_first_or_was_there_before():
    async def body(before):
        stop, ended = Stop(), []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("closed its things")

        if before:
            stop.set()
        else:
            asyncio.get_running_loop().call_later(0.01, stop.set)
        with pytest.raises(Stopped):
            await stop.unless(work())
        return ended

    assert asyncio.run(body(before=False)) == ["closed its things"]
    assert asyncio.run(body(before=True)) in (["closed its things"], [])


def test_an_error_of_the_work_is_its_own():
    async def broken():
        raise KeyError("x")

    async def body():
        await Stop().unless(broken())

    with pytest.raises(KeyError):
        asyncio.run(body())
