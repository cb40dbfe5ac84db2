"""Addresses to listen on: who can reach them, and what is said where one cannot be had."""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket

from envgym.errors import ConfigError


def listen(host: str, port: int, *, refusal: str | None) -> socket.socket:
    """A socket bound to an address, not yet accepting: clients are refused until the server is ready.

    An empty host is every address; port 0 takes a free one. With a `refusal`, its words, only loopback addresses are
    taken. Raises `ConfigError` for one that others can reach then, and for one that cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"cannot serve on port {port}: ports go from 1 to 65535, and 0 takes a free one")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
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


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address, or the name `localhost`, is this machine's own. Other names are not looked up."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
