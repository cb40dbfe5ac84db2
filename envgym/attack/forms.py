"""The form of a right answer, from a demonstration: a cheat in another form would be rejected for its form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envgym.types import Message

from .fields import DATA

Turns = Sequence[str | Message]

_PLACES = [re.compile(place) for place in DATA["places"]]


@dataclass(frozen=True, slots=True)
class Form:
    """The turns of a demonstration before its last one (`lead`), and the text around the answer in the last one."""

    lead: tuple[str | Message, ...] = ()
    prefix: str = ""
    suffix: str = ""

    def text(self, answer: str) -> str:
        """The last turn with another answer."""
        return f"{self.prefix}{answer}{self.suffix}"

    def is_like(self, form: Form) -> bool:
        """True if both differ in no more than the turns before the last one."""
        return (self.prefix, self.suffix, len(self.lead)) == (form.prefix, form.suffix, len(form.lead))


RAW = Form()
IN_BLOCK = Form(prefix="```python\n", suffix="\n```")
USUAL = (RAW, Form(prefix="\\boxed{", suffix="}"), Form(prefix="<answer>", suffix="</answer>"))
"""The forms that are tried without demonstrations."""


def split_form(turns: Turns, answer: str) -> tuple[Form, str]:
    """The form of a demonstration, and its answer: the text in the usual places, or else `answer`, the task's reference
    answer as text, if it is in the last turn; or else the last turn."""
    last = last_text(turns)
    match = next((match for place in _PLACES if (match := place.search(last))), None)
    start, end = match.span(1) if match else (0, len(last))
    if match is None and answer and (place := last.rfind(answer)) >= 0:
        start, end = place, place + len(answer)
    return Form(tuple(turns[:-1]), last[:start], last[end:]), last[start:end]


def last_text(turns: Turns) -> str:
    """The text of the last turn."""
    return turns[-1].text if isinstance(turns[-1], Message) else turns[-1]


def is_program(text: str) -> bool:
    """True if a task asks for a program, or an answer is one."""
    return re.search(r"```|\bpython\b|\bdef \w+\(", text, re.IGNORECASE) is not None
