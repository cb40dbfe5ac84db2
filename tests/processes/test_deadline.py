"""Deadlines that pause while a rate limit is waited for.

By a clock that moves only where everything waits: to the moment of the next timer.
"""

import asyncio
import contextlib
import gc
import random
import selectors
import weakref

import pytest

from envgym.processes.cancellation import Deadline, pause_timeouts


class Skipping(selectors.DefaultSelector):
    """Does not wait: the clock is `now`, and skips what would be waited for."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing would ever happen any more"
            self.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.clock = Skipping()
        super().__init__(self.clock)

    def time(self):
        return self.clock.now


@pytest.fixture
def run():
    """`asyncio.run` by that clock."""

    def run(work):
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(work)

    return run


async def waiting(seconds):
    with pause_timeouts():
        await asyncio.sleep(seconds)


async def under(deadline):
    async with deadline:
        await asyncio.sleep(0.15)
        await waiting(0.2)
        await asyncio.sleep(0.15)


def test_what_is_waited_for_does_not_count_and_the_rest_does(run):
    async def main():
        async with Deadline(0.2), Deadline(0.2):
            await waiting(0.3)
            await asyncio.gather(waiting(0.1), waiting(0.3))  # at once, in tasks of their own
            await asyncio.sleep(0.05)
        deadline = Deadline(0.2)
        with pytest.raises(TimeoutError):
            await under(deadline)
        assert deadline.expired()

    run(main())


def test_what_outlives_the_deadline_around_it_does_no_harm(run):
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

    run(main())


async def _late():
    await asyncio.sleep(0.05)
    await waiting(0.01)


async def expires_after(seconds):
    """When a deadline of so many seconds is over, by the clock."""
    now = asyncio.get_running_loop().time
    began = now()
    with pytest.raises(TimeoutError):
        async with Deadline(seconds):
            await asyncio.sleep(20)
    return now() - began


def test_many_deadlines_are_over_each_at_its_own_time(run):
    async def main():
        over = []

        async def one(seconds):
            assert await expires_after(seconds) == pytest.approx(seconds)
            over.append(seconds)

        async def kept():
            async with Deadline(0.2):
                await asyncio.sleep(0.05)

        times = [0.03 * number for number in range(1, 11)]
        shuffled = random.Random(1).sample(times, len(times))
        await asyncio.gather(*map(one, shuffled), *(kept() for _ in range(10)))
        assert over == times

    run(main())


def test_a_deadline_that_is_set_after_a_later_one_does_not_wait_for_it(run):
    async def main():
        async with Deadline(10):
            for _ in range(2):  # the second finds the timer set for the later one
                assert await expires_after(0.05) == pytest.approx(0.05)

    run(main())


def test_a_deadline_inside_another_is_over_alone_and_the_outer_one_ends_both(run):
    async def nested(outer, inner):
        async with outer:
            await expires_after(0.05)
            assert not outer.expired()
            async with inner:
                await asyncio.sleep(10)

    async def main():
        outer, inner = Deadline(0.4), Deadline(10)
        with pytest.raises(TimeoutError):
            await nested(outer, inner)
        assert (outer.expired(), inner.expired()) == (True, False)

    run(main())


def test_a_deadline_can_be_made_to_be_over_now_and_not_once_it_is_left(run):
    async def main():
        async def work(deadline):
            async with deadline:
                await asyncio.sleep(0 if deadline is done else 10)

        done, given_up = Deadline(10), Deadline(10)
        await work(done)
        working = asyncio.create_task(work(given_up))
        await asyncio.sleep(0)
        for deadline in (done, given_up):
            deadline.expire()
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError):
                await working
        assert (done.expired(), given_up.expired()) == (False, True)

    run(main())


def test_an_event_loop_in_which_deadlines_were_used_is_forgotten(run):
    async def main():
        async with Deadline(100):
            await expires_after(0.01)
        left = asyncio.create_task(waiting_under(Deadline(100)))
        await asyncio.sleep(0)
        assert not left.done()  # `asyncio.run` ends it

    def once():
        loops = []
        with asyncio.Runner(loop_factory=Loop) as runner:
            loops.append(weakref.ref(runner.get_loop()))
            runner.run(main())
        return loops[0]

    loop = once()
    gc.collect()
    assert loop() is None


async def waiting_under(deadline):
    await within(deadline, asyncio.sleep(100))


async def within(deadline, work):
    async with deadline:
        return await work


def test_all_of_the_work_is_under_its_deadline(run):
    async def held(seconds, *, blocks=0.0):
        asyncio.get_running_loop().clock.now += blocks  # as an environment may that does not await
        await asyncio.sleep(seconds)
        return "done"

    async def nested():
        async with Deadline(0.1):  # begun before anything waits
            await asyncio.sleep(0)
            await waiting(0.2)
        return "nested"

    async def pauses_first():
        await waiting(0.2)
        await asyncio.sleep(0.05)
        return "paused"

    async def at_once():
        return "at once"

    async def raises():
        await asyncio.sleep(0)
        raise KeyError("its own")

    async def main():
        assert await within(Deadline(0.1), at_once()) == "at once"
        assert await within(Deadline(0.2), held(0.05)) == "done"
        assert await within(Deadline(0.1), nested()) == "nested"
        assert await within(Deadline(0.1), pauses_first()) == "paused"
        with pytest.raises(KeyError, match="its own"):
            await within(Deadline(0.1), raises())
        for work in (held(0.3), held(0.1, blocks=0.15)):
            deadline = Deadline(0.2)
            with pytest.raises(TimeoutError):
                await within(deadline, work)
            assert deadline.expired()

    run(main())


def test_work_under_a_deadline_is_cancelled_with_who_waits_for_it(run):
    async def main():
        ended = []

        async def work():
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                ended.append(True)
                await asyncio.sleep(0)  # it may wait before it ends
                raise

        deadline = Deadline(5)
        task = asyncio.create_task(within(deadline, work()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        assert not deadline.expired()

    run(main())


def test_a_clock_that_is_set_again_while_it_rings_does_no_harm(run):
    async def main():
        wrong = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

        async def turns():
            while True:
                with pause_timeouts():  # sets the clock anew, without waiting
                    pass
                asyncio.get_running_loop().clock.now += 0.01
                await asyncio.sleep(0)

        async def ends_slowly():
            async with Deadline(0.05):
                turning = asyncio.create_task(turns())
                try:
                    await asyncio.sleep(10)
                finally:
                    await asyncio.sleep(0.05)
                    turning.cancel()

        with pytest.raises(TimeoutError):
            await ends_slowly()
        assert wrong == []

    run(main())


def test_a_deadline_that_is_being_made_is_not_over():
    """The thread that watches the loop may find it in a frame before `__init__` has ended."""
    assert not Deadline.__new__(Deadline).expire_if_overrun()
