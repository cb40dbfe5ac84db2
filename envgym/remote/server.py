"""`envgym serve`: environments over HTTP."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.net.listening import NEEDS_TOKENS, is_loopback, listen, stop_signals, tls_context, until_stopped, url_of
from envgym.net.tokens import Tokens
from envgym.services import check_servable, start_services

from .admission import ServerLimits
from .application import Application
from .registration import Announcement, Announcer

OPEN_FILES = 65_536
"""Connections and files the process may have open, where the machine allows as many."""
RESERVED = {"v1", "livez", "readyz", "metrics"}
"""First parts of the server's own paths."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

logger = logging.getLogger(__name__)


async def serve(
    specs: Mapping[str, EnvSpec],
    host: str,
    port: int,
    *,
    on_ready: Callable[[str], None],
    limits: ServerLimits | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    announcement: Announcement | None = None,
    on_registered: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the environments, by their names, at `host:port` until SIGINT or SIGTERM.

    Then sessions may continue for `limits.drain_seconds` while new ones are rejected; the rest is closed. A second
    signal ends it immediately. `on_ready` gets the server's URL once it answers; port 0 picks a free one. With an
    `announcement` the server registers at a trainer, and `on_registered` gets the URL that it gave there.

    Raises `ConfigError` for an address that is taken, unknown, or public without tokens, for a token file or a
    certificate that cannot be used, for an environment that cannot be served, and where the trainer rejects the server.
    """
    for name, spec in specs.items():
        check_name(name)
        check_servable(spec)
    limits = limits or ServerLimits()
    tokens = None if token_file is None else Tokens.read(token_file)
    tls = tls_context(tls_cert, tls_key)
    allow_open_files()
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, refusal=None if tokens else NEEDS_TOKENS))
        bound = listener.getsockname()[0]
        if tls is None and not is_loopback(bound):
            logger.warning(
                "serving on %s without TLS: tokens and episodes can be read on the way; give --tls-cert and --tls-key, "
                "or put a proxy with TLS before it",
                bound,
            )
        stopping = stack.enter_context(stop_signals())
        for spec in specs.values():
            await stack.enter_async_context(start_services(spec))
        application = Application(specs, limits, tokens)
        await stack.enter_async_context(application.serve_requests(listener, tls))
        url = url_of(listener, tls)
        announcer = None if announcement is None else Announcer(announcement, url, on_registered)
        on_ready(url)
        if announcer is None:
            await stopping.wait()
        else:
            stack.push_async_callback(announcer.close)
            await until_stopped(announcer.run(), stopping)
            await announcer.leave()
        await application.drain()


def allow_open_files() -> None:
    """Raise the process's own limit on open files (often 1,024): each client's connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def name_of(spec: EnvSpec) -> str:
    """The default name of an environment on a server: its id without namespace, version and folder."""
    id = spec.id
    target, _, name = id.rpartition(":")
    if target and _NAME.fullmatch(name):  # file.py:Name, package.module:Name
        return name
    return re.sub(r"-v\d+$", "", id.rstrip("/").rpartition("/")[2].removesuffix(".py"))


def check_name(name: str) -> None:
    """Raise `ConfigError` for a name that cannot stand in the server's addresses."""
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise ConfigError(f"an environment cannot be served as {name!r}: choose a name and write NAME=E")
