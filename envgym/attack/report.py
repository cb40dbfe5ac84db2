"""The result of `envs attack`: a row per cheat, with the statistics that decide if it pays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

DEVIATIONS = 3.3
"""Standard errors between the mean difference and its lower bound. By chance one in 2,000 cheats that earn as much as
blind play exceeds it, so one in ten environments has such a cheat, if all 200 earn that much."""
MARGIN = 0.2
"""The share of the way from blind play to a right answer that a cheat must earn to pay."""
ECHO_MARGIN = 0.5
"""The same of an echo: if parts of an answer are rewarded, a copy of the task may earn one."""
FULL = 0.99
"""The mean score from which demonstrations earn all."""


class AttackVerdict(StrEnum):
    """The result of one cheat, or of the demonstrations, as it is printed."""

    NO = "no"
    PAYS = "PAYS"
    HANGS = "HANGS"
    ENDS = "ENDS PROCESS"
    FAILS = "fails"
    ALL = "earn all"
    LESS = "EARN LESS"


WEAK = frozenset({AttackVerdict.PAYS, AttackVerdict.HANGS, AttackVerdict.ENDS, AttackVerdict.LESS})
"""Verdicts after which the environment must be mended."""


@dataclass(slots=True)
class AttackRow:
    """A cheat, or the demonstrations: the mean that it earned in its best form, the mean of the best blind play on the
    same `tasks` episodes, and a lower bound of the mean difference."""

    kind: str
    cheat: str
    verdict: AttackVerdict
    message: str = ""
    earned: float | None = None
    blind: float | None = None
    lower_bound: float | None = None
    tasks: int = 0

    def __str__(self) -> str:
        numbers = "  ".join(f"{'' if value is None else f'{value:.3f}':>8}" for value in (self.earned, self.blind))
        text = f"{self.verdict:<12}  {numbers}  {self.tasks:>5}  {self.cheat}"
        return f"{text}\n{'':14}-> {self.message}" if self.message else text


HEADING = f"{'VERDICT':<12}  {'EARNED':>8}  {'BLIND':>8}  {'TASKS':>5}  CHEAT"


@dataclass(slots=True)
class AttackReport:
    """The rows of all cheats and of the demonstrations, and the best answer-blind play."""

    env: str
    blind_play: str = ""
    blind: float = 0.0
    rows: list[AttackRow] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if no cheat pays, hangs the grader or ends its process, and the demonstrations earn all."""
        return not any(row.verdict in WEAK for row in self.rows)

    def summary(self) -> str:
        """One line: the number of each verdict, and the duration."""
        verdicts = [row.verdict for row in self.rows]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in AttackVerdict if verdict in verdicts)
        return f"{len(verdicts)} rows: {counts} ({self.seconds:.0f} s)"


def compare(values: Sequence[float | None], blind: Sequence[float]) -> tuple[float, float]:
    """The mean difference of two or more paired values, and its lower bound. A failed episode counts as blind play."""
    differences = [
        0.0 if value is None else value - blind_value for value, blind_value in zip(values, blind, strict=True)
    ]
    mean = statistics.fmean(differences)
    return mean, mean - DEVIATIONS * statistics.stdev(differences) / math.sqrt(len(differences))
