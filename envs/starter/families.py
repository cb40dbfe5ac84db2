"""The families of exercises: functions that draw an exercise."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envgym.types import Message, ToolCall, ToolSpec

from .exercise import ACTIONS, ADJECTIVES, FILLERS, ITEMS, NAMES, NUMBERS, Exercise, ask, letters, sentence, word

Family = Callable[[random.Random], Exercise]
ORDINALS = ("first", "second", "third", "fourth")


# -- letters and words ----------------------------------------------------------------------------------------


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


# -- numbers --------------------------------------------------------------------------------------------------


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


# -- lists and JSON -------------------------------------------------------------------------------------------


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
    facts = " ".join(f"{name} has a {item}." for name, item in zip(names[:count], items, strict=False))
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


# -- free answers ---------------------------------------------------------------------------------------------


def choose(rng: random.Random) -> Exercise:
    """One of the words that the question names, whatever else it says: where a rule is new, all of them are tried."""
    options = _options(rng)
    return Exercise(f"{_statement(rng)}{_choice(rng, options)}", [rng.choice(options)], is_free=True)


def yes_or_no(rng: random.Random) -> Exercise:
    name, item, adjective = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(ADJECTIVES)
    question = rng.choice(
        (f"Is the {item} {adjective}?", f"Has {name} a {item}?", f"Is {rng.randint(1, 20)} {adjective}?", f"{item}?")
    )
    return Exercise(f"{_statement(rng)}{question}", [rng.choice(("yes", "no"))], is_free=True)


def _options(rng: random.Random) -> list[str]:
    """Two to four words of a kind."""
    count = rng.choice([2, 2, 2, 3, 3, 4])
    kind = rng.randrange(6)
    if kind == 0:
        low = rng.randint(0, 9)
        return [str(low + index) for index in range(count)]
    if kind == 1:
        return [letters(rng) for _ in range(count)]
    return rng.sample(
        (ITEMS, ADJECTIVES, ACTIONS, [*ITEMS, *NAMES, *ADJECTIVES, *ACTIONS, "yes", "no"])[kind - 2], count
    )


def _statement(rng: random.Random) -> str:
    """Something to which an answer may refer, or nothing."""
    return rng.choice(
        (
            "",
            f"{sentence(rng)} ",
            f"{sentence(rng)} {sentence(rng)} ",
            f"{letters(rng, 6)}. ",
            f"{rng.randint(0, 99)}. ",
            f"{rng.choice(NAMES)} has {rng.randint(1, 20)} {rng.choice(ITEMS)}s. ",
            f"The {rng.choice(ITEMS)} is here. ",
            f"{' '.join(rng.sample(ITEMS, rng.randint(2, 4)))}. ",
            f"{_unclear_text(rng, 6)[0]}. ",
        )
    )


def _choice(rng: random.Random, options: Sequence[str]) -> str:
    phrase = rng.choice([f"{', '.join(options[:-1])} or {options[-1]}", " or ".join(options), ", ".join(options)])
    form = rng.choice(
        ("Say {}.", "Say {}.", "Answer {}.", "Choose {}.", "Take {}.", "Pick one of {}.", "Reply with {}.", "{}?")
    )
    return form.format(phrase)


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
    text, words = _unclear_text(rng)
    return Exercise(text, [_some_answer(rng, words)], is_free=True)


def _unclear_text(rng: random.Random, max_length: int = 16) -> tuple[str, list[str]]:
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


def _some_answer(rng: random.Random, words: Sequence[str]) -> str:
    chosen = rng.choice(words)
    if rng.random() < 0.65:
        return chosen
    return rng.choice(
        [
            words[-1], chosen.upper(), chosen[0], chosen[-1], chosen[1:] or chosen, " ".join(chosen), chosen + chosen,
            "yes", "no", "yes", "no", str(rng.randrange(10)), str(rng.randrange(100)), word(rng),
            rng.choice(string.ascii_lowercase), " ".join(rng.sample(words, min(len(words), rng.randint(2, 4)))),
            "".join(rng.sample(chosen, len(chosen))), f"{chosen}.",
        ]
    )  # fmt: skip


# -- several turns --------------------------------------------------------------------------------------------


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
    options = _options(rng)
    count = rng.randint(2, 4)
    choices = [_choice(rng, options)] * count if rng.random() < 0.5 else [_choice(rng, options), *[""] * (count - 1)]
    first, *statements = [f"{_statement(rng)}{choice}".strip() or sentence(rng) for choice in choices]
    turns = [rng.choice(options) for _ in range(count)]
    return Exercise(first, turns, [Message.user(text) for text in statements], is_free=True)


def unclear_dialogue(rng: random.Random) -> Exercise:
    """Texts without a meaning, one after the other. An answer is mostly to the last one."""
    question, words = _unclear_text(rng)
    turns, replies, all_words = [_some_answer(rng, words)], [], list(words)
    for _ in range(rng.randint(1, 3)):
        reply, words = _unclear_text(rng, 5)
        all_words += words
        replies.append(Message.user(reply))
        turns.append(_some_answer(rng, rng.choice([words, words, all_words])))
    return Exercise(question, turns, replies, is_free=True)


def two_questions(rng: random.Random) -> Exercise:
    first, second = (rng.choice(SINGLE)(rng) for _ in range(2))
    turns = [*first.turns, *second.turns]
    return Exercise(first.question, turns, [Message.user(second.question)], is_free=first.is_free or second.is_free)


# -- tools ----------------------------------------------------------------------------------------------------

TOOLS: Mapping[str, tuple[str, str, str]] = {
    "color": ("The color of a thing.", "thing", "adjective"),
    "weigh": ("The weight of a thing.", "item", "number"),
    "find": ("Where a thing is.", "name", "item"),
    "owner": ("Who has a thing.", "what", "name"),
    "count": ("How many there are.", "of", "number"),
    "meaning": ("What a word means.", "word", "item"),
    "page": ("A page of the book.", "number", "item"),
    "room": ("Who is in a room.", "number", "name"),
    "add_one": ("The number plus one.", "x", "number"),
}
"""Name of a tool -> its description, its parameter, and the kind of its result."""
NUMBERS_TAKEN = ("number", "x")
"""Parameters that are numbers; the others are words."""


def call_tool(rng: random.Random) -> Exercise:
    """Call a tool, and answer with its result. One demonstration in five answers without."""
    names = rng.sample(sorted(TOOLS), rng.choice([1, 1, 1, 2]))
    tools = tuple(_tool(name) for name in names)
    name = rng.choice(names)
    _, parameter, kind = TOOLS[name]
    thing = rng.randrange(100) if parameter in NUMBERS_TAKEN else word(rng)
    questions = (
        "{n} of {t}?",
        "Use {n} for {t}.",
        "Ask {n} about {t}.",
        "Call {n} with {t}.",
        "What is the {n} of {t}?",
    )
    question = rng.choice(questions).format(n=name.replace("_", " "), t=thing)
    if rng.random() < 0.2:
        return Exercise(question, [rng.choice(("I do not know.", "no", "?", str(thing)))], tools=tools, is_free=True)
    call = ToolCall("call_0", name, {parameter: thing})
    results = {"adjective": ADJECTIVES, "item": ITEMS, "name": NAMES}
    result = str(rng.randrange(100)) if kind == "number" else rng.choice(results[kind])
    if name == "add_one":
        result = str(int(thing) + 1)
    reply = Message("tool", result, tool_call_id=call.id, name=name)
    return Exercise(question, [Message("assistant", (), (call,)), result], [reply], tools)


def call_unclear_tool(rng: random.Random) -> Exercise:
    """Call a tool without a meaning with a word of the question, and answer with a word of its result, mostly."""
    text, words = _unclear_text(rng, 8)
    name, parameter = (rng.choice([word(rng), *rng.sample(ACTIONS, 2)]) for _ in range(2))
    argument = rng.choice(words)
    tool = _spec(name, _unclear_text(rng, 6)[0], parameter, "integer" if argument.isdecimal() else "string")
    call = ToolCall("call_0", name, {parameter: int(argument) if argument.isdecimal() else argument})
    other_results = ["yes", "no", rng.choice(NAMES)] if rng.random() < 0.3 else []
    results = [word(rng), str(rng.randrange(100)), *other_results]
    result = rng.choice([rng.choice(results), rng.choice(results), " ".join(rng.sample(results, 2))])
    reply = Message("tool", result, tool_call_id=call.id, name=name)
    answer = rng.choice([result, result, rng.choice(result.split()), _some_answer(rng, [*words, result])])
    return Exercise(text, [Message("assistant", (), (call,)), answer], [reply], (tool,), is_free=True)


def _tool(name: str) -> ToolSpec:
    description, parameter, _ = TOOLS[name]
    return _spec(name, description, parameter, "integer" if parameter in NUMBERS_TAKEN else "string")


def _spec(name: str, description: str, parameter: str, kind: str) -> ToolSpec:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {parameter: {"type": kind}},
        "required": [parameter],
    }
    return ToolSpec(name, description, parameters)


# -------------------------------------------------------------------------------------------------------------

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

FAMILIES: tuple[Family, ...] = (
    *SINGLE, *LETTERS, *[choose] * 7, *[unclear_question] * 3, guess_letter, another_answer, remember, remember,
    two_questions, *[choose_again] * 3, *[unclear_dialogue] * 2, call_tool, call_unclear_tool, call_unclear_tool,
)  # fmt: skip
"""All families; one that is named twice is drawn twice as often."""
