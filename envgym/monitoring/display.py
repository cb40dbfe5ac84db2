"""The interface by which a run shows its progress, and its implementation with plain lines for a log file or a pipe.
`terminal` has the live table, and chooses between the two."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO

from envgym.errors import printable, printable_line

from .report import aligned, counts, duration, score, summary_lines, tasks_behind


class Display:
    """The events of a run. This implementation shows nothing; see `terminal.open_display`."""

    def begin(self, name: str | None, subject: str) -> None:
        """The run's name, and its environment and model."""

    def phase(self, text: str) -> None:
        """The start of an activity ("starting the engine")."""

    def rollout(self, n_done: int, total: int, failures: Mapping[str, int]) -> None:
        """Number of finished episodes, of all in this rollout, and the number of failed ones by kind."""

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        """The end of a training step; `metrics` is its record in `metrics.jsonl`."""

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """An evaluation on held-out tasks (`evaluation.result.result_of`)."""

    def alarm(self, step: int, text: str) -> None:
        """An alarm that is raised at this step, with its meaning and advice."""

    def note(self, text: str) -> None:
        """A permanent line."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The end of the run: the content of `summary.json`, with `run`, the run's folder."""

    def close(self) -> None:
        """Restore the terminal. May be called twice, and at any moment."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LineDisplay(Display):
    """Plain ASCII lines, at most one in `SECONDS_BETWEEN` for steps."""

    SECONDS_BETWEEN = 2.0
    SECONDS_BETWEEN_COUNTS = 30.0

    def __init__(self, file: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: TextIO | None = file
        self._clock = clock
        self._first_step, self._first_time, self._step = 0, 0.0, float("inf")
        self._last_line = self._last_step = -float("inf")
        self._shown_step: int | None = None
        self._count_start, self._n_done, self._has_shown_counts = 0.0, float("inf"), False

    def phase(self, text: str) -> None:
        self._print(text)

    def rollout(self, n_done: int, total: int, failures: Mapping[str, int]) -> None:
        if n_done <= self._n_done:  # of another rollout
            self._count_start, self._has_shown_counts = self._clock(), False
        self._n_done = n_done
        is_due = self._clock() - max(self._last_line, self._count_start) >= self.SECONDS_BETWEEN_COUNTS
        if is_due or (self._has_shown_counts and n_done == total):
            self._has_shown_counts = True
            self._print(f"{n_done} of {total} episodes{failure_suffix(failures)}")

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        seconds_left = self._seconds_left(step, steps)
        is_due = self._clock() - self._last_step >= self.SECONDS_BETWEEN or step in (1, steps)
        if step == 0 or not is_due:  # step 0 is the evaluation before training, which `evaluation` has shown
            return
        n_skipped = 0 if self._shown_step is None else step - self._shown_step - 1
        self._last_step, self._shown_step = self._clock(), step
        parts = [f"step {step:>{len(str(steps))}}/{steps}"]
        parts += [text for key in METRICS if (text := metric(key, metrics))]
        if seconds_left:
            parts.append(f"left {duration(seconds_left)}")
        if n_skipped > 0:
            parts.append(f"({n_skipped} before it not shown)")
        self._print("  ".join(parts))

    def _seconds_left(self, step: int, steps: int) -> float | None:
        """The remaining seconds, from the steps since the first one of the stage; None at that one. A step number that
        does not increase begins another stage."""
        clock = self._clock()
        if step <= self._step:
            self._first_step, self._first_time = step, clock
        self._step, n_steps = step, step - self._first_step
        return (clock - self._first_time) / n_steps * (steps - step) if n_steps else None

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        mode = ", greedy" if result.get("greedy") else ""
        self._print(f"held-out at step {step}{mode}: {score(result)} ({tasks_behind(result)} tasks)")

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
            self._file = None  # the reader is gone, or the disk is full: the run continues


def failure_suffix(failures: Mapping[str, int]) -> str:
    """`, failed: timeout 2`, or ""."""
    return f", failed: {printable_line(counts(failures))}" if failures else ""


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
"""The metrics in a step's line: key -> name and format."""
MAIN = ("reward/mean", "preference/accuracy", "step/accuracy", "loss")
"""Candidates for a run's curve: the first one that its steps have."""


def metric(key: str, metrics: Mapping[str, Any]) -> str:
    """`reward 0.512`, or "" if the step has no such number."""
    name, form = METRICS[key]
    return f"{name} {form.format(metrics[key])}" if key in metrics else ""
