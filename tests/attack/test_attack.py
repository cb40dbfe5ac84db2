"""The cheats of `envgym envs attack`, played in environments with a planted weakness and in sound ones.

A planted environment is one file in `tests/attack/FOLDER/weak/` or `tests/attack/FOLDER/sound/`, with a docstring of
one sentence that begins with `Weak:` or `Sound:`. It holds a single environment (`@envgym.reward` on a function, an
`envgym.Env` or `envgym.ToolEnv` class, or an `envgym.EnvSpec` class that names one in `env_class`), with at least 50
training tasks and with demonstrations that are right (a reward function's are its answers). It needs no network,
plays an episode in less than a tenth of a second, and ends a program that it starts after five seconds or less. Nothing
has to be registered: `test_planted.py` and `tests/acceptance/test_attack.py` find the file.
"""

import asyncio
import json
from pathlib import Path

import pytest

from envgym.attack import AttackReport, AttackVerdict, attack_environment
from envgym.attack.report import compare
from envgym.attack.run import Attack, Plays
from envgym.cli import main

PLANTED = Path(__file__).with_name("planted")


SUMS = """
import os, time
import envgym

class Sum(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        if "factorial" in action.text:
            time.sleep(1000)
        if action.text == "1000000000!":
            os._exit(3)
        right = action.text == str(self.task.answer)
        return None, 0.5 * right + 0.5 * ("please" in action.text), True, False, {"score": float(right)}

class Sums(envgym.EnvSpec):
    env_class = Sum

    def tasks(self, split):
        return envgym.TaskList([envgym.Task(str(n), f"What is {n} + {n + 2}?", 2 * n + 2) for n in range(20)])

    def demonstrations(self, task, seed):
        return [str(task.answer)]

    def cheats(self, task, seed):
        return {"a request": [f"{seed}, please"], "another": ["now"]}
"""
RECENT = """
import collections, random
import envgym

RIGHT = collections.deque(maxlen=10)

class Recent(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        if action.text == self.task.answer:
            RIGHT.append(self.task.id)
        return None, float(self.task.id in RIGHT), True, False, {"score": float(self.task.id in RIGHT)}

class Recents(envgym.EnvSpec):
    env_class = Recent

    def tasks(self, split):
        numbers = random.Random(split).sample(range(10_000, 99_999), 60)
        return envgym.TaskList([envgym.Task(str(n), f"Write {n} backwards.", str(n)[::-1]) for n in numbers])

    def demonstrations(self, task, seed):
        return [task.answer]
"""


def attack(file, **settings):
    return asyncio.run(attack_environment(str(file), settings))


def paying(report):
    """The cheats that pay, with their kinds."""
    return {row.cheat: row.kind for row in report.rows if row.verdict is AttackVerdict.PAYS}


def test_a_planted_weakness_pays():
    report = attack(PLANTED / "weak" / "any_number.py")
    assert not report.passed
    assert "all guesses in a line" in paying(report)
    assert report.blind < 0.1
    assert [row.verdict for row in report.rows if row.kind == "demonstrations"] == [AttackVerdict.ALL]


def test_nothing_pays_in_a_sound_environment():
    report = attack(PLANTED / "sound" / "mostly_b.py")
    assert report.passed, paying(report)
    assert report.blind == pytest.approx(0.62, abs=0.05)
    assert len([row for row in report.rows if row.kind == "texts"]) >= 40


def test_what_an_earlier_episode_left_behind_pays(tmp_path):
    """The memory is short: each cheat follows a right episode of its own task."""
    (tmp_path / "recent.py").write_text(RECENT)
    report = attack(tmp_path / "recent.py")
    assert set(paying(report).values()) == {"left_behind"}
    earned = {row.cheat: row.earned for row in report.rows}
    assert earned["nothing after a right episode"] == earned["demonstrations"] == 1.0


def test_an_authors_cheats_and_graders_that_hang_or_end_are_in_the_table(tmp_path, capsys):
    """Of 20 tasks each is played with several seeds. A process that hangs or ends is replaced."""
    (tmp_path / "sums.py").write_text(SUMS)
    assert main(["envs", "attack", str(tmp_path / "sums.py"), "env.call_timeout=1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    rows = {row["cheat"]: row for row in report["rows"]}
    assert not report["passed"]
    assert (rows["a request"]["verdict"], rows["a request"]["earned"], rows["a request"]["tasks"]) == ("PAYS", 0.5, 50)
    assert (rows["another"]["verdict"], rows["another"]["kind"]) == ("no", "author")
    assert rows["a factorial"]["verdict"] == "HANGS"
    assert "blocked permanently in step" in rows["a factorial"]["message"]
    assert rows["a factorial of mathematics"]["verdict"] == "ENDS PROCESS"
    assert rows["a number of many digits"]["verdict"] == "no"
    assert rows["demonstrations"]["verdict"] == "earn all"
    assert rows["demonstrations"]["earned"] == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "there is no file"),
        (["math_verify", "env.digts=1"], "Did you mean 'digits'?"),
        (["empty.py"], "empty.py has no tasks"),
        (["raises.py"], "raises.py, line 21): see envgym envs check"),
    ],
)
def test_a_mistake_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "raises.py").write_text(SUMS.replace("2 * n + 2", "1 / 0"))
    (tmp_path / "empty.py").write_text(SUMS.replace("range(20)", "()"))
    monkeypatch.chdir(tmp_path)
    assert main(["envs", "attack", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("envgym: error: ")
    assert said in line


def test_the_lower_bound_of_paired_differences():
    """By hand: a mean of 0.3, a standard deviation of 0.4830 and ten pairs; 3.3 standard errors are 0.5041."""
    mean, lower_bound = compare([1, 0, 0, 1, 0, 0, 1, 0, 0, None], [0.0] * 9 + [0.7])
    assert mean == pytest.approx(0.3)
    assert lower_bound == pytest.approx(0.3 - 0.5041, abs=1e-4)
    assert compare([1.0, 1.0], [0.0, 0.0]) == (1.0, 1.0)


def test_answers_that_are_equally_frequent_do_not_tell_the_right_one(tmp_path):
    """Without the task's own, its letter would be the rarest, and the last of all guesses would earn all."""
    rows = [
        {
            "prompt": f"What is {a} + {a + 3}?",
            "choices": [2 * a + 3 + (k - a) % 4 for k in range(4)],
            "answer": str(2 * a + 3),
        }
        for a in range(20, 60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": {"path": str(tmp_path / "rows.jsonl")}}
    report = asyncio.run(attack_environment("multiple_choice", settings))
    assert report.passed


def test_right_answers_are_not_compared_with_demonstrations_that_hang():
    """They have no reward for every task, and do not earn all."""

    class Host:
        async def describe(self):
            return [("blind", "nothing"), ("demonstrations", "demonstrations"), ("excess", "every turn twice")], 1.0

        async def play(self, index, start, stop):
            if index == 1:
                return Plays([[(1.0, 1.0)]] * 8, "step took longer than 1 s", AttackVerdict.HANGS)
            return Plays([[(float(index > 0), None)]] * (stop - start))

    class Process:
        def call(self, call):
            return call(Host())

        async def kill(self):
            pass

    report = AttackReport("hanging")
    asyncio.run(Attack(report, Process()).run(lambda row, total: None))
    [row] = report.rows
    assert (row.cheat, row.verdict, row.message) == (
        "demonstrations", AttackVerdict.LESS, "step took longer than 1 s"
    )  # fmt: skip
    assert not report.passed
