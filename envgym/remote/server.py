"""`envgym serve`: one environment over HTTP, on this machine only."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.services import Policy, start_services

from .application import Application


async def serve(spec: EnvSpec, host: str, port: int, *, on_ready: Callable[[str], None]) -> None:
    """Serve `spec` at `host:port` until SIGINT or SIGTERM, then finish what runs and close everything.

    `on_ready` gets the URL once the server answers; port 0 picks a free one. A second signal ends it at once.

    Raises `ConfigError` for an address that is taken, unknown or not this machine's loopback, and for an
    environment that cannot be served yet.
    """
    check_servable(spec)
    stopping = asyncio.Event()
    with listen(host, port) as listener, stop_signals(stopping):
        async with start_services(spec), Application(spec).running(listener):
            bound, bound_port = listener.getsockname()[:2]
            on_ready(f"http://[{bound}]:{bound_port}" if ":" in bound else f"http://{bound}:{bound_port}")
            await stopping.wait()


def check_servable(spec: EnvSpec) -> None:
    """Raise `ConfigError` for what a client would silently play differently from the local environment."""
    if opponents := [name for name, service in spec.services.items() if isinstance(service, Policy)]:
        raise ConfigError(
            f"environment {spec.id} plays against the policy in training ({opponents[0]}), which is not here: give it "
            "another model, or train without a server"
        )
    if judging := [part.id for part in spec.parts() if type(part).score_group is not EnvSpec.score_group]:
        raise ConfigError(f"environment {judging[0]} scores groups of episodes: that cannot be served over HTTP yet")


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to a loopback address, not yet accepting: clients are refused until the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError):
        raise ConfigError(f"cannot serve on {host}:{port}: no such address; use --host 127.0.0.1") from None
    if not host or not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"refusing to serve on {host or 'every address'}: whoever can reach it could use the environment, and "
            "tokens come in a later version; use --host 127.0.0.1, and an SSH tunnel from other machines"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(f"cannot serve on {host}:{port}: {reason}; choose another --port, or 0 for any") from None
    return listener


@contextlib.contextmanager
def stop_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Set `stopping` at the first SIGINT or SIGTERM; the second has its usual effect."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def stop() -> None:
        restore()
        stopping.set()

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        restore()
