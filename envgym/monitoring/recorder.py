"""The one place that a step's metrics are written to: the run folder, the alarms, the display and the trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .alarms import Alarms

if TYPE_CHECKING:
    from envgym.run_folder import RunFolder

    from .display import Display
    from .trackers import Trackers


class Recorder:
    """Writes a stage's records. Alarms depend on the records alone, so a resumed run raises those that the run would
    have raised anyway."""

    def __init__(self, folder: RunFolder, display: Display, steps: int) -> None:
        self._folder = folder
        self._display = display
        self._steps = steps
        self.alarms = Alarms()
        self.trackers: Trackers | None = None

    def resume(self) -> None:
        """Go on after the records that the folder holds."""
        for record in self._folder.read_metrics():
            self.alarms.observe(record)

    def finish(self) -> None:
        """Raise `no_variance` at the end of a run that sampled, where it was too short for it or its groups hold one
        episode each, and rewards never varied. The last record has it then, and the share that its sentence gives."""
        records = self._folder.read_metrics()
        steps = [record for record in records if "reward/min" in record]
        rewards = {record[key] for record in steps for key in ("reward/min", "reward/max")}
        varies = len(rewards) > 1 and any(record.get("reward/zero_variance_share") != 1 for record in steps)
        if not steps or varies or self.alarms.counts["no_variance"]:
            return
        self.alarms.counts["no_variance"] += 1
        same = f"the same reward, {rewards.pop():g}" if len(rewards) == 1 else "the reward of its whole group"
        text = (
            f"every episode of the run had {same}, and that teaches nothing: see what a right and a wrong answer earn "
            "(envgym envs try), and whether the tasks are far too hard or too easy (envgym show)"
        )
        last = steps[-1]
        names = dict.fromkeys([*last.get("alarms", []), "no_variance"])
        last |= {"reward/zero_variance_share": 1.0, "alarms": [*names]}  # a share of groups of one too
        self._folder.write_metrics(records)
        self._display.alarm(last["step"], text)

    def write(self, record: dict[str, Any]) -> None:
        """Record a step, or (0) the measurement before the first one. Adds the `alarms` that begin with it."""
        raised = self.alarms.observe(record)
        if raised:
            record["alarms"] = [alarm.name for alarm in raised]
        self._folder.append_metrics(record)
        for alarm in raised:
            self._display.alarm(record["step"], alarm.text)
        self._display.step(record["step"], self._steps, record)
        if self.trackers is not None:
            self.trackers.log(record)
