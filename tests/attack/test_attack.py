"""The cheats of `envgym envs attack`, played in environments with a planted weakness and in sound ones.

A planted environment is one file in `tests/attack/FOLDER/weak/` or `tests/attack/FOLDER/sound/`, with a docstring of
one sentence that begins with `Weak:` or `Sound:`. It holds a single environment (`@envgym.reward` on a function, an
`envgym.Env` or `envgym.ToolEnv` class, or an `envgym.EnvSpec` class that names one in `env_class`), with at least 50
training tasks and with demonstrations that are right (a reward function's are its answers). It needs no network,
plays an episode in less than a tenth of a second, and ends a program that it starts after five seconds or less. Nothing
has to be registered: `test_planted.py` and `tests/acceptance/test_attack.py` find the file.
"""

import asyncio
from pathlib import Path

import pytest

from envgym.attack import AttackVerdict, attack_environment

PLANTED = Path(__file__).with_name("planted")


def attack(file, **settings):
    return asyncio.run(attack_environment(str(file), settings))


@pytest.mark.parametrize(
    ("name", "cheat"),
    [("any_number", "all guesses in a line"), ("submits_again", "the first try tells the answer")],
)
def test_a_planted_weakness_pays(name, cheat):
    report = attack(PLANTED / "weak" / f"{name}.py")
    assert not report.passed
    assert cheat in report.paying
    assert report.blind < 0.1
    assert [row.verdict for row in report.rows if row.kind == "demonstrations"] == [AttackVerdict.ALL]


def test_nothing_pays_in_a_sound_environment():
    report = attack(PLANTED / "sound" / "mostly_b.py")
    assert report.passed, report.paying
    assert report.blind == pytest.approx(0.62, abs=0.05)
    assert len([row for row in report.rows if row.kind == "texts"]) >= 40
