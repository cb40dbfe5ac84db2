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
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from envgym.errors import printable
from envgym.net.retries import WAITS

from .display import MAIN, METRICS, Display, LineDisplay, failure_suffix
from .report import score, summary_lines

REFRESHES_PER_SECOND = 2
BARS = "▁▂▃▄▅▆▇█"


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
        phase, count = (
            TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(overflow="fold"))
            for field in ("description", "fields[count]")
        )
        self._phases = Progress(phase, BarColumn(20), count, TimeElapsedColumn())
        self._phase = self._phases.add_task("starting", total=None, count="")
        self._begin_stage()
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_SECOND)

    def _begin_stage(self) -> None:
        text = TextColumn("[bold]step[/]  {task.completed}/{task.total}")
        self._progress = Progress(text, BarColumn(30), TimeRemainingColumn(), speed_estimate_period=float("inf"))
        self._bar = self._progress.add_task("", visible=False)
        self._step = self._steps = 0
        self._metrics: Mapping[str, Any] = {}
        self._history: list[float] = []
        self._evaluations: list[tuple[int, Mapping[str, Any]]] = []

    def begin(self, name: str | None, subject: str) -> None:
        self._title = Text("envgym", "bold").append(f"  {name or ''}", "bold cyan").append(f"  {subject}", "dim")

    def phase(self, text: str) -> None:
        self._start()
        self._phases.remove_task(self._phase)
        self._phase = self._phases.add_task(text, total=None, count="")

    def rollout(self, n_done: int, total: int, failures: Mapping[str, int]) -> None:
        count = f"{n_done}/{total} episodes{failure_suffix(failures)}"
        self._phases.update(self._phase, completed=n_done, total=total, count=count)

    def step(self, step: int, steps: int, metrics: Mapping[str, Any]) -> None:
        if self._steps and (step <= self._step or steps != self._steps):
            self._begin_stage()
        self._step, self._steps, self._metrics = step, steps, metrics
        self._progress.update(self._bar, completed=step, total=steps, visible=True)
        key = self._main_key()
        if key in metrics:
            self._history.append(metrics[key])
        self.phase("training")

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
        self._phases.update(self._phase, visible=False)
        self._live.stop()

    def _start(self) -> None:
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)

    def render(self) -> RenderableType:
        """The panel with the latest state."""
        waits = [(url, end - time.monotonic()) for url, end in list(WAITS.items())]
        lines = [Text(f"{url} cannot be reached: {wait:.0f} s left", "red") for url, wait in waits if wait > 0]
        tables: list[RenderableType] = [self._phases.make_tasks_table(self._phases.tasks), *lines]
        tables += [self._progress.make_tasks_table(self._progress.tasks), self._table()]
        parts = [part for part in tables if not isinstance(part, Table) or part.row_count]
        return Panel(Group(*parts), title=self._title, title_align="left", border_style="blue", padding=(0, 1))

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        main = self._main_key()
        for key, (name, form) in METRICS.items():
            if key in self._metrics:
                text = Text(form.format(self._metrics[key]))
                if key == main:
                    text.append("  " + sparkline(self._history, 40, None if key == "loss" else (0.0, 1.0)), "cyan")
                table.add_row(Text(name, "bold"), text)
        if self._evaluations:
            (first_step, first), (step, latest) = self._evaluations[0], self._evaluations[-1]
            text = Text(score(latest), "bold yellow").append(f"  at step {step}", "dim")
            if first_step != step:
                text.append(f"  from {score(first)}", "dim")
            table.add_row(Text("held-out", "bold"), text)
        return table

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
