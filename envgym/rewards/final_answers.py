r"""The final answer in a completion: the content of the last `\boxed{…}`, what follows a marker in the last line, or
the last number."""

from __future__ import annotations

import re

MAX_JOINT = 40
"""Characters between two boxes that are one answer."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of a set, not braces of the box
_JOINT = re.compile(r"(?:[\s$]|\\[()]|[a-z]\s*=)*(?:,|,?\s*(?:and|or)\b)(?:[\s$]|\\[()]|[a-z]\s*=)*")
_DECORATION = " \t*_`"
_NUMBER = re.compile(
    r"""(?<![\w.^])(?<!\^\{)                                      # in no word, number or exponent
    (?P<sign>(?<![)\]}%])[-\u2212](?=[$\u20ac\u00a3]?\s?(?:[\d.]|\\[dt]?frac)))?   # no difference: `7 - 3`
    (?:\\?[$\u20ac\u00a3]\s?)?
    (?: \\[dt]?frac\s*\{(?P<above>\d+)\}\s*\{(?P<below>\d+)\}
      | (?P<number>(?:\d{1,3}(?:[,\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\^\{?\d+\}?)?|\.\d+)
        (?P<fraction>/\d+)? (?P<percent>\s?\\?%)? (?!(?:st|nd|rd|th)\b) )""",
    re.VERBOSE,
)
"""Numbers with thousands separators, currency, percent signs and fractions; no ordinals (`3rd`)."""


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


def final_line(text: str, marker: str) -> str | None:
    """The text after `marker` (`####`, `The answer is`, `ANSWER:`) in the last line that is not blank, without a period
    at its end and emphasis (`**`), or the content of a box in it. None if that line lacks the marker, or nothing
    follows it.

    The case of the marker does not matter, nor emphasis around it, nor a colon behind it. The last marker of the line
    counts, and it must begin a word: `DATA: 5` has no `A:`.
    """
    lines = text.rstrip().splitlines()
    words = marker.rstrip(":")
    pattern = rf"{re.escape(words)}[*_`]*{':' if words != marker else ':?'}"
    if marker[:1].isalnum():
        pattern = rf"(?<![^\W_]){pattern}"
    if not lines or not (marks := list(re.finditer(pattern, lines[-1], re.IGNORECASE))):
        return None
    answer = lines[-1][marks[-1].end() :]
    return boxed(answer) or answer.strip(_DECORATION).removesuffix(".").strip(_DECORATION) or None


def last_number(text: str) -> str | None:
    """The last number of a text, as `-1200.50`, `3/4` or `5%`: without thousands separators, currency, units, emphasis
    and the period after it. None if it has none.

    What the number stands for is not looked at: of a list of numbers it is the last.
    """
    numbers = list(_NUMBER.finditer(text.replace("**", " ").replace("__", " ").replace("{,}", ",")))
    if not numbers:
        return None
    match = numbers[-1]
    number = f"{match['above']}/{match['below']}" if match["above"] else match["number"] + (match["fraction"] or "")
    sign, percent = "-" if match["sign"] else "", "%" if match["percent"] else ""
    return sign + re.sub("[,\u00a0\u202f]", "", number) + percent


def _closing(text: str, start: int) -> int | None:
    """The position of the brace that closes the content from `start` on, or None."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
