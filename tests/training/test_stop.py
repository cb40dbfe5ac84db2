"""Waiting that heeds the user's wish to stop, and how that is heard of."""

import asyncio
import os
import signal

import pytest

from envgym.monitoring.display import Display
from envgym.training.stop import Interrupts, Stop, Stopped


@pytest.fixture(autouse=True)
def terminal_that_tells():
    """SIGHUP as a terminal's programs have it, also where the tests run under `nohup` (and are to outlive theirs)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_work_that_is_done_first_is_what_comes():
    async def body():
        return await Stop().run_until_stopped(asyncio.sleep(0, "done"))

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
            await stop.run_until_stopped(work())
        return ended

    assert asyncio.run(body(before=False)) == ["closed its things"]
    assert asyncio.run(body(before=True)) in (["closed its things"], [])


def test_an_error_of_the_work_is_its_own():
    async def broken():
        raise KeyError("x")

    async def body():
        await Stop().run_until_stopped(broken())

    with pytest.raises(KeyError):
        asyncio.run(body())


class Gone(Display):
    """A terminal that was closed."""

    def note(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_run_though_its_terminal_is_gone(number):
    async def body():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        stop, interrupts = Stop(), Interrupts(Gone())
        with interrupts:
            interrupts.listen(stop.set)
            os.kill(os.getpid(), number)
            await stop.wait()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_closed_terminal_is_told_of_twice_and_asks_once():
    """By the shell and by the kernel; a second Ctrl-C would end the run at once."""

    async def body():
        stop, interrupts = Stop(), Interrupts(Display())
        with interrupts:
            interrupts.listen(stop.set)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGHUP)
            for _ in range(3):
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_run_that_was_started_with_nohup_outlives_its_terminal():
    async def body():
        stop, interrupts = Stop(), Interrupts(Display())
        with interrupts:
            interrupts.listen(stop.set)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
        assert interrupts._signals == [signal.SIGINT, signal.SIGTERM]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(asyncio.wait_for(body(), 60))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
