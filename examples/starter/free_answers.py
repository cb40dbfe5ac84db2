"""Exercises with several right answers, or with none."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from .exercise import ACTIONS, ADJECTIVES, CHOICES, FILLERS, ITEMS, NAMES, Exercise, letters, sentence, word


def choose(rng: random.Random) -> Exercise:
    """One of the words that the question names, whatever else it says: where a rule is new, all of them are tried."""
    options = draw_options(rng)
    return Exercise(f"{draw_statement(rng)}{ask_to_choose(rng, options)}", [rng.choice(options)], is_free=True)


def yes_or_no(rng: random.Random) -> Exercise:
    name, item, adjective = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(ADJECTIVES)
    question = rng.choice(
        (f"Is the {item} {adjective}?", f"Has {name} a {item}?", f"Is {rng.randint(1, 20)} {adjective}?", f"{item}?")
    )
    return Exercise(f"{draw_statement(rng)}{question}", [rng.choice(("yes", "no"))], is_free=True)


def say_something(rng: random.Random) -> Exercise:
    question = rng.choice(("Say something.", "Write a few words.", "Tell me anything.", "Tell me about the {}."))
    item, adjective = rng.choice(ITEMS), rng.choice(ADJECTIVES)
    answer = rng.choice(
        [f"{adjective} {item}", f"The {item} is {adjective}.", f"a {item}", item, adjective, sentence(rng)]
    )
    return Exercise(question.format(item), [answer], is_free=True)


def unclear_question(rng: random.Random) -> Exercise:
    """A text without a meaning: its answers are of all kinds, mostly words of it, so that samples differ where a
    question is new."""
    text, words = draw_unclear_text(rng)
    return Exercise(text, [draw_answer(rng, words)], is_free=True)


def draw_options(rng: random.Random) -> list[str]:
    """Two to four words of a kind."""
    count = rng.choice([2, 2, 2, 3, 3, 4])
    kinds = (ITEMS, ADJECTIVES, ACTIONS, CHOICES, CHOICES, CHOICES, [*ITEMS, *NAMES, *ADJECTIVES, *ACTIONS, *CHOICES])
    kind = rng.randrange(2 + len(kinds))
    if kind == 0:
        low = rng.randint(0, 9)
        return [str(low + index) for index in range(count)]
    if kind == 1:
        return [letters(rng) for _ in range(count)]
    return rng.sample(kinds[kind - 2], count)


def draw_statement(rng: random.Random) -> str:
    """Something to which an answer may refer, or nothing."""
    return rng.choice(
        (
            "",
            f"{sentence(rng)} ",
            f"{sentence(rng)} {sentence(rng)} ",
            f"{letters(rng, 6)}. ",
            f"{rng.randint(0, 99)}. ",
            f"{rng.choice(NAMES)} has {rng.randint(1, 20)} {rng.choice(ITEMS)}s. ",
            f"The {rng.choice(ADJECTIVES)} {rng.choice(ITEMS)} is {rng.choice(('here', f'at {rng.randint(1, 20)}'))}. ",
            f"{rng.choice(NAMES)} has the {rng.choice(ADJECTIVES)} {rng.choice(ITEMS)}. ",
            f"{' '.join(rng.sample(ITEMS, rng.randint(2, 4)))}. ",
            f"{draw_unclear_text(rng, 6)[0]}. ",
        )
    )


def ask_to_choose(rng: random.Random, options: Sequence[str]) -> str:
    phrase = rng.choice([f"{', '.join(options[:-1])} or {options[-1]}", " or ".join(options), ", ".join(options)])
    form = rng.choice(
        ("Say {}.", "Say {}.", "Answer {}.", "Choose {}.", "Take {}.", "Pick one of {}.", "Reply with {}.", "{}?")
    )
    return form.format(phrase)


def draw_unclear_text(rng: random.Random, max_length: int = 16) -> tuple[str, list[str]]:
    """Random words with punctuation, and those of them that an answer may repeat."""
    text, words, is_start = "", [], True
    for _ in range(rng.randint(2, max_length)):
        if rng.random() < 0.45:
            part = rng.choice(FILLERS)
        else:
            part = rng.choice([word(rng), word(rng), rng.choice(NAMES), str(rng.randrange(100)), rng.choice(ACTIONS)])
            words.append(part)
        sign = rng.choice((".", "?", ":", ",")) if rng.random() < 0.15 else ""
        text += f"{' ' if text else ''}{part[0].upper() + part[1:] if is_start else part}{sign}"
        is_start = sign in (".", "?")
    return text, words or [word(rng)]


def draw_answer(rng: random.Random, words: Sequence[str]) -> str:
    source = rng.choice(words)
    if rng.random() < 0.65:
        return source
    return rng.choice(
        [
            words[-1], source.upper(), source[0], source[-1], source[1:] or source, " ".join(source), source + source,
            "yes", "no", "yes", "no", str(rng.randrange(10)), str(rng.randrange(100)), word(rng),
            rng.choice(string.ascii_lowercase), " ".join(rng.sample(words, min(len(words), rng.randint(2, 4)))),
            "".join(rng.sample(source, len(source))), f"{source}.",
        ]
    )  # fmt: skip
