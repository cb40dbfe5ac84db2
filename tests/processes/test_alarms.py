"""`signal.alarm` on threads, as functions of users call it."""

import signal
import threading
import time

import pytest

from envgym.processes import alarms


class TooLong(BaseException):
    """As math-verify's: no `Exception`."""


def limited(function, seconds, start=lambda seconds: signal.alarm(seconds)):
    """`function()`, or the text of the timeout: what decorators with a time limit do."""

    def handler(number, frame):
        raise TooLong(f"longer than {seconds} s")

    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, handler)
    start(seconds)
    try:
        return function()
    except TooLong as error:
        return str(error)
    finally:
        start(0)
        signal.signal(signal.SIGALRM, before)


def on_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    return results


def forever():
    while True:
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for name in ("signal", "alarm", "setitimer"):
        monkeypatch.setattr(signal, name, getattr(signal, name))  # taken back afterwards
    alarms.install()


def start_of(name):
    if name == "alarm":
        return lambda seconds: signal.alarm(seconds)
    return lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.parametrize("name", ["alarm", "setitimer"])
def test_a_thread_has_an_alarm_of_its_own(name):
    before = signal.getsignal(signal.SIGALRM)
    assert on_thread(lambda: limited(forever, 1, start_of(name))) == ["longer than 1 s"]
    assert on_thread(lambda: limited(lambda: 5, 1, start_of(name))) == [5]
    assert limited(forever, 1, start_of(name)) == "longer than 1 s"  # on the main thread a true signal
    assert signal.getsignal(signal.SIGALRM) == before


def test_alarms_of_threads_do_not_meet():
    """Two threads wait, one without end; only that one is interrupted."""
    both = threading.Barrier(2)
    results = {}

    def run(name, function, seconds):
        results[name] = limited(lambda: (both.wait(60), function())[1], seconds)

    threads = [
        threading.Thread(target=run, args=arguments, daemon=True)
        for arguments in (("endless", forever, 1), ("short", lambda: 5, 50))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"endless": "longer than 1 s", "short": 5}


def test_a_cancelled_alarm_does_not_ring():
    """Of two, the first would ring earlier."""

    def run():
        signal.signal(signal.SIGALRM, lambda number, frame: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        signal.alarm(0)
        return limited(forever, 1)

    assert on_thread(run) == ["longer than 1 s"]


def test_other_signals_stay_those_of_the_main_thread():
    def run():
        with pytest.raises(ValueError, match="main thread"):
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return True

    assert on_thread(run) == [True]
