r"""The final answer in a completion: the content of the last `\boxed{…}`, or what follows a marker in the last line."""

from __future__ import annotations

import re

MAX_JOINT = 40
"""Characters between two boxes that are one answer."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of a set, not braces of the box
_JOINT = re.compile(r"(?:[\s$]|\\[()]|[a-z]\s*=)*(?:,|,?\s*(?:and|or)\b)(?:[\s$]|\\[()]|[a-z]\s*=)*")
_DECORATION = " \t*_`"
_EMPHASIZED = re.compile(r"(?<![\w*])(\*\*|__)(?=[^\s*_])(.{1,300}?)(?<=\S)\1")  # `**12** apples`, but not `2**3`


def boxed(text: str, *, allow_several: bool = False) -> str | None:
    r"""The content of the last `\boxed{…}`, or None where there is none, it is empty, or it never closes.

    With `allow_several`, boxes joined by `and`, `or` and commas are one answer: `\boxed{2} and \boxed{3}` is `2, 3`.
    """
    contents: list[str] = []
    end = len(text)
    while (start := text.rfind(r"\boxed", 0, end)) >= 0:
        opening = _BOX.match(text, start)
        closing = _closing(text, opening.end()) if opening else None
        if opening is None or closing is None:
            break
        if contents and (end - closing > MAX_JOINT or not _JOINT.fullmatch(text, closing + 1, end)):
            break
        contents.insert(0, text[opening.end() : closing].strip())
        if not allow_several:
            break
        end = start
    return ", ".join(contents) or None


def reference(answer: object) -> str:
    """The final answer in a task's reference answer: after GSM8K's `####`, or in a box, or all of it."""
    text = str(answer)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return boxed(text) or text.strip()


def final_line(text: str, marker: str) -> str | None:
    """The text after `marker` (`####`, `The answer is`, `ANSWER:`) in the last line that is not blank, without emphasis
    (`**`) and without a period at its end; if that text holds a box, the content of the box. None if the line lacks the
    marker, or nothing follows it.

    Case does not count, and neither do a colon and emphasis behind the marker (`**Answer**: 12`). The last marker of
    the line counts, and it must be whole words: `DATA: 5` has no `A:`, `the answer isn't 5` no `The answer is`.
    """
    lines = text.rstrip().splitlines()
    words = marker.rstrip(": ")
    start, end = r"(?<!\w)" if words[:1].isalnum() else "", r"(?![^\W\d_])" if words[-1:].isalnum() else ""
    colon = r"[\s*_`]*:" if words != marker.rstrip() else r"(?:[\s*_`]*:)?"
    pattern = start + r"\s+".join(map(re.escape, words.split())) + end + colon
    if not lines or not (marks := list(re.finditer(pattern, lines[-1], re.IGNORECASE))):
        return None
    answer = _EMPHASIZED.sub(r"\2", lines[-1][marks[-1].end() :])
    return boxed(answer) or answer.strip(_DECORATION).removesuffix(".").strip(_DECORATION) or None


def _closing(text: str, start: int) -> int | None:
    """The position of the brace that closes the content from `start` on, or None."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
