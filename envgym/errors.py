"""The errors that users meet. Each is one line: what is wrong and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import inspect
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

Error = TypeVar("Error", bound=BaseException)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
MAX_LINE = 1000
"""Maximum characters of a logged line that a model or another program wrote."""
MAX_MESSAGE = 10_000
"""Maximum characters of a message, which may list names that a server gives."""


def shorten(text: str) -> str:
    """The text, without its middle if it has more than `MAX_MESSAGE` characters: advice is at the end."""
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 1003]} … {text[-1000:]}"


class EnvgymError(Exception):
    """A mistake or condition that the user can fix. The command line prints it as one line and exits with 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shorten(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(EnvgymError):
    """A configuration key or value that cannot be used."""


class UnknownKey(ConfigError):
    """An unknown key. The error lists the `names` of the keys beside it unless there is a `hint`. `message` is without
    the hint, so that a caller that knows more settings can give a better one."""

    def __init__(self, message: str, key: str, hint: str, names: Collection[str] = ()) -> None:
        choices = f" There is {', '.join(sorted(names))}." if names else ""
        super().__init__(f"{message}.{hint or choices}")
        self.message, self.key, self.hint, self.names = message, key, hint, names


class SettingsNote(UserWarning):
    """A note about the settings of a run. The command line prints each note once, in one line."""


class DroppedSettings(SettingsNote):
    """Settings that are dropped because their learner, agent or environment was replaced by another. The command line
    prints it as one line."""


class DataError(EnvgymError):
    """A data file that is missing or has a malformed row; the message names the file and the line."""


class NameNotFound(EnvgymError):
    """An id of an environment, learner, agent or recipe that is not registered."""


class VersionNotFound(EnvgymError):
    """A registered environment name with a version that does not exist."""


class MissingDependency(EnvgymError):
    """An optional package that is not installed; the message holds the command that installs it."""


class ResetNeeded(EnvgymError):
    """`step` was called before `reset`, or after the episode had ended."""


class InvalidStep(EnvgymError):
    """An environment returned something other than Gymnasium's tuple, or a reward that is no number."""


class TurnRefused(EnvgymError):
    """A chat template cannot render another turn after a completion: the episode is truncated there."""


class CallTimeout(EnvgymError):
    """An environment's call that took longer than its deadline."""


class InvalidOutcome(EnvgymError):
    """An episode that does not measure the policy: a judge is unreachable, a sandbox does not start.

    An environment raises it from `reset`, `step` or `score_group`. The episode fails with this `kind`; it is never a
    reward of zero. A `retryable` one is retried.
    """

    def __init__(self, kind: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class PromptTooLong(EnvgymError):
    """A prompt that leaves no room for a completion in the model's context. It is never truncated silently."""


class RunError(EnvgymError):
    """A run folder that exists already or cannot be resumed, or a run that cannot continue."""


class CheckpointDamaged(RunError):
    """A checkpoint with a missing, truncated or corrupt file; the message names the file."""


class RolloutFailed(RunError):
    """Too many of a step's episodes failed to train on it. The weights are those of the last complete step."""


class WorkerError(EnvgymError):
    """A worker process raised an error; the message is the last line, the worker's log file has the rest."""


class WorkerDied(WorkerError):
    """A worker process ended unexpectedly."""


def cannot_write(error: Exception) -> str | None:
    """The message, in one line, of an error that says that the disk is full or read-only; None for any other. Libraries
    in Rust have errors of their own for it."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return None
    return f"{getattr(error, 'filename', None) or 'a file'} cannot be written: {os.strerror(number)}"


@contextlib.contextmanager
def report_full_disk() -> Iterator[None]:
    """Turn the error of a disk that is full or read-only into a `RunError` of one line."""
    try:
        yield
    except Exception as error:
        if (reason := cannot_write(error)) is None:
            raise
        raise RunError(reason) from error


@contextlib.contextmanager
def reported_as(
    kind: type[EnvgymError], problem: str, advice: str = "", *, cause: type[Exception] = OSError
) -> Iterator[None]:
    """Turn an error of type `cause` into one of type `kind`, in one line: the problem, the reason (for an `OSError` the
    system's), and advice."""
    try:
        yield
    except cause as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{problem}: {reason}{advice and f'; {advice}'}") from None


def printable(text: str) -> str:
    """The text with control characters written as escapes: it may be a model's or a stranger's."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def printable_line(text: str) -> str:
    """Like `printable`, as one line of at most `MAX_LINE` characters; an ellipsis marks a truncated one."""
    line = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


def loggable(text: str) -> str:
    """The text as it may be logged: printable, and of at most `MAX_MESSAGE` characters."""
    return shorten(printable(text))


def extend_message(error: Error, text: str) -> Error:
    """Append `text` to the message of `error`, and return `error` itself."""
    error.args = (f"{error}; {text}", *error.args[1:])
    return error


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` with the closest of `names`: one that is spelled alike, has the same letters, or is
    longer or shorter by a part. Empty without such a name."""
    names = list(names)
    close = get_close_matches(name, names, n=1, cutoff=0.7)
    for candidate in close or get_close_matches(name, names, n=9, cutoff=0.4):
        is_part = min(len(name), len(candidate)) > 2 and (name in candidate or candidate in name)
        if close or is_part or sorted(name) == sorted(candidate):
            return f" Did you mean {candidate!r}?"
    return ""


def missing_package(package: str, extra: str, purpose: str) -> MissingDependency:
    """The error for a missing optional package: its purpose and the command that installs it."""
    return MissingDependency(
        f"{purpose} needs the package {package!r}, which is not installed: {install_command(extra, package)}"
    )


def describe(value: Any) -> str:
    """A wrong return value, as a phrase for an error message."""
    if not (coroutines := coroutines_in(value)):
        return f"{value!r:.80}"
    for coroutine in coroutines:
        coroutine.close()  # prevents Python's later warning that it was never awaited
    return f"a coroutine: an await is missing before {coroutines[0].__name__}(…)"


def coroutines_in(value: Any) -> list[Any]:
    """The coroutines in a return value, at any depth of tuples, lists and mappings."""
    if inspect.iscoroutine(value):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [coroutine for part in parts for coroutine in coroutines_in(part)]


@contextlib.contextmanager
def needs(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Context manager around imports of optional packages: a missing one raises `missing_package`, under its own name
    or else `package`."""
    try:
        yield
    except ImportError as error:
        raise missing_package(error.name or package, extra, purpose) from None


def install_command(extra: str, package: str) -> str:
    """The command that installs the packages of an extra of envgym's, or `package` if there is no such extra, into the
    running environment. It names the packages, since envgym itself is on no index."""
    try:
        declared = importlib.metadata.requires("envgym") or []
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e '.[{extra}]' in envgym's folder"
    marker = re.compile(rf"extra == [\"']{extra}[\"']")
    packages = [requirement.partition(";")[0].strip() for requirement in declared if marker.search(requirement)]
    return shlex.join([sys.executable, "-m", "pip", "install", *(packages or [package])])
