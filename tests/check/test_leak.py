"""The leak check finds answers that are given away, and, with a bound, no others."""

import random

import pytest

from envgym.check.leak import SHARE, answer_text, leak_finding, places

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "max": max,
    "%": lambda a, b: a % (b or 1),
}
FORMATS = (
    "{a} {op} {b}",
    "What is {a} {op} {b}?",
    "Compute {op} of {a} and {b}. Answer with a number.",
    "Tom has {a} apples and Eve {b}; with {op}, how many? Think of 0 and 1.",
    "{b}; {a}; {op}",
)


def arithmetic(rng, tasks=160):
    """A made-up arithmetic environment: operands of some size, one operation, one way of asking."""
    name = rng.choice(sorted(OPERATIONS))
    low, high = rng.choice(((0, 4), (0, 9), (0, 99), (10, 99), (-9, 9)))
    form = rng.choice(FORMATS)
    pairs = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(tasks)]
    texts = [form.format(a=a, b=b, op=name) for a, b in pairs]
    return name, texts, [answer_text(OPERATIONS[name](a, b)) for a, b in pairs]


@pytest.mark.slow
def test_arithmetic_raises_no_alarm():
    """Small numbers are in their own sums, and one of two numbers is the larger: neither is given away."""
    rng = random.Random(0)
    for _ in range(60):
        name, texts, answers = arithmetic(rng)
        finding = leak_finding(texts, answers)
        assert finding.verdict != "FAILED", (name, texts[:3], finding)
        if name in ("+", "-"):
            assert finding.verdict != "warning", (texts[:3], finding)


@pytest.mark.parametrize("leak", ["{t} (answer: {x})", "{x} {t}", "{t}\n{x}", "solution={x};\n{t}", "{t} Not {x}!"])
def test_what_is_given_away_is_found_whatever_the_arithmetic(leak):
    rng = random.Random(leak)
    for _ in range(6):
        name, texts, answers = arithmetic(rng)
        if len(set(answers)) > 2:  # else there is little to give away
            given = [leak.format(t=text, x=answer) for text, answer in zip(texts, answers, strict=True)]
            finding = leak_finding(given, answers)
            assert finding.verdict == "FAILED", (name, given[:3], finding)


def test_yes_or_no_given_away_is_found_and_asked_for_is_not():
    rng = random.Random(1)
    answers = [rng.choice(("yes", "no")) for _ in range(80)]
    asked = [f"Is {rng.randrange(100)} prime? Answer yes or no." for _ in answers]
    assert leak_finding(asked, answers).verdict == "ok"
    given = [f"{text} ({answer})" for text, answer in zip(asked, answers, strict=True)]
    assert leak_finding(given, answers).verdict == "FAILED"


def test_an_answer_to_be_picked_out_of_a_text_is_a_warning():
    rng = random.Random(2)
    rows = [[f"w{rng.randrange(1000)}" for _ in range(6)] for _ in range(80)]
    texts = [f"Which of these is in my list? {' '.join(row)}" for row in rows]
    assert leak_finding(texts, [rng.choice(row) for row in rows]).verdict == "warning"


def test_answers_dealt_out_at_random_raise_no_alarm():
    """The texts do hold numbers at fixed places."""
    rng = random.Random(4)
    alarms = 0
    for _ in range(60):
        _, texts, answers = arithmetic(rng, tasks=64)
        rng.shuffle(answers)
        alarms += leak_finding(texts, answers).verdict in ("FAILED", "warning")
    assert alarms == 0


def test_a_rule_that_is_often_right_by_honest_chance_is_no_leak():
    """The first operand is the sum in two of three tasks here: less than the share that counts."""
    rng = random.Random(5)
    pairs = [(rng.randrange(100), 0 if rng.random() < 0.8 * SHARE else rng.randrange(1, 100)) for _ in range(200)]
    finding = leak_finding([f"{a} + {b}" for a, b in pairs], [str(a + b) for a, b in pairs])
    assert finding.verdict == "ok"


def test_numbers_stand_for_themselves():
    assert places("4", "4 + 0 = 4, not 42 or 14") == [0, 8]
    assert places("x", "fox box") == []
    assert answer_text(4.0) == "4"
    assert answer_text("so it is #### 12") == "12"
    assert answer_text(None) == ""


def test_an_answer_with_signs_around_it_is_found_where_it_stands():
    rng = random.Random(3)
    answers = [f"[{rng.randrange(1000)}]" for _ in range(64)]
    texts = ["".join(rng.choices("abcdefgh", k=9)) + f" {answer}" for answer in answers]
    finding = leak_finding(texts, answers)
    assert str(finding.verdict) == "FAILED"
    assert "the 1. last word" in finding.message or "the 2. word" in finding.message
