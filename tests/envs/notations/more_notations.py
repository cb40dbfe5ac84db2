r"""Notations by a second author, who has not read the grader. `notations.py` describes the fields.

`MORE_NOTATIONS` is a list of tuples:

    (name, write)                 for a notation that applies to at least thirty references of the data
    (name, write, by_hand)        with additional references made by hand

`name` is the row of the table in the docs. `write(reference)` gives the answer as a model would box it, or None if the
notation does not change this reference (or the whole of the model's text, with its own `\boxed`). `by_hand` is a list
of (problem, reference, written).
"""

from __future__ import annotations

import re
from collections.abc import Callable

Write = Callable[[str], str | None]

PAIRS = [(1, 2), (3, 4), (2, 5), (5, 7), (7, 3), (9, 4), (11, 6), (8, 15), (13, 2), (4, 9)]
ROOTS = [(2, 3), (3, 5), (5, 2), (4, 7), (6, 11), (7, 13), (9, 10), (12, 6), (10, 19), (8, 15)]


def _replaced(pattern: str, replacement: str, *, among: str = "") -> Write:
    """A notation that replaces a pattern in references that `among` matches somewhere."""

    def write(reference: str) -> str | None:
        written = re.sub(pattern, replacement, reference) if re.search(among, reference) else reference
        return None if written == reference else written

    return write


def _framed(frame: str) -> Write:
    """The reference within other text, where a `@` stands in `frame`."""
    return lambda reference: frame.replace("@", reference)


def _terms_reversed(reference: str) -> str | None:
    """`-1 + x` for `x - 1`: the terms of a polynomial or a complex number, the last one first."""
    if not re.fullmatch(r"[-+ 0-9a-z^{}]+", reference) or not re.search(r"[a-z]", reference):
        return None
    terms = re.findall(r"[-+]?[^-+]+", reference.replace(" ", ""))
    written = "".join(term if term[0] in "+-" else f"+{term}" for term in reversed(terms)).removeprefix("+")
    return written if len(terms) > 1 else None


def _list_reversed(reference: str) -> str | None:
    """`3, 2` for `2, 3`: answers of which each is right, in another order."""
    items = reference.split(",")
    if (
        len(items) < 2
        or not all(re.fullmatch(r" ?-?[0-9]+", item) for item in items)
        or re.search(r"\d,\d{3}", reference)
    ):
        return None
    return ", ".join(item.strip() for item in reversed(items))


def _list_with_and(reference: str) -> str | None:
    """`1 and -2` for `1,-2`."""
    is_list = re.fullmatch(r"-?\d+, ?-?\d+", reference) and not re.search(r"\d,\d{3}$", reference)
    return reference.replace(",", " and ") if is_list else None


def _plus_or_minus(reference: str) -> str | None:
    """Both values of `a \\pm b`, written out."""
    if not (match := re.fullmatch(r"(.+?) ?\\pm ?(.+)", reference)):
        return None
    return f"{match[1]} + {match[2]}, {match[1]} - {match[2]}"


def _improper(reference: str) -> str | None:
    """`\\frac{9}{5}` for `1\\frac{4}{5}`."""
    if not (match := re.fullmatch(r"(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", reference)):
        return None
    return rf"\frac{{{int(match[1]) * int(match[3]) + int(match[2])}}}{{{match[3]}}}"


