"""The last number of prose, and what is said where no answer has the form that is read."""

import asyncio
import json
from pathlib import Path

import pytest

import envgym
from envgym.envs.math_verify.prose import last_number
from envgym.rewards.final_answers import final_line
from envgym.rollout.first_answers import FirstAnswers
from envgym.types import Episode, Outcome, Task

NUMBERS = [
    ("She has 42.", "42"), ("1,2,3", "3"), ("1, 2, 3", "3"), ("3.", "3"), ("-4", "-4"), ("−4", "-4"), ("x=-4", "-4"),
    ("10 - 4", "4"), ("5-4", "4"), ("$1,200.50", "1,200.50"), ("-$5", "-5"), ("$-5", "-5"), ("12 €", "12"),
    ("£3.50", "3.50"), (r"\$18", "18"), ("5%", "5%"), (r"5\%", "5%"), ("5 percent", "5%"), ("1/2", "1/2"),
    ("1 1/2 cups", "1 1/2"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), ("7/2 = 3.5", "3.5"), (".5", ".5"), ("wait...5", "5"),
    ("**18**", "18"), ("**$18.**", "18"), ("_12_", "12"), (r"\(12\)", "12"), (r"$\boxed{12}$", "12"),
    ("1 234 km", "1 234"), ("1{,}234", "1234"), ("1,2345", "2345"), ("2 x 3 = 6", "6"), ("<<6*7=42>>42", "42"),
    ("3 million", "3 million"),
    ("10^3", "10^3"), (r"1.2\times10^{5}", r"1.2\times10^{5}"), ("12 m^2", "12"), ("12 m^{2}", "12"), ("12cm", "12"),
    ("on 2024-05-01", "01"), ("3/4/2025", "2025"), ("at 12:30", "12:30"), ("H2O", None), ("none", None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_last_number_of_prose(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [("so **$1,200.50**.", "1200.5", 1), ("half: 1/2 of it", "0.5", 1), ("that is 10^3", "3", 0), ("-4", "4", 0)],
)
def test_the_last_number_is_compared_with_the_reference(text, gold, reward):
    async def main():
        async with envgym.spec("math_verify", read="last_number") as spec:
            env = spec.make()
            await env.reset(options={"task": Task("t", "q", gold)})
            return (await env.step(envgym.Action(text)))[1]

    assert asyncio.run(main()) == reward


@pytest.mark.parametrize(
    ("answered", "lines"),
    [([0] * 70, 1), ([0] * 31 + [1], 0), ([0] * 8, 1), ([0] * 7, 0), ([0] * 32 + [1], 1), ([None] * 40, 0)],
)
def test_it_is_said_once_if_none_of_the_first_answers_has_the_form(answered, lines):
    said = []
    answers = FirstAnswers(envgym.spec("math_verify"))
    answers.note = said.append
    for value in answered:
        if answers.start(TASK):
            answers.add(episode_with(value))
    answers.conclude()
    answers.conclude()
    assert len(said) == lines
    assert all("env.read=last_number" in line and "box" in line for line in said)


TASK = Task("t", "q", "1")


def episode_with(value):
    metrics = {} if value is None else {"answered": float(value)}
    return Episode(id="", task=TASK, outcome=Outcome.finish(), metrics=metrics)


def test_the_first_answers_are_those_that_start_first():
    """Those that end first are the shortest, which rarely have the form that is asked for."""
    said = []
    answers = FirstAnswers(envgym.spec("math_verify"))
    answers.note = said.append
    are_first = [answers.start(TASK) for _ in range(80)]
    assert are_first == [True] * 32 + [False] * 48
    for is_first in [*are_first[32:], *are_first[:31]]:
        if is_first:
            answers.add(episode_with(0))
    assert not said
    answers.add(episode_with(1))
    answers.conclude()
    assert not said


@pytest.mark.parametrize("read", ["####", "last_number"])
def test_an_evaluation_says_once_that_no_answer_has_the_form(read, run, tiny_model):
    words = ("rollout.max_tokens=4", "eval.tasks=8", "engine.kind=transformers", "debug=true", f"env.read={read}")
    result = run("eval", "--env", "math_verify", "--model", tiny_model, "--name", "e", *words)
    assert result.returncode == 0, result.stderr
    said = (result.stdout + result.stderr).count("none is in the last line after '####'; if the policy writes prose")
    assert said == (read == "####")
    parts = json.loads(Path("evals/e/result.json").read_text())["envs"].values()
    assert [part["settings"]["read"] for part in parts] == [read, read], "sampled and greedy"


def test_repeated_emphasis_is_read_in_linear_time():
    assert final_line("The answer is " + "**a " * 100_000, "The answer is") is not None  # would take hours else
