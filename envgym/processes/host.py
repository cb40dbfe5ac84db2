"""A worker object in its process, and the calls that run on it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import traceback
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .cancellation import is_shutdown
from .runtime import ErrorRecord, close_object, describe_error, load_target
from .watchdog import CallWatch, watched_thread

Answer = tuple[ErrorRecord | None, Any]
"""The error of a call, or its result."""
CallId = tuple[Hashable, int]
"""The caller of a call, and the call's number among the caller's."""


class Host:
    """One worker object and its running calls. It does not know who brings it the messages and takes the answers."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._tasks: dict[CallId, asyncio.Task[None]] = {}
        self._watch = CallWatch()

    def start(self, target: str, kwargs: Mapping[str, Any]) -> Answer:
        """Build the worker. The result is the process's id."""
        try:
            self._worker = load_target(target)(**kwargs)
        except Exception as error:
            return _failure(error)
        # Objects made so far are permanent: without the freeze every full collection traverses all of them.
        gc.collect()
        gc.freeze()
        return None, os.getpid()

    def run(
        self,
        number: CallId,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        answer: Callable[[Answer], None],
    ) -> None:
        """Start a call: a plain method runs immediately, a coroutine as a concurrent task. `answer` is called once; it
        may raise an error for a result that cannot be sent, which becomes the answer."""
        try:
            with watched_thread(function := getattr(self._worker, method)):
                result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(self._finish(method, result, answer))
                self._tasks[number] = task
                task.add_done_callback(lambda _: self._tasks.pop(number))
            else:
                answer((None, result))
        except Exception as error:
            answer(_failure(error))

    async def _finish(self, method: str, result: Any, answer: Callable[[Answer], None]) -> None:
        try:
            with self._watch.watching(method):
                answer((None, await result))
        except BaseException as error:
            if isinstance(error, SystemExit | KeyboardInterrupt) or is_shutdown(error):
                raise
            answer(_failure(error))

    def cancel(self, number: CallId) -> None:
        """Cancel a call, unless it has ended. It gets no answer."""
        if number in self._tasks:
            self._tasks[number].cancel()

    def cancel_all(self, caller: Hashable) -> None:
        """Cancel the calls of a caller, unless they are: a second time would interrupt what they do at their end."""
        for number, task in self._tasks.items():
            if number[0] is caller and not task.cancelling():
                task.cancel()

    async def close(self) -> None:
        await close_object(self._worker)


def _failure(error: BaseException) -> Answer:
    traceback.print_exception(error)
    return describe_error(error), None
