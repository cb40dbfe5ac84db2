"""What NeMo-Gym's servers say of themselves and of a sample, for all that speak with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

FAILURE_CLASS = "_ng_failure_class"
"""The field of a rollout that failed, and of an answer that a server's own guards gave beside a reward of zero."""
WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that a server listens on and nobody can call: it is where its head server is."""
DEPTH = 5
"""How often what is referred to may refer on."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def void_kind(answer: Mapping[str, Any]) -> str | None:
    """The kind of failure for which an answer says that the sample counts for nothing, whatever its reward; None where
    it says no such thing."""
    masked, kind = answer.get("mask_sample"), answer.get(FAILURE_CLASS) or answer.get("failure_kind")
    # A kind alone voids the sample; with `mask_sample` false it is a remark on one that was measured all the same.
    if masked is True or answer.get(FAILURE_CLASS) or (kind and masked is None):
        return re.sub(r"\W+", "_", str(kind or "masked"))[:60]
    return None


def number(value: Any) -> float | None:
    """A finite number as JSON has it, truth among them; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


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
