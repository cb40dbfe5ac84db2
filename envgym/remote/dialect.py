"""envgym's own protocol as `envgym serve` speaks it: its options, and the server."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from envgym.env import EnvSpec
from envgym.errors import ConfigError

if TYPE_CHECKING:
    from .registration import Announcement

N = TypeVar("N", int, float)


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of the server."""
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8000, help="port; 0 for a free one (8000)")
    parser.add_argument("--token-file", metavar="F", type=Path, help="lines NAME TOKEN [max_sessions=N], or one token")
    parser.add_argument("--max-sessions", metavar="N", type=int, default=10_000, help="concurrent sessions (10000)")
    parser.add_argument("--lease-seconds", metavar="S", type=float, default=60, help="idle seconds of a session (60)")
    parser.add_argument("--drain-seconds", metavar="S", type=float, default=20, help="grace period at shutdown (20)")
    parser.add_argument("--tls-cert", metavar="F", type=Path, help="certificate, with its chain, as PEM")
    parser.add_argument("--tls-key", metavar="F", type=Path, help="its key, as PEM")
    parser.add_argument("--register", metavar="URL", help="announce this server to the trainer that listens at URL")
    parser.add_argument("--weight", metavar="W", type=float, help="with --register: load-balancing weight (1)")
    parser.add_argument("--advertise", metavar="URL", help="with --register: this server's URL for the trainer")
    parser.add_argument("--register-token-file", metavar="F", type=Path, help="with --register: token for the trainer")
    parser.add_argument("--ca-file", metavar="F", type=Path, help="with --register: certificates to trust, as PEM")


async def serve(specs: Mapping[str, EnvSpec], options: Namespace) -> None:
    """Serve environments, by their names, until SIGINT or SIGTERM, and print each one's URL. Raises `ConfigError`."""
    from . import server
    from .admission import ServerLimits

    def on_ready(url: str) -> None:
        for name, spec in specs.items():
            print(f"serving {spec.id} at {url}/{name} (Ctrl-C ends it)", flush=True)

    def on_registered(url: str) -> None:
        print(f"registered at {options.register} as {url}", flush=True)

    await server.serve(
        specs,
        options.host,
        options.port,
        on_ready=on_ready,
        on_registered=on_registered,
        announcement=announcement(options),
        limits=ServerLimits(
            max_sessions=at_least(1, "--max-sessions", options.max_sessions),
            lease_seconds=at_least(0.1, "--lease-seconds", options.lease_seconds),
            drain_seconds=at_least(0.0, "--drain-seconds", options.drain_seconds),
        ),
        token_file=options.token_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )


def announcement(options: Namespace) -> Announcement | None:
    """The settings of a server that registers; None if it does not. Raises `ConfigError` for settings without that."""
    from .registration import Announcement

    if options.register is None:
        names = ("weight", "advertise", "register_token_file", "ca_file")
        if misplaced := [name for name in names if getattr(options, name) is not None]:
            raise ConfigError(f"--{misplaced[0].replace('_', '-')} goes with --register URL")
        return None
    weight = 1.0 if options.weight is None else options.weight
    return Announcement(options.register, options.register_token_file, options.ca_file, options.advertise, weight)


def at_least(minimum: N, option: str, value: N) -> N:
    if not minimum <= value < math.inf:
        raise ConfigError(f"{option} is at least {minimum:g}, not {value:g}")
    return value
