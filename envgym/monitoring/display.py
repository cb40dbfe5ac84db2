"""The interface by which a run shows its progress, and plain lines for a log file or a pipe. `terminal` has the live
table, and chooses between the two."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO

from envgym.errors import printable

from .report import aligned, counts, duration, score, summary_lines, tasks_behind


class Display:
    """The events that a run shows as it goes on. This one shows nothing; see `terminal.open_display`."""

    def begin(self, name: str | None, subject: str) -> None:
        """The run's name, and its environment and model."""

    def phase(self, text: str) -> None:
        """The activity that begins ("starting the engine")."""

    def rollout(self, done: int, total: int, failures: Mapping[str, int]) -> None:
        """Episodes played, of those that are to be played now, and how many of them failed, by kind."""

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """A step is done; `metrics` is its record in `metrics.jsonl`."""

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """A measurement on held-out tasks (`evaluation.result.result_of`)."""

    def alarm(self, step: int, text: str) -> None:
        """An alarm that begins with this step: what it means and what to try."""

    def note(self, text: str) -> None:
        """One line that stays."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The end of the run: the content of `summary.json`, with `run`, the run's folder."""

    def close(self) -> None:
        """Leave the terminal as it was found. May be called twice, and in the middle of anything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Pace:
    """Time left, from the steps since the first one seen (which, in a resumed run, is not the first)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self.step = -1

    def seconds_left(self, step: int, steps: int) -> float | None:
        """None while nothing is known. A step that is not a later one begins another stage."""
        now = self._clock()
        if self._first is None or step <= self.step:
            self._first = (step, now)
        self.step = step
        first, since = self._first
        return (now - since) / (step - first) * (steps - step) if step > first else None


class LineDisplay(Display):
    """Plain ASCII lines, at most one in `SECONDS_BETWEEN` for steps."""

    SECONDS_BETWEEN = 2.0
    SECONDS_BETWEEN_COUNTS = 30.0

    def __init__(self, file: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: TextIO | None = file
        self._clock = clock
        self._pace = Pace(clock)
        self._last_line = self._last_step = -float("inf")
        self._shown_step: int | None = None
        self._began_counting, self._done, self._has_counted = 0.0, float("inf"), False

    def phase(self, text: str) -> None:
        self._print(text)

    def rollout(self, done: int, total: int, failures: Mapping[str, int]) -> None:
        if done <= self._done:  # those of another step
            self._began_counting, self._has_counted = self._clock(), False
        self._done = done
        due = self._clock() - max(self._last_line, self._began_counting) >= self.SECONDS_BETWEEN_COUNTS
        if due or (self._has_counted and done == total):
            self._has_counted = True
            self._print(f"{done} of {total} episodes{failed(failures)}")

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        left = self._pace.seconds_left(step, steps)
        due = self._clock() - self._last_step >= self.SECONDS_BETWEEN or step in (1, steps)
        if step == 0 or not due:  # step 0 is the measurement before the first one, which `evaluation` has shown
            return
        left_out = 0 if self._shown_step is None else step - self._shown_step - 1
        self._last_step, self._shown_step = self._clock(), step
        parts = [f"step {step:>{len(str(steps))}}/{steps}"]
        parts += [text for key in METRICS if (text := metric(key, metrics))]
        if left:
            parts.append(f"left {duration(left)}")
        if left_out > 0:
            parts.append(f"({left_out} before it not shown)")
        self._print("  ".join(parts))

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        how = ", greedy" if result.get("greedy") else ""
        self._print(f"held-out at step {step}{how}: {score(result)} ({tasks_behind(result)} tasks)")

    def alarm(self, step: int, text: str) -> None:
        self._print(f"alarm at step {step}: {text}")

    def note(self, text: str) -> None:
        self._print(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._print(aligned(summary_lines(summary)))

    def _print(self, text: str) -> None:
        if self._file is None:
            return
        self._last_line = self._clock()
        try:
            print(printable(text), file=self._file, flush=True)
        except OSError:
            self._file = None  # whoever read the lines is gone, or the disk is full: no reason to end the run


def failed(failures: Mapping[str, int]) -> str:
    """`, failed: timeout 2`, or nothing."""
    return f", failed: {printable(counts(failures))}" if failures else ""


METRICS = {
    "reward/mean": ("reward", "{:.3f}"),
    "preference/accuracy": ("accuracy", "{:.3f}"),
    "step/accuracy": ("accuracy", "{:.3f}"),
    "preference/margin": ("margin", "{:.3f}"),
    "loss": ("loss", "{:.4f}"),
    "tokens/per_second": ("tokens/s", "{:,.0f}"),
    "mismatch/max": ("mismatch", "{:.1e}"),
    "seconds/step": ("seconds", "{:.1f}"),
}
"""The metrics that a line of a step shows: key -> name and format."""
MAIN = ("reward/mean", "preference/accuracy", "step/accuracy", "loss")
"""The metrics that may be a run's curve: the first that its steps have."""


def metric(key: str, metrics: Mapping[str, Any]) -> str:
    """`reward 0.512`, or nothing where the step has no such number."""
    name, form = METRICS[key]
    return f"{name} {form.format(metrics[key])}" if key in metrics else ""
