r"""Answers as text: one notation for all of them, the grades that need no algebra, and the form of an answer, which is
that of the reference, without operations that the reference does not have.

The library does not check the form: it evaluates `\gcd(4,6)` to 2, and of `47 \\ 46` it reads the 46.
"""

from __future__ import annotations

import math
import re

from . import numerals

_NAME = r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\(\w+\))?"
_NAMED = re.compile(rf"\s*(?:{_NAME}|\(\s*{_NAME}\s*(?:,\s*{_NAME}\s*)*\))\s*(?:=|\\in(?![A-Za-z]))\s*")

_INNER = r"[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*"  # with two more levels of braces
_REWRITES = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"−", "-"),
        (r"≤|\\le(?:q|qslant)?(?![A-Za-z])", r"\\le "),
        (r"≥|\\ge(?:q|qslant)?(?![A-Za-z])", r"\\ge "),
        (r"\\[cdt]frac(?![A-Za-z])", r"\\frac"),
        (rf"\{{({_INNER}?)\s*\\over(?![A-Za-z])\s*({_INNER})\}}", r"\\frac{\1}{\2}"),
        (r"^\s*\\frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*-\s*([0-9]+)\s*\}\s*$", r"-\\frac{\1}{\2}"),
        (r"√\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"(?<=[0-9)}])\s+(and|or)\s+(?=[-+(\\0-9])", r"\\text{ \1 }"),
        (r"^\s*\\text\s*\{\s*(?:[Tt]he )?(?:final )?[Aa]nswer(?: is)?\s*:?\s*\}", ""),
        (rf"^\s*\\math(?:rm|bf|sf|it)\s*\{{({_INNER})\}}\s*$", r"\1"),
        (r"\\mathrm\s*\{([ei])\}", r"\1"),
        (r"\\(?:mbox|text(?:bf|it|rm|sf|tt|normal|up)|math(?:rm|bf|sf|it))\s*\{", r"\\text{"),
        (r"(?<=[0-9])(?:,\s*\\!|\{,\}|\\[,!])\s*(?=[0-9]{3}(?![0-9]))", ""),  # between the thousands
        (r"(?<!\\)\\!", ""),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|q?quad)(?![A-Za-z])|(?<!\\)\\[,;: ]|~", " "),
        (r"[(\[]\s*\\begin\{array\}(?:\{[^{}]*\})?(.*?)\\end\{array\}\s*[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
        (r"^\s*\$((?:[^$\\]|\\.)+)\$(\s*\.?\s*)$", r"\1\2"),
        (r"^\s*\\[(\[]((?:(?!\\[)\]]).)*)\\[)\]](\s*\.?\s*)$", r"\1\2"),
        (r"(?<!\.)\.\s*$|\\text\{\.\}\s*$", ""),
        (r"\\\\\s*(?=\\end\{)", ""),
        (r"^\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}\s*$", r"\1"),
    )
)


