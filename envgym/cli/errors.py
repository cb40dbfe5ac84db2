"""Error reports of commands: one line on standard error, and an exit status."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import logging
import os
import re
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError, EnvgymError, RunError, SettingsNote, cannot_write, loggable, missing_package
from envgym.loading import user_line

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Invocation:
    """The part of a command's state that an error report needs. Commands fill it in as they learn it."""

    command: Sequence[str] = ()
    """The command's name, if there is one."""
    debug: bool = False
    """Show tracebacks."""
    folder: Path | None = None
    """The run's folder, once there is one."""


class LogLine(logging.Formatter):
    """Log lines of bounded length without terminal escapes: they may quote environments, servers and models."""

    def format(self, record: logging.LogRecord) -> str:
        return loggable(super().format(record))


@contextlib.contextmanager
def notes_in_one_line() -> Iterator[None]:
    """Print each note about settings once, as one line, not in Python's format."""
    notes: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", SettingsNote)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            if not issubclass(category, SettingsNote):
                show_other(message, category, *args, **kwargs)
            elif str(message) not in notes:
                notes.add(str(message))
                _print(f"note: {message}")

        warnings.showwarning = show
        yield


def open_console(**options: Any) -> Console:
    """A console that raises `BrokenPipeError` where rich's own ends the program, if no one reads the output."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return PipedConsole(**options)


def report(error: BaseException, invocation: Invocation) -> int:
    """Print the line for `error` and return the exit status."""
    if isinstance(error, BrokenPipeError) and _reader_is_gone():  # such as `envgym … | head`
        _discard_output()
        return 128 + signal.SIGPIPE
    if isinstance(error, ModuleNotFoundError):
        error = _missing_extra(error, f"envgym {' '.join(invocation.command)}") or error
    if isinstance(error, Exception) and (reason := cannot_write(error)) is not None:
        if isinstance(error, OSError) and error.filename is None:  # standard output may be a file on the full disk
            _discard_output()
        error = RunError(reason)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = ConfigError(f"there is no file '{str(error.filename)[:60]}…': its name would be too long")
    if invocation.debug:
        traceback.print_exception(error)
    line = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, KeyboardInterrupt):  # a run's message names its checkpoint and how to resume
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # else: a program ended after the event loop
        _print(": ".join(filter(None, ("interrupted", line))))
        return 128 + signal.SIGINT
    if isinstance(error, EnvgymError):
        _print(f"error: {line}")
        return 2
    place = "above" if invocation.debug else f"in {_write_traceback(error, invocation.folder)}"
    if line_of_user := user_line(error):
        _print(f"error: {line_of_user}: {type(error).__name__}: {line} (the traceback is {place})")
        return 2
    _print(f"error: unexpected {type(error).__name__}: {line} (a mistake in envgym; the traceback is {place})")
    return 1


def _missing_extra(error: ModuleNotFoundError, command: str) -> EnvgymError | None:
    """The error for a package that an extra of envgym installs, by envgym's metadata; None for any other."""
    module = (error.name or "").partition(".")[0]
    for requirement in importlib.metadata.requires("envgym") or ():
        match = re.match(r"([\w.-]+).*extra == [\"']([\w-]+)[\"']", requirement)
        if match and match[2] != "dev" and match[1].replace("-", "_") == module:
            return missing_package(match[1], match[2], command)
    return None


def _discard_output() -> None:
    """Redirect standard output to /dev/null, since the interpreter's final flush would fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone() -> bool:
    """True if standard output is a pipe without a reader: a BrokenPipeError may come from another pipe."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # no standard output at all
        return True


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # without a reader the exit status still tells
        print(f"envgym: {loggable(line)}", file=sys.stderr, flush=True)


def _write_traceback(error: BaseException, folder: Path | None) -> Path:
    """Write the traceback into the run's folder, else into a temporary file, so that the error stays one line."""
    import tempfile

    text = "".join(traceback.format_exception(error))
    if folder is not None and folder.is_dir():
        path = folder / "error.log"
        with contextlib.suppress(OSError):  # on a full disk, say, use the temporary folder
            path.write_text(text, encoding="utf-8")
            return path
    with tempfile.NamedTemporaryFile("w", prefix="envgym-", suffix=".log", delete=False, encoding="utf-8") as file:
        file.write(text)
    return Path(file.name)
