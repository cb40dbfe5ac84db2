"""Instances in separate processes (`env.processes`): a crash of one ends episodes, not the run."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import CallTimeout, InvalidOutcome
from envgym.processes.callbacks import call_with_answers
from envgym.processes.cancellation import call_in_time, pause_timeouts
from envgym.processes.pool import Processes, ProcessSession
from envgym.processes.runtime import message_of
from envgym.types import Action, Observation

from .marks import may_have_ended
from .protocol import CheckedEnv, Env, with_files

if TYPE_CHECKING:
    from .host import EnvHost
    from .spec import EnvSpec

HOST = "envgym.env.host:EnvHost"
NO_LIMIT = 1e9
"""Seconds that no call takes."""
HostCall = Callable[["EnvHost"], Awaitable[Any]]
"""A call of an instance."""


class EnvProcesses:
    """The processes that hold an environment's instances."""

    def __init__(self, spec: EnvSpec) -> None:
        description = json.loads(spec.to_json())
        # The run's process has the deadlines, whose clocks its services can stop.
        description["kwargs"] |= {"processes": 0, "call_timeout": NO_LIMIT, "concurrency": None}
        self.marks = tempfile.TemporaryDirectory(prefix="envgym-marks-")
        kwargs = {
            "make_spec": partial(type(spec).from_json, json.dumps(description)),
            "clients": [*spec.clients],
            "marks": Path(self.marks.name),
        }
        self.pool: Processes[EnvHost] = Processes(HOST, kwargs, count=spec.config.processes, name="environment")

    async def close(self) -> None:
        await self.pool.close()
        self.marks.cleanup()


class ProcessEnv(CheckedEnv):
    """The checks of an instance in another process, which has deadlines for its calls there, and checks their images.

    If its code ends the process, the episode fails (`crash`). If that of another instance does, this one is built again
    in another process, by its seed and actions. It must then give the same observations and rewards.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(Instance(spec), spec)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    async def _with_files(self, observation: Observation) -> Observation:
        return observation


class Instance(Env):
    """One episode at a time of an instance in another process."""

    _numbers = itertools.count()

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._id = next(self._numbers)
        self._processes: EnvProcesses | None = None
        self._session: ProcessSession[EnvHost] | None = None
        self._history: list[tuple[HostCall, Any]] = []
        """The calls of the running episode, each with its result without its info."""
        self._n_repeated = 0
        """The first calls of the episode that the session's process has answered."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        if self._processes is not self.spec.instance_processes:  # the spec may be set up again
            self._session, self._processes = None, self.spec.instance_processes
        self._history, self._n_repeated = [], 0
        # That of the caller, and not the task's as `seed` may be: the process's own checks choose.
        reset_seed, self._np_random = self._np_random, None
        host_seed = reset_seed if isinstance(reset_seed, int) else random.getrandbits(31)
        return await self._ask(lambda host: host.reset(self._id, host_seed, options or {}))

    async def step(self, action: Action) -> Any:
        return await self._ask(lambda host: host.step(self._id, action))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close(lambda: self._call_in(session, lambda host: host.close_instance(self._id)))

    async def _ask(self, call: HostCall) -> Any:
        """Call a method of the instance, in a living process."""
        while True:
            session = await self._living_session()
            try:
                await self._repeat_history(session)
                observation, *items = await self._call_in(session, call)
                # A process may send what it likes: its images are read to the end here, and hashed anew.
                result = (await with_files(self.spec, observation), *items)
                break
            except (InvalidOutcome, CallTimeout) as failure:
                if isinstance(failure, InvalidOutcome) and failure.kind != "crash":
                    raise
                await session.wait_for_check()  # after a timeout: a process that is stuck is killed
                marks = Path(self.spec.instance_processes.marks.name)
                if session.alive or may_have_ended(marks, session.pid, self._id):
                    raise
        self._history.append((call, result[:-1]))
        self._n_repeated += 1
        return result

    async def _living_session(self) -> ProcessSession[EnvHost]:
        """The instance's session; a new one if its process has died."""
        if self._session is not None:
            await self._session.wait_for_check()
            if self._session.alive:
                return self._session
        await self.close()
        session = self._session = await self.spec.instance_processes.pool.session()
        self._n_repeated = 0
        with pause_timeouts():  # the set-up of a process is not the episode's time
            await session.call(lambda host: host.setup())
        return session

    async def _repeat_history(self, session: ProcessSession[EnvHost]) -> None:
        """Repeat the calls of the episode that an earlier process had answered."""
        for call, result in self._history[self._n_repeated :]:
            if (await self._call_in(session, call))[:-1] != result:
                message = "its process died, and in another one the same actions gave another result"
                raise InvalidOutcome("crash", f"{self.spec.id}: {message}", retryable=True)
            self._n_repeated += 1

    async def _call_in(self, session: ProcessSession[EnvHost], call: HostCall) -> Any:
        """Call a method of the instance under the environment's deadline, and answer its calls of services."""
        name = f"{self.spec.id}: {message_of(call)[0]}"
        calling = call_with_answers(session, self._id, self.spec.clients, call)
        return await call_in_time(calling, self.spec.config.call_timeout, name)
