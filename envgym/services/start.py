"""Starts the services that an environment declares, and ends them on every exit."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from envgym.errors import ConfigError, EnvgymError
from envgym.processes.local import LocalRuntime

from .client import Client
from .declarations import Chat, Policy, RewardEndpoint, RewardModel, Service

if TYPE_CHECKING:
    from envgym.env import EnvSpec
    from envgym.processes.runtime import Runtime

    from .policy import PolicyEngine

WORKER = "service-{}"
"""The name of a service's worker."""


class Services:
    """The clients of the services of an environment and its parts. Made by `start_services`."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients

    @property
    def names(self) -> list[str]:
        """The services' names; equal ones are one."""
        return list(self._clients)

    async def start(self) -> None:
        """Start every service that is not running yet."""
        for client in self._clients.values():  # sequentially: each looks for the device with the most free memory
            await client.start()

    def bind_policy(self, bound: PolicyEngine) -> None:
        """Let `Policy` services sample this engine."""
        from .policy import PolicyClient

        for client in self._clients.values():
            if isinstance(client, PolicyClient):
                client.bind(bound)

    @property
    def counters(self) -> Counter[str]:
        """The services' counters, as `NAME/requests` and so on."""
        return Counter(
            {f"{name}/{counter}": n for name, client in self._clients.items() for counter, n in client.counters.items()}
        )

    async def close(self) -> None:
        """End every service. Safe to call twice."""
        await asyncio.gather(*(client.close() for client in self._clients.values()), return_exceptions=True)


@asynccontextmanager
async def start_services(
    spec: EnvSpec, runtime: Runtime | None = None, *, deterministic: bool = False, eager: bool = True
) -> AsyncIterator[Services]:
    """Fill `spec.clients` (and those of its parts), set the environment up and start its services; close all on exit.

    Workers start in `runtime`, by default as processes of this machine. With `eager` false a service starts at its
    first use or at `Services.start`. `deterministic`: a reward model's score of a conversation does not depend on
    concurrent ones. `Policy` services answer once `Services.bind_policy` was called.

    Raises `EnvgymError` for an environment or a service that cannot be set up.
    """
    clients: dict[str, Client] = {}
    services = Services(clients)
    async with AsyncExitStack() as stack:
        workers = runtime or (await stack.enter_async_context(temporary_runtime("services")))[0]
        stack.push_async_callback(services.close)
        _make_clients(spec, clients, workers, deterministic)
        await stack.enter_async_context(spec)
        # Before the environment's teardown, so that no service outlives what it calls.
        stack.push_async_callback(services.close)
        if eager:
            await services.start()
        yield services


@asynccontextmanager
async def temporary_runtime(name: str) -> AsyncIterator[tuple[LocalRuntime, str]]:
    """A runtime for processes of this machine, and the folder of their logs, which is deleted at the end, except after
    an error that names it."""
    logs = tempfile.mkdtemp(prefix=f"envgym-{name}-")
    runtime, is_named = LocalRuntime(logs), False
    try:
        yield runtime, logs
    except EnvgymError as error:
        is_named = logs in str(error)
        raise
    finally:
        await runtime.close()
        if not is_named:
            shutil.rmtree(logs, ignore_errors=True)


def _make_clients(spec: EnvSpec, clients: dict[str, Client], runtime: Runtime, deterministic: bool) -> None:
    """Give an environment and its parts their clients, equal declarations the same one, and add them to `clients`."""
    by_key: dict[str, Client] = {}
    for unique, declared in _declared(spec).items():
        by_key[declared.key] = clients[unique] = _client(declared, unique, runtime, deterministic)
    for part in with_parts(spec):
        for name, declared in part.services.items():
            part.clients[name] = by_key[declared.key]


def local_models(spec: EnvSpec) -> dict[str, RewardModel]:
    """An environment's reward models, which become workers, by the name of the worker; its ranks are NAME-0, NAME-1, …
    if there are several."""
    declared = _declared(spec).items()
    return {WORKER.format(name): service for name, service in declared if isinstance(service, RewardModel)}


def check_servable(spec: EnvSpec) -> None:
    """Raise `ConfigError` for an environment that would behave differently on a server."""
    refuse_policies(spec, "which is not here: give it another model, or train without a server")


def refuse_policies(spec: EnvSpec, reason: str) -> None:
    """Raise `ConfigError`, which gives the `reason`, for an environment that asks the policy in training."""
    for part in with_parts(spec):
        if names := [name for name, service in part.services.items() if isinstance(service, Policy)]:
            raise ConfigError(f"environment {part.id} asks the policy itself ({', '.join(names)}), {reason}")


def _declared(spec: EnvSpec) -> dict[str, Service]:
    """The services of an environment and its parts by unique names, equal ones once."""
    services: dict[str, Service] = {}
    for part in with_parts(spec):
        for name, declared in part.services.items():
            if declared.key not in [service.key for service in services.values()]:
                services[name if name not in services else f"{name}-{len(services)}"] = declared
    return services


def with_parts(spec: EnvSpec) -> Iterator[EnvSpec]:
    """An environment and its parts, in the same order in every process."""
    yield spec
    for part in spec.parts():
        if part is not spec:
            yield from with_parts(part)


def _client(declared: Service, name: str, runtime: Runtime, deterministic: bool) -> Client:
    """A new client of a declared service, not started yet. Raises `ConfigError` for another kind of service."""
    if isinstance(declared, RewardModel):
        from .reward import RewardModelClient

        return RewardModelClient(declared, WORKER.format(name), runtime, deterministic=deterministic)
    if isinstance(declared, RewardEndpoint):
        from .reward import RewardEndpointClient

        return RewardEndpointClient(declared)
    if isinstance(declared, Chat):
        from .chat import OpenAIChatClient

        return OpenAIChatClient(declared)
    if isinstance(declared, Policy):
        from .policy import PolicyClient

        return PolicyClient(name)
    raise ConfigError(f"service {name}: {type(declared).__name__} cannot be started")