MORE_NOTATIONS: list[tuple[str, Write] | tuple[str, Write, list[tuple[str, str, str]]]] = [
    ("words after the box", _framed(r"So we get $\boxed{@}$, which is the value that was asked for.")),
    ("the box twice", _framed(r"This gives \boxed{@}. The final answer is therefore \[ \boxed{@} \]")),
    ("`\\boxed {…}` with a space", _framed(r"The answer is $\boxed {@}$")),
    ("more braces in the box", _framed("{@}")),
    ("thin spaces at both ends", _framed(r"\,@\,")),
    ("line breaks in the box", _framed("\n@\n")),
    ("`\\mathbf{…}` in the box", _framed(r"\mathbf{@}")),
    ("`\\text{…}` around a number", _replaced(r"^(-?\d+)$", r"\\text{\1}")),
    ("no spaces", lambda reference: None if "\\" in reference else _replaced(r" ", "")(reference), [
        ("Write the line.", f"y = {a}x + {b}", f"y={a}x+{b}") for a, b in PAIRS
    ] + [("Expand.", f"{a}x^2 + {b}x - 1", f"{a}x^2+{b}x-1") for a, b in PAIRS]
      + [("What is the number?", f"{a} + {b}i", f"{a}+{b}i") for a, b in PAIRS]),
    ("`\\frac12`", _replaced(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2"), [
        ("What is the slope?", rf"\frac{{{a}}}{{{b}}}", rf"\frac{a}{b}") for a in (1, 2, 4, 5) for b in (3, 7, 9)
    ]),
    ("`{a \\over b}`", _replaced(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"{\1 \\over \2}")),
    ("`\\frac{-a}{b}` for `-\\frac{a}{b}`", _replaced(r"^-\\frac\{", r"\\frac{-"), [
        ("What is the slope?", rf"-\frac{{{a}}}{{{b}}}", rf"\frac{{-{a}}}{{{b}}}") for a, b in PAIRS
    ] + [("What is the slope?", rf"-\frac{{{a}}}{{{b}}}", rf"\frac{{{a}}}{{-{b}}}") for a, b in PAIRS]
      + [("What is the slope?", rf"-\frac{{{a}}}{{{b}}}", f"-{a}/{b}") for a, b in PAIRS]),
    ("an improper fraction for a mixed number", _improper, [
        ("How many cups?", rf"{n}\frac{{{a}}}{{{b}}}", rf"\frac{{{n * b + a}}}{{{b}}}")
        for a, b in ((1, 2), (3, 4), (2, 5), (5, 7), (4, 9), (8, 15)) for n in (1, 2, 3, 5, 12)
    ]),
    ("braces around exponents", _replaced(r"\^(\d)", r"^{\1}"), [
        ("Simplify.", f"{a}x^{b} + {b}", f"{a}x^{{{b}}} + {b}") for a, b in PAIRS
    ] + [("Simplify.", f"{a}y^{b}", f"{a}y^{{{b}}}") for a, b in PAIRS]),
    ("braces around a base", _replaced(r"_(\d)$", r"_{\1}"), [
        ("Write it in the base.", f"{n}_{b}", f"{n}_{{{b}}}")
        for n in (101, 214, 1203, 322, 4210) for b in (5, 6, 7, 8, 9)
    ]),
    ("unicode `π`", _replaced(r" ?\\pi", "π"), [
        ("What is the area?", rf"{a}\pi", f"{a}π") for a in range(2, 12)
    ] + [("What is the volume?", rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}π}}{{{b}}}") for a, b in PAIRS]),
    ("unicode `°`", _replaced(r"\^\\circ", "°"), [("What angle?", rf"{a}^\circ", f"{a}°") for a in range(15, 75, 3)]),
    ("`\\text{ degrees}`", _replaced(r"\^\\circ", r"\\text{ degrees}"), [
        ("What angle?", rf"{a}^\circ", rf"{a} \text{{ degrees}}") for a in range(15, 75, 3)
    ]),
    ("unicode `√`", _replaced(r"\\sqrt\{(\d+)\}", r"√\1", among=r"^\d* ?\\sqrt\{\d+\}$"), [
        ("How long?", rf"{a}\sqrt{{{b}}}", f"{a}√{b}") for a, b in ROOTS
    ] + [("How long?", rf"\sqrt{{{b}}}", f"√{b}") for _, b in ROOTS]),
    ("`\\sqrt5`", _replaced(r"\\sqrt\{(\d)\}", r"\\sqrt\1"), [
        ("How long?", rf"{a}\sqrt{{{b}}}", rf"{a}\sqrt {b}") for a in range(2, 7) for b in (2, 3, 5, 6, 7)
    ]),
    ("the root before the number", _replaced(r"^(\d+) ?\\sqrt\{(\d+)\}$", r"\\sqrt{\2} \\cdot \1"), [
        ("How long?", rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}} \cdot {a}") for a, b in ROOTS
    ] + [("How long?", rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}} \cdot {a}") for a in (3, 4, 9) for b in (2, 7, 11, 14)]),
    ("`+\\infty`", _replaced(r"(?<![-+])\\infty", r"+\\infty"), [
        ("Solve.", rf"({a},\infty)", rf"({a}, +\infty)") for a in range(-10, 10)
    ] + [("Solve.", rf"[{a},\infty)", rf"[{a}, +\infty)") for a in range(-10, 10)]),
    ("unicode `∪`", _replaced(r"\\cup", "∪"), [
        ("Solve.", rf"(-\infty, {a}) \cup ({b}, \infty)", rf"(-\infty, {a}) ∪ ({b}, \infty)")
        for a in range(-6, 0) for b in range(1, 6)
    ]),
    ("a zero before the point", _replaced(r"^\.(\d)", r"0.\1"), [
        ("What is the probability?", f".{n}", f"0.{n}") for n in range(11, 99, 3)
    ]),
    ("a zero at the end of a decimal", _replaced(r"^(-?\d+\.\d+)$", r"\g<1>0"), [
        ("How much?", f"{n / 4}", f"{n / 4}0") for n in range(5, 125, 4)
    ]),
    ("`5.0` for `5`", _replaced(r"^(-?\d{1,3})$", r"\1.0")),
    ("another variable before a number", _replaced(r"^(-?\d+)$", r"n = \1")),
    ("a sentence in the box", _replaced(r"^(-?\d+)$", r"\\text{The answer is } \1")),
    ("a list in another order", _list_reversed, [
        ("Find all solutions.", f"{a}, {b}", f"{b}, {a}") for a in range(-3, 3) for b in range(4, 9)
    ]),
    ("a list in braces", _replaced(r"^(-?\d+(?:, ?-?\d+)+)$", r"\\{\1\\}", among=r"^(?!\d{1,3},\d{3}$)"), [
        ("Find all solutions.", f"{a}, {b}", rf"\{{{a}, {b}\}}") for a in range(-3, 3) for b in range(4, 9)
    ]),
    ("a list with `and`", _list_with_and, [
        ("Find all solutions.", f"{a}, {b}", f"{a} \\text{{ and }} {b}") for a in range(-3, 3) for b in range(4, 9)
    ]),
    ("both values of `\\pm`", _plus_or_minus, [
        ("Solve.", rf"{a} \pm \sqrt{{{b}}}", rf"{a} + \sqrt{{{b}}}, {a} - \sqrt{{{b}}}")
        for a in (1, 2, 3) for _, b in ROOTS
    ]),
    ("terms in another order", _terms_reversed, [
        ("What is the number?", f"{a} + {b}i", f"{b}i + {a}") for a, b in PAIRS
    ] + [("What polynomial?", f"{a}x^2 - {b}x + 3", f"3 - {b}x + {a}x^2") for a, b in PAIRS]),
    ("the letter of a choice alone", _replaced(r"^\\text\{\(([A-E])\)\}$", r"\1"), [
        ("Which of them?", rf"\text{{({letter})}}", written.replace("@", letter))
        for letter in "ABCDE" for written in ("@", "(@)", r"\textbf{(@)}", r"\mathrm{@}", r"\text{@}", r"\textbf{@}")
    ]),
]  # fmt: skip
