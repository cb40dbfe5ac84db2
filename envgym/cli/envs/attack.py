"""`envgym envs attack`: which cheats earn a reward of an environment without solving its tasks?"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.cli.parser import ENV, Parser, env_settings, make_spec
from envgym.errors import printable
from envgym.processes import event_loop

if TYPE_CHECKING:
    from envgym.attack import AttackRow


def attack_main(arguments: Sequence[str]) -> int:
    """Play scripted cheats in an environment and compare each with the best answer-blind play. One line per cheat; exit
    status 1 if one pays, hangs the grader or ends its process, or if the demonstrations do not earn all, else 0.

    usage: E [--json] [key=value …]
    example: envgym envs attack math_verify
      envgym envs attack my_env.py env.size=4 --json
    """
    parser = Parser("envs attack", attack_main)
    parser.add_argument("env", **ENV)
    parser.add_argument("--json", action="store_true", help="print the table as JSON at the end")
    options, words = parser.parse_with_words(arguments)
    spec = make_spec(options.env, words)  # raises the errors of its name and settings

    from envgym.attack import attack_environment
    from envgym.attack.report import HEADING

    def show(row: AttackRow, total: int) -> None:
        if not options.json:
            print(printable(str(row)), flush=True)
        elif sys.stderr.isatty():
            print(f"\r{next(count)}/{total} cheats ", end="", file=sys.stderr, flush=True)

    count = itertools.count(1)
    if not options.json:
        print(f"{spec.id}\n{HEADING}", flush=True)
    report = event_loop.run(attack_environment(options.env, env_settings(options.env, words), show))
    if options.json:
        print(json.dumps({**dataclasses.asdict(report), "passed": report.passed}, indent=2))
    else:
        print(printable(f"best answer-blind play: {report.blind_play}\n{report.summary()}"))
    return 0 if report.passed else 1
