"""What a check says: one finding for each question, and all of them together."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to the question `check`: what was `found`, and, where something is wrong, what to do (`advice`)."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict:<14}  {self.check:<16}  {self.found}"
        return f"{text}\n{'':34}-> {self.advice}" if self.advice else text


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def failed(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Verdict.FAILED, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Verdict.WARNING, found, advice)


def not_applicable(check: str, why: str) -> Finding:
    return Finding(check, Verdict.NOT_APPLICABLE, why)


@dataclass(slots=True)
class Report:
    """All findings on one environment, in the order they were made, and the seconds it took."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed. Warnings are for people to judge."""
        return not self.failed()

    def failed(self) -> set[str]:
        """The names of the checks that failed."""
        return {finding.check for finding in self.findings if finding.verdict is Verdict.FAILED}

    def verdict(self, check: str) -> Verdict | None:
        """The answer to one question; None where it was not asked."""
        return next((finding.verdict for finding in self.findings if finding.check == check), None)

    def summary(self) -> str:
        """One line: how many of each, and how long it took."""
        counts = {verdict: sum(finding.verdict is verdict for finding in self.findings) for verdict in Verdict}
        said = [f"{count} {verdict.lower()}" for verdict, count in counts.items() if count]
        return f"{len(self.findings)} checks: {', '.join(said)} ({self.seconds:.0f} s)"


def listed(items: Iterable[object], most: int = 3) -> str:
    """A few of `items` for a sentence, and how many more there are."""
    shown = [str(item) for item in items]
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")
