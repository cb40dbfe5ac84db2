"""Distribution of a step's metrics to the run folder, the alarms, the display and the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .alarms import Alarms, RaisedAlarm

if TYPE_CHECKING:
    from envgym.run_folder import RunFolder

    from .display import Display
    from .trackers import Trackers


class Recorder:
    """Writes a stage's records. Alarms depend on the records alone, so a resumed run raises the same ones as an
    uninterrupted run."""

    def __init__(self, folder: RunFolder, display: Display, steps: int) -> None:
        self._folder = folder
        self._display = display
        self._steps = steps
        self.alarms = Alarms()
        self.trackers: Trackers | None = None

    def resume(self) -> None:
        """Restore the alarms' state from the folder's records."""
        for record in self._folder.read_metrics():
            self.alarms.observe(record)

    def finish(self) -> None:
        """Raise `no_variance` at the end of a run whose rewards never varied, if it was too short for this alarm or its
        groups have one episode each. It is added to the last record, with the share in its text."""
        records = self._folder.read_metrics()
        steps = [record for record in records if "reward/min" in record]
        rewards = {record[key] for record in steps for key in ("reward/min", "reward/max")}
        varies = len(rewards) > 1 and any(record.get("reward/zero_variance_share") != 1 for record in steps)
        if not steps or varies or self.alarms.counts["no_variance"]:
            return
        self.alarms.counts["no_variance"] += 1
        subject = f"the same reward, {rewards.pop():g}" if len(rewards) == 1 else "the reward of its whole group"
        text = (
            f"every episode of the run had {subject}, which gives no gradient: check the rewards of a right "
            "and a wrong answer (envgym envs try), and whether the tasks are far too hard or too easy (envgym show)"
        )
        last = steps[-1]
        names = dict.fromkeys([*last.get("alarms", []), "no_variance"])
        last |= {"reward/zero_variance_share": 1.0, "alarms": [*names]}  # also for groups of one episode
        self._folder.write_metrics(records)
        self._display.alarm(last["step"], text)

    def warn(self, record: dict[str, Any]) -> None:
        """Write the record of a step that an error ends, if it raises alarms: they may name the cause."""
        if raised := self.alarms.observe(record):
            self._append(record, raised)

    def write(self, record: dict[str, Any]) -> None:
        """Write the record of a step, or (step 0) of the evaluation before training. Adds the raised `alarms`."""
        self._append(record, self.alarms.observe(record))
        self._display.step(record["step"], self._steps, record)
        if self.trackers is not None:
            self.trackers.log(record)

    def _append(self, record: dict[str, Any], raised: Sequence[RaisedAlarm]) -> None:
        if raised:
            record["alarms"] = [alarm.name for alarm in raised]
        self._folder.append_metrics(record)
        for alarm in raised:
            self._display.alarm(record["step"], alarm.text)
