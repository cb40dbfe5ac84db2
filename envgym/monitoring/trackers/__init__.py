"""What a run is also told to, beside `metrics.jsonl`: TensorBoard, Weights & Biases, SwanLab (`report_to`).

Each is an optional package, imported when it is used. All contact with it is on a thread of its own, so that a server
that does not answer holds nobody up, and a run never ends because of one: what goes wrong is said once and counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.errors import EnvgymError, MissingDependency

from .tracker import Story, Tracker

__all__ = ["Story", "Tracker", "Trackers", "check_installed", "numbers_of", "run_id"]

CLOSE_SECONDS = 60.0
"""How long the end of a run may wait for what a tracker still has to send."""


class Trackers:
    """The trackers of one stage. `note` is told, in one line each, where they write to and what goes wrong."""

    def __init__(self, names: Sequence[str], story: Story, note: Callable[[str], None]) -> None:
        self._threads = [_Thread(name, story, note) for name in names]

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand on a step's numbers. Returns at once."""
        numbers = numbers_of(record)
        for thread in self._threads:
            thread.tell(lambda tracker: tracker.log(int(record["step"]), numbers))

    def close(self, status: str) -> None:
        """Wait, so far as is reasonable, until everything is written or sent."""
        for thread in self._threads:
            thread.finish(status)
        for thread in self._threads:
            thread.wait(CLOSE_SECONDS)

    def summary(self) -> dict[str, dict[str, int]]:
        """What failed, by tracker."""
        return {thread.name: {"failures": thread.failures} for thread in self._threads}


class _Thread:
    """One tracker and the thread on which everything it does happens, in order."""

    def __init__(self, name: str, story: Story, note: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        self._note = note
        self._work: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(story,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def tell(self, work: Callable[[Tracker], None]) -> None:
        self._work.put(work)

    def finish(self, status: str) -> None:
        self._work.put(lambda tracker: tracker.close(status))
        self._work.put(None)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._failed(f"has not ended within {seconds:g} s; what it had not sent by then may be missing")

    def _run(self, story: Story) -> None:
        try:
            tracker = _tracker_class(self.name)()
            if place := tracker.open(story):
                self._note(f"{self.name}: {place}")
        except Exception as error:  # a login that fails, a server that is down, a library that changed
            self._failed(f"could not be started, and hears nothing of this run: {_first_line(error)}")
            return
        while (work := self._work.get()) is not None:
            try:
                work(tracker)
            except Exception as error:
                self._failed(f"fails: {_first_line(error)}")

    def _failed(self, what: str) -> None:
        self.failures += 1
        if self.failures == 1:
            self._note(f"{self.name} {what} (the run goes on; its numbers are in metrics.jsonl)")


def check_installed(names: Sequence[str]) -> None:
    """Raise `MissingDependency`, with the command that installs it, for a tracker whose package is not there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(
                f"report_to={name} needs the package {name!r}, which is not installed: pip install 'envgym[{name}]'"
            )


def run_id(folder: Path) -> str:
    """The id under which trackers know a run, the same before and after a resume: 21 letters and digits, kept in the
    run's folder."""
    file = folder / "tracker_id"
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex[:21])
    return file.read_text(encoding="utf-8").strip()


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a record can be drawn: its finite numbers, the ends of intervals as `NAME/low` and `NAME/high`, and how
    many alarms were raised."""
    numbers: dict[str, float] = {"alarms": float(len(record.get("alarms", ())))}
    for name, value in record.items():
        if name.endswith("ci95") and value is not None:
            numbers |= {f"{name}/low": value[0], f"{name}/high": value[1]}
        elif isinstance(value, int | float) and math.isfinite(value) and name != "step":
            numbers[name] = float(value)
    return numbers


def _tracker_class(name: str) -> type[Tracker]:
    """Each is in the module of its name."""
    found: type[Tracker] = importlib.import_module(f".{name}", __name__).TRACKER
    return found


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return line if isinstance(error, EnvgymError) else f"{type(error).__name__}: {line}"