def plain(text: str) -> str:
    r"""An answer, a reference or a problem in one notation: `14,\!400` is `14400`, `\cfrac` is `\frac`, `\mbox` is
    `\text`. Only rewritings that never change the meaning: brackets, values and operations stay as they are."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


def unnamed(text: str) -> str:
    r"""The value without a name before it: `x =`, `f(x) =`, `(p, q) =`, `x \in`."""
    return _NAMED.sub("", text, count=1) if _NAMED.match(text) else text


MAX_ANSWER_LENGTH = 1000
"""Characters of an answer up to which it is parsed; a longer one equals only the same text."""

_PERCENT = re.compile(r"%|\bper ?cent")
# A factorial, a very long number, an exponent that is more than a few characters or has one of its own.
_COSTLY = re.compile(r"!|[0-9]{30}|(?:\^|\*\*)(?!\s*(?:-?\w{1,3}|\{-?\w{1,3}\})(?![\w{]|\s*(?:\^|\*\*)))")


def grade_by_text(answer: str, gold: str, problem: str = "") -> bool | None:
    """The grade of `answer` where the text is enough for one, else None: then the mathematics decides.

    Where the reference is a number, the answer must be a number. An expression of the problem is right only in the
    form of the reference, so that copying what was to be computed, simplified or converted gets no reward.
    """
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > MAX_ANSWER_LENGTH:
        return False
    answer, gold = plain(answer), plain(gold)
    gold_number = numerals.read(gold)
    percent = _PERCENT.search(problem) is not None
    if gold_number is None:
        if has_same_words(answer, gold):
            return True
        if not has_same_form(answer, gold) or is_copied(answer, gold, problem):
            return False
        pairs = number_pairs(answer, gold)
    else:
        number = numerals.read(answer)
        pairs = [] if number is None else [(number, gold_number)]
    if pairs and all(numerals.agree(*pair, percent=percent) for pair in pairs):
        return not any(numerals.is_copied(*pair, plain(problem)) for pair in pairs)
    return None if gold_number is None else False


def looks_costly(answer: str) -> bool:
    """True for an answer that may take long to grade. A guess that decides only which queue an answer waits in."""
    return len(answer) > 200 or _COSTLY.search(answer) is not None


_DROPPED = re.compile(r"\$|\\(?=[$%])")
_SIMPLE_FRACTION = re.compile(r"\\frac\s*\{\s*(\w+)\s*\}\s*\{\s*(\w+)\s*\}")
_TOKEN = re.compile(r"\\[a-zA-Z]+|[0-9]+(?:\.[0-9]+)?|[a-zA-Z]|\S")
_COMMA_OF_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_RATIO = re.compile(
    r"(?<![\w.)}])([0-9]+)\s*(?:[/:÷]|\\div)\s*([0-9]+)(?![\w.({])"
    r"|\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
)
_WORD = re.compile(r"\\text\s*\{([^{}]*)\}")
_LISTED = re.compile(r"\\pm|\\mp|±|;|\\lor|\\vee|\\land|\\wedge|\\text\s*\{\s*(?:or|and)\b")
_IS_EXPRESSION = re.compile(r"[-+*/^=!<>|_÷×·]|\\(?!text)[a-zA-Z]|[0-9]\s*[a-zA-Z(]|[a-zA-Z)]\s*\(")
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(
    r"\\(?:begin|end)\s*\{[a-z]+\*?\}|&|[:;?]|[.,](?!\d)|\n"
    r"|(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|ln|sqrt)(?![a-z]))[A-Za-z]{2,}"
)
_BASE = re.compile(r"[0-9][0-9A-F]*\s*_\s*(\{[^{}]*\}|\w)")
_RELATION = re.compile(r"[<>]|\\[lg](?:eq?|t)(?![a-z])")
_ARITHMETIC = re.compile(r"[-+\s()]*[0-9.]+[-+\s()]+[0-9.]+[-+\s().0-9]*")  # also `2(2)` and `2 2`
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


def has_same_words(answer: str, gold: str) -> bool:
    r"""True if the answer has the words of a reference of words: `East` for `\text{east}`, `B` for `\text{(B)}`."""
    words, gold_words = (" ".join(re.findall(r"[^\s().]+", _WORD.sub(r"\1", text))).lower() for text in (answer, gold))
    return _WORD.fullmatch(gold) is not None and words == gold_words != ""


def number_pairs(answer: str, gold: str) -> list[tuple[numerals.Numeral, numerals.Numeral]]:
    """The numbers of two lists, tuples or matrices, one by one, those of a list by size. Empty if one has more."""
    numbers, gold_numbers = (_numbers(text) for text in (answer, gold))
    if _shape(gold) == "list":
        numbers, gold_numbers = (sorted(side, key=lambda number: number.value) for side in (numbers, gold_numbers))
    if any(answer.count(mark) != gold.count(mark) for mark in ("&", r"\\")) or len(numbers) != len(gold_numbers):
        return []
    return list(zip(numbers, gold_numbers, strict=True))


def is_list(gold: str) -> bool:
    """True for a reference of several values in any order."""
    return _shape(plain(gold)) == "list"


def is_copied(answer: str, gold: str, problem: str) -> bool:
    """True if the answer is an expression of the problem, its parts in any order, and the reference is not."""
    tokens, problem_tokens = (_without_joints(text) for text in (answer, problem))
    n = len(tokens)
    if not _IS_EXPRESSION.search(answer) or not tokens or sorted(tokens) == sorted(_without_joints(gold)):
        return False
    answer_hash, hashes = sum(map(hash, tokens)), [hash(token) for token in problem_tokens]
    window_hash = sum(hashes[:n])  # a cheap test before the comparison of the sorted tokens
    for start in range(len(hashes) - n + 1):
        if window_hash == answer_hash and sorted(problem_tokens[start : start + n]) == sorted(tokens):
            return True
        window_hash += hashes[start + n] - hashes[start] if start + n < len(hashes) else 0
    return False


def has_same_form(answer: str, gold: str) -> bool:
    """True if the answer has the form of the reference: as many values, brackets of the same kind, no other
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
    bases, gold_bases = (sorted(base.strip("{}() ") for base in _BASE.findall(text)) for text in (answer, gold))
    if (bases and bases != gold_bases) or (_unreduced(answer) and not _unreduced(gold)):
        return False
    if _numbers(gold) and any(_ARITHMETIC.fullmatch(part) and not numerals.read(part) for part in _entries(answer)):
        return False
    gold_words = set(re.findall(r"[a-z]+", gold.lower()))
    return _words(answer) <= (gold_words if _words(gold) else gold_words | numerals.UNITS.keys())


