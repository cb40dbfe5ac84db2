"""`envgym envs`: list, show, check, attack, try, create, name and export environments."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser
from envgym.errors import ConfigError, did_you_mean

ACTIONS = {
    "list": ("show", "list the environments that are installed"),
    "show": ("show", "show an environment: its agent, tools, services, settings, tasks and a first observation"),
    "check": ("check", "run checks on an environment; exit status 1 if one fails"),
    "attack": ("attack", "play cheats in an environment; exit status 1 if one pays"),
    "try": ("play", "play an episode yourself"),
    "new": ("new", "create a working file to start from"),
    "add": ("remote", "save a name for a remote environment"),
    "remove": ("remote", "remove a saved remote environment"),
    "export": ("export", "write an environment as a project of another framework"),
}


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Environments.

    {actions}

    envgym envs ACTION --help for details.

    usage: list | show|check|attack|try E | new NAME | add NAME URL | remove NAME | export E --as D [key=value …]
    example: envgym envs list
      envgym envs show math_verify
      envgym envs check my_env.py
      envgym envs attack my_env.py
    """
    lines = "\n".join(f"  {name:<8}{summary}" for name, (_, summary) in ACTIONS.items())
    parser = Parser("envs", main, actions=lines)
    if list(arguments) in (["--help"], ["-h"]):
        parser.parse_args(list(arguments))
    if not arguments:
        parser.error(f"envgym envs is followed by {' or '.join(ACTIONS)}")
    action, *options = arguments
    if action not in ACTIONS:
        hint = did_you_mean(action, ACTIONS)
        raise ConfigError(f"there is no envgym envs {action!r}.{hint} See: envgym envs --help")
    module = importlib.import_module(f".{ACTIONS[action][0]}", __name__)
    status: int = getattr(module, f"{action}_main")(options)
    return status
