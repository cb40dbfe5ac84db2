"""Experiment trackers, in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, SwanLab (`report_to`).

Each is an optional package, imported when it is used. Each runs on its own thread, so that a server that does not
answer does not delay the run. A failure never ends the run: it is counted, and the first one is shown.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.disk import write_atomically
from envgym.errors import EnvgymError, missing_package

CLOSE_SECONDS = 60.0
"""Time limit at the end of a run for a tracker to send its remaining data."""
START_SECONDS = 60
"""Time limit for Weights & Biases to answer at the start of a run."""
FLUSH_SECONDS = 10
"""Interval at which TensorBoard's event files are flushed."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The description of a run before its first step.

    id      the same before and after a resume
    name    the run's name, followed by the stage's if there are several; `group` is the run's name alone
    folder  the stage's folder; a tracker writes its files to a sub-folder with the tracker's name
    config  every setting
    step    the last finished step: 0, or the step of the checkpoint from which a run resumes
    """

    id: str
    name: str
    group: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    step: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `init` that Weights & Biases and SwanLab share."""
        names = {"id": self.id, "name": self.name, "group": self.group}
        return {**names, "resume": "allow", "config": dict(self.config)}


class Tracker(ABC):
    """One tracker. All calls come from one thread, and may block and raise."""

    @abstractmethod
    def open(self, run: RunInfo) -> str:
        """Start or resume the run of this id. Returns its URL or path; empty if the package prints it."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record a step's numbers, by name."""

    @abstractmethod
    def close(self, status: str) -> None:
        """End the run as `completed`, `stopped` or `failed`. Returns when everything is written or sent."""


class TensorBoard(Tracker):
    """Event files in the run folder, written by TensorBoard's package, without torch or TensorFlow."""

    def open(self, run: RunInfo) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        parent = run.config.get("tensorboard_dir")
        folder = run.folder / "tensorboard" if parent is None else Path(str(parent)) / run.name
        self._writer: Any = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        if run.step:  # drop the steps after the checkpoint, which are taken again
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.step + 1, session_log=start))
        return f"tensorboard --logdir {run.folder.parent if parent is None else parent}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, status: str) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases. `WANDB_MODE=offline` stores everything in the run folder; its other variables apply as well.

    A resumed run continues its record. Steps that it repeats are skipped: W&B accepts no step twice.
    """

    def open(self, run: RunInfo) -> str:
        import wandb

        online = os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
        # Without `prompt=False` it would ask for a key on a terminal that may be unattended.
        if online and not wandb.login(prompt=False):
            raise EnvgymError("there is no API key: type `wandb login` once, or set WANDB_MODE=offline")
        settings = wandb.Settings(silent=True, console="off", init_timeout=START_SECONDS)
        project = os.environ.get("WANDB_PROJECT", run.project)
        self._run: Any = wandb.init(**run.arguments, project=project, dir=str(run.folder), settings=settings)
        self._last_step = self._run.step - 1 if self._run.resumed else -1
        return str(self._run.url) if online else f"offline; send it with: wandb sync {run.folder}/wandb/offline-run-*"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._last_step:
            self._run.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "completed" else 1)


class SwanLab(Tracker):
    """SwanLab. `SWANLAB_MODE=offline` stores everything in the run folder; its other variables apply as well.

    A resumed run continues its record online; offline it writes another folder of the same id.
    """

    def open(self, run: RunInfo) -> str:
        import swanlab

        # Never prompt, since the terminal may be unattended; its output is the display's.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        self._swanlab: Any = swanlab
        project, folder = settings.project.name or run.project, str(run.folder / "swanlab")
        swanlab.init(**run.arguments, project=project, log_dir=folder, settings=settings)
        return ""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._swanlab.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        state = {"completed": "success", "stopped": "aborted", "failed": "crashed"}[status]
        self._swanlab.finish(state=state, error=None if status == "completed" else f"the run {status}")


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "swanlab": SwanLab}
"""The trackers of `report_to`. A name is also the name of the package and of the extra that installs it."""


class Trackers:
    """The trackers of one stage. `note` gets a line with each tracker's location, and one with its first failure."""

    def __init__(self, names: Sequence[str], run: RunInfo, note: Callable[[str], None]) -> None:
        self._threads = [_Thread(name, run, note) for name in names]

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue a step's numbers. Returns immediately."""
        step, numbers = int(record["step"]), numbers_of(record)
        for thread in self._threads:
            thread.submit(lambda tracker: tracker.log(step, numbers))

    def close(self, status: str) -> None:
        """Wait until everything is written or sent, for `CLOSE_SECONDS` at most."""
        for thread in self._threads:
            thread.submit(lambda tracker: tracker.close(status))
            thread.submit(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def summary(self) -> dict[str, dict[str, int]]:
        """The number of failures, by tracker."""
        return {thread.name: {"failures": thread.failures} for thread in self._threads}


class _Thread:
    """One tracker and the thread that makes all its calls, in order."""

    def __init__(self, name: str, run: RunInfo, note: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        self._note = note
        self._work: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self.submit = self._work.put
        self._thread = threading.Thread(target=self._run, args=(run,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(f"has not ended within {seconds:g} s; unsent data may be missing")

    def _run(self, run: RunInfo) -> None:
        try:
            tracker = TRACKERS[self.name]()
            if location := tracker.open(run):
                self._note(f"{self.name}: {location}")
        except Exception as error:  # a login that fails, a server that is down, a library that changed
            self._fail(f"could not be started, and records nothing of this run: {_first_line(error)}")
            return
        while (work := self._work.get()) is not None:
            try:
                work(tracker)
            except Exception as error:
                self._fail(f"fails: {_first_line(error)}")

    def _fail(self, reason: str) -> None:
        self.failures += 1
        if self.failures == 1:
            self._note(f"{self.name} {reason} (the run continues; its metrics are in metrics.jsonl)")


def check_installed(names: Sequence[str]) -> None:
    """Raise `MissingDependency`, with the command that installs it, for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise missing_package(name, name, f"report_to={name}")


def run_id(folder: Path) -> str:
    """The id under which trackers know a run, the same before and after a resume: 21 letters and digits, stored in
    the run's folder."""
    file = folder / "tracker_id"
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex[:21])
    return file.read_text(encoding="utf-8").strip()


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record for curves: its finite numbers, the ends of intervals as `NAME/low` and `NAME/high`, and
    the number of alarms."""
    numbers: dict[str, float] = {"alarms": float(len(record.get("alarms", ())))}
    for name, value in record.items():
        if name.endswith("ci95") and value is not None:
            numbers |= {f"{name}/low": value[0], f"{name}/high": value[1]}
        elif isinstance(value, int | float) and math.isfinite(value) and name != "step":
            numbers[name] = float(value)
    return numbers


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, EnvgymError) else f"{type(error).__name__}: {line}"
