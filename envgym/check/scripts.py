"""Scripts that replace the policy: empty completions, noise, a parrot, demonstrations."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envgym.rollout.scripted import Script, action_of, script_of
from envgym.types import Action, Message, Observation, ToolCall, ToolSpec, observed_messages

from .play import text_of

WORDS = (
    "a and at by from go he house in it light no not of on one river say seven she so stone the then tree two we yes"
)

MAX_TURNS = 30
"""Limit of turns of every script but demonstrations."""


def answer_script(answer: Callable[[Observation], str]) -> Script:
    """A script with the same function of the observation in every turn."""
    return lambda turn, observation: text_action(answer(observation)) if turn < MAX_TURNS else None


silence = answer_script(lambda observation: "")
parrot = answer_script(lambda observation: "\n".join(message.text for message in observed_messages(observation)))


def random_text(seed: object) -> Script:
    """Thirty everyday words in random order."""
    rng = random.Random(f"text {seed}")
    text = " ".join(rng.choices(WORDS.split(), k=30))
    return answer_script(lambda observation: text)


def random_tokens(seed: object) -> Script:
    """The text of a policy with random weights: pieces of any script, digits and signs."""
    rng = random.Random(f"tokens {seed}")
    alphabets = (range(33, 127), range(0xA1, 0x530), range(0x4E00, 0x9FFF))
    text = "".join(chr(rng.choice(rng.choice(alphabets))) for _ in range(60))
    return answer_script(lambda observation: text)


def monkey(seed: object) -> Script:
    """Random actions: words and numbers from the observation, and calls of the tools.

    The actions are a function of the observations. Make one per episode: it remembers the first observation's tools.
    """
    tools: list[ToolSpec] = []

    def script(turn: int, observation: Observation) -> Action | None:
        if turn >= MAX_TURNS:
            return None
        tools[:] = tools or observation.tools
        rng = random.Random(f"monkey {seed} {turn}")
        words = re.findall(r"\[[^\]\n]{1,20}\]|\w+", text_of(observation)[-4000:]) or WORDS.split()
        if tools and rng.random() < 0.6:
            return call_action([call_of(rng.choice(tools), rng, words)])
        word = rng.choice((rng.choice(words), str(rng.randrange(10)), f"[{rng.randrange(10)}]"))
        return text_action(" ".join([word, *rng.choices(words, k=rng.choice((0, 0, 3)))]))

    return script


def demonstration_script(turns: Sequence[str | Message]) -> Script:
    """The turns of a demonstration as a script."""
    return script_of([text_action(turn) for turn in turns])


def text_action(turn: str | Message) -> Action:
    """A turn of the assistant as an action, whose token ids are its bytes."""
    text = turn.text if isinstance(turn, Message) else turn
    return action_of(turn, text.encode("utf-8", "replace"))


def call_action(calls: Sequence[ToolCall]) -> Action:
    """An action that calls tools, with a text as in some templates."""
    text = "".join(f"<tool_call>{call.name}</tool_call>" for call in calls)
    return Action(text, tuple(text.encode()), tuple(calls))


def call_of(tool: ToolSpec, rng: random.Random, words: Sequence[str]) -> ToolCall:
    """A call with random arguments that fit the tool's schema."""
    arguments = value_of(tool.parameters, rng, words)
    return ToolCall(f"call_{rng.randrange(10**6)}", tool.name, arguments if isinstance(arguments, dict) else {})


def value_of(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str], depth: int = 0) -> Any:
    """A random value of a JSON schema, of the kinds that tools use; None for other schemas."""
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else rng.choice(schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return value_of(rng.choice(choices), rng, words, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "object" and depth < 4:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        names = [name for name in properties if name in required or rng.random() < 0.5]
        return {name: value_of(properties[name], rng, words, depth + 1) for name in names}
    if kind == "array" and depth < 4:
        count = rng.randrange(max(1, schema.get("minItems", 0)), 3)
        return [value_of(schema.get("items") or {"type": "string"}, rng, words, depth + 1) for _ in range(count)]
    if kind in ("integer", "number"):
        low = int(schema.get("minimum", 0))
        number = rng.randint(low, max(low, int(schema.get("maximum", low + 9))))
        return number if kind == "integer" else float(number)
    return {"boolean": rng.random() < 0.5, "string": rng.choice(words)}.get(str(kind))
