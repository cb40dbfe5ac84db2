"""`envgym serve`: environments over HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.loading import entry_points, import_target, target_of_name
from envgym.processes import event_loop

from .errors import Invocation
from .parser import Parser, make_spec

_NAMED = re.compile(r"(?!env=|data=|debug=)([A-Za-z0-9_-]+)=(.+)")
"""NAME=E. Settings begin with `env.`, `data.` or the name of an environment and a dot."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Serve environments over HTTP until Ctrl-C. Their URLs can be used wherever an environment id is accepted.

    usage: E [E …] [--host H] [--port P] [--token-file F] [--max-sessions N] [--register URL] [key=value …]
    example: envgym serve math_verify --port 8000
      envgym train --env http://127.0.0.1:8000/math_verify
    """
    parser = Parser("serve", main)
    parser.add_argument(
        "envs", metavar="E", nargs="+", help="environment: id, file.py[:Name] or import path; NAME=E names it"
    )
    names = ", ".join(protocols())
    parser.add_argument("--dialect", metavar="D", help=f"use another protocol ({names}); D --help lists its options")
    dialect = chosen_dialect(arguments)
    dialect.add_options(parser)
    options, words = parser.parse_with_words(arguments)
    specs = make_specs(*split_words([*options.envs, *words]))
    del options.envs, options.dialect
    event_loop.run(dialect.serve(specs, options))
    return 0


def protocols() -> list[str]:
    """The dialects that serve: a module called `export` only writes projects."""
    return [name for name, target in entry_points("envgym.dialects").items() if not target.endswith(".export")]


def chosen_dialect(arguments: Sequence[str]) -> Any:
    """The module of the `--dialect`, by default of envgym's own protocol. It is needed before parsing, since it adds
    options."""
    parser = Parser("serve", main)
    parser.add_argument("--dialect")
    name = parser.parse_known_args([word for word in arguments if word not in ("-h", "--help")])[0].dialect
    if name is not None:
        module = import_target(target_of_name("envgym.dialects", name, "dialect"))
        if not hasattr(module, "serve"):
            advice = f"envgym envs export E --as {name} --out DIR writes a package"
            raise ConfigError(f"{name} has no protocol to serve: {advice}")
        return module
    from envgym.remote import dialect

    return dialect


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
