"""Where NeMo-Gym's servers are, by what its config says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
DEPTH = 5
"""How often what is referred to may refer on."""
WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that a server listens on and nobody can call: it is where its head server is."""


def url_of(host: str, port: int, head: str) -> str:
    """The URL of a server that `head`, the URL of a head server, says is at `host` and `port`."""
    if host in WILDCARDS:
        host = urlsplit(head).hostname or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def resolved(value: Any, config: Mapping[str, Any], depth: int = DEPTH) -> Any:
    """A value of a config in which `${another.key}` stands for what is there. A head server tells of its config as
    it was written. What refers to nothing stays as it is."""
    if isinstance(value, list):
        return [resolved(one, config, depth) for one in value]
    if not isinstance(value, str) or depth == 0:
        return value
    if whole := _REFERENCE.fullmatch(value):
        found: Any = config
        for key in whole[1].split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return value if found is None else resolved(found, config, depth - 1)
    return _REFERENCE.sub(lambda part: str(resolved(part[0], config, depth - 1)), value)
