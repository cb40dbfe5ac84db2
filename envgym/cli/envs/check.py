"""`envgym envs check`: a report on whether an environment can be trusted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.cli.parser import ENV, Parser, env_settings, make_spec
from envgym.errors import printable
from envgym.processes import event_loop

if TYPE_CHECKING:
    from envgym.check import Finding

COLOURS = {"ok": "32", "FAILED": "1;31", "warning": "33", "not applicable": "2"}


def check_main(arguments: Sequence[str]) -> int:
    """Check an environment: is it repeatable, isolated, correctly typed, fast enough, and hard to fool? One line per
    check; exit status 1 if one fails, else 0.

    usage: E [key=value …]
    example: envgym envs check math_verify
      envgym envs check my_env.py env.size=4 data.path=tasks.jsonl
    """
    parser = Parser("envs check", check_main)
    parser.add_argument("env", **ENV)
    options, words = parser.parse_with_words(arguments)
    spec = make_spec(options.env, words)  # raises the errors of its name and settings

    from envgym.check import check_environment

    print(f"{spec.id}", flush=True)
    report = event_loop.run(check_environment(options.env, env_settings(options.env, words), _show))
    print(report.summary())
    if report.passed:
        print(f"whether its rewards can be forged: {printable(shlex.join(['envgym', 'envs', 'attack', *arguments]))}")
    return 0 if report.passed else 1


def _show(finding: Finding) -> None:
    text = printable(str(finding))
    if sys.stdout.isatty():
        word = str(finding.verdict)
        text = f"\x1b[{COLOURS[word]}m{word}\x1b[0m{text.removeprefix(word)}"
    print(text, flush=True)
