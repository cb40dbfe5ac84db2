"""The exercises that the starter policy has learned: small tasks in a few words each, by demonstrations.

They are for `recipes/starter.yaml` alone, so no entry point names them. No environment of the documentation or of the
tests is among them, so that learning one of those shows something. Many exercises have several right answers, and some
have a free one: a policy whose samples are all the same could not improve.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgym.env import Env, EnvSpec, Info, SeededTasks, StepResult, TaskSet
from envgym.types import Action, Message, Observation, Task, ToolCall, ToolSpec

ITEMS = """
    apple bag ball bed bell bird boat book box bread bus cake car cat chair clock coat cow cup dog door duck egg
    fan farm fish flag frog goat hat hen hill horse house jar key king lamp leaf lion map milk moon mouse nest
    net nut owl pan pear pen pig pot queen rain ring road rock roof rose sea sheep ship shoe snow sock star sun
    tent tree van wall
"""
ADJECTIVES = "big black blue cold dark fast green hot long new old red short slow small soft tall warm white wide"
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
ITEM_WORDS, ADJECTIVE_WORDS, NUMBER_WORDS = ITEMS.split(), ADJECTIVES.split(), NUMBERS.split()


@dataclass(frozen=True)
class Exercise:
    """An exercise with a demonstration: the policy's `turns`, and the environment's replies between them."""

    question: str
    turns: Sequence[str | Message]
    replies: Sequence[str | Message] = ()
    tools: tuple[ToolSpec, ...] = ()
    is_free: bool = False
    """True if other answers are right as well, so that accuracy says nothing."""


Family = Callable[[random.Random], Exercise]


def _letters(rng: random.Random, max_length: int = 7) -> str:
    alphabet = rng.choice([string.ascii_lowercase, string.ascii_lowercase, "abc", "xyz", "efgh", "rst"])
    return "".join(rng.choices(alphabet, k=rng.randint(1, max_length)))


def _word(rng: random.Random) -> str:
    return rng.choice([rng.choice(ITEM_WORDS), rng.choice(ADJECTIVE_WORDS), _letters(rng)])


def _ask(rng: random.Random, questions: Sequence[str], answer: str, **fields: Any) -> Exercise:
    """A question in one of several forms. Now and then its answer is put in words, or has a format of its own."""
    question = rng.choice(questions).format(**fields)
    if rng.random() < 0.2:
        form, text = rng.choice(FORMS)
        return Exercise(f"{question} {form}", [text.format(answer)])
    return Exercise(question, [answer])


FORMS = (
    ("Put the answer in brackets.", "[{}]"),
    ("Answer in a sentence.", "The answer is {}."),
    ("End with a full stop.", "{}."),
    ("Begin with =.", "= {}"),
    ("Use quotes.", '"{}"'),
)


# -- letters and words ----------------------------------------------------------------------------------------


def repeat(rng: random.Random) -> Exercise:
    word = _word(rng)
    return _ask(rng, ("Repeat {w}.", "Say {w} again.", "Copy {w}.", "Write {w}."), word, w=word)


def first_letter(rng: random.Random) -> Exercise:
    word = _word(rng)
    return _ask(rng, ("First letter of {w}?", "Which letter does {w} begin with?"), word[0], w=word)


def last_letter(rng: random.Random) -> Exercise:
    word = _word(rng)
    return _ask(rng, ("Last letter of {w}?", "Which letter does {w} end with?"), word[-1], w=word)


def nth_letter(rng: random.Random) -> Exercise:
    word = _letters(rng)
    number = rng.randint(1, len(word))
    return _ask(rng, ("Letter {n} of {w}?", "Letter number {n} of {w}?"), word[number - 1], w=word, n=number)


def sort_letters(rng: random.Random) -> Exercise:
    word = _letters(rng)
    return _ask(rng, ("Sort the letters of {w}.", "Put {w} in order."), "".join(sorted(word)), w=word)


def count_letters(rng: random.Random) -> Exercise:
    word = _letters(rng)
    return _ask(rng, ("How many letters has {w}?", "How long is {w}?"), str(len(word)), w=word)


def spell(rng: random.Random) -> Exercise:
    word = _word(rng)
    sign, name = rng.choice([(" ", "spaces"), ("-", "dashes"), (",", "commas")])
    return _ask(rng, ("Spell {w} with {s}.", "Letters of {w}, with {s}."), sign.join(word), w=word, s=name)


def capitals(rng: random.Random) -> Exercise:
    word = _word(rng)
    return _ask(rng, ("Write {w} in capitals.", "{w} in big letters?"), word.upper(), w=word)


def double_word(rng: random.Random) -> Exercise:
    word = _letters(rng, 5)
    return _ask(rng, ("Write {w} twice.", "Double {w}."), word + word, w=word)


def without_first(rng: random.Random) -> Exercise:
    word = _letters(rng) + rng.choice(string.ascii_lowercase)
    return _ask(rng, ("Leave out the first letter of {w}.", "{w} without its first letter?"), word[1:], w=word)


def without_last(rng: random.Random) -> Exercise:
    word = _letters(rng) + rng.choice(string.ascii_lowercase)
    return _ask(rng, ("Leave out the last letter of {w}.", "{w} without its last letter?"), word[:-1], w=word)


def join_words(rng: random.Random) -> Exercise:
    first, second = _word(rng), _word(rng)
    return _ask(rng, ("Join {a} and {b}.", "Write {a} and {b} as one word."), first + second, a=first, b=second)


def has_letter(rng: random.Random) -> Exercise:
    word = _letters(rng)
    letter = rng.choice([rng.choice(word), rng.choice(string.ascii_lowercase)])
    return _ask(rng, ("Is {l} in {w}?", "Has {w} the letter {l}?"), "yes" if letter in word else "no", w=word, l=letter)


def next_letter(rng: random.Random) -> Exercise:
    number = rng.randrange(25)
    letter, answer = string.ascii_lowercase[number], string.ascii_lowercase[number + 1]
    return _ask(rng, ("Which letter follows {l}?", "Next letter after {l}?"), answer, l=letter)


# -- numbers --------------------------------------------------------------------------------------------------


def more_or_less(rng: random.Random) -> Exercise:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    word, answer = rng.choice([("more", a > b), ("less", a < b)])
    return _ask(rng, ("Is {a} {w} than {b}?",), "yes" if answer else "no", a=a, b=b, w=word)


def larger_number(rng: random.Random) -> Exercise:
    a, b = rng.sample(range(100), 2)
    word, choose = rng.choice([("larger", max), ("smaller", min)])
    return _ask(rng, ("Which is {w}, {a} or {b}?", "The {w} of {a} and {b}?"), str(choose(a, b)), a=a, b=b, w=word)


def number_as_word(rng: random.Random) -> Exercise:
    number = rng.randrange(len(NUMBER_WORDS))
    return _ask(rng, ("Write {n} as a word.", "{n} in words?"), NUMBER_WORDS[number], n=number)


def word_as_number(rng: random.Random) -> Exercise:
    number = rng.randrange(len(NUMBER_WORDS))
    return _ask(rng, ("Write {n} as a number.", "{n} in digits?"), str(number), n=NUMBER_WORDS[number])


def next_number(rng: random.Random) -> Exercise:
    number = rng.randint(1, 98)
    word, answer = rng.choice([("after", number + 1), ("before", number - 1)])
    return _ask(rng, ("Which number comes {w} {n}?", "The number {w} {n}?"), str(answer), n=number, w=word)


def any_number(rng: random.Random) -> Exercise:
    low = rng.choice([0, 1, 1, 5, 10, 20])
    high = rng.randint(low + 1, rng.choice([10, 30, 100]) + low)
    forms = ("Say a number from {a} to {b}.", "Name a number between {a} and {b}.", "Choose a number, {a}-{b}.")
    question = rng.choice(forms).format(a=low, b=high)
    return Exercise(question, [str(rng.randint(low, high))], is_free=True)


def number_above_or_below(rng: random.Random) -> Exercise:
    number = rng.randint(5, 60)
    word, low, high = rng.choice([("higher", number + 1, number + 30), ("lower", 0, number - 1)])
    return Exercise(f"Name a number {word} than {number}.", [str(rng.randint(low, high))], is_free=True)


# -- lists and JSON -------------------------------------------------------------------------------------------


def pick_word(rng: random.Random) -> Exercise:
    words = rng.sample([*ITEM_WORDS, *ADJECTIVE_WORDS], rng.randint(2, 4))
    question = rng.choice(("Choose a word: {}.", "Pick one of {}.", "Say one of these: {}."))
    return Exercise(question.format(" ".join(words)), [rng.choice(words)], is_free=True)


def word_at(rng: random.Random) -> Exercise:
    words = rng.sample(ITEM_WORDS, rng.randint(2, 4))
    index = rng.randrange(len(words))
    name = ("first", "second", "third", "fourth")[index]
    return _ask(rng, ("The {n} word of {w}?", "{n} word: {w}?"), words[index], n=name, w=" ".join(words))


def as_list(rng: random.Random) -> Exercise:
    words = [_word(rng) for _ in range(rng.randint(1, 3))]
    form, text = rng.choice([("JSON", json.dumps(words)), ("a list", "\n".join(f"- {word}" for word in words))])
    return Exercise(f"{', '.join(words)}: write {form}.", [text])


def as_object(rng: random.Random) -> Exercise:
    names = rng.sample(ITEM_WORDS, rng.randint(1, 2))
    fields = {name: rng.choice([rng.randrange(100), rng.choice(ADJECTIVE_WORDS)]) for name in names}
    text = " and ".join(f"{name} is {value}" for name, value in fields.items())
    return Exercise(f"{text}: write JSON.", [json.dumps(fields)])


def some_letters(rng: random.Random) -> Exercise:
    word = _letters(rng)
    answer = "".join(rng.choices(word, k=rng.randint(1, 6)))
    return Exercise(
        rng.choice(("Write some letters of {}.", "Use letters of {}.")).format(word), [answer], is_free=True
    )


def say_something(rng: random.Random) -> Exercise:
    words = [rng.choice(ADJECTIVE_WORDS), rng.choice(ITEM_WORDS)]
    answer = rng.choice([" ".join(words), f"The {words[1]} is {words[0]}.", f"a {words[1]}", words[1]])
    return Exercise(rng.choice(("Say something.", "Write a few words.", "Tell me anything.")), [answer], is_free=True)


# -- several turns --------------------------------------------------------------------------------------------


def guess_letter(rng: random.Random) -> Exercise:
    """Guess a letter; each guess is answered with a hint."""
    alphabet = string.ascii_lowercase
    low, high = 0, rng.choice([8, 12, 25])
    secret = rng.randint(low, high)
    turns: list[str] = []
    replies: list[str] = []
    up, down = rng.choice([("later", "earlier"), ("further", "back"), ("up", "down"), ("more", "less")])
    question = f"I think of a letter, a to {alphabet[high]}. Which?"
    is_careful = rng.random() < 0.6
    top = high
    while len(turns) < 5:
        guess = (low + high) // 2 if is_careful else rng.randint(0, top)
        turns.append(alphabet[guess])
        if guess == secret or len(turns) == 5:
            break
        replies.append(up if guess < secret else down)
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return Exercise(question, turns, replies, is_free=True)


def correct_answer(rng: random.Random) -> Exercise:
    """A first answer that the environment turns down, and a second one."""
    words = rng.sample(ITEM_WORDS, 3)
    first, second = rng.sample(words, 2)
    reply = rng.choice(("Not that one.", "Another one.", f"Not {first}."))
    return Exercise(f"Pick one of {' '.join(words)}.", [first, second], [reply], is_free=True)


def next_question(rng: random.Random) -> Exercise:
    """Two questions, one after the other."""
    first, second = (rng.choice(SINGLE)(rng) for _ in range(2))
    return Exercise(first.question, [*first.turns, *second.turns], [second.question])


# -- tools ----------------------------------------------------------------------------------------------------

TOOLS = {
    "color": ("The color of a thing.", "thing", ADJECTIVE_WORDS),
    "weigh": ("The weight of a thing.", "item", range(1, 100)),
    "find": ("Where a thing is.", "name", ITEM_WORDS),
    "owner": ("Who has a thing.", "what", ITEM_WORDS),
    "count": ("How many there are.", "of", range(1, 100)),
    "meaning": ("What a word means.", "word", ITEM_WORDS),
}
"""Name of a tool -> its description, its parameter, and its possible results."""


def call_tool(rng: random.Random) -> Exercise:
    """Call a tool, and answer with its result. Sometimes the demonstration answers without."""
    name = rng.choice(list(TOOLS))
    description, parameter, results = TOOLS[name]
    thing = _word(rng)
    kinds: Mapping[str, Any] = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    tool = ToolSpec(name, description, kinds)
    question = rng.choice((f"{name} of {thing}?", f"Use {name} for {thing}.", f"Ask {name} about {thing}."))
    if rng.random() < 0.2:
        return Exercise(question, [rng.choice(("I do not know.", "no", "?"))], tools=(tool,), is_free=True)
    call = ToolCall("call_0", name, {parameter: thing})
    result = str(rng.choice(results))
    reply = Message("tool", result, tool_call_id=call.id, name=name)
    return Exercise(question, [Message("assistant", (), (call,)), result], [reply], (tool,))


# -------------------------------------------------------------------------------------------------------------

SINGLE: tuple[Family, ...] = (
    repeat, first_letter, last_letter, nth_letter, sort_letters, count_letters, spell, capitals, double_word, without_first,
    without_last, join_words, has_letter, next_letter, more_or_less, larger_number, number_as_word, word_as_number,
    next_number, any_number, number_above_or_below, pick_word, word_at, as_list, as_object, some_letters, say_something,
)  # fmt: skip
FAMILIES: tuple[Family, ...] = (*SINGLE, guess_letter, correct_answer, next_question, call_tool, call_tool, call_tool)


def exercise_of(task: Task) -> Exercise:
    """The exercise of a task, drawn by its seed. Its number is that of its family."""
    rng = random.Random(task.seed)
    return FAMILIES[rng.randrange(len(FAMILIES))](rng)


class ExerciseEnv(Env):
    """One exercise, with the replies of its demonstration. The reward is 1 for the demonstrated answer."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.exercise, self.n_turns = exercise_of(self.task), 0
        return Observation(Message.user(self.exercise.question), tools=self.exercise.tools), {}

    async def step(self, action: Action) -> StepResult:
        self.n_turns += 1
        if self.n_turns < len(self.exercise.turns):
            reply = self.exercise.replies[self.n_turns - 1]
            return Message.user(reply) if isinstance(reply, str) else reply, 0.0, False, False, {}
        return None, float(action.text == self.exercise.turns[-1]), True, False, {}


class Exercises(EnvSpec):
    """The exercises of the starter policy."""

    env_class = ExerciseEnv
    agent = "tool_calling"

    def tasks(self, split: str) -> TaskSet:
        return SeededTasks(split)

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        return list(exercise_of(task).turns)
