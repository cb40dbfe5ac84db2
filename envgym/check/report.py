"""The result of a check: one finding for each question, and all of them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """The answer to one question. The value is what a reader of the report sees."""

    OK = "ok"
    FAILED = "FAILED"
    WARNING = "warning"
    NOT_APPLICABLE = "not applicable"


@dataclass(slots=True)
class Finding:
    """The answer to one question: what was `found`, and, where something is wrong, what to do (`advice`). `check` is
    the question's name, set by whoever runs the checks."""

    verdict: Verdict
    found: str
    advice: str = ""
    check: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict:<14}  {self.check:<16}  {self.found}"
        return f"{text}\n{'':34}-> {self.advice}" if self.advice else text


def ok(found: str) -> Finding:
    return Finding(Verdict.OK, found)


def failed(found: str, advice: str) -> Finding:
    return Finding(Verdict.FAILED, found, advice)


def warning(found: str, advice: str) -> Finding:
    return Finding(Verdict.WARNING, found, advice)


def not_applicable(why: str) -> Finding:
    return Finding(Verdict.NOT_APPLICABLE, why)


@dataclass(slots=True)
class Report:
    """All findings on one environment, in the order they were made, and the seconds it took."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if nothing failed. Warnings are for people to judge."""
        return not self.failed()

    def failed(self) -> set[str]:
        """The names of the checks that failed."""
        return {check for check, verdict in self.verdicts().items() if verdict is Verdict.FAILED}

    def verdicts(self) -> dict[str, Verdict]:
        """The answers so far, by check."""
        return {finding.check: finding.verdict for finding in self.findings}

    def verdict(self, check: str) -> Verdict | None:
        """The answer to one question; None where it was not asked."""
        return self.verdicts().get(check)

    def summary(self) -> str:
        """One line: the number of each verdict, and the time it took."""
        given = list(self.verdicts().values())
        counts = ", ".join(f"{given.count(verdict)} {verdict.lower()}" for verdict in Verdict if verdict in given)
        return f"{len(given)} checks: {counts} ({self.seconds:.0f} s)"


def listed(items: Iterable[object], most: int = 3) -> str:
    """A few of `items` for a sentence, and how many more there are."""
    shown = [str(item) for item in items]
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")
