"""`envgym envs`: the environments there are; one of them shown, examined, played or begun."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from .failures import Invocation
from .parser import Parser, choose

ACTIONS = {
    "list": ("listing", "list the environments that are installed"),
    "show": ("listing", "show one: its agent, tools, services, settings, tasks and a first observation"),
    "check": ("check", "examine one; exit status 1 where a check fails"),
    "try": ("try_out", "play an episode yourself"),
    "new": ("new", "write a working file to start from"),
    "add": ("add", "give one that is served elsewhere a name"),
    "remove": ("add", "forget such a name"),
}

_LISTED = "\n".join(f"  {name:<8}{summary}" for name, (_, summary) in ACTIONS.items())


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    if list(arguments) in (["--help"], ["-h"]):
        parser = Parser(
            "envs",
            "list | show E | check E | try E | new NAME | add NAME URL | remove NAME [key=value …]",
            f"Environments.\n\n{_LISTED}\n\nenvgym envs ACTION --help says more.",
            "envgym envs list\n  envgym envs show math_verify\n  envgym envs check my_env.py",
        )
        parser.parse_args(list(arguments))
    action, rest = choose("envs", tuple(ACTIONS), arguments)
    module = importlib.import_module(f"envgym.cli.environments.{ACTIONS[action][0]}")
    status: int = getattr(module, f"{action}_main")(rest, invocation)
    return status