def _without_joints(text: str) -> list[str]:
    r"""The tokens without those that may be omitted: `x^2 - 1` is `-1 + x^2`, and `2 * x` is `2x`, also in `\{2x\}`."""
    return [token for token in _TOKEN.findall(_plain(text)) if token not in "+*\\"]


def _parts(text: str) -> list[str]:
    """The values of a list."""
    return [part.strip() for part in re.split(r"[,;]|\\text\s*\{\s*(?:or|and)\s*\}", unnamed(text))]


def _entries(text: str) -> list[str]:
    """The values of a list, a tuple or a matrix."""
    text = unnamed(text)
    if (matrix := _MATRIX.fullmatch(text)) and matrix[1] in ("matrix", "pmatrix", "bmatrix", "Bmatrix"):
        text = re.sub(r"\\\\\s*$", "", matrix[2].strip()).replace("&", ",").replace(r"\\", ",")
    elif any(text.startswith(opening) and text.endswith(closing) for opening, closing in _PAIRS.items()):
        text = text.removeprefix("\\")[1:-1].removesuffix("\\")
    return _parts(text)


def _numbers(text: str) -> list[numerals.Numeral]:
    """The numbers of a list, a tuple or a matrix; empty where an entry is no number."""
    numbers = [numerals.read(part) for part in _entries(text)]
    return [number for number in numbers if number] if all(numbers) else []


def _plain(text: str) -> str:
    """Text in one notation, with one sign for each operation and without braces."""
    text = _COMMA_OF_THOUSANDS.sub("", _DROPPED.sub(" ", plain(text)))
    text = re.sub(r"\\cdot(?![a-z])|\\times(?![a-z])|×|·|\*\*?", "*", text)
    text = re.sub(r"\\div(?![a-z])|÷", "/", _SIMPLE_FRACTION.sub(r"\1/\2", text))
    return re.sub(r"[{}]", " ", text)


def _shape(text: str) -> str:
    """`list` of values, a pair of brackets around one, `matrix`, or `one`. A set is a list: it has no order either."""
    text = unnamed(_COMMA_OF_THOUSANDS.sub("", text)).strip()
    if _LISTED.search(text) or ("," in _outside_brackets(text)):
        return "list"
    for opening in _PAIRS:
        for closing in _PAIRS.values():
            content = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and "," in _outside_brackets(content):
                return "list" if opening == r"\{" else opening + closing
    return "matrix" if _MATRIX.fullmatch(text) else "one"


def _outside_brackets(text: str) -> str:
    """The text outside all brackets; empty where they are closed before they are opened, as in `(1,2)∪(3,4)`."""
    depth, tokens = 0, []
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        if token in _OPEN:
            depth += 1
        elif token in _CLOSED:
            depth -= 1
            if depth < 0:
                return ""
        elif depth == 0:
            tokens.append(token)
    return "".join(tokens)


def _unreduced(text: str) -> bool:
    """True if the text has a fraction of whole numbers that can be reduced."""
    for match in _RATIO.finditer(text):
        numerator, denominator = (int(part) for part in match.groups() if part is not None)
        if denominator < 2 or math.gcd(numerator, denominator) > 1:
            return True
    return False


def _words(text: str) -> set[str]:
    """The words in `\\text`, without those that join the values of a list."""
    return set(re.findall(r"[a-z]+", " ".join(_WORD.findall(text)).lower())) - {"or", "and"}
