"""The instances of an environment in one of its processes (`env.processes`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from envgym.errors import EnvgymError
from envgym.processes.callbacks import CallsBack, ForwardingClient
from envgym.processes.cancellation import UsersCode
from envgym.types import Action

from .marks import Marked, Marks
from .protocol import CheckedEnv, environment_failure

if TYPE_CHECKING:
    from .spec import EnvSpec

T = TypeVar("T")


class EnvHost(CallsBack):
    """Makes, steps and closes instances, by their numbers, of the spec that `make_spec` makes. It is a worker like
    others: a `processes.host.Host` runs its methods.
    `clients` are the names of the services that the run's own process calls for them; `marks` is the folder of the file
    that tells which instance's code ended the process."""

    def __init__(self, make_spec: Callable[[], EnvSpec], clients: Sequence[str], marks: Path) -> None:
        super().__init__()
        self._spec = make_spec()
        self._marks = Marks(marks)
        self._spec.clients = {name: ForwardingClient(self, name) for name in clients}
        self._envs: dict[int, CheckedEnv] = {}

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
        self.begin_requests(instance)
        try:
            with UsersCode() as users:
                return await Marked(call, self._marks, instance)
        finally:
            if self._spec.clients:
                self.end_requests(instance)
        error = users.error
        raise error if isinstance(error, EnvgymError) else environment_failure(error)


async def _close_none() -> None:
    """The closing of an instance that was never made."""
