"""NeMo-Gym's protocol: the fields of data rows and responses, and the configuration that names NeMo-Gym's servers."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from envgym.errors import InvalidOutcome

PARAMS = "responses_create_params"
"""The field of a row with the request to the policy."""
FAILURE_CLASS = "_ng_failure_class"
"""The field of a failed rollout, and of an answer whose reward of zero comes from the server's own guards."""
TRANSIENT = ("transport_", "provider_", "session_", "judge_failed")
"""Prefixes of the kinds of transient failures."""
WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts to listen on, not to connect to: such a server is at the host of its head server."""
DEPTH = 5
"""Maximum length of a chain of references in a config."""

FlowName = Literal["tools", "gymnasium"]
ROUTES: dict[FlowName, tuple[str, str]] = {"tools": ("seed_session", "verify"), "gymnasium": ("reset", "step")}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def check_valid(answer: Mapping[str, Any], server: str) -> None:
    """Raise `InvalidOutcome`, with the kind of failure, if an answer of `server` marks the sample as invalid."""
    masked, kind = answer.get("mask_sample"), answer.get(FAILURE_CLASS) or answer.get("failure_kind")
    # A kind alone invalidates the sample; with `mask_sample` false it is only a remark.
    if masked is True or answer.get(FAILURE_CLASS) or (kind and masked is None):
        kind = re.sub(r"\W+", "_", str(kind or "masked"))[:60]
        retryable = kind.startswith(TRANSIENT) and not answer.get("_ng_failure_terminal")
        message = f"{server} marks the sample as invalid: {failure_reason(answer)}"
        raise InvalidOutcome(kind, message, retryable=retryable)


def failure_reason(answer: Mapping[str, Any]) -> str:
    """An answer's reason for a failure, as one line."""
    fields = ("failure_reason", "_ng_failure_judge_error", "error_message", "error")
    reason = next((answer[field] for field in fields if answer.get(field)), "it gives no reason")
    return " ".join(str(reason).split())[:300]


def number(value: Any) -> float | None:
    """A finite number or boolean of JSON as a float; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(fields: Mapping[str, Any], excluded: Container[str] = ()) -> dict[str, float]:
    """The finite numbers among the fields, without `excluded` names and names with a leading underscore."""
    values = {str(name): number(value) for name, value in fields.items() if name not in excluded}
    return {name: value for name, value in values.items() if value is not None and not name.startswith("_")}


# -- a head server's config -------------------------------------------------------------------------------


def servers(config: Mapping[str, Any], kind: str) -> dict[str, Mapping[str, Any]]:
    """The settings of the config's servers of one kind (`resources_servers`, …), by name. They lie two levels below
    the name, under the kind and the implementation."""
    entries = {}
    for name, kinds in config.items():
        implementations = kinds.get(kind) if isinstance(kinds, Mapping) else None
        settings = next(iter(implementations.values()), None) if isinstance(implementations, Mapping) else None
        if isinstance(settings, Mapping):
            entries[str(name)] = settings
    return entries


def address_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Host and port of a server, None if the config has no port. The host may be empty."""
    host, port = (resolve(settings.get(key), config) for key in ("host", "port"))
    return (str(host or ""), port) if isinstance(port, int) else None


def url_of(host: str, port: int, head: str) -> str:
    """The URL of a server at `host` and `port`, as configured at the head server with the URL `head`."""
    if host in WILDCARDS:
        host = urlsplit(head).hostname or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_and_port(url: str) -> tuple[str, int] | None:
    """Host and port of a URL, None unless it has both."""
    parts = urlsplit(url)
    try:
        return (parts.hostname, parts.port) if parts.hostname and parts.port is not None else None
    except ValueError:
        return None


def resolve(value: Any, config: Mapping[str, Any], depth: int = DEPTH) -> Any:
    """Replace each `${another.key}` in a value of a config by the value there, since a head server returns its config
    unresolved. A reference to a missing key stays unmodified."""
    if isinstance(value, list):
        return [resolve(item, config, depth) for item in value]
    if not isinstance(value, str) or depth == 0:
        return value
    if reference := _REFERENCE.fullmatch(value):
        target: Any = config
        for key in reference[1].split("."):
            target = target.get(key) if isinstance(target, Mapping) else None
        return value if target is None else resolve(target, config, depth - 1)
    return _REFERENCE.sub(lambda part: str(resolve(part[0], config, depth - 1)), value)
