"""The families of exercises: functions that draw an exercise."""

from __future__ import annotations

import random
from collections.abc import Callable

from envgym.types import Message

from .dialogues import another_answer, choose_again, guess_letter, remember, unclear_dialogue
from .exercise import Exercise
from .free_answers import choose, say_something, unclear_question, yes_or_no
from .letters import (
    add_letter,
    capitals,
    count_letters,
    count_one_letter,
    double_word,
    first_letter,
    has_letter,
    join_letters,
    join_words,
    last_letter,
    last_letters,
    mixed_letters,
    next_letter,
    nth_letter,
    repeat,
    rotate,
    same_word,
    some_letters,
    sort_letters,
    spell,
    swap_ends,
    without_first,
    without_last,
)
from .questions import (
    any_number,
    as_list,
    as_object,
    count_words,
    larger_number,
    last_number,
    last_word,
    more_or_less,
    next_number,
    number_above_or_below,
    number_as_word,
    say_if,
    small_difference,
    who_has,
    word_as_number,
    word_at,
)
from .tool_calls import call_tool, call_unclear_tool

Family = Callable[[random.Random], Exercise]

LETTERS: tuple[Family, ...] = (
    repeat, first_letter, last_letter, nth_letter, last_letters, sort_letters, rotate, swap_ends, spell,
    join_letters, capitals, double_word, without_first, without_last, add_letter, join_words,
    some_letters, mixed_letters,
)  # fmt: skip
SINGLE: tuple[Family, ...] = (
    *LETTERS, count_letters, count_one_letter, has_letter, same_word, next_letter, more_or_less, larger_number,
    number_as_word, word_as_number, next_number, small_difference, last_number, any_number, number_above_or_below,
    word_at, last_word, count_words, as_list, as_object, who_has, say_if, choose, yes_or_no, say_something,
    unclear_question,
)  # fmt: skip
"""The families of one turn."""


def two_questions(rng: random.Random) -> Exercise:
    first, second = (rng.choice(SINGLE)(rng) for _ in range(2))
    turns = [*first.turns, *second.turns]
    return Exercise(first.question, turns, [Message.user(second.question)], is_free=first.is_free or second.is_free)


FAMILIES: tuple[Family, ...] = (
    *SINGLE, *LETTERS, *[choose] * 7, *[unclear_question] * 3, guess_letter, another_answer, remember, remember,
    two_questions, *[choose_again] * 3, *[unclear_dialogue] * 2, call_tool, call_unclear_tool, call_unclear_tool,
)  # fmt: skip
"""All families; one that is named twice is drawn twice as often."""
