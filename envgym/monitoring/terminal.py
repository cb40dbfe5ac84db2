"""The live table of a run on a terminal. It is imported when a run starts, as rich takes time to import."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from envgym.errors import printable
from envgym.net.retries import WAITS

from .display import MAIN, METRICS, Display, LineDisplay, Pace, failure_suffix
from .report import duration, score, summary_lines

REFRESHES_PER_SECOND = 2
BARS = "▁▂▃▄▅▆▇█"
PHASES = ("rollout", "score", "prepare", "learn", "sync", "eval")


def open_display() -> Display:
    """The display for standard output: live on a terminal, else (and where `CI` is set) lines."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
    return LiveDisplay() if is_terminal else LineDisplay(sys.stdout)


class LiveDisplay(Display):
    """A live table. It stores the latest state, which rich draws twice per second from its own thread, so that updates
    cost nothing. The cursor stays visible, so that a killed run leaves nothing to restore.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._title = Text("envgym", "bold")
        self._console = console or Console(highlight=False, file=cast(TextIO, _Lasting(sys.stdout)))
        self._spinner = Spinner("dots")
        self._phase, self._phase_began = "starting", time.monotonic()
        self._episodes: tuple[int, int, str] | None = None
        self._begin_stage()
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_SECOND)

    def _begin_stage(self) -> None:
        self._pace = Pace(time.monotonic)
        self._step = self._steps = 0
        self._estimate: tuple[float, float] | None = None
        self._metrics: Mapping[str, Any] = {}
        self._history: list[float] = []
        self._evaluations: list[tuple[int, Mapping[str, Any]]] = []

    def begin(self, name: str | None, subject: str) -> None:
        self._title = Text("envgym", "bold").append(f"  {name or ''}", "bold cyan").append(f"  {subject}", "dim")

    def phase(self, text: str) -> None:
        self._start()
        self._phase, self._phase_began, self._episodes = text, time.monotonic(), None

    def rollout(self, n_done: int, total: int, failures: Mapping[str, int]) -> None:
        self._episodes = (n_done, total, failure_suffix(failures)) if n_done < total else None

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        self._start()
        if self._steps and (step <= self._step or steps != self._steps):
            self._begin_stage()
        seconds_left = self._pace.seconds_left(step, steps)
        self._estimate = None if seconds_left is None else (time.monotonic(), seconds_left)
        self._step, self._steps, self._metrics = step, steps, metrics
        key = self._main_key()
        if key in metrics:
            self._history.append(metrics[key])
        self._phase, self._phase_began, self._episodes = "training", time.monotonic(), None

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        self._start()
        if self._steps and step < self._step:
            self._begin_stage()
        if not result.get("greedy"):
            self._evaluations.append((step, result))

    def alarm(self, step: int, text: str) -> None:
        self._console.print(Text(f"alarm at step {step}: ", "bold red").append(printable(text), "not bold"))

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()
        table = Table.grid(padding=(0, 2))
        for name, text in summary_lines(summary):
            style = "bold green" if name == "next" else "bold"
            table.add_row(Text(name, style), Text(printable(text), overflow="fold"))
        self._console.print(Padding(table, (0, 1)))

    def close(self) -> None:
        self._phase, self._episodes = "", None
        self._live.stop()

    def _start(self) -> None:
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)

    def render(self) -> RenderableType:
        """The panel with the latest state."""
        parts: list[RenderableType] = []
        if self._phase:
            parts.append(self._activity())
        if self._steps:
            parts.append(self._table())
        return Panel(Group(*parts), title=self._title, title_align="left", border_style="blue", padding=(0, 1))

    def _activity(self) -> Table:
        line = Table.grid(padding=(0, 1))
        self._spinner.update(text=Text(self._phase))
        parts: list[RenderableType] = [self._spinner]
        if self._episodes is not None:
            n_done, total, failures = self._episodes
            parts.append(ProgressBar(total, n_done, width=20))
            parts.append(Text(f"{n_done}/{total} episodes", "dim").append(failures, "red"))
        waits = [(url, end - time.monotonic()) for url, end in list(WAITS.items())]
        parts += [Text(f"{url} cannot be reached: {wait:.0f} s left", "red") for url, wait in waits if wait > 0]
        elapsed = time.monotonic() - self._phase_began
        line.add_row(*parts, Text(duration(elapsed) if elapsed >= 3 else "", "dim"))
        return line

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        steps = Table.grid(padding=(0, 2))
        bar = ProgressBar(self._steps, self._step, width=30)
        steps.add_row(Text(f"{self._step}/{self._steps}"), bar, Text(self._time_left()))
        table.add_row(Text("step", "bold"), steps)
        key = self._main_key()
        if self._history:
            name, form = METRICS[key]
            bounds = None if key == "loss" else (0.0, 1.0)
            text = Text(form.format(self._history[-1])).append("  " + sparkline(self._history, 40, bounds), "cyan")
            table.add_row(Text(name, "bold"), text)
        if self._evaluations:
            table.add_row(Text("held-out", "bold"), self._held_out())
        for key in ("preference/margin", "tokens/per_second", "mismatch/max"):
            if key in self._metrics:
                name, form = METRICS[key]
                table.add_row(Text(name, "bold"), Text(form.format(self._metrics[key])))
        times = [
            f"{phase} {self._metrics[key]:.2f} s" for phase in PHASES if (key := f"seconds/{phase}") in self._metrics
        ]
        if times:
            table.add_row(Text("time", "bold"), Text("  ".join(times), "dim"))
        return table

    def _held_out(self) -> Text:
        step, latest = self._evaluations[-1]
        text = Text(score(latest), "bold yellow").append(f"  at step {step}", "dim")
        first_step, first = self._evaluations[0]
        if first_step != step:
            text.append(f"  from {score(first)}", "dim")
        return text

    def _time_left(self) -> str:
        if self._estimate is None or self._step >= self._steps:
            return ""
        estimated, seconds_left = self._estimate
        return f"{duration(max(0.0, seconds_left - (time.monotonic() - estimated)))} left"

    def _main_key(self) -> str:
        return next((key for key in MAIN if key in self._metrics), MAIN[-1])


class _Lasting:
    """A terminal stream that may be closed during a run: later output is dropped, and the run continues."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def sparkline(values: Sequence[float], width: int, bounds: tuple[float, float] | None = None) -> str:
    """The values as at most `width` bars, each the mean of adjacent values.

    The scale is the range of the values, widened to `bounds` if given.
    """
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min([*means, *(bounds or ())[:1]]), max([*means, *(bounds or ())[1:]])
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] for mean in means)
