"""The fields of cheats: guesses from other tasks, and echoes of what reached the policy in this episode."""

from __future__ import annotations

import base64
import binascii
import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.check.play import text_of
from envgym.types import Observation, observed_messages
from envgym.yaml_files import read_yaml

Fields = Mapping[str, Callable[[], str]]

DATA: Mapping[str, Any] = read_yaml(Path(__file__).with_name("plays.yaml"))
CHEATS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("cheats.yaml"))
LISTED = 200
"""Maximum number of guesses in one answer."""
NAMES = 12
"""Maximum number of names that are read out of results."""
_TAG = re.compile(r"<(\w+)>")
_ERROR = re.compile(DATA["error"], re.IGNORECASE)
_MARK = DATA["mark"].replace("MARKS", DATA["marks"])
_PIECES = {name: re.compile(pattern.replace("MARK", _MARK)) for name, pattern in DATA["pieces"].items()}
_TEXTS = {name: "".join(text * count for text, count in parts) for name, parts in DATA["repeated"].items()}
_TEXTS |= {name: CHEATS[name] for name in ("folders", "search")}
CONSTANTS: Fields = {name: functools.partial(str, text) for name, text in _TEXTS.items()} | {
    "numbers": lambda: " ".join(map(str, range(1001))),
    "steps": lambda: "\n".join(f"Step {number}: therefore, I verify this step." for number in range(1, 301)),
}


def fill(text: str, fields: Fields) -> str:
    """The text with its fields; words in braces that are none stay."""
    return re.sub(r"\{(\w+)\}", lambda match: fields[match[1]]() if match[1] in fields else match[0], text)


def guess_fields(guesses: Sequence[str], rng: random.Random, in_form: Callable[[str], str]) -> Fields:
    """Fields of answers to other tasks, the most frequent first. `in_form` returns the text of a whole answer."""
    answers = guesses[:LISTED] or ["1"]
    return {
        "guess": lambda: answers[0],
        "other": lambda: rng.choice(answers),
        "guesses": lambda: " ".join(answers),
        "guess_commas": lambda: ", ".join(answers),
        "guess_lines": lambda: "\n".join(answers),
        "forms": lambda: "\n".join(map(in_form, answers[:40])),
    }


def echoes(observations: Sequence[Observation], guess: str, rng: random.Random) -> Fields:
    """Fields of the observations of an episode so far. An echo of a thing that is not there is empty."""
    opening, last = observations[0], result_of(observations[-1])
    conversation = "\n".join(map(text_of, observations))
    instructions = [message.text for message in observed_messages(opening) if message.role == "system"]
    texts = {"": last, "conversation_": conversation}
    texts["instructions_"] = "\n".join([*instructions, *(tool.description for tool in opening.tools)])
    return {
        f"{source}{place}_{name}": functools.partial(_piece, pattern, text, index)
        for source, text in texts.items()
        for name, pattern in _PIECES.items()
        for place, index in (("first", 0), ("last", -1))
    } | {
        "observation": lambda: last,
        "conversation": lambda: conversation,
        "conversation_repr": lambda: repr(conversation),
        "instructions": lambda: texts["instructions_"],
        "random_word": lambda: rng.choice(re.findall(r"\w+", last) or [""]),
        "decoded": lambda: next(filter(None, map(decode, reversed(re.findall(r"[\w+/]{4,}=*", conversation)))), ""),
        "function": lambda: function_in(conversation) or function_in(guess) or "solution",
        "tags": lambda: "".join(f"<{tag}>{guess}</{tag}>" for tag in dict.fromkeys(_TAG.findall(conversation))),
    }


def result_of(observation: Observation) -> str:
    """The last message that is no error, else the last one."""
    texts = [message.text for message in observed_messages(observation)] or [text_of(observation)]
    return next((text for text in reversed(texts) if text.strip() and not _ERROR.search(text)), texts[-1])


def names_in(observation: Observation) -> list[str]:
    """Names in the results that are no errors; those that sound like answers come last, so that their results do."""
    texts = [message.text for message in observed_messages(observation) if not _ERROR.search(message.text)]
    names = dict.fromkeys(name for text in texts for name in re.findall(r"[\w.-]{1,80}", text))
    return sorted(names, key=lambda name: re.search(DATA["marks"], name, re.IGNORECASE) is not None)[-NAMES:]


def function_in(text: str) -> str:
    """The name of the first function in a text; empty if it names none."""
    match = re.search(r"(?<![\w.])([A-Za-z_]\w*)\(", text) or re.search(r"function\s+(?:called\s+)?`?(\w+)", text)
    return match[1] if match else ""


def decode(word: str) -> str:
    """A word in base 64 or hexadecimal digits as text; empty if it is none."""
    for decoder in (binascii.unhexlify, functools.partial(base64.b64decode, validate=True)):
        try:
            text = decoder(word).decode("ascii")
        except ValueError:
            continue
        if text.isprintable():
            return text
    return ""


def _piece(pattern: re.Pattern[str], text: str, index: int) -> str:
    """The first or the last match of a pattern in a text: its group, without punctuation around it."""
    matches = list(pattern.finditer(text))
    if not matches:
        return ""
    piece = next((group for group in matches[index].groups() if group), matches[index][0]).strip()
    return piece if piece == matches[index][0].strip() else piece.strip(".,;:!?`*$ ")
