"""The leak check compares the tasks whose answer is in their own text with chance."""

import random

import pytest

from envgym.check.leak import answer_text, leak_finding, occurs

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
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
    return texts, [answer_text(OPERATIONS[name](a, b)) for a, b in pairs]


def test_arithmetic_raises_no_alarm():
    """Small numbers are in their own sums."""
    rng = random.Random(0)
    for _ in range(20):
        texts, answers = arithmetic(rng)
        finding = leak_finding(texts, answers)
        assert finding.verdict in ("ok", "not applicable"), (texts[:3], finding)


@pytest.mark.parametrize("leak", ["{t} (answer: {x})", "{x} {t}", "{t}\n{x}", "solution={x};\n{t}", "{t} Not {x}!"])
def test_what_is_given_away_is_a_warning_whatever_the_arithmetic(leak):
    rng = random.Random(leak)
    texts = [f"What is {rng.randrange(100)} times {rng.randrange(100)}?" for _ in range(80)]
    answers = [str(rng.randrange(10_000)) for _ in texts]
    assert leak_finding(texts, answers).verdict == "ok"
    given = [leak.format(t=text, x=answer) for text, answer in zip(texts, answers, strict=True)]
    assert leak_finding(given, answers).verdict == "warning"


def test_yes_or_no_given_away_is_a_warning_and_asked_for_is_not():
    rng = random.Random(1)
    answers = [rng.choice(("yes", "no")) for _ in range(80)]
    asked = [f"Is {rng.randrange(100)} prime? Answer yes or no." for _ in answers]
    assert leak_finding(asked, answers).verdict == "ok"
    given = [f"Is {rng.randrange(100)} prime? ({answer})" for answer in answers]
    assert leak_finding(given, answers).verdict == "warning"


def test_an_answer_to_be_picked_out_of_a_text_is_a_warning():
    rng = random.Random(2)
    rows = [[f"w{rng.randrange(1000)}" for _ in range(6)] for _ in range(80)]
    texts = [f"Which of these is in my list? {' '.join(row)}" for row in rows]
    assert leak_finding(texts, [rng.choice(row) for row in rows]).verdict == "warning"


def test_numbers_stand_for_themselves():
    assert occurs("4", "4 + 0")
    assert not occurs("4", "not 42 or 14")
    assert not occurs("x", "fox box")
    assert occurs("[4]", "x [4]")
    assert occurs("1.5", "1.5")
    assert not occurs("1.5", "125")
    assert answer_text(4.0) == "4"
    assert answer_text("so it is #### 12") == "12"
    assert answer_text(None) == ""
