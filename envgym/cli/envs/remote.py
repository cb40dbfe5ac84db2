"""`envgym envs add` and `envgym envs remove`: names for environments that are served elsewhere."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.cli.parser import Parser
from envgym.errors import ConfigError, NameNotFound, did_you_mean

if TYPE_CHECKING:
    from envgym.remote.client import RemoteEnvSpec
    from envgym.remote.named import Scope


def add_main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "envs add",
        "NAME URL [URL …] [--token-file F] [--ca-file F] [--user|--project]",
        "Give an environment that is served elsewhere a name, which then stands wherever an environment does. Several "
        "URLs are servers of the same environment.",
        "envgym envs add chess https://10.0.0.5:8000/chess --token-file chess.token\n  envgym train --env chess",
    )
    parser.add_argument("name", metavar="NAME", help="what to call it")
    parser.add_argument("urls", metavar="URL", nargs="+", help="where it is served: http://HOST:PORT/NAME")
    parser.add_argument("--token-file", metavar="F", type=Path, help="file with the token the server asks for")
    parser.add_argument("--ca-file", metavar="F", type=Path, help="certificates to trust, in place of the system's")
    _add_scope(parser)
    options = parser.parse_without_words(arguments, "settings are given where the environment is used or served")

    from envgym import registry
    from envgym.loading import names_file
    from envgym.remote import named
    from envgym.remote.client import RemoteEnvSpec

    if names_file(options.name) or ":" in options.name:
        raise ConfigError(f"{options.name!r} reads as a file or an import path: names look like [namespace/]name[-v0]")
    if registry.is_installed(options.name):
        raise ConfigError(f"{options.name!r} is the name of an environment that is installed here: choose another one")
    name = registry.check_beside(options.name, registry.list_ids())
    files = {"token_file": options.token_file, "ca_file": options.ca_file}
    absolute = {name: path and path.expanduser().absolute() for name, path in files.items()}
    entry = named.NamedEnvironment(urls=tuple(options.urls), **absolute)
    description = asyncio.run(_reach(RemoteEnvSpec(name, **entry.settings())))
    scope: Scope = "project" if options.project else "user"
    known = name in named.read(scope)
    path = named.add(scope, name, entry)
    print(description)
    print(f"{'replaced' if known else 'added'} {name} in {path}")
    found, problems = named.readable()
    if found[name] != entry:
        problems.append(f"here {named.file_of('project')} has another {name}, which counts")
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0


def remove_main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "envs remove",
        "NAME [--user|--project]",
        "Forget the name of an environment that is served elsewhere.",
        "envgym envs remove chess",
    )
    parser.add_argument("name", metavar="NAME", help="what it is called")
    _add_scope(parser)
    options = parser.parse_without_words(arguments, "removing takes no settings")

    from envgym.remote import named

    asked: Scope | None = "user" if options.user else "project" if options.project else None
    scope = asked or named.scope_of(options.name)
    if scope is None or options.name not in named.read(scope):
        known = named.registered() if asked is None else named.read(asked)
        there_is = did_you_mean(options.name, known) or (f" There is {', '.join(sorted(known))}." if known else "")
        raise NameNotFound(f"no remote environment is called {options.name!r}.{there_is}")
    print(f"removed {options.name} from {named.remove(scope, options.name)}")
    return 0


def _add_scope(parser: Parser) -> None:
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--user", action="store_true", help="in this user's configuration, whatever the folder")
    scope.add_argument("--project", action="store_true", help="in envgym.yaml, for who works in this folder")


async def _reach(spec: RemoteEnvSpec) -> str:
    """The description of the environment by its servers. Raises `EnvgymError` where none answers."""
    async with spec:
        found = spec.description
        sizes = [
            f"{'no end of' if split.size is None else split.size} {name} tasks"
            for name, split in found.splits.items()
            if split.error is None
        ]
        down = [str(replica.address) for replica in spec.replicas.down]
        lost = "".join(f"\n{address} does not answer, and is used once it does" for address in down)
        about = f": {found.about}" if found.about else ""
        return f"{found.name}{about}\n{', '.join(sizes)}; played by {found.agent} there, by {spec.agent} here{lost}"
