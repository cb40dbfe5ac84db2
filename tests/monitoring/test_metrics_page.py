"""`docs/training/monitor.md` and the code agree on the alarms; `test_end_to_end.py` compares the names that a run logs
with `docs/reference/metrics.md`."""

from __future__ import annotations

import re
from pathlib import Path

from envgym.monitoring.alarms import ALARMS

PAGE = (Path(__file__).parents[2] / "docs" / "training" / "monitor.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_page_lists_every_alarm_with_the_number_it_listens_to():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Alerts"), re.MULTILINE))
    assert list(rows) == [alarm.name for alarm in ALARMS]
    for alarm in ALARMS:
        assert f"`{alarm.metric}`" in rows[alarm.name]


def test_an_alarm_begins_where_the_page_says():
    """Each limit that the page gives as a number is where the condition changes."""
    limits = re.findall(r"^\| `(\w+)` \| `\S+` is (above|below) ([\d.]+)(?: for (\d+) steps)? \|$", PAGE, re.MULTILINE)
    assert len(limits) >= 11
    conditions = {alarm.name: alarm.condition for alarm in ALARMS}
    for name, side, limit, steps in limits:
        beyond = float(limit) * 1.01 + 1e-9 if side == "above" else float(limit) * 0.99
        n = int(steps or 1)
        assert conditions[name]([beyond] * n), name
        assert not conditions[name]([float(limit)] * n), name
        assert not conditions[name]([beyond] * (n - 1)), name
