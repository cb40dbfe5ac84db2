r"""The form that an answer may have beside a reference: the same, with no operation of its own.

The library sees through both: to it `\gcd(4,6)` is 2, and of `47 \\ 46` it reads the 46.
"""

from __future__ import annotations

import math
import re

from . import numerals
from .notation import plain, unnamed

_DROPPED = re.compile(r"\$|\\(?=[$%])")
_SIMPLE_FRACTION = re.compile(r"\\frac\s*\{\s*(\w+)\s*\}\s*\{\s*(\w+)\s*\}")
_TOKEN = re.compile(r"\\[a-zA-Z]+|[0-9]+(?:\.[0-9]+)?|[a-zA-Z]|\S")
_COMMA_OF_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_RATIO = re.compile(
    r"(?<![\w.)}])([0-9]+)\s*[/:]\s*([0-9]+)(?![\w.({])|\\frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"
)
_WORD = re.compile(r"\\text\s*\{([^{}]*)\}")
_LISTED = re.compile(r"\\pm|\\mp|±|;|\\lor|\\vee|\\land|\\wedge|\\text\s*\{\s*(?:or|and)\b")
_IS_EXPRESSION = re.compile(r"[-+*/^=!<>|_÷×·]|\\(?!text)[a-zA-Z]|[0-9]\s*[a-zA-Z(]|[a-zA-Z)]\s*\(")
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(
    r"\\(?:begin|end)\s*\{[a-z]+\*?\}|&|[:;?]|[.,](?!\d)|\n"
    r"|(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|ln|sqrt)(?![a-z]))[A-Za-z]{2,}"
)
_RELATION = re.compile(r"[<>]|\\[lg](?:eq?|t)(?![a-z])")
_MATRIX = re.compile(r"\\begin\{(\w+)\}(.*)\\end\{\1\}", re.DOTALL)
_PAIRS = {"(": ")", "[": "]", r"\{": r"\}"}
_OPEN, _CLOSED = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")

# Operations by their names; those of one kind may stand for each other (`2\sin x\cos x` for `\sin 2x`).
_OPERATIONS = tuple(
    re.compile(pattern)
    for pattern in (
        r"!(?!=)", r"binom|choose", r"gcd|lcm", r"max(?![a-z])|min(?![a-z])|\\sup(?![a-z])|\\inf(?![a-z])",
        r"\\sum|\\prod", r"\\i*int(?![a-z])|\\oint", r"\\lim(?![a-z])", r"\\det|\\begin\{vmatrix", r"floor|ceil",
        r"mod(?![a-z])", r"sin|cos|tan|cot(?![a-z])|\\sec|\\csc", r"\\log|\\ln|\\lg|(?<![a-z])(?:log|ln)(?![a-z])",
        r"\\exp|(?<![a-z])exp(?![a-z])", r"\||\\[lr]?vert|abs(?![a-z])",
        r"\\frac\s*\{?\s*(?:d|\\partial)(?![a-z])|'|\\prime",
        r"sqrt|root|\^\s*\{?\s*\(?\s*[-+]?\s*(?:\\frac|[0-9]+\s*/|0?\.[0-9])",
        r"\\cup|\\cap|\\setminus", r"\\circ(?![a-z])", r"\\overline|\\bar(?![a-z])", r"\\equiv", r"operatorname",
    )
)  # fmt: skip


def expressions(problem: str) -> list[str]:
    """The expressions and relations of a problem, and the sides of its equations."""
    formulas = ["".join(groups) for groups in _FORMULA.findall(problem)]
    pieces = [piece for text in (*formulas, _FORMULA.sub(" ; ", problem)) for piece in (text, *_PROSE.split(text))]
    sides = [side.strip(" .,:;?") for piece in pieces for side in (piece, *re.split(r"(?<!\\)=", piece))]
    return [side for side in dict.fromkeys(sides) if _IS_EXPRESSION.search(side)]


def same_words(answer: str, gold: str) -> bool:
    r"""True for a reference of words, and an answer of the same: `East` for `\text{east}`, `B` for `\text{(B)}`."""
    given, wanted = (" ".join(re.findall(r"[^\s().]+", _WORD.sub(r"\1", text))).lower() for text in (answer, gold))
    return _WORD.fullmatch(gold) is not None and given == wanted != ""


def numbers_agree(answer: str, gold: str, *, percent: bool) -> bool:
    """True for lists, tuples and matrices of numbers that agree one by one, those of a list in any order."""
    given, wanted = (_numbers(text) for text in (answer, gold))
    if _shape(gold) == "list":
        given, wanted = (sorted(numbers, key=lambda number: number.value) for numbers in (given, wanted))
    if any(answer.count(mark) != gold.count(mark) for mark in ("&", r"\\")):
        return False
    return 0 < len(wanted) == len(given) and all(
        numerals.agree(number, right, percent=percent) for number, right in zip(given, wanted, strict=True)
    )


