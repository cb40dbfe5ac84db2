"""Exercises on numbers, lists and facts."""

from __future__ import annotations

import json
import random
import string

from .exercise import ACTIONS, ADJECTIVES, ITEMS, NAMES, NUMBERS, Exercise, ask, letters, word

ORDINALS = ("first", "second", "third", "fourth")


def more_or_less(rng: random.Random) -> Exercise:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    name, answer = rng.choice([("more", a > b), ("less", a < b)])
    return ask(rng, ("Is {a} {w} than {b}?",), "yes" if answer else "no", a=a, b=b, w=name)


def larger_number(rng: random.Random) -> Exercise:
    a, b = rng.sample(range(21), 2)
    name, choose = rng.choice([("larger", max), ("smaller", min)])
    return ask(rng, ("Which is {w}, {a} or {b}?", "The {w} of {a} and {b}?"), str(choose(a, b)), a=a, b=b, w=name)


def number_as_word(rng: random.Random) -> Exercise:
    number = rng.randrange(len(NUMBERS))
    return ask(rng, ("Write {n} as a word.", "{n} in words?"), NUMBERS[number], n=number)


def word_as_number(rng: random.Random) -> Exercise:
    number = rng.randrange(len(NUMBERS))
    return ask(rng, ("Write {n} as a number.", "{n} in digits?"), str(number), n=NUMBERS[number])


def next_number(rng: random.Random) -> Exercise:
    number = rng.randint(1, 98)
    name, answer = rng.choice([("after", number + 1), ("before", number - 1)])
    return ask(rng, ("Which number comes {w} {n}?", "The number {w} {n}?"), str(answer), n=number, w=name)


def small_difference(rng: random.Random) -> Exercise:
    a, b = rng.randint(1, 20), rng.randint(0, 5)
    name, answer = rng.choice([("more", a + b), ("less", max(a, b) - b)])
    return ask(rng, ("{b} {w} than {a}?", "What is {b} {w} than {a}?"), str(answer), a=max(a, b), b=b, w=name)


def last_number(rng: random.Random) -> Exercise:
    """A number among words: the answer is in the question."""
    name, item, number = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(0, 99)
    questions = ("{n} has {x} {i}s. How many {i}s has {n}?", "There are {x} {i}s here. How many {i}s?")
    return ask(rng, questions, str(number), n=name, x=number, i=item)


def any_number(rng: random.Random) -> Exercise:
    low = rng.choice([0, 1, 1, 5, 10, 20])
    high = rng.randint(low + 1, rng.choice([10, 30, 100]) + low)
    questions = ("Say a number from {a} to {b}.", "Name a number between {a} and {b}.", "Choose a number, {a}-{b}.")
    return ask(rng, questions, str(rng.randint(low, high)), is_free=True, a=low, b=high)


def number_above_or_below(rng: random.Random) -> Exercise:
    number = rng.randint(5, 60)
    name, low, high = rng.choice([("higher", number + 1, number + 30), ("lower", 0, number - 1)])
    return ask(rng, ("Name a number {w} than {n}.",), str(rng.randint(low, high)), is_free=True, w=name, n=number)


def word_at(rng: random.Random) -> Exercise:
    words = rng.sample(ITEMS, rng.randint(2, 4))
    index = rng.randrange(len(words))
    questions = ("The {n} word of {w}?", "{n} word: {w}?")
    return ask(rng, questions, words[index], n=ORDINALS[index], w=" ".join(words))


def last_word(rng: random.Random) -> Exercise:
    words = [word(rng) for _ in range(rng.randint(2, 5))]
    return ask(rng, ("The last word of {w}?", "Last word: {w}?"), words[-1], w=" ".join(words))


def count_words(rng: random.Random) -> Exercise:
    words = [word(rng) for _ in range(rng.randint(1, 4))]
    return ask(rng, ("How many words: {w}?", "Count the words in {w}."), str(len(words)), w=" ".join(words))


def as_list(rng: random.Random) -> Exercise:
    words = [word(rng) for _ in range(rng.randint(1, 3))]
    form, text = rng.choice([("JSON", json.dumps(words)), ("a list", "\n".join(f"- {text}" for text in words))])
    return Exercise(f"{', '.join(words)}: write {form}.", [text])


def as_object(rng: random.Random) -> Exercise:
    names = rng.sample(ITEMS, rng.randint(1, 2))
    fields = {name: rng.choice([rng.randrange(100), rng.choice(ADJECTIVES)]) for name in names}
    text = " and ".join(f"{name} is {value}" for name, value in fields.items())
    return Exercise(f"{text}: write JSON.", [json.dumps(fields)])


def who_has(rng: random.Random) -> Exercise:
    """The answer is in one of two or three sentences."""
    names, items = rng.sample(NAMES, 3), rng.sample(ITEMS, 3)
    count = rng.choice([2, 2, 3])
    facts = " ".join(f"{name} has a {item}." for name, item in zip(names[:count], items[:count], strict=True))
    index = rng.randrange(count)
    questions, answer = rng.choice(
        [(("{f} Who has the {i}?",), names[index]), (("{f} What has {n}?", "{f} {n} has what?"), items[index])]
    )
    return ask(rng, questions, answer, f=facts, i=items[index], n=names[index])


def say_if(rng: random.Random) -> Exercise:
    """One of two words, by what the question holds."""
    first, second = rng.sample([*ITEMS, *ADJECTIVES, *ACTIONS], 2)
    text = letters(rng)
    letter = rng.choice([rng.choice(text), rng.choice(string.ascii_lowercase)])
    questions = ("Say {a} if {l} is in {w}, else {b}.", "{w}: {a} if it has {l}, else {b}?")
    return ask(rng, questions, first if letter in text else second, a=first, b=second, l=letter, w=text)
