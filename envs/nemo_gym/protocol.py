"""NeMo-Gym's protocol: the fields of rows and answers, and the config that names its servers."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from envgym.errors import InvalidOutcome

PARAMS = "responses_create_params"
"""The field of a row that holds the request it makes of a policy."""
FAILURE_CLASS = "_ng_failure_class"
"""The field of a rollout that failed, and of an answer that a server's own guards gave beside a reward of zero."""
TRANSIENT = ("transport_", "provider_", "session_", "judge_failed")
"""Beginnings of the kinds of failure that another try may not meet."""
WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that a server listens on and nobody can call: it is where its head server is."""
DEPTH = 5
"""Longest chain of references in a config that is followed."""

FlowName = Literal["tools", "gymnasium"]
ROUTES: dict[FlowName, tuple[str, str]] = {"tools": ("seed_session", "verify"), "gymnasium": ("reset", "step")}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def check_valid(answer: Mapping[str, Any], server: str) -> None:
    """Raise `InvalidOutcome`, by the kind of failure, where an answer of `server` says that the sample is void,
    whatever its reward."""
    masked, kind = answer.get("mask_sample"), answer.get(FAILURE_CLASS) or answer.get("failure_kind")
    # A kind alone voids the sample; with `mask_sample` false it is a remark on one that was measured all the same.
    if masked is True or answer.get(FAILURE_CLASS) or (kind and masked is None):
        kind = re.sub(r"\W+", "_", str(kind or "masked"))[:60]
        retryable = kind.startswith(TRANSIENT) and not answer.get("_ng_failure_terminal")
        message = f"{server} says that the sample is void: {failure_reason(answer)}"
        raise InvalidOutcome(kind, message, retryable=retryable)


def failure_reason(answer: Mapping[str, Any]) -> str:
    """The reason that an answer gives for a failure, in one line."""
    fields = ("failure_reason", "_ng_failure_judge_error", "error_message", "error")
    reason = next((answer[field] for field in fields if answer.get(field)), "it gives no reason")
    return " ".join(str(reason).split())[:300]


def number(value: Any) -> float | None:
    """A finite number as JSON has it, truth among them; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(fields: Mapping[str, Any], without: Container[str] = ()) -> dict[str, float]:
    """The finite numbers among the fields, but for those named in `without` or with a leading underscore."""
    found = {str(name): number(value) for name, value in fields.items() if name not in without}
    return {name: value for name, value in found.items() if value is not None and not name.startswith("_")}


# -- a head server's config -------------------------------------------------------------------------------


def servers(config: Mapping[str, Any], kind: str) -> dict[str, Mapping[str, Any]]:
    """The settings of the config's servers of one kind (`resources_servers`, …), by name. They lie two levels below
    the name, under the kind and the implementation."""
    found = {}
    for name, kinds in config.items():
        implementations = kinds.get(kind) if isinstance(kinds, Mapping) else None
        settings = next(iter(implementations.values()), None) if isinstance(implementations, Mapping) else None
        if isinstance(settings, Mapping):
            found[str(name)] = settings
    return found


def address_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Host and port of a server, where the config has a port. The host may be empty."""
    host, port = (resolved(settings.get(key), config) for key in ("host", "port"))
    return (str(host or ""), port) if isinstance(port, int) else None


def url_of(host: str, port: int, head: str) -> str:
    """The URL of a server that `head`, the URL of a head server, says is at `host` and `port`."""
    if host in WILDCARDS:
        host = urlsplit(head).hostname or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_and_port(url: str) -> tuple[str, int] | None:
    """Host and port of a URL that has both."""
    parts = urlsplit(url)
    try:
        return (parts.hostname, parts.port) if parts.hostname and parts.port is not None else None
    except ValueError:
        return None


def resolved(value: Any, config: Mapping[str, Any], depth: int = DEPTH) -> Any:
    """A value of a config with `${another.key}` replaced by the value there: a head server gives its config as it was
    written. A reference to nothing stays as it is."""
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
