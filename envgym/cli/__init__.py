"""The command line: `envgym COMMAND …`. Each command has a file here; this one finds it and runs it.

Exit status: 0 done, 2 a mistake that the user can mend, 130 Ctrl-C, 1 an error of ours (and, of `envs check`, a check
that failed).
"""

from __future__ import annotations

import importlib
import io
import logging
import sys
from collections.abc import Sequence

from envgym.errors import ConfigError, did_you_mean

from .errors import Invocation, LogLine, notes_in_one_line, report

COMMANDS = {
    "train": "train a policy on an environment",
    "eval": "measure a model on a suite of environments, or on one",
    "compare": "compare two evaluations task by task",
    "rollout": "write a model's episodes in an environment to a file",
    "score": "judge saved episodes again, by another environment or reward model",
    "envs": "list, show, check, try or begin environments",
    "serve": "serve an environment over HTTP",
    "serve-reward-model": "serve a reward model over HTTP",
    "config": "print what would run, without starting anything",
    "plan": "print where a run's processes would go, and their memory",
    "model": "make a model from a recipe, or from an adapter and its base",
    "runs": "list run folders with their results",
    "stop": "stop a run of another terminal",
    "show": "print episodes of a run as people read them",
    "view": "look at runs, evaluations and episodes in a browser",
    "export": "write a run as one HTML file to look at",
    "openrlhf": "run a command line of OpenRLHF",
}

_LISTED = "\n".join(f"  {name:<{max(map(len, COMMANDS)) + 2}}{summary}" for name, summary in COMMANDS.items())

HELP = f"""usage: envgym COMMAND …

Train and evaluate language-model agents, environments first.

commands:
{_LISTED}

options:
  --help     this text; envgym COMMAND --help says more
  --version  the version

example:
  envgym train --env math_verify
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Whatever goes wrong is one line on standard error.

    Without `argv` the process is the command's own, and ends with all that environments have left in it."""
    if argv is None:
        from envgym.processes.shutdown import Shutdown

        shutdown = Shutdown()
        return shutdown.begin(_run(sys.argv[1:]))
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
        sys.stdout.flush()  # here, where a closed pipe is caught, and not when the interpreter ends
        return status
    except (KeyboardInterrupt, Exception) as error:
        return report(error, invocation)


def _dispatch(arguments: list[str], invocation: Invocation) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"envgym {version('envgym')}")
        return 0
    if command not in COMMANDS:
        noun = "option" if command.startswith("-") else "command"
        known = ["--help", "--version"] if noun == "option" else COMMANDS
        raise ConfigError(f"there is no {noun} {command!r}.{did_you_mean(command, known)} See: envgym --help")
    status: int = importlib.import_module(f".{command.replace('-', '_')}", __name__).main(rest, invocation)
    return status