def lists(gold: str) -> bool:
    """True for a reference of several values in any order."""
    return _shape(plain(gold)) == "list"


def copied(answer: str, gold: str, problem: str) -> bool:
    """True for an answer that is an expression of the problem, its parts in any order, unless the reference is too."""
    wanted, given = (_without_joints(text) for text in (answer, problem))
    n = len(wanted)
    if not _IS_EXPRESSION.search(answer) or not wanted or sorted(wanted) == sorted(_without_joints(gold)):
        return False
    sought, marks = sum(map(hash, wanted)), [hash(token) for token in given]
    total = sum(marks[:n])
    for start in range(len(given) - n + 1):
        if total == sought and sorted(given[start : start + n]) == sorted(wanted):
            return True
        total += marks[start + n] - marks[start] if start + n < len(given) else 0
    return False


def alike(answer: str, gold: str) -> bool:
    """True for an answer of the form of the reference: as many values, brackets of the same kind, no other
    operations, no alternatives."""
    if any(operation.search(answer) and not operation.search(gold) for operation in _OPERATIONS):
        return False
    for mark in (r"\\", r"\begin", "$"):
        if answer.count(mark) > gold.count(mark):
            return False
    if _shape(answer) != _shape(gold) and not _RELATION.search(gold):  # `[3,\infty)` for `x\ge 3`
        return False
    if "=" in answer and "=" not in gold and any("=" in unnamed(part) for part in _parts(answer)):
        return False
    if _unreduced(answer) and not _unreduced(gold):
        return False
    named = set(re.findall(r"[a-z]+", gold.lower()))
    return _words(answer) <= (named if _words(gold) else named | numerals.UNITS.keys())


def _without_joints(text: str) -> list[str]:
    """Tokens but for those that may be left out: `x^2 - 1` is `-1 + x^2`, and `2 * x` is `2x`."""
    return [token for token in _tokens(text) if token not in "+*"]


def _parts(text: str) -> list[str]:
    """The values of a list."""
    return [part.strip() for part in re.split(r"[,;]|\\text\s*\{\s*(?:or|and)\s*\}", unnamed(text))]


def _numbers(text: str) -> list[numerals.Numeral]:
    """The numbers of a list, a tuple or a matrix; none where something in it is no number."""
    text = unnamed(text)
    if (matrix := _MATRIX.fullmatch(text)) and matrix[1] in ("matrix", "pmatrix", "bmatrix", "Bmatrix"):
        text = re.sub(r"\\\\\s*$", "", matrix[2].strip()).replace("&", ",").replace(r"\\", ",")
    elif any(text.startswith(opening) and text.endswith(closing) for opening, closing in _PAIRS.items()):
        text = text.removeprefix("\\")[1:-1].removesuffix("\\")
    numbers = [numerals.read(part) for part in _parts(text)]
    return [number for number in numbers if number] if all(numbers) else []


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(_plain(text))


def _plain(text: str) -> str:
    """Text in one notation, with one sign for each operation and without braces."""
    text = _COMMA_OF_THOUSANDS.sub("", _DROPPED.sub(" ", plain(text)))
    text = re.sub(r"\\cdot(?![a-z])|\\times(?![a-z])|×|·|\*\*?", "*", text)
    text = re.sub(r"\\div(?![a-z])|÷", "/", _SIMPLE_FRACTION.sub(r"\1/\2", text))
    return re.sub(r"[{}]", " ", text)


def _shape(text: str) -> str:
    """`list` of values, a pair of brackets around one, `matrix`, or `one`. A set is a list: it has no order either."""
    text = unnamed(_COMMA_OF_THOUSANDS.sub("", text)).strip()
    if _LISTED.search(text) or ("," in _outside(text)):
        return "list"
    for opening in _PAIRS:
        for closing in _PAIRS.values():
            inside = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and "," in _outside(inside):
                return "list" if opening == r"\{" else opening + closing
    return "matrix" if _MATRIX.fullmatch(text) else "one"


def _outside(text: str) -> str:
    """The text outside all brackets; nothing where they are closed before they are opened, as in `(1,2)∪(3,4)`."""
    depth, kept = 0, []
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        if token in _OPEN:
            depth += 1
        elif token in _CLOSED:
            depth -= 1
            if depth < 0:
                return ""
        elif depth == 0:
            kept.append(token)
    return "".join(kept)


def _unreduced(text: str) -> bool:
    """True if a fraction of whole numbers could be made simpler."""
    for match in _RATIO.finditer(text):
        above, below = (int(part) for part in match.groups() if part is not None)
        if below < 2 or math.gcd(above, below) > 1:
            return True
    return False


def _words(text: str) -> set[str]:
    """Words put as text, but for those that join the values of a list."""
    return set(re.findall(r"[a-z]+", " ".join(_WORD.findall(text)).lower())) - {"or", "and"}
