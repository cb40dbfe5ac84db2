"""Listening on an address: loopback or public, TLS, and the signals that end it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import signal
import socket
import ssl
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError

NEEDS_TOKENS = (
    "without tokens: whoever can reach it could use the environment; give --token-file F, or use --host 127.0.0.1 and "
    "an SSH tunnel from other machines"
)
"""The refusal of a server of environments that takes tokens and was given none."""


def listen(host: str, port: int, *, refusal: str | None) -> socket.socket:
    """A socket bound to an address, not yet accepting: connections are rejected until the server is ready.

    An empty host means every address; port 0 takes a free port. With a `refusal` (the end of the message) only loopback
    addresses are allowed. Raises `ConfigError` for another address then, and for one that cannot be bound.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"cannot serve on port {port}: ports go from 1 to 65535, and 0 takes a free one")
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"cannot serve on {host}:{port}: no such address; use 127.0.0.1") from None
    if refusal is not None and not is_loopback(str(address[0])):
        raise ConfigError(f"refusing to serve on {host or 'every address'} {refusal}")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        listener.bind(address)
    except OSError as error:
        listener.close()
        choose = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot serve on {host}:{port}: {reason}; choose another {choose}") from None
    return listener


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """The URL of a listener."""
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """True for a loopback address and the name `localhost`. Other names are not resolved."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context of a certificate (with its chain) and its key, both PEM; None without either. Raises
    `ConfigError` if unusable."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS takes both files, the certificate (tls-cert) and its key (tls-key)")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")  # without a prompt for a pass phrase
    except (OSError, ssl.SSLError):
        missing = next((file for file in (cert, key) if not file.is_file()), None)
        form = "the certificate and its own key, both PEM, the key without a pass phrase"
        problem = f"{missing} is not there" if missing else f"{cert} and {key} are not {form}"
        raise ConfigError(f"TLS: {problem}") from None
    return context


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that is set at the first SIGINT or SIGTERM; the second has its default effect."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
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
        yield stopping
    finally:
        restore()


async def until_stopped(work: Coroutine[Any, Any, object], stopping: asyncio.Event) -> bool:
    """Wait for the end of `work`, or cancel it when `stopping` is set. Returns True if it ended by itself; raises its
    error."""
    tasks = working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        stopped.cancel()
        await asyncio.wait(tasks)
    if working.cancelled():
        return False
    working.result()
    return True
