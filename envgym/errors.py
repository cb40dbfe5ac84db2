"""The errors a user can meet. Each is one clear line: what is wrong and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
LONGEST_LINE = 1000
"""Characters of a line that somebody else has written, on its way to a log."""


class EnvgymError(Exception):
    """A mistake or condition the user can mend. The command line prints it as one line and exits with 2."""


class ConfigError(EnvgymError):
    """A configuration key or value that cannot be used."""


class UnknownKey(ConfigError):
    """An unknown key. `message` is without the hint `near`, so that a caller that knows more settings than those beside
    it (`known`) can give a better one. Without a hint the error lists the keys there are."""

    def __init__(self, message: str, key: str, near: str, known: Collection[str] = ()) -> None:
        there_are = f" There is {', '.join(sorted(known))}." if known else ""
        super().__init__(f"{message}.{near or there_are}")
        self.message, self.key, self.near, self.known = message, key, near, known


class DroppedSettings(UserWarning):
    """Settings that are left out, because another learner, agent or environment took the place of the one they are for.
    The command line says it in one line."""


class DataError(EnvgymError):
    """A data file that is missing or has a malformed row; the message names the file and the line."""


class NameNotFound(EnvgymError):
    """An environment, learner, recipe or agent id that nothing is registered under."""


class VersionNotFound(EnvgymError):
    """A registered environment name with a version that does not exist."""


class MissingDependency(EnvgymError):
    """An optional package that is not installed; the message holds the command that installs it."""


class ResetNeeded(EnvgymError):
    """`step` was called before `reset`, or after the episode had ended."""


class InvalidStep(EnvgymError):
    """An environment returned something that is not Gymnasium's tuple (a reward that is not a number, say)."""


class TurnRefused(EnvgymError):
    """A chat template that cannot go on from what the policy said: the episode ends there, truncated."""


class CallTimeout(EnvgymError):
    """An environment's call that took longer than its deadline."""


class InvalidOutcome(EnvgymError):
    """An episode that says nothing about the policy: a judge that cannot be reached, a sandbox that will not start.

    An environment raises it from `reset`, `step` or `score_group`. The episode fails with this `kind`; it is never a
    reward of zero. A `retryable` one is played again.
    """

    def __init__(self, kind: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class PromptTooLong(EnvgymError):
    """A prompt that leaves no room for an answer in the model's context. It is never cut silently."""


class RunError(EnvgymError):
    """A run folder that exists already, cannot be resumed, or a run that cannot go on."""


class CheckpointDamaged(RunError):
    """A checkpoint of which a file is missing, cut short or garbage; the message names the file."""


class RolloutFailed(RunError):
    """A step's episodes failed too often to learn from. The weights are those of the last whole step."""


class WorkerError(EnvgymError):
    """A worker process raised an error; the message is the last line, the worker's log file has the rest."""


class WorkerDied(WorkerError):
    """A worker process ended without being asked to."""


def cannot_write(error: OSError) -> str | None:
    """The message of an `OSError` in one line where the disk is full or takes no writes; None for any other."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return None
    where = f"{error.filename} cannot be written" if error.filename else "a file cannot be written"
    return f"{where}: {error.strerror}"


@contextlib.contextmanager
def reported_as(
    kind: type[EnvgymError], what: str, advice: str = "", *, of: type[Exception] = OSError
) -> Iterator[None]:
    """Report an error from within, one `of` this type, as an error of this `kind`: in one line `what` went wrong, the
    reason (of an `OSError` the system's), and advice."""
    try:
        yield
    except of as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{what}: {reason}{advice and f'; {advice}'}") from None


def printable(text: str) -> str:
    """The text with what would command a terminal written out: it may be a model's, or a stranger's."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def printable_line(text: str) -> str:
    """The same as one line of at most `LONGEST_LINE` characters, and a sign where it was cut."""
    line = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"


def extended(error: Error, text: str) -> Error:
    """`error` itself, with whatever it holds; its message now goes on with `text`."""
    error.args = (f"{error}; {text}", *error.args[1:])
    return error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest known name, or an empty string."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def missing_package(package: str, extra: str, purpose: str) -> MissingDependency:
    """Build the error for an optional package: says what needs it and the command that installs it."""
    return MissingDependency(
        f"{purpose} needs the package {package!r}, which is not installed: {install_command(extra, package)}"
    )


@contextlib.contextmanager
def needs(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Import optional packages within: where one is not there, it is told as `missing_package` tells it, by its own
    name or else by `package`."""
    try:
        yield
    except ImportError as error:
        raise missing_package(error.name or package, extra, purpose) from None


def install_command(extra: str, package: str) -> str:
    """The command that installs what an extra of envgym's names, or `package` where it has no such extra, into the
    environment that runs. It names the packages: envgym itself is on no index."""
    try:
        declared = importlib.metadata.requires("envgym") or []
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in envgym's folder"
    of_extra = re.compile(rf"extra == [\"']{extra}[\"']")
    packages = [requirement.partition(";")[0].strip() for requirement in declared if of_extra.search(requirement)]
    return shlex.join([sys.executable, "-m", "pip", "install", *(packages or [package])])
