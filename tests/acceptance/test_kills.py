"""The soak of `tests/kills.py`, with few kills: `python -m tests.kills` makes many, and stores its figures."""

from __future__ import annotations

import pytest

from tests.kills import PARTS, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("part", PARTS)
def test_the_books_balance_after_kills_at_random(part, tmp_path):
    figures = soak(part, tmp_path, number=len(PARTS[part].victims) + 1)
    assert figures["kills"] == len(PARTS[part].victims) + 1
    assert figures["learned_episodes"] > 0
