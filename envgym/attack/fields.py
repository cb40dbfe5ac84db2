"""The fields of cheats: guesses from other tasks, and echoes of what reached the policy in this episode."""

from __future__ import annotations

import base64
import binascii
import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from envgym.check.play import text_of
from envgym.types import Observation, observed_messages

Fields = Mapping[str, Callable[[], str]]

LISTED = 200
"""Maximum number of guesses in one answer."""
NAMES = 12
"""Maximum number of names that are read out of results."""
_ERROR = re.compile(r"error|exception|traceback|no such|not a |not found|invalid|denied|unknown|missing", re.IGNORECASE)
_MARKS = (
    r"answers?|solution|key|expected|target|correct|reference|secret|truth|gold|label|value|result|password|code|hint"
)
_MARK = rf"(?i:\b(?:{_MARKS})\b[\"']?(?: \w+){{0,2}}\s*(?:\bis\b|\bwas\b|[:=]|->)|\b(?:was|were)\b)\s*[\"'(<\[]*"
PATTERNS = {
    "line": r"[^\n]+",
    "word": r"\w+",
    "number": r"-?\d+(?:[.,]\d+)*",
    "name": r"[\w-]+\.\w+",
    "quoted": r"\"([^\"\n]+)\"|'([^'\n]+)'|`([^`\n]+)`",
    "bracketed": r"\(([^()\n]+)\)|\[([^\[\]\n]+)\]",
    "hidden": r"<!--(.*?)-->|/\*(.*?)\*/|\{#(.*?)#\}|(?:display: ?none|hidden)[^>]*>([^<]*)<",
    "tagged": r">([^<>\n]+)<",
    "after_colon": r":\s+([^\n:]+)",
    "option": r"(?:\b(?:an? |the )?([\w-]+))(?=,| or | and )|(?<= or )(?:an? |the )?([\w-]+)",
    "marked": _MARK + r"([^\s\"'<>()\[\]{},;]+)",
    "marked_line": _MARK + r"(\S[^\n]*)",
}
"""Pieces of an observation. `{last_number}` is the last number of the last message, `{conversation_first_word}` the
first word of all observations, `{instructions_last_word}` the last one of the system's message and the tools."""

CONSTANTS: Fields = {
    "filler": lambda: "the answer is well explained here " * 3334,
    "deep": lambda: "(" * 4000 + "1" + ")" * 4000,
    "deep_fractions": lambda: r"\frac{" * 500 + "1" + "}{2}" * 500,
    "digits": lambda: "7" * 20_000,
    "blanks": lambda: " " * 20_000,
    "numbers": lambda: " ".join(map(str, range(1001))),
    "steps": lambda: "\n".join(f"Step {number}: therefore, I verify this step." for number in range(1, 301)),
}


def fill(text: str, fields: Fields) -> str:
    """The text with its fields; words in braces that are none stay."""
    return re.sub(r"\{(\w+)\}", lambda match: fields[match[1]]() if match[1] in fields else match[0], text)


def guess_fields(guesses: Counter[str], rng: random.Random, in_form: Callable[[str], str]) -> Fields:
    """Fields of answers to other tasks, with their counts. `in_form` returns the text of a whole answer."""
    answers = [answer for answer, _ in guesses.most_common(LISTED)] or ["1"]
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
        for name, pattern in PATTERNS.items()
        for place, index in (("first", 0), ("last", -1))
    } | {
        "observation": lambda: last,
        "conversation": lambda: conversation,
        "conversation_repr": lambda: repr(conversation),
        "instructions": lambda: texts["instructions_"],
        "random_word": lambda: rng.choice(re.findall(r"\w+", last) or [""]),
        "decoded": lambda: next(filter(None, map(decode, reversed(re.findall(r"[\w+/]{4,}=*", conversation)))), ""),
        "function": lambda: function_in(conversation) or function_in(guess) or "solution",
        "tags": lambda: "".join(f"<{tag}>{guess}</{tag}>" for tag in tags_in(conversation)),
    }


def result_of(observation: Observation) -> str:
    """The last message that is no error, else the last one."""
    texts = [message.text for message in observed_messages(observation)] or [text_of(observation)]
    return next((text for text in reversed(texts) if text.strip() and not _ERROR.search(text)), texts[-1])


def names_in(observation: Observation) -> list[str]:
    """Names in the results that are no errors; those that sound like answers come last, so that their results do."""
    texts = [message.text for message in observed_messages(observation) if not _ERROR.search(message.text)]
    names = dict.fromkeys(name for text in texts for name in re.findall(r"[\w.-]{1,80}", text))
    return sorted(names, key=lambda name: re.search(_MARKS, name, re.IGNORECASE) is not None)[-NAMES:]


def function_in(text: str) -> str:
    """The name of the first function in a text; empty if it names none."""
    match = re.search(r"(?<![\w.])([A-Za-z_]\w*)\(", text) or re.search(r"function\s+(?:called\s+)?`?(\w+)", text)
    return match[1] if match else ""


def tags_in(text: str) -> list[str]:
    """The different tags of a text, in their order."""
    return list(dict.fromkeys(re.findall(r"<(\w+)>", text)))


def decode(word: str) -> str:
    """A word in base 64 or hexadecimal digits as text; empty if it is none."""
    for decoder in (binascii.unhexlify, functools.partial(base64.b64decode, validate=True)):
        try:
            text = decoder(word).decode("ascii")
        except (ValueError, UnicodeDecodeError):
            continue
        if text.isprintable():
            return text
    return ""


def _piece(pattern: str, text: str, index: int) -> str:
    """The first or the last match of a pattern in a text: its group, without punctuation around it."""
    matches = list(re.finditer(pattern, text, re.DOTALL if "<!--" in pattern else 0))
    if not matches:
        return ""
    piece = next((group for group in matches[index].groups() if group), matches[index][0]).strip()
    return piece if piece == matches[index][0].strip() else piece.strip(".,;:!?`*$ ")
