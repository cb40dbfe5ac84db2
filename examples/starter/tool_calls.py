"""Exercises with a call of a tool."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from envgym.types import Message, ToolCall, ToolSpec

from .exercise import ACTIONS, ADJECTIVES, ITEMS, NAMES, Exercise, word
from .free_answers import draw_answer, draw_unclear_text

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
    text, words = draw_unclear_text(rng, 8)
    name, parameter = (rng.choice([word(rng), *rng.sample(ACTIONS, 2)]) for _ in range(2))
    argument = rng.choice(words)
    tool = _spec(name, draw_unclear_text(rng, 6)[0], parameter, "integer" if argument.isdecimal() else "string")
    call = ToolCall("call_0", name, {parameter: int(argument) if argument.isdecimal() else argument})
    other_results = ["yes", "no", rng.choice(NAMES)] if rng.random() < 0.3 else []
    results = [word(rng), str(rng.randrange(100)), *other_results]
    result = rng.choice([rng.choice(results), rng.choice(results), " ".join(rng.sample(results, 2))])
    reply = Message("tool", result, tool_call_id=call.id, name=name)
    answer = rng.choice([result, result, rng.choice(result.split()), draw_answer(rng, [*words, result])])
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
