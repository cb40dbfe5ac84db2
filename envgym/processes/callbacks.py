"""Calls that a worker makes while one of its methods runs, of objects in the process that called the method: a service
runs there once, with its limits, for all workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from envgym.errors import EnvgymError

from .cancellation import pause_timeouts, report_pauses, start_task
from .event_loop import in_loop
from .runtime import ErrorRecord, Result, WorkerHandle, describe_error, rebuild_error

SUBJECT: ContextVar[int] = ContextVar("SUBJECT")
"""The number of the subject (an instance, an episode) that the running code belongs to. Its requests are separate."""
Request = tuple[int, str, str, Any, Any]
"""A call: its number, the object, the method and its arguments. Without an object it cancels the call."""
NO_REQUEST: Request = (-1, "", "", (), {})
POLL_SECONDS = 300.0
"""Seconds after which a worker answers that there is no request: a call that lasts longer is taken for a slow one."""
Event = bool | tuple[ErrorRecord | None, Any]
"""The answer to a call, its error or its result; or whether the deadlines around it pause from now on."""
CallingBack = TypeVar("CallingBack", bound="CallsBack")


class CallsBack:
    """Base of workers that call objects of the process that called them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._requests: defaultdict[int, asyncio.Queue[Request | None]] = defaultdict(asyncio.Queue)
        self._answers: dict[int, asyncio.Queue[Event]] = {}

    async def ask(self, name: str, method: str, args: Any, kwargs: Any) -> Any:
        """Let the calling process call a method for the running subject. Raises what that raised, and pickle's error
        for arguments that cannot be sent."""
        pickle.dumps((args, kwargs))
        number, requests = next(self._numbers), self._requests[SUBJECT.get()]
        events = self._answers[number] = asyncio.Queue()
        requests.put_nowait((number, name, method, args, kwargs))
        event: Event = False
        try:
            while isinstance(event, bool):
                with pause_timeouts() if event else contextlib.nullcontext():
                    event = await events.get()
        except asyncio.CancelledError:
            requests.put_nowait((number, "", "", (), {}))
            raise
        finally:
            del self._answers[number]
        error, result = event
        if error is not None:
            raise rebuild_error(error, "service", Path())
        return result

    async def next_request(self, subject: int) -> Request | None:
        """The next call of a subject. None once the subject's method has returned."""
        try:
            async with asyncio.timeout(POLL_SECONDS):
                request = await self._requests[subject].get()
        except TimeoutError:
            return NO_REQUEST
        if request is None:
            del self._requests[subject]
        return request

    def begin_requests(self, subject: int) -> None:
        """The running method is for this subject: what a cancelled one has left is no request of it."""
        SUBJECT.set(subject)
        self._requests.pop(subject, None)

    def end_requests(self, subject: int) -> None:
        """No more calls come from the method that runs for a subject."""
        self._requests[subject].put_nowait(None)

    def answer(self, number: int, event: Event) -> None:
        """An answer to a call, or a pause."""
        if number in self._answers:  # else the call was cancelled
            self._answers[number].put_nowait(event)


class ForwardingClient:
    """An object of the process that calls a worker, for the worker's code. Its methods may be called in any event
    loop."""

    def __init__(self, worker: CallsBack, name: str) -> None:
        self._worker, self._name, self._loop = worker, name, asyncio.get_running_loop()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await in_loop(self._loop, self._worker.ask(self._name, method, args, kwargs))

        return call


async def call_with_answers(
    handle: WorkerHandle[CallingBack],
    subject: int,
    objects: Mapping[str, Any],
    call: Callable[[CallingBack], Awaitable[Result]],
) -> Result:
    """Call a method of a worker for a subject, and answer its calls of `objects` meanwhile. These run in the caller's
    context, so that they can stop the clocks of its deadlines, and those of the deadlines around the worker's calls.
    The method calls `begin_requests` and `end_requests`."""
    answering = asyncio.create_task(answer_calls(handle, subject, objects)) if objects else None
    try:
        result = await handle.call(call)
        if answering is not None:
            await answering  # the worker ends it
        return result
    finally:
        if answering is not None:
            answering.cancel()
            await asyncio.wait({answering})


async def answer_calls(handle: WorkerHandle[CallingBack], subject: int, objects: Mapping[str, Any]) -> None:
    """Answer a subject's calls until its method has returned, or its worker has died."""
    answering: dict[int, asyncio.Task[None]] = {}
    try:
        with contextlib.suppress(EnvgymError):  # of a worker that died: the method's own call raises it
            while (request := await handle.call(lambda worker: worker.next_request(subject))) is not None:
                number, name, *call = request
                if name:
                    answering[number] = task = asyncio.create_task(_answer(handle, number, objects[name], *call))
                    task.add_done_callback(lambda _, number=number: answering.pop(number, None))  # type: ignore[misc]
                elif number in answering:
                    answering[number].cancel()
    finally:
        for task in answering.values():
            task.cancel()


async def _answer(
    handle: WorkerHandle[CallingBack], number: int, target: Any, method: str, args: Any, kwargs: Any
) -> None:
    loop, sending = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def send(event: Event) -> None:
        with contextlib.suppress(EnvgymError):
            await handle.run(lambda worker: worker.answer(number, event))

    def report(is_paused: bool) -> None:
        if asyncio.get_running_loop() is loop:
            start_task(send(is_paused), sending)

    error, result = None, None
    try:
        with report_pauses(report):
            result = await getattr(target, method)(*args, **kwargs)
    except Exception as raised:
        error = describe_error(raised)
    await send((error, result))
