"""Attacks on an environment: scripted cheats, none of which may earn more than answer-blind play.

    report = await attack_environment("file.py", {"digits": 2})
    print(report.passed, *report.rows, sep="\\n")

A cheat is a script of a policy that has not read the task. Most are data, in `cheats.yaml`; `fields` fills them in,
`forms` gives them the form of a right answer, `attempts` makes scripts of them, `run` plays them in a separate process
and `report` decides which ones pay. An environment's author adds others with `EnvSpec.cheats`.
"""

from .report import AttackReport, AttackRow, AttackVerdict
from .run import attack_environment

__all__ = ["AttackReport", "AttackRow", "AttackVerdict", "attack_environment"]
