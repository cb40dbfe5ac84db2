"""The local runtime with real processes: calls, waves, errors, death, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envgym.errors import ConfigError, InvalidOutcome, WorkerDied, WorkerError
from envgym.processes import local
from envgym.processes.host import Host
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime
from tests.running import is_running

WORKER = '''
import asyncio, os, signal, subprocess, sys, time
from envgym.errors import ConfigError, InvalidOutcome
class NoJudge(InvalidOutcome):
    pass

class Worker:
    def __init__(self, start=0):
        if start == "fail":
            raise ValueError("bad\\nstart")
        if start == "config":
            raise ConfigError("mend the key")
        end = time.monotonic() + 3
        while start == "logs" and time.monotonic() < end:
            print("still loading", flush=True)
            time.sleep(0.2)
        while start == "computes" and time.monotonic() < end:
            pass
        if start == "hang":
            time.sleep(1000)
        self.events, self.stepping, self.gate = [], None, asyncio.Event()

    def add(self, a, b=1):
        return a + b

    async def wave(self, i):
        """An engine in small: the first request starts the stepping task, which must find the whole wave."""
        self.events.append(i)
        if self.stepping is None:
            self.stepping = asyncio.ensure_future(self.step())
        return await asyncio.shield(self.stepping)

    async def step(self):
        return list(self.events)

    async def wait(self):
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise

    def release(self):
        self.gate.set()
        return self.events

    def environment(self, name):
        return os.environ.get(name), os.getpid(), os.getppid()

    def frozen(self):
        import gc
        return gc.get_freeze_count()

    def sigint(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "alive"

    async def lose(self):
        task = asyncio.ensure_future(asyncio.sleep(1000))
        task.cancel()
        await task

    def fail(self, kind):
        if kind == "config":
            raise ConfigError("mend the key")
        if kind == "outcome":
            raise NoJudge("judge_down", "no judge", retryable=True)
        raise RuntimeError("two\\nlines")

    def read(self, path):
        return open(path).read()

    def unpicklable(self):
        return lambda: None

    def array(self, n):
        import numpy as np
        return np.arange(n)

    def grandchild(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    def leave(self, status):
        print("last words", flush=True)
        os._exit(status)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        print("closed in order", flush=True)

class Stubborn(Worker):
    def close(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
'''


@pytest.fixture
def worker_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"worker_{os.path.basename(tmp_path).replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def with_worker(module, tmp_path, body, **kwargs):
    """Run `body(worker)` with a started worker, then close the runtime."""

    async def main():
        runtime = LocalRuntime(tmp_path / "logs")
        try:
            return await body(await runtime.start(f"{module}:Worker", kwargs, name="w", environ={"ENVGYM_X": "y"}))
        finally:
            await runtime.close()

    return asyncio.run(main())


def wait_until_gone(pids, seconds=60.0):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def test_calls_run_in_a_process_of_their_own(worker_module, tmp_path):
    async def body(worker):
        assert await worker.call(lambda worker: worker.add(2, b=3)) == 5
        value, pid, parent = await worker.call(lambda worker: worker.environment("ENVGYM_X"))
        assert value == "y"
        assert pid == worker.pid != os.getpid() == parent
        assert await worker.call(lambda worker: worker.sigint()) == "alive"
        assert (await worker.call(lambda worker: worker.array(3_000_000))).sum() == 4499998500000
        return pid

    pid = with_worker(worker_module, tmp_path, body)
    wait_until_gone([pid])
    assert (tmp_path / "logs" / "w.log").read_text() == "closed in order\n"


def test_a_wave_is_one_frame_started_in_order_before_anything_else(worker_module, tmp_path):
    async def body(worker):
        return await asyncio.gather(*(worker.call(lambda worker: worker.wave(i)) for i in range(512)))

    assert with_worker(worker_module, tmp_path, body) == [list(range(512))] * 512


def test_a_worker_begins_while_there_is_more_to_come_where_waves_need_not_be_whole(worker_module, tmp_path):
    async def main():
        runtime = LocalRuntime(tmp_path / "logs", deterministic=False)
        try:
            for _ in range(20):  # a busy machine may not give a worker a core in time, but not twenty times
                worker = await runtime.start(f"{worker_module}:Worker", {}, name="w")
                found, *_ = await asyncio.gather(*(worker.call(lambda worker: worker.wave(i)) for i in range(512)))
                if len(found) < 512:
                    return found
        finally:
            await runtime.close()

    found = asyncio.run(main())
    assert found == list(range(len(found)))


def test_what_a_worker_has_imported_is_left_out_of_garbage_collections(worker_module, tmp_path):
    async def body(worker):
        return await worker.call(lambda worker: worker.frozen())

    assert with_worker(worker_module, tmp_path, body) > 10_000


def test_coroutines_overlap_and_a_cancelled_call_is_cancelled_there(worker_module, tmp_path):
    async def body(worker):
        waiting = asyncio.create_task(worker.call(lambda worker: worker.wait()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.call(lambda worker: worker.wait()), 0.2)
        await worker.call(
            lambda worker: worker.add(1)
        )  # the cancelled coroutine has had its turn when this is answered
        assert await worker.call(lambda worker: worker.release()) == ["cancelled"]
        await waiting

    with_worker(worker_module, tmp_path, body)


def test_an_exception_is_one_line_and_the_worker_lives_on(worker_module, tmp_path):
    async def body(worker):
        with pytest.raises(WorkerError) as failure:
            await worker.call(lambda worker: worker.fail("other"))
        before, place, after = str(failure.value).partition(f" ({tmp_path}/worker_")  # the line that raised it
        assert (before, bool(place)) == ("w: RuntimeError: two lines", True)
        assert after.endswith(f" (log: {tmp_path / 'logs' / 'w.log'})")
        with pytest.raises(ConfigError, match=r"^mend the key$"):
            await worker.call(lambda worker: worker.fail("config"))
        with pytest.raises(InvalidOutcome, match=r"^no judge$") as outcome:
            await worker.call(lambda worker: worker.fail("outcome"))
        assert (outcome.value.kind, outcome.value.retryable) == ("judge_down", True)
        with pytest.raises(WorkerError, match="CancelledError"):  # of a task of its own, which nobody asked for
            await asyncio.wait_for(worker.call(lambda worker: worker.lose()), 30)
        with pytest.raises(WorkerError, match="no_such_method"):
            await worker.call(lambda worker: worker.no_such_method())
        with pytest.raises(WorkerError, match=r"pickle|local object"):  # the words of Python 3.11, and of 3.13
            await worker.call(lambda worker: worker.unpicklable())
        assert await worker.call(lambda worker: worker.add(1)) == 2

    with_worker(worker_module, tmp_path, body)
    assert "Traceback" in (tmp_path / "logs" / "w.log").read_text()


def test_libraries_read_utf_8_whatever_the_locale(worker_module, tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    (tmp_path / "text").write_text("größer", encoding="utf-8")

    async def body(worker):
        assert await worker.call(lambda worker: worker.read(str(tmp_path / "text"))) == "größer"

    with_worker(worker_module, tmp_path, body)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda worker: worker.die(), "was killed by SIGKILL"),
        (lambda worker: worker.leave(3), r"ended with exit status 3 .*last line: last words"),
    ],
)
def test_death_fails_pending_and_later_calls(worker_module, tmp_path, end, said):
    async def body(worker):
        grandchild = await worker.call(lambda worker: worker.grandchild())
        pending = asyncio.create_task(worker.call(lambda worker: worker.wait()))
        for call in (worker.call(end), pending, worker.call(lambda worker: worker.add(1))):
            with pytest.raises(WorkerDied, match=rf"^w {said}") as failure:
                await asyncio.wait_for(call, 10)
            assert "w.log" in str(failure.value)
        await worker.close()
        wait_until_gone([worker.pid, grandchild])

    with_worker(worker_module, tmp_path, body)


def test_a_kill_whose_caller_is_cancelled_still_ends_all_calls(worker_module, tmp_path):
    async def body(worker):
        pending = asyncio.create_task(worker.call(lambda worker: worker.wait()))
        await worker.call(lambda worker: worker.add(1))
        killing = asyncio.create_task(worker.kill())
        await asyncio.sleep(0)
        killing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killing
        for call in (pending, worker.call(lambda worker: worker.add(1))):
            with pytest.raises(WorkerDied):
                await asyncio.wait_for(call, 10)

    with_worker(worker_module, tmp_path, body)


def test_a_constructor_that_fails_or_hangs(worker_module, tmp_path, monkeypatch):
    with pytest.raises(WorkerError, match=r"^w: ValueError: bad start .*w\.log"):
        with_worker(worker_module, tmp_path, None, start="fail")
    with pytest.raises(ConfigError, match=r"^mend the key$"):
        with_worker(worker_module, tmp_path, None, start="config")
    monkeypatch.setattr(local, "START_TIMEOUT", 1.0)
    with pytest.raises(WorkerError, match="w is not ready, and made no progress for 1 s"):
        with_worker(worker_module, tmp_path, None, start="hang")


def test_a_constructor_that_makes_progress_may_take_longer(worker_module, tmp_path, monkeypatch):
    """One that logs, and one that computes, for three times the limit."""
    monkeypatch.setattr(local, "START_TIMEOUT", 1.0)
    for kind in ("logs", "computes"):
        assert (
            with_worker(
                worker_module, tmp_path, lambda worker: worker.call(lambda worker: worker.add(2, 3)), start=kind
            )
            == 5
        )
    monkeypatch.setattr(local, "CALL_SECONDS", 1.5)
    with pytest.raises(WorkerError, match="w is not ready, and has been starting for 2 s"):
        with_worker(worker_module, tmp_path, None, start="logs")


def test_programs_beside_the_interpreter_come_first(worker_module, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    path, *_ = with_worker(
        worker_module, tmp_path, lambda worker: worker.call(lambda worker: worker.environment("PATH"))
    )
    assert path == f"{Path(sys.executable).parent}:/usr/bin"


def test_a_worker_that_will_not_end_is_killed(worker_module, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "CLOSE_TIMEOUT", 0.5)

    async def main():
        runtime = LocalRuntime(tmp_path)
        worker = await runtime.start(f"{worker_module}:Stubborn", {}, name="s")
        await asyncio.gather(runtime.close(), worker.close())
        await runtime.close()
        with pytest.raises(WorkerError, match="closed"):
            await worker.call(lambda worker: worker.add(1))
        return worker.pid

    wait_until_gone([asyncio.run(main())])


CONTROLLER = """
import asyncio, sys
from envgym.processes.local import LocalRuntime

