"""The boundary to users' code, which tells its errors from a cancellation of the code around it."""

from __future__ import annotations

from types import TracebackType

from envgym.errors import InvalidOutcome
from envgym.loading import user_line
from envgym.processes.cancellation import is_shutdown


class UsersCode:
    """Context manager around users' code: `with UsersCode() as call:`.

    It catches every exception, `SystemExit` included, and stores it in `call.error`. Two kinds pass: errors of the
    classes `passing`, and shutdown (a cancellation of the surrounding task, Ctrl-C).
    """

    error: BaseException
    """The error that ended the block; unset if there was none."""

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


def environment_failure(error: BaseException) -> InvalidOutcome:
    """The failure of an episode whose environment raised `error`; the message names the line of the user's code."""
    location = f" ({line})" if (line := user_line(error)) else ""
    name = type(error).__name__
    message = f"{name}: {str(error) or name}{location}"
    return InvalidOutcome("environment", message, retryable=bool(getattr(error, "retryable", False)))
