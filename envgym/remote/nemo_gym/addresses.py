"""Where NeMo-Gym's servers are, by what its config says of them."""

from __future__ import annotations

from urllib.parse import urlsplit

WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that a server listens on and nobody can call: it is where its head server is."""


def url_of(host: str, port: int, head: str) -> str:
    """The URL of a server that `head`, the URL of a head server, says is at `host` and `port`."""
    if host in WILDCARDS:
        host = urlsplit(head).hostname or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
