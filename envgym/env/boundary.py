"""The boundary to users' code: the one place that tells what it raised from what ends the code that runs here."""

from __future__ import annotations

from types import TracebackType

from envgym.processes.cancellation import is_shutdown


class UsersCode:
    """`with UsersCode() as call:` around users' code, which may raise anything at all, also what ends a program.

    What it raises is kept in `call.error`, and the code behind the block goes on. Raised on are the errors that are
    `passing`, and what ends the code that runs here: its own cancellation, or Ctrl-C.
    """

    error: BaseException
    """The error that ended the block; not there where it ended by itself."""

    def __init__(self, *passing: type[BaseException]) -> None:
        self._passing = passing

    def __enter__(self) -> UsersCode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, self._passing) or is_shutdown(error):
            return False
        self.error = error
        return True
