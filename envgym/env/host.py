"""The instances of an environment in one of its processes (`env.processes`)."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from envgym.errors import EnvgymError
from envgym.processes.cancellation import UsersCode
from envgym.processes.event_loop import in_loop
from envgym.processes.runtime import ErrorRecord, rebuild_error
from envgym.types import Action

from .marks import Marked, Marks
from .protocol import CheckedEnv, environment_failure

if TYPE_CHECKING:
    from .spec import EnvSpec

T = TypeVar("T")
INSTANCE: ContextVar[int] = ContextVar("INSTANCE")
"""The instance that the running code belongs to."""


class EnvHost:
    """Makes, steps and closes instances, by their numbers, of the spec that `read` makes of its `description`. It is a
    worker like others: a `processes.host.Host` runs its methods.
    `clients` are the names of the services that the run's own process calls for them; `marks` is the folder of the file
    that tells which instance's code ended the process."""

    def __init__(self, read: Callable[[str], EnvSpec], description: str, clients: Sequence[str], marks: str) -> None:
        self._spec = read(description)
        self._marks = Marks(Path(marks))
        self._spec.clients = {name: ForwardingClient(self, name) for name in clients}
        self._envs: dict[int, CheckedEnv] = {}
        self._numbers = itertools.count()
        self._requests: defaultdict[int, asyncio.Queue[tuple[Any, ...] | None]] = defaultdict(asyncio.Queue)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def setup(self) -> None:
        """Set the spec up, once."""
        await self._spec.ensure_setup()

    async def reset(self, instance: int, seed: int | None, options: Mapping[str, Any]) -> Any:
        if instance not in self._envs:
            self._envs[instance] = self._spec.make()
        return await self._call(instance, self._envs[instance].reset(seed=seed, options=options))

    async def step(self, instance: int, action: Action) -> Any:
        return await self._call(instance, self._envs[instance].step(action))

    async def close_instance(self, instance: int) -> None:
        env = self._envs.pop(instance, None)
        await self._call(instance, _close_none() if env is None else env.close())

    async def close(self) -> None:
        await self._spec.close()

    async def _call(self, instance: int, call: Coroutine[Any, Any, T]) -> T:
        """Await a method of an instance. An error of the environment becomes an `InvalidOutcome` with its line, since
        its class may not exist in the run's process."""
        INSTANCE.set(instance)
        try:
            with UsersCode() as users:
                return await Marked(call, self._marks, instance)
        finally:
            if self._spec.clients:
                self._requests[instance].put_nowait(None)
        error = users.error
        raise error if isinstance(error, EnvgymError) else environment_failure(error)

    async def ask(self, client: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let the run's process call a service for the running instance. Raises what the service raised, and pickle's
        error for arguments that cannot be sent."""
        pickle.dumps((args, kwargs))
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._requests[INSTANCE.get()].put_nowait((number, client, method, args, kwargs))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def next_request(self, instance: int) -> tuple[Any, ...] | None:
        """The next call of a service by an instance: its number, the service, the method and its arguments. None once
        the instance's method has returned."""
        request = await self._requests[instance].get()
        if request is None:
            del self._requests[instance]
        return request

    def answer(self, number: int, error: ErrorRecord | None, result: Any) -> None:
        """The result of a call, or its error."""
        future = self._answers.get(number)
        if future is None or future.done():
            return  # the call was cancelled
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(rebuild_error(error, "service", Path()))


class ForwardingClient:
    """A service's client whose methods run in the run's own process. They may be called in any event loop."""

    def __init__(self, host: EnvHost, name: str) -> None:
        self._host, self._name, self._loop = host, name, asyncio.get_running_loop()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await in_loop(self._loop, self._host.ask(self._name, method, args, kwargs))

        return call


async def _close_none() -> None:
    """The closing of an instance that was never made."""
