"""How a command ends when something goes wrong: one line on standard error, and an exit status."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.errors import DroppedSettings, EnvgymError, RunError, cannot_write, missing_package


@dataclass
class Invocation:
    """What the command knows about itself that matters if it fails. Commands fill it in as they learn it."""

    debug: bool = False
    """Show tracebacks."""
    folder: Path | None = None
    """The run's folder, once there is one."""


@contextlib.contextmanager
def notes_in_one_line() -> Iterator[None]:
    """Within it, what is left out of the settings is said in one line of ours and not as Python says warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DroppedSettings)
        otherwise = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DroppedSettings):
                _say(f"note: {message}")
            else:
                otherwise(message, category, *where, **more)

        warnings.showwarning = show
        yield


def not_installed(error: ModuleNotFoundError, command: str) -> EnvgymError | None:
    """The error for a package that an extra of ours installs, by what envgym declares itself; None for any other."""
    module = (error.name or "").partition(".")[0]
    try:
        declared = importlib.metadata.requires("envgym") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in declared:
        match = re.match(r"([\w.-]+).*extra == [\"']([\w-]+)[\"']", requirement)
        if match and match[2] != "dev" and match[1].replace("-", "_") == module:
            return missing_package(match[1], match[2], f"envgym {command}")
    return None


def mistake(error: EnvgymError, invocation: Invocation) -> int:
    """Something the user can mend."""
    if invocation.debug:
        traceback.print_exception(error)
    _say(f"error: {_one_line(error)}")
    return 2


def interrupted(error: KeyboardInterrupt, invocation: Invocation) -> int:
    """Ctrl-C. The run says in the exception which checkpoint it kept and how to go on."""
    if invocation.debug:
        traceback.print_exception(error)
    _say(": ".join(filter(None, ("interrupted", _one_line(error)))))
    return 128 + signal.SIGINT


def unexpected(error: Exception, invocation: Invocation) -> int:
    """An error of ours, but for a full disk. The traceback goes into a file, so that the line stays one and nothing is
    lost."""
    if isinstance(error, OSError) and (said := cannot_write(error)) is not None:
        if error.filename is None:  # it may be standard output that is a file there
            _print_no_more()
        return mistake(RunError(said), invocation)
    if invocation.debug:
        traceback.print_exception(error)
        where = "above"
    else:
        where = f"in {_write_traceback(error, invocation.folder)}"
    _say(
        f"error: unexpected {type(error).__name__}: {_one_line(error)} (a mistake in envgym; the traceback is {where})"
    )
    return 1


def broken_pipe() -> int:
    """`envgym … | head` has read enough. That is no mistake, and nothing is left to say it to."""
    _print_no_more()
    return 128 + signal.SIGPIPE


def _print_no_more() -> None:
    """Let go of standard output, or the interpreter complains when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads: a BrokenPipeError may be about another pipe."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # no standard output at all
        return True


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens; the exit status still tells
        print(f"envgym: {line}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _write_traceback(error: Exception, folder: Path | None) -> Path:
    import tempfile

    text = "".join(traceback.format_exception(error))
    if folder is not None and folder.is_dir():
        path = folder / "error.log"
        with contextlib.suppress(OSError):  # the disk may be what went wrong: then the temporary folder
            path.write_text(text, encoding="utf-8")
            return path
    with tempfile.NamedTemporaryFile("w", prefix="envgym-", suffix=".log", delete=False, encoding="utf-8") as file:
        file.write(text)
    return Path(file.name)
