"""The user's request to stop: cancelling work, and the signals that make the request."""

import asyncio
import os
import signal

import pytest

from envgym.monitoring.display import Display
from envgym.training.trainer import Interrupts, Stop, Stopped


@pytest.fixture(autouse=True)
def default_sighup():
    """The default handler of SIGHUP, even if the tests run under `nohup`."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_work_that_ends_before_a_stop_returns_its_result():
    async def body():
        return await Stop().run_until_stopped(asyncio.sleep(0, "done"))

    assert asyncio.run(body()) == "done"


def test_work_is_cancelled_by_a_stop_before_or_during_it():
    async def body(is_set):
        stop, cleanups = Stop(), []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                cleanups.append("work")

        if is_set:
            stop.set()
        else:
            asyncio.get_running_loop().call_later(0.01, stop.set)
        with pytest.raises(Stopped):
            await stop.run_until_stopped(work())
        return cleanups

    assert asyncio.run(body(is_set=False)) == ["work"]
    assert asyncio.run(body(is_set=True)) in (["work"], [])


def test_an_error_of_the_work_is_raised():
    async def broken():
        raise KeyError("x")

    async def body():
        await Stop().run_until_stopped(broken())

    with pytest.raises(KeyError):
        asyncio.run(body())


class ClosedDisplay(Display):
    """A display on a closed terminal."""

    def note(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_run_whose_terminal_is_closed(number):
    async def body():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        stop, interrupts = Stop(), Interrupts(ClosedDisplay())
        with interrupts:
            interrupts.listen(stop.set)
            os.kill(os.getpid(), number)
            await stop.wait()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_two_signals_of_a_closed_terminal_are_one_request():
    """The shell and the kernel both send one; a second Ctrl-C would end the run immediately."""

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

    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(asyncio.wait_for(body(), 60))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
