"""Starting what an environment declares, and ending it on every way out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from envgym.errors import ConfigError, WorkerError

from .client import Client
from .declarations import Chat, Policy, RewardEndpoint, RewardModel, Service

if TYPE_CHECKING:
    from envgym.engines.base import Engine
    from envgym.env import EnvSpec
    from envgym.render import Renderer
    from envgym.workers.runtime import Runtime


class Services:
    """The clients of an environment's services, and of its parts'. Made by `start_services`."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients

    @property
    def names(self) -> list[str]:
        """What the services are called; equal ones are one."""
        return list(self._clients)

    @property
    def of_policy(self) -> list[str]:
        """Those of the names that are the policy itself."""
        from .policy import PolicyClient

        return [name for name, client in self._clients.items() if isinstance(client, PolicyClient)]

    async def start(self) -> None:
        """Start every service that is not running yet."""
        for client in self._clients.values():  # one after the other: each looks for a device with room
            await client.start()

    def bind_policy(
        self, renderer: Renderer, engine: Engine, max_model_len: int, *, deterministic: bool = False, seed: int = 0
    ) -> None:
        """Let `Policy` services sample this engine."""
        from .policy import Bound, PolicyClient

        for client in self._clients.values():
            if isinstance(client, PolicyClient):
                client.bind(Bound(renderer, engine, max_model_len, deterministic, seed))

    @property
    def counters(self) -> Counter[str]:
        """What the services counted, as `NAME/requests` and so on."""
        return Counter(
            {f"{name}/{what}": n for name, client in self._clients.items() for what, n in client.counters.items()}
        )

    async def close(self) -> None:
        """End every service. Safe to call twice."""
        await asyncio.gather(*(client.close() for client in self._clients.values()), return_exceptions=True)


@asynccontextmanager
async def start_services(
    spec: EnvSpec, runtime: Runtime | None = None, *, deterministic: bool = False, now: bool = True
) -> AsyncIterator[Services]:
    """Fill `spec.clients` (and those of its parts), set the environment up and start its services; end all of it.

    Workers start in `runtime`, by default as processes of this machine. With `now` false a service starts when it is
    first used or `Services.start` is called. `deterministic`: what a reward model says of a conversation does not
    depend on what else it is asked. `Policy` services answer once `Services.bind_policy` was called.

    Raises `EnvgymError` for an environment or a service that cannot be set up.
    """
    workers = _Workers(runtime)
    clients: dict[str, Client] = {}
    by_key: dict[str, Client] = {}
    try:
        for part in _with_parts(spec):
            for name, declared in part.services.items():
                if declared.key not in by_key:
                    unique = name if name not in clients else f"{name}-{len(clients)}"
                    client = _client(declared, unique, workers.runtime, deterministic)
                    by_key[declared.key] = clients[unique] = client
                part.clients[name] = by_key[declared.key]
        services = Services(clients)
        async with spec:
            try:
                if now:
                    await services.start()
                yield services
            finally:
                # Before the environment's teardown, so that nothing calls into what is gone.
                await services.close()
    except WorkerError:
        workers.keep_logs()  # the error names one
        raise
    finally:
        await Services(clients).close()
        await workers.close()


def _with_parts(spec: EnvSpec) -> Iterator[EnvSpec]:
    yield spec
    for part in spec.parts():
        if part is not spec:
            yield from _with_parts(part)


class _Workers:
    """The runtime that was given, or one of our own that is made when it is needed."""

    def __init__(self, runtime: Runtime | None) -> None:
        self._given = runtime
        self._own: Runtime | None = None
        self._logs = ""
        self._keep_logs = False

    def runtime(self) -> Runtime:
        if self._given is not None:
            return self._given
        if self._own is None:
            from envgym.workers.local import LocalRuntime

            self._logs = tempfile.mkdtemp(prefix="envgym-services-")
            self._own = LocalRuntime(self._logs)
        return self._own

    def keep_logs(self) -> None:
        self._keep_logs = True

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()
            if not self._keep_logs:
                shutil.rmtree(self._logs, ignore_errors=True)


def _client(declared: Service, name: str, runtime: Callable[[], Runtime], deterministic: bool) -> Client:
    if isinstance(declared, RewardModel):
        from .reward import RewardModelClient

        return RewardModelClient(declared, f"service-{name}", runtime, deterministic=deterministic)
    if isinstance(declared, RewardEndpoint):
        from .reward_endpoint import RewardEndpointClient

        return RewardEndpointClient(declared)
    if isinstance(declared, Chat):
        from .chat import OpenAIChatClient

        return OpenAIChatClient(declared)
    if isinstance(declared, Policy):
        from .policy import PolicyClient

        return PolicyClient(name)
    raise ConfigError(f"service {name}: {type(declared).__name__} is not something that can be started")
