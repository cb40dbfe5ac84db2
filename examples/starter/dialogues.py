"""Exercises of several turns."""

from __future__ import annotations

import random
import string

from envgym.types import Message

from .exercise import ITEMS, Exercise, letters, sentence
from .free_answers import ask_to_choose, draw_answer, draw_options, draw_statement, draw_unclear_text


def guess_letter(rng: random.Random) -> Exercise:
    """Guess a letter; each guess is answered with a hint."""
    alphabet = string.ascii_lowercase
    last = rng.choice([8, 12, 25])
    low, high, secret = 0, last, rng.randint(0, last)
    hints = rng.choice([("later", "earlier"), ("further", "back"), ("up", "down"), ("more", "less")])
    bisects = rng.random() < 0.6
    turns: list[str] = []
    replies: list[Message] = []
    while True:
        guess = (low + high) // 2 if bisects else rng.randint(0, last)
        turns.append(alphabet[guess])
        if guess == secret or len(turns) == 5:
            break
        replies.append(Message.user(hints[guess > secret]))
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return Exercise(f"I think of a letter, a to {alphabet[last]}. Which?", turns, replies, is_free=True)


def another_answer(rng: random.Random) -> Exercise:
    """A first answer that the environment turns down, and a second one."""
    words = rng.sample(ITEMS, 3)
    first, second = rng.sample(words, 2)
    reply = rng.choice(("Not that one.", "Another one.", "No.", "Try again.", f"Not {first}."))
    return Exercise(f"Pick one of {' '.join(words)}.", [first, second], [Message.user(reply)], is_free=True)


def remember(rng: random.Random) -> Exercise:
    """A word of the first turn is asked for in a later one."""
    text = rng.choice([rng.choice(ITEMS), letters(rng, 3), str(rng.randrange(100))])
    questions = ("Remember {}.", "Keep {} in mind.", "The word is {}.")
    replies = [Message.user(rng.choice(("Which was it?", "What was the word?", "Now say it.")))]
    turns = ["ok", text]
    if rng.random() < 0.4:
        replies.insert(0, Message.user(rng.choice(("Wait.", "Not yet.", sentence(rng)))))
        turns.insert(0, "ok")
    return Exercise(rng.choice(questions).format(text), turns, replies)


def choose_again(rng: random.Random) -> Exercise:
    """The same words to choose from in each turn, with other statements."""
    options, count = draw_options(rng), rng.randint(2, 4)
    names_them_again = rng.random() < 0.5
    request = ask_to_choose(rng, options)
    first, *statements = [
        f"{draw_statement(rng)}{request if number == 0 or names_them_again else ''}".strip() or sentence(rng)
        for number in range(count)
    ]
    turns = [rng.choice(options) for _ in range(count)]
    return Exercise(first, turns, [Message.user(text) for text in statements], is_free=True)


def unclear_dialogue(rng: random.Random) -> Exercise:
    """Texts without a meaning, one after the other. An answer is mostly to the last one."""
    question, words = draw_unclear_text(rng)
    turns, replies, all_words = [draw_answer(rng, words)], [], list(words)
    for _ in range(rng.randint(1, 3)):
        reply, words = draw_unclear_text(rng, 5)
        all_words += words
        replies.append(Message.user(reply))
        turns.append(draw_answer(rng, rng.choice([words, words, all_words])))
    return Exercise(question, turns, replies, is_free=True)
