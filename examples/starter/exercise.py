"""An exercise, and the forms in which a question and its answer are put."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envgym.types import Message, ToolSpec


def _words(text: str) -> list[str]:
    return text.split()


ITEMS = _words("""
    apple bag ball bed bell bird boat book box bread bus cake car cat chair clock coat cow cup dog door duck egg
    fan farm fish flag frog goat hat hen hill horse house jar key king lamp leaf lion map milk moon mouse nest
    net nut owl pan pear pen pig pot queen rain ring road rock roof rose sea sheep ship shoe snow sock star sun
    tent tree van wall
""")
ADJECTIVES = _words("""
    big black blue cold dark fast green hot long new old red short slow small soft tall warm white wide
""")
ACTIONS = _words("""
    add buy call card close come draw eat fall find game get give go hold jump keep left look move name open pass play
    put read right run say see sell send sit stay stop take tell time turn wait walk week word work write
""")
CHOICES = _words("""
    up down in out on off over under left right front back near far here there north south east west high low top
    bottom first last more less same other even odd yes no maybe true false good bad fine hot cold warm dry wet open
    shut full empty light dark early late now never always soon day night win lose safe risky stop go wait jump duck
    fold hold hit pass buy sell bid help ask keep drop push pull lift turn start end accept reject allow deny agree
    rock paper scissors sun rain heads tails love hate glad sad happy angry calm loud quiet hard easy quick slow
    great best worst none some all many few
""")
"""Words that people let choose from."""
FILLERS = _words("""
    the the a of and with what which who how is are was it you your my me for all in on at from to or not one two any
    each other then if when letter letters number only answer please begin end same new
""")
NAMES = _words("Amy Ben Dan Eva Ida Jim Kim Leo Mia Sam")
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")


@dataclass(frozen=True)
class Exercise:
    """An exercise with a demonstration: the policy's `turns`, and the environment's `replies` between them."""

    question: str
    turns: Sequence[str | Message]
    replies: Sequence[Message] = ()
    tools: tuple[ToolSpec, ...] = ()
    is_free: bool = False
    """True if other answers are right as well, so that agreement with the demonstration says nothing."""
    system: str = ""

    @property
    def prompt(self) -> list[Message]:
        system = [Message.system(self.system)] if self.system else []
        return [*system, Message.user(self.question)]


ANSWER_FORMS = (
    ("Put the answer in brackets.", "[{}]"),
    ("Put the answer in a box.", "\\boxed{{{}}}"),
    ("Answer in a sentence.", "The answer is {}."),
    ("End with a full stop.", "{}."),
    ("Begin with =.", "= {}"),
    ("Use quotes.", '"{}"'),
)
"""A form that a question asks for -> the answer in that form."""

QUESTION_FORMS = (
    "Question: {}", "Task: {}", "{} Answer in one line.", "{} Be brief.", "Please answer. {}", "Here is a task. {}",
    "{} Give the answer alone.", "{} Answer now.", "Look at this. {}", "{} Nothing else.",
)  # fmt: skip
"""Words around a question that do not change its answer."""

SYSTEM_PROMPTS = ("You are a helper.", "Answer the question.", "You solve small tasks.", "Be exact.")


def ask(rng: random.Random, questions: Sequence[str], answer: str, *, is_free: bool = False, **fields: Any) -> Exercise:
    """A question in one of several forms. One in seven asks for an answer in a form of its own."""
    question = rng.choice(questions).format(**fields)
    if rng.random() < 0.15:
        form, text = rng.choice(ANSWER_FORMS)
        question, answer = f"{question} {form}", text.format(answer)
    if rng.random() < 0.2:
        question = rng.choice(QUESTION_FORMS).format(question)
    if rng.random() < 0.1:
        question = f"{sentence(rng)} {question}"  # questions begin at any position
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.05 else ""
    return Exercise(question, [answer], is_free=is_free, system=system)


def sentence(rng: random.Random) -> str:
    """A sentence that says nothing about the question."""
    name, item, adjective = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(ADJECTIVES)
    return rng.choice(
        (
            f"{name} has a {adjective} {item}.",
            f"The {item} is {adjective}.",
            f"{name} sees {rng.randint(2, 99)} of them.",
        )
    )


def letters(rng: random.Random, max_length: int = 4) -> str:
    """Random letters, often of a small alphabet."""
    alphabet = rng.choice([string.ascii_lowercase, string.ascii_lowercase, "abc", "xyz", "efgh", "rst", "abcdef"])
    return "".join(rng.choices(alphabet, k=rng.randint(1, max_length)))


def word(rng: random.Random) -> str:
    return rng.choice([rng.choice(ITEMS), rng.choice(ADJECTIVES), letters(rng)])
