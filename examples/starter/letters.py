"""Exercises on the letters of a word."""

from __future__ import annotations

import random
import string

from .exercise import Exercise, ask, letters, word


def repeat(rng: random.Random) -> Exercise:
    text = word(rng)
    return ask(rng, ("Repeat {w}.", "Say {w} again.", "Copy {w}.", "Write {w}."), text, w=text)


def first_letter(rng: random.Random) -> Exercise:
    text = word(rng)
    return ask(rng, ("First letter of {w}?", "Which letter does {w} begin with?"), text[0], w=text)


def last_letter(rng: random.Random) -> Exercise:
    text = word(rng)
    return ask(rng, ("Last letter of {w}?", "Which letter does {w} end with?"), text[-1], w=text)


def nth_letter(rng: random.Random) -> Exercise:
    text = letters(rng)
    number = rng.randint(1, len(text))
    return ask(rng, ("Letter {n} of {w}?", "Letter number {n} of {w}?"), text[number - 1], w=text, n=number)


def last_letters(rng: random.Random) -> Exercise:
    text = letters(rng) + letters(rng, 2)
    return ask(rng, ("Last two letters of {w}?", "Write the end of {w}, two letters."), text[-2:], w=text)


def sort_letters(rng: random.Random) -> Exercise:
    text = letters(rng)
    return ask(rng, ("Sort the letters of {w}.", "Put {w} in order."), "".join(sorted(text)), w=text)


def rotate(rng: random.Random) -> Exercise:
    text = letters(rng)
    questions, answer = rng.choice(
        [
            (("Move the first letter of {w} to the end.", "Rotate {w}."), text[1:] + text[0]),
            (("Move the last letter of {w} to the start.", "Rotate {w} to the right."), text[-1] + text[:-1]),
        ]
    )
    return ask(rng, questions, answer, w=text)


def swap_ends(rng: random.Random) -> Exercise:
    text = letters(rng)
    answer = text if len(text) == 1 else f"{text[-1]}{text[1:-1]}{text[0]}"
    return ask(rng, ("Swap the first and last letter of {w}.", "Swap the ends of {w}."), answer, w=text)


def count_letters(rng: random.Random) -> Exercise:
    text = letters(rng)
    return ask(rng, ("How many letters has {w}?", "How long is {w}?"), str(len(text)), w=text)


def count_one_letter(rng: random.Random) -> Exercise:
    text = "".join(rng.choices("abc", k=rng.randint(1, 4)))
    letter = rng.choice("abc")
    return ask(rng, ("How many {l} are in {w}?", "Count {l} in {w}."), str(text.count(letter)), w=text, l=letter)


def spell(rng: random.Random) -> Exercise:
    text = word(rng)
    sign, name = rng.choice([(" ", "spaces"), ("-", "dashes"), (",", "commas")])
    return ask(rng, ("Spell {w} with {s}.", "Letters of {w}, with {s}."), sign.join(text), w=text, s=name)


def join_letters(rng: random.Random) -> Exercise:
    text = letters(rng)
    spelled = rng.choice([" ", "-", ","]).join(text)
    return ask(rng, ("Make a word of {w}.", "Join {w}."), text, w=spelled)


def capitals(rng: random.Random) -> Exercise:
    text = word(rng)
    return ask(rng, ("Write {w} in capitals.", "{w} in big letters?"), text.upper(), w=text)


def double_word(rng: random.Random) -> Exercise:
    text = letters(rng, 3)
    return ask(rng, ("Write {w} twice.", "Double {w}."), text + text, w=text)


def without_first(rng: random.Random) -> Exercise:
    text = letters(rng) + rng.choice(string.ascii_lowercase)
    return ask(rng, ("Leave out the first letter of {w}.", "{w} without its first letter?"), text[1:], w=text)


def without_last(rng: random.Random) -> Exercise:
    text = letters(rng) + rng.choice(string.ascii_lowercase)
    return ask(rng, ("Leave out the last letter of {w}.", "{w} without its last letter?"), text[:-1], w=text)


def add_letter(rng: random.Random) -> Exercise:
    text, letter = letters(rng), rng.choice(string.ascii_lowercase)
    end, answer = rng.choice([("end", text + letter), ("start", letter + text)])
    return ask(rng, ("Add {l} at the {e} of {w}.", "Put {l} at the {e} of {w}."), answer, w=text, l=letter, e=end)


def join_words(rng: random.Random) -> Exercise:
    first, second = letters(rng, 3), letters(rng, 3)
    return ask(rng, ("Join {a} and {b}.", "Write {a} and {b} as one word."), first + second, a=first, b=second)


def has_letter(rng: random.Random) -> Exercise:
    text = letters(rng)
    letter = rng.choice([rng.choice(text), rng.choice(string.ascii_lowercase)])
    answer = "yes" if letter in text else "no"
    return ask(rng, ("Is {l} in {w}?", "Has {w} the letter {l}?"), answer, w=text, l=letter)


def same_word(rng: random.Random) -> Exercise:
    first, second = letters(rng, 2), letters(rng, 2)
    second = rng.choice([first, second])
    answer = "yes" if first == second else "no"
    return ask(rng, ("Are {a} and {b} the same?", "Is {a} equal to {b}?"), answer, a=first, b=second)


def next_letter(rng: random.Random) -> Exercise:
    number = rng.randrange(25)
    letter, answer = string.ascii_lowercase[number], string.ascii_lowercase[number + 1]
    return ask(rng, ("Which letter follows {l}?", "Next letter after {l}?"), answer, l=letter)


def some_letters(rng: random.Random) -> Exercise:
    text = letters(rng)
    answer = "".join(rng.choices(text, k=rng.randint(1, 6)))
    return ask(rng, ("Write some letters of {w}.", "Use letters of {w}."), answer, is_free=True, w=text)


def mixed_letters(rng: random.Random) -> Exercise:
    """Letters in an order that a word asks for which says nothing."""
    text = letters(rng)
    manner = rng.choice(("mixed", "apart", "freely", "somehow", "sideways", "nicely", "slowly", "around", "otherwise"))
    answer = "".join(rng.sample(text, len(text)))
    return ask(rng, ("Write {w} {m}.", "Spell {w} {m}.", "{w}, {m}?"), answer, is_free=True, w=text, m=manner)
