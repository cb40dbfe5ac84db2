"""The policy for further tries: pauses that double within bounds, and what a server asks for."""

from __future__ import annotations

import email.utils
import time
from itertools import islice

import pytest

from envgym.net.retries import pauses, retry_after


def test_pauses_double_up_to_the_longest():
    assert list(islice(pauses(2.0, 30.0), 6)) == [2, 4, 8, 16, 30, 30]


def test_jitter_only_shortens():
    for wait, longest in zip(islice(pauses(1.0, jitter=0.5), 8), [1, 2, 4, 8, 16, 32, 60, 60], strict=True):
        assert longest / 2 <= wait <= longest


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3.0), ("0.5", 0.5), ("", 0.0), ("-1", 0.0), ("nan", 0.0), ("inf", 0.0), ("soon", 0.0)]
)
def test_what_a_server_asks_for(header, seconds):
    assert retry_after(header) == seconds


def test_a_date_is_seconds_from_now():
    assert 8 < retry_after(email.utils.formatdate(time.time() + 10, usegmt=True)) <= 10
    assert retry_after("Sun, 22 Nov 2020 09:00:00 GMT") == 0.0
