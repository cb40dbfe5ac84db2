"""The result of `envs check`: a finding per check, and the report of all findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class CheckVerdict(StrEnum):
    """The result of one check, as it is printed."""

    OK = "ok"
    FAILED = "FAILED"
    WARNING = "warning"
    NOT_APPLICABLE = "not applicable"


@dataclass(slots=True)
class Finding:
    """The verdict of one check with a `message` and, if something is wrong, `advice`. `check` is the check's name, set
    by the caller of the checks."""

    verdict: CheckVerdict
    message: str
    advice: str = ""
    check: str = ""
    is_last: bool = False
    """No other group of checks makes sense after it."""

    def __str__(self) -> str:
        text = f"{self.verdict:<14}  {self.check:<16}  {self.message}"
        return f"{text}\n{'':34}-> {self.advice}" if self.advice else text


def ok(message: str) -> Finding:
    return Finding(CheckVerdict.OK, message)


def failure(message: str, advice: str) -> Finding:
    return Finding(CheckVerdict.FAILED, message, advice)


def warning(message: str, advice: str) -> Finding:
    return Finding(CheckVerdict.WARNING, message, advice)


def not_applicable(reason: str) -> Finding:
    return Finding(CheckVerdict.NOT_APPLICABLE, reason)


@dataclass(slots=True)
class Report:
    """All findings on one environment, in the order of the checks, and the duration."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if no check failed; warnings do not count."""
        return CheckVerdict.FAILED not in self.verdicts().values()

    def verdicts(self) -> dict[str, CheckVerdict]:
        """The verdicts so far, by check."""
        return {finding.check: finding.verdict for finding in self.findings}

    def verdict(self, check: str) -> CheckVerdict | None:
        """The verdict of one check; None if it has not run."""
        return self.verdicts().get(check)

    def summary(self) -> str:
        """One line: the number of each verdict, and the duration."""
        verdicts = list(self.verdicts().values())
        counts = ", ".join(
            f"{verdicts.count(verdict)} {verdict.lower()}" for verdict in CheckVerdict if verdict in verdicts
        )
        return f"{len(verdicts)} checks: {counts} ({self.seconds:.0f} s)"


def join_first(items: Iterable[object], limit: int = 3) -> str:
    """The first items for a sentence, and the number of the others."""
    texts = [str(item) for item in items]
    n_hidden = len(texts) - limit
    return ", ".join(texts[:limit]) + (f" and {n_hidden} more" if n_hidden > 0 else "")
