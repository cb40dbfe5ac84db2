"""How the time of a step and of a stage is counted."""

import contextlib
from types import SimpleNamespace

from envgym.training import progress as module
from envgym.training.progress import Progress


def test_what_a_phase_takes_is_added_up_over_its_turns_also_where_one_fails(monkeypatch):
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    progress = Progress()
    for step in (1, 2):
        progress.record = {"step": step}
        with progress.timed("sync"):
            now += 2.0
        with contextlib.suppress(OSError), progress.timed("sync"):
            now += 3.0
            raise OSError("lost")
        assert progress.record == {"step": step, "seconds/sync": 5.0}
    assert progress.seconds == {"sync": 10.0}