async def main():
    sys.path.insert(0, sys.argv[2])
    worker = await LocalRuntime(sys.argv[2]).start(sys.argv[1] + ":Worker", {}, name="w")
    print(worker.pid, flush=True)
    await worker.call(lambda worker: worker.wait())

asyncio.run(main())
"""


def test_sigkill_of_the_controller_leaves_nothing(worker_module, tmp_path):
    command = [sys.executable, "-c", CONTROLLER, worker_module, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        assert is_running(pid)
        controller.send_signal(signal.SIGKILL)
    wait_until_gone([pid])


def test_inline_has_the_same_interface(worker_module):
    async def main():
        runtime = InlineRuntime()
        worker = await runtime.start(f"{worker_module}:Worker", {}, name="w")
        assert await worker.call(lambda worker: worker.add(2, b=3)) == 5
        assert (await worker.call(lambda worker: worker.environment("PATH")))[1] == os.getpid()
        waves = await asyncio.gather(*(worker.call(lambda worker: worker.wave(i)) for i in range(8)))
        assert waves[0] == list(range(8))
        with pytest.raises(WorkerError, match="w: RuntimeError: two lines"):
            await worker.call(lambda worker: worker.fail("other"))
        with pytest.raises(ConfigError, match=r"^mend the key$"):
            await worker.call(lambda worker: worker.fail("config"))
        with pytest.raises(InvalidOutcome, match=r"^no judge$") as outcome:
            await worker.call(lambda worker: worker.fail("outcome"))
        assert (outcome.value.kind, outcome.value.retryable) == ("judge_down", True)
        await runtime.close()
        await runtime.close()

    asyncio.run(main())


def test_inline_closes_all_workers_also_after_one_that_fails(tmp_path, monkeypatch):
    (tmp_path / "closing.py").write_text(
        "class Worker:\n"
        "    closed = []\n"
        "    def __init__(self, name):\n        self.name = name\n"
        "    async def close(self):\n"
        "        self.closed.append(self.name)\n"
        "        if self.name == 'first':\n            raise OSError('the disk is full')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        runtime = InlineRuntime()
        for name in ("first", "second"):
            await runtime.start("closing:Worker", {"name": name}, name=name)
        with pytest.raises(OSError, match="the disk is full"):
            await runtime.close()

    asyncio.run(main())
    from closing import Worker

    assert Worker.closed == ["first", "second"]


def test_the_end_of_a_caller_does_not_cancel_a_call_twice():
    class Worker:
        ends = 0

        async def wait(self):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)  # an engine aborts its request
                Worker.ends += 1

    async def main():
        host, answers = Host(), []
        host._worker = Worker()
        for number in range(2):
            host.run(("caller", number), "wait", (), {}, answers.append)
        await asyncio.sleep(0.01)
        host.cancel(("caller", 0))
        await asyncio.sleep(0.01)
        host.cancel_all("caller")
        await asyncio.sleep(0.2)
        assert Worker.ends == 2
        assert not host._tasks

    asyncio.run(main())


def test_stacks_of_what_takes_long_are_in_the_logs(tmp_path, monkeypatch):
    """Of a method that holds the worker, of one that waits in it, and of the controller that waits for both."""
    monkeypatch.setenv("ENVGYM_STACKS_SECONDS", "0.2")
    (tmp_path / "slow.py").write_text(
        "import asyncio, time\n"
        "class Slow:\n"
        "    def hold(self):\n        time.sleep(1.0)\n"
        "    async def linger(self):\n        await asyncio.sleep(1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def the_controller_waits(worker):
        await worker.call(lambda worker: worker.hold())
        await worker.call(lambda worker: worker.linger())

    async def main():
        runtime = LocalRuntime(tmp_path / "logs")
        try:
            await the_controller_waits(await runtime.start("slow:Slow", {}, name="slow"))
        finally:
            await runtime.close()

    asyncio.run(main())
    log = (tmp_path / "logs" / "slow.log").read_text()
    assert 'slow.py", line 4 in hold' in log
    assert "linger takes long" in log
    assert "await asyncio.sleep(1.0)" in log
    controller = (tmp_path / "logs" / "controller.log").read_text()
    assert "slow: hold takes long" in controller
    assert "the_controller_waits" in controller
