"""`envgym envs add` and `envgym envs remove`: saved names of remote environments."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.cli.parser import Parser
from envgym.errors import ConfigError, NameNotFound, did_you_mean, printable

if TYPE_CHECKING:
    from envgym.env import EnvSpec
    from envgym.remote_names import Scope


def add_main(arguments: Sequence[str]) -> int:
    """Save a name for a remote environment, usable wherever an environment id is accepted. Several URLs are servers of
    the same environment.

    usage: NAME URL [URL …] [--token-file F] [--ca-file F] [--user|--project]
    example: envgym envs add chess https://10.0.0.5:8000/chess --token-file chess.token
      envgym train --env chess
    """
    parser = Parser("envs add", add_main)
    parser.add_argument("name", metavar="NAME", help="the new name")
    parser.add_argument("urls", metavar="URL", nargs="+", help="address of a server: [SCHEME:]http://HOST:PORT/NAME")
    parser.add_argument("--token-file", metavar="F", type=Path, help="file with the server's token")
    parser.add_argument("--ca-file", metavar="F", type=Path, help="certificates to trust instead of the system's")
    _add_scope(parser)
    options = parser.parse_without_words(arguments, "settings belong to the command that uses or serves it")

    from envgym import registry, remote_names
    from envgym.loading import is_file_target

    if is_file_target(options.name) or ":" in options.name:
        raise ConfigError(f"{options.name!r} reads as a file or an import path: names look like [namespace/]name[-v0]")
    if registry.is_installed(options.name):
        raise ConfigError(f"{options.name!r} is the name of an environment that is installed here: choose another one")
    name = registry.check_new_id(options.name, registry.list_ids())
    files = {"token_file": options.token_file, "ca_file": options.ca_file}
    absolute = {name: path and path.expanduser().absolute() for name, path in files.items()}
    entry = remote_names.NamedEnvironment(urls=tuple(options.urls), **absolute)
    registration = registry.registration_of(name, entry)
    env_class = registry.load_env_class(registration.entry_point)
    if env_class.address != "URL":
        target = registration.id
        raise ConfigError(f"{target} is no address of a server, and needs no name here: --env {target}")
    spec: EnvSpec = env_class(registration.id, **registration.kwargs)
    description = asyncio.run(_reach(name, spec))
    scope: Scope = "project" if options.project else "user"
    is_known = name in remote_names.read(scope)
    path = remote_names.save(scope, name, entry)
    print(printable(description))
    print(f"{'replaced' if is_known else 'added'} {name} in {path}")
    entries, problems = remote_names.read_usable()
    if entries[name] != entry:
        problems.append(f"the {name} in {remote_names.file_of('project')} takes precedence here")
    for problem in problems:
        print(printable(f"note: {problem}"), file=sys.stderr)
    return 0


def remove_main(arguments: Sequence[str]) -> int:
    """Remove the saved name of a remote environment.

    usage: NAME [--user|--project]
    example: envgym envs remove chess
    """
    parser = Parser("envs remove", remove_main)
    parser.add_argument("name", metavar="NAME", help="the saved name")
    _add_scope(parser)
    options = parser.parse_without_words(arguments, "removing takes no settings")

    from envgym import remote_names

    scopes: Sequence[Scope] = ["user"] if options.user else ["project"] if options.project else remote_names.SCOPES
    names = {name: scope for scope in scopes for name in remote_names.read(scope)}
    if options.name not in names:
        there_is = did_you_mean(options.name, names) or (f" There is {', '.join(sorted(names))}." if names else "")
        raise NameNotFound(f"no remote environment is called {options.name!r}.{there_is}")
    print(f"removed {options.name} from {remote_names.save(names[options.name], options.name, None)}")
    return 0


def _add_scope(parser: Parser) -> None:
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--user", action="store_true", help="in this user's configuration, for all folders")
    scope.add_argument("--project", action="store_true", help="in envgym.yaml, for everyone in this folder")


async def _reach(name: str, spec: EnvSpec) -> str:
    """The environment's description from its servers. Raises `EnvgymError` if none answers."""
    from envgym.remote.client import RemoteEnvSpec

    async with spec:
        if not isinstance(spec, RemoteEnvSpec):
            return f"{name}: {spec.summary}"
        description = spec.description
        sizes = [
            f"{'no end of' if split.size is None else split.size} {name} tasks"
            for name, split in description.splits.items()
            if split.error is None
        ]
        addresses = [str(replica.address) for replica in spec.replicas.down_replicas]
        notes = "".join(f"\n{address} does not answer, and is used once it does" for address in addresses)
        title = f"{description.name}: {description.about}" if description.about else description.name
        agents = f"agent {description.agent} there, {spec.agent} here"
        return f"{title}\n{', '.join(sizes)}; {agents}{notes}"
