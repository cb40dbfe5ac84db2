"""Which checkpoint is the best one: that of the step at which a chosen metric was."""

from __future__ import annotations

import math

from envgym.errors import ConfigError, did_you_mean

from .progress import Progress

HELD_OUT = "eval/"
"""What the names of metrics begin with that only an evaluation has."""


def metric_of(wanted: str) -> str:
    """The metric that `checkpoint.best` names."""
    return wanted.removeprefix("-")


class BestMetric:
    """`wanted` is `checkpoint.best`: the metric whose greatest value is the best one; its least, behind a minus or
    where the name ends in `loss`."""

    def __init__(self, wanted: str | None) -> None:
        self.name = metric_of(wanted or "")
        self._sign = -1.0 if wanted and (wanted.startswith("-") or wanted.endswith("loss")) else 1.0
        self._numbers: set[str] = set()

    def improves(self, progress: Progress) -> bool:
        """Whether a step's record has the best value so far, which `progress.best` then says. Of equal ones it is the
        first. What is measured before the first step does not count: there is no checkpoint of it.

        Raises `ConfigError` for a metric that neither the first evaluation nor the first step has.
        """
        if not self.name:
            return False
        record, step = progress.record, progress.step
        self._numbers |= {key for key, value in record.items() if isinstance(value, int | float)}
        value = record.get(self.name)
        expected = step == 0 if self.name.startswith(HELD_OUT) else step == 1
        if (expected and self.name not in record) or (value is not None and not isinstance(value, int | float)):
            raise ConfigError(
                f"checkpoint.best: this run has no metric {self.name!r} that is a number."
                f"{did_you_mean(self.name, self._numbers)}"
            )
        if expected and value is None and "eval/reward" in record:
            raise ConfigError(
                f"checkpoint.best: {self.name} is not known, as no held-out episode has a score (the environment gives "
                "none, and its rewards are not all in [0, 1]): name eval/reward"
            )
        if not step or value is None or not math.isfinite(value):
            return False
        best = progress.best
        if best and best["metric"] == self.name and self._sign * value <= self._sign * best["value"]:
            return False
        progress.best = {"metric": self.name, "value": value, "step": step}
        return True
