"""Limits of time and memory of a block: whatever it does ends in an error, and the process is as it was."""

import re
import resource
import signal
import threading

import pytest

from envgym.limits import limits


def endless():
    while True:
        pass


def doubling():
    text = "x"
    while True:
        text += text


BACKTRACKING = ("a" * 40 + "!", r"(a+)+$")
OVERRUNS = {
    "a loop": (endless, "longer than 0.5 s"),
    "a regular expression": (lambda: re.search(BACKTRACKING[1], BACKTRACKING[0]), "longer than 0.5 s"),
    "a large text": (lambda: "x" * 10**11, "more than 256 MiB"),
    "a text that grows": (doubling, "more than 256 MiB"),
}


def state():
    return resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)


@pytest.mark.parametrize("name", OVERRUNS)
def test_what_takes_too_much_ends_in_an_error_and_leaves_no_limit(name):
    work, why = OVERRUNS[name]
    before = state()
    with pytest.raises(TimeoutError, match=why), limits(60.0 if "MiB" in why else 0.5, 2**28):
        work()
    assert state() == before
    with limits(60.0, 2**30):
        assert re.search("a", "ba")
    assert state() == before


@pytest.mark.parametrize("name", ["a loop", "a large text", "a text that grows"])
def test_threads_have_limits_too(name):
    work, why = OVERRUNS[name]
    raised = []

    def run():
        try:
            with limits(60.0 if "MiB" in why else 0.5, 2**28):
                work()
        except TimeoutError as error:
            raised.append(str(error))

    before = state()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == [f"it took {why}"] * 2
    assert state() == before


def test_a_timer_around_it_stays():
    previous, timer = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        with limits(60.0, 2**30):
            pass
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
    assert signal.getsignal(signal.SIGALRM) == previous
