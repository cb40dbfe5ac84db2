"""Processes for users' code: called, killed, replaced, and closed on every way out."""

import asyncio
import os
import tempfile

import pytest

from envgym.errors import CallTimeout, ConfigError, InvalidOutcome
from envgym.processes import pool as processes
from envgym.processes.family import descendants
from envgym.processes.pool import Processes
from tests.running import is_running

HOST = """
import asyncio, os, pathlib, time
from envgym.errors import ConfigError

class Host:
    def __init__(self, mark=None, start=""):
        if start == "config":
            raise ConfigError("mend it")
        if mark is not None:
            if pathlib.Path(mark).exists():
                raise RuntimeError("no second start")
            pathlib.Path(mark).touch()
        self.value = 0

    def ping(self): ...

    def pid(self, value=None):
        return os.getpid()

    def block(self, seconds):
        time.sleep(seconds)
        return os.getpid()

    async def wait(self, seconds):
        await asyncio.sleep(seconds)

    async def meet(self, count):
        self.value += 1
        while self.value < count:
            await asyncio.sleep(0.01)

    def add(self):
        self.value += 1
        return self.value

    def fail(self):
        raise ValueError("two\\nlines")

    def die(self):
        print("last words", flush=True)
        os._exit(3)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `body(pool)` with a pool of processes."""
    (tmp_path / "host_in_a_process.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processes, "PING_SECONDS", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def with_pool(body, count=1, calls=1, logs=None, **kwargs):
        async def main():
            pool = Processes("host_in_a_process:Host", kwargs, count=count, calls=calls, name="test-pool", logs=logs)
            await pool.start()
            try:
                return await body(pool)
            finally:
                await pool.close()

        return asyncio.run(asyncio.wait_for(main(), 60))

    return with_pool


def test_one_call_at_a_time_in_each_and_nothing_is_left(run, tmp_path):
    async def body(pool):
        pids = await asyncio.gather(*(pool.call(lambda worker: worker.block(0.1), timeout=60) for _ in range(6)))
        assert len(set(pids)) == 2
        return pids

    pids = run(body, count=2)
    assert not any(map(is_running, pids))
    assert not list(tmp_path.glob("envgym-test-pool-*")), "nothing went wrong, so no log is kept"


def test_a_process_takes_several_calls_at_a_time(run):
    async def body(pool):
        await asyncio.gather(*(pool.call(lambda worker: worker.meet(3), timeout=30) for _ in range(3)))

    run(body, calls=3)


def test_a_call_past_its_deadline_is_killed_and_the_next_finds_a_new_process(run, tmp_path):
    async def body(pool):
        before = await pool.call(lambda worker: worker.pid(), timeout=60)
        with pytest.raises(CallTimeout, match=r"test-pool-0: block took longer than 0\.3 s"):
            await pool.call(lambda worker: worker.block(60), timeout=0.3)
        assert not is_running(before)
        assert await pool.call(lambda worker: worker.pid(), timeout=60) != before

    run(body, logs=str(tmp_path / "logs"))


def test_what_a_method_raises_and_a_death_are_outcomes(run, tmp_path):
    async def body(pool):
        with pytest.raises(InvalidOutcome, match=r"ValueError: two lines \(\S+_process.py, line \d+\) \(log") as failed:
            await pool.call(lambda worker: worker.fail(), timeout=60)
        assert (failed.value.kind, failed.value.retryable) == ("environment", False)
        with pytest.raises(InvalidOutcome, match=r"exit status 3.*last line: last words") as died:
            await pool.call(lambda worker: worker.die(), timeout=60)
        assert (died.value.kind, died.value.retryable) == ("crash", True)
        assert await pool.call(lambda worker: worker.pid(), timeout=60)

    run(body, logs=str(tmp_path / "logs"))


def test_one_that_does_not_start_again_is_no_end_of_the_run(run, tmp_path):
    async def body(pool):
        for _ in range(2):
            with pytest.raises(InvalidOutcome) as died:
                await pool.call(lambda worker: worker.die(), timeout=60)
            assert died.value.kind == "crash"

    run(body, logs=str(tmp_path / "logs"), mark=str(tmp_path / "mark"))


@pytest.mark.parametrize("ticks", [2, 8])
def test_a_pool_that_is_closed_while_it_starts_leaves_nothing(ticks, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descendants({os.getpid()})

    async def main():
        pool = Processes("collections:OrderedDict", {}, count=1, name="test-pool")
        starting = asyncio.create_task(pool.start())
        for _ in range(ticks):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert descendants({os.getpid()}) <= before

    asyncio.run(main())
    assert not [*tmp_path.iterdir()]


def test_a_first_start_that_fails_says_why(run):
    with pytest.raises(ConfigError, match=r"^mend it$"):
        run(None, start="config")


def test_a_caller_that_gives_up_has_the_process_checked(run, tmp_path):
    """One that only waits lives on; one that does not react is replaced. The pool is not held up by either."""

    async def body(pool):
        first = await pool.call(lambda worker: worker.pid(), timeout=60)
        for call, waits in ((lambda worker: worker.wait(600), True), (lambda worker: worker.block(600), False)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.call(call, timeout=1000), 0.2)
            then = await pool.call(lambda worker: worker.pid(), timeout=60)
            assert (then == first) == waits

    run(body, logs=str(tmp_path / "logs"))


def test_sessions_keep_their_state_and_end_with_their_process(run, tmp_path):
    async def body(pool):
        sessions = [await pool.session() for _ in range(4)]
        assert len({await session.call(lambda worker: worker.pid()) for session in sessions}) == 2
        assert [await session.call(lambda worker: worker.add()) for session in sessions] == [1, 1, 2, 2]
        with pytest.raises(InvalidOutcome, match="exit status 3"):
            await sessions[0].call(lambda worker: worker.die())
        assert [session.alive for session in sessions] == [False, True, False, True]
        with pytest.raises(InvalidOutcome, match="exit status 3"):
            await sessions[2].call(lambda worker: worker.add())
        for session in sessions:
            await session.close()
        assert await (await pool.session()).call(lambda worker: worker.add()) == 1

    run(body, count=2, logs=str(tmp_path / "logs"))
