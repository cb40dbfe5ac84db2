"""The command line: `envgym COMMAND …`. Each command is a file here with `main(arguments, invocation)`. Other packages
add theirs as entry points of the group `envgym.commands`: modules with `main`, and `SUMMARY`, its line in
`envgym --help`, which imports them; so they import nothing heavy at the top. This file finds and runs commands.

Exit status: 0 success, 2 a mistake that the user can fix, 130 Ctrl-C, 1 an error in envgym, or a failed check of `envs
check`.
"""

from __future__ import annotations

import importlib
import io
import logging
import sys
from collections.abc import Sequence
from typing import Any

from envgym.errors import ConfigError, EnvgymError, did_you_mean
from envgym.loading import entry_points, import_target

from .errors import Invocation, LogLine, notes_in_one_line, report

COMMANDS = {
    "train": "train a policy on an environment",
    "eval": "measure a model on a suite of environments, or on one",
    "ask": "ask a model one question",
    "compare": "compare two evaluations task by task",
    "rollout": "write a model's episodes in an environment to a file",
    "score": "re-score saved episodes with another environment or reward model",
    "replay": "run a step's recorded actions again and compare",
    "envs": "list, show, check, attack, try, create and name environments",
    "serve": "serve an environment over HTTP",
    "serve-reward-model": "serve a reward model over HTTP",
    "config": "print what would run, without starting anything",
    "plan": "print the placement of a run's processes, and their memory",
    "model": "make a model from a recipe, or from an adapter and its base",
    "stop": "stop a run in another terminal",
    "runs": "list run folders with their results",
    "show": "print readable transcripts of episodes",
    "view": "look at runs, evaluations and episodes in a browser",
    "export": "write a run as one self-contained HTML file",
    "openrlhf": "run a command line of OpenRLHF",
}

HELP = """usage: envgym COMMAND …

Train and evaluate language-model agents, environments first.

commands:
{commands}

options:
  --help     this text; envgym COMMAND --help for details
  --version  the version

example:
  envgym train --env math_verify
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Every error is one line on standard error.

    Without `argv` the command owns the process, and ends it with everything that environments left running."""
    if argv is None:
        from envgym.processes.shutdown import Shutdown

        shutdown = Shutdown()
        return shutdown.start(_run(sys.argv[1:]))
    return _run(list(argv))


def _run(arguments: list[str]) -> int:
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogLine())
    invocation = Invocation(arguments[:1], debug="debug=true" in arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode gets a question mark, not an error
    try:
        with notes_in_one_line():
            status = _dispatch(arguments, invocation)
        sys.stdout.flush()  # here, where a closed pipe is caught, not at interpreter exit
        return status
    except (KeyboardInterrupt, Exception) as error:
        return report(error, invocation)


def _dispatch(arguments: list[str], invocation: Invocation) -> int:
    command, options = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("--help", "-h", "help"):
        width = max(map(len, summaries := summaries_of_commands())) + 2
        print(HELP.format(commands="\n".join(f"  {name:<{width}}{text}" for name, text in summaries.items())), end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"envgym {version('envgym')}")
        return 0
    status: int = load_command(command).main(options, invocation)
    return status


def load_command(name: str) -> Any:
    """The module of a command. Raises `ConfigError` for an unknown name."""
    if name in COMMANDS:
        return importlib.import_module(f".{name.replace('-', '_')}", __name__)
    plugins = entry_points("envgym.commands")
    if name in plugins:
        return import_target(plugins[name])
    noun = "option" if name.startswith("-") else "command"
    names = ["--help", "--version"] if noun == "option" else [*COMMANDS, *plugins]
    raise ConfigError(f"there is no {noun} {name!r}.{did_you_mean(name, names)} See: envgym --help")


def summaries_of_commands() -> dict[str, str]:
    """Each command with its one-line summary."""
    summaries: dict[str, str] = dict(COMMANDS)
    for name in entry_points("envgym.commands"):
        try:
            summaries[name] = load_command(name).SUMMARY
        except EnvgymError as error:  # a broken package must not hide the other commands
            summaries[name] = f"(cannot be used: {error})"
    return summaries
