"""`envgym serve`: environments over HTTP."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from envgym.env import EnvSpec
from envgym.errors import ConfigError, NameNotFound, did_you_mean
from envgym.loading import entry_points, import_target
from envgym.processes import event_loop

from .errors import Invocation
from .parser import Parser, make_spec

if TYPE_CHECKING:
    from envgym.remote.registration import Announcement

N = TypeVar("N", int, float)
_NAMED = re.compile(r"(?!env=|data=|debug=)([A-Za-z0-9_-]+)=(.+)")
"""NAME=E. Settings begin with `env.`, `data.` or the name of an environment and a dot."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Serve environments over HTTP until Ctrl-C. Their URLs can be used wherever an environment id is accepted.

    usage: E [E …] [--host H] [--port P] [--token-file F] [--max-sessions N] [--register URL] [key=value …]
    example: envgym serve math_verify --port 8000
      envgym train --env http://127.0.0.1:8000/math_verify
    """
    parser = Parser.from_docstring("serve", main)
    parser.add_argument(
        "envs", metavar="E", nargs="+", help="environment: id, file.py[:Name] or import path; NAME=E names it"
    )
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8000, help="port; 0 for a free one (8000)")
    parser.add_argument(
        "--token-file", metavar="F", type=Path, help="clients: lines NAME TOKEN [max_sessions=N], or one token"
    )
    parser.add_argument("--max-sessions", metavar="N", type=int, default=10_000, help="concurrent sessions (10000)")
    parser.add_argument("--lease-seconds", metavar="S", type=float, help="idle timeout of a session, in seconds (60)")
    parser.add_argument("--drain-seconds", metavar="S", type=float, help="grace period of sessions at shutdown (20)")
    parser.add_argument("--tls-cert", metavar="F", type=Path, help="certificate, with its chain, as PEM")
    parser.add_argument("--tls-key", metavar="F", type=Path, help="its key, as PEM")
    parser.add_argument("--register", metavar="URL", help="announce this server to the trainer that listens at URL")
    parser.add_argument("--weight", metavar="W", type=float, help="with --register: load-balancing weight (1)")
    parser.add_argument("--advertise", metavar="URL", help="with --register: this server's URL for the trainer")
    parser.add_argument("--register-token-file", metavar="F", type=Path, help="with --register: token for the trainer")
    parser.add_argument("--ca-file", metavar="F", type=Path, help="with --register: certificates to trust, as PEM")
    names = ", ".join(entry_points("envgym.dialects"))
    parser.add_argument("--dialect", metavar="D", help=f"use another protocol ({names}); D --help lists its options")
    if (dialect := chosen_dialect(arguments)) is not None:
        dialect.add_options(parser)
    options, words = parser.parse_with_words(arguments)
    specs = make_specs(*split_words([*options.envs, *words]))

    from envgym.remote.admission import ServerLimits
    from envgym.remote.server import serve

    limits = ServerLimits(max_sessions=at_least(1, "--max-sessions", options.max_sessions))
    if options.lease_seconds is not None:
        limits = replace(limits, lease_seconds=at_least(0.1, "--lease-seconds", options.lease_seconds))
    if options.drain_seconds is not None:
        limits = replace(limits, drain_seconds=at_least(0.0, "--drain-seconds", options.drain_seconds))

    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port is 0 to 65535, not {options.port}")
    announced = announcement(options)
    if dialect is not None:
        event_loop.run(dialect.serve(specs, options))
        return 0

    def on_ready(url: str) -> None:
        for name, spec in specs.items():
            print(f"serving {spec.id} at {url}/{name} (Ctrl-C ends it)", flush=True)

    def on_registered(url: str) -> None:
        print(f"registered at {options.register} as {url}", flush=True)

    event_loop.run(
        serve(
            specs,
            options.host,
            options.port,
            on_ready=on_ready,
            on_registered=on_registered,
            announcement=announced,
            limits=limits,
            token_file=options.token_file,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
        )
    )
    return 0


def chosen_dialect(arguments: Sequence[str]) -> Any:
    """The module of the `--dialect`, or None. It is needed before parsing, since it adds options."""
    parser = Parser("serve", "", "", "")
    parser.add_argument("--dialect")
    name = parser.parse_known_args([word for word in arguments if word not in ("-h", "--help")])[0].dialect
    dialects = entry_points("envgym.dialects")
    if name is not None and name not in dialects:
        raise NameNotFound(f"there is no dialect {name!r}.{did_you_mean(name, dialects)} See: envgym serve --help")
    return None if name is None else import_target(dialects[name])


def announcement(options: Namespace) -> Announcement | None:
    from envgym.remote.registration import Announcement

    if options.register is None:
        names = ("weight", "advertise", "register_token_file", "ca_file")
        if misplaced := [name for name in names if getattr(options, name) is not None]:
            raise ConfigError(f"--{misplaced[0].replace('_', '-')} goes with --register URL")
        return None
    weight = 1.0 if options.weight is None else options.weight
    return Announcement(options.register, options.register_token_file, options.ca_file, options.advertise, weight)


def split_words(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The environments, each as (name or "", E), and the settings."""
    environments, settings = [], []
    for word in words:
        if match := _NAMED.fullmatch(word):
            environments.append((match.group(1), match.group(2)))
        elif "=" in word and word.partition(":")[0] not in entry_points("envgym.schemes"):
            settings.append(word)
        else:
            environments.append(("", word))
    return environments, settings


def make_specs(environments: Sequence[tuple[str, str]], settings: Sequence[str]) -> dict[str, EnvSpec]:
    """The environments by name. With several environments a setting begins with a name: `NAME.env.KEY=VALUE`."""
    from envgym.remote.server import check_name, name_of

    if not environments:
        raise ConfigError("name an environment to serve. See: envgym serve --help")
    if len(environments) == 1:
        [(name, target)] = environments
        words = [setting.removeprefix(f"{name}.") if name else setting for setting in settings]
        spec = make_spec(target, words)
        return {name or name_of(spec): spec}
    specs: dict[str, EnvSpec] = {}
    unused = list(settings)
    for option, target in environments:
        name = option or name_of(make_spec(target, ()))
        check_name(name)
        words = [setting for setting in unused if setting.startswith(f"{name}.")]
        unused = [setting for setting in unused if setting not in words]
        if name in specs:
            raise ConfigError(f"two environments are called {name!r}: name one of them, NAME={target}")
        specs[name] = make_spec(target, [setting.removeprefix(f"{name}.") for setting in words])
    if unused:
        raise ConfigError(f"{unused[0]!r} names no environment: with several environments write NAME.env.KEY=VALUE")
    return specs


def at_least(minimum: N, option: str, value: N) -> N:
    if not minimum <= value < math.inf:
        raise ConfigError(f"{option} is at least {minimum:g}, not {value:g}")
    return value
