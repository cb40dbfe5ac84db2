r"""Notations that models use for the answers of MATH: each rewrites a reference in another notation.

`NOTATIONS` is a list of `Notation(name, write, by_hand)`. `write` takes a reference in the data set's notation and
returns the content of a model's box, or None if the notation does not change this reference. It returns the whole of
the model's text instead if that has its own `\boxed`. `by_hand` is a list of (problem, reference, written), for
notations that apply to fewer than thirty references of the data.

`more_notations.py` has a second list of the same kind, by an author who has not read the grader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.envs.notations.more_notations import MORE_NOTATIONS


class Notation(NamedTuple):
    """A notation of an answer; the module's docstring describes the fields."""

    name: str
    write: Callable[[str], str | None]
    by_hand: Sequence[tuple[str, str, str]] = ()


_WHOLE = re.compile(r"-?[0-9]{4,}")
_GROUPED = re.compile(r"(?:\\\$)?[0-9]{1,3}(?:(?:,\\!|,|\{,\}) ?[0-9]{3})+(?![0-9])")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_TUPLE = re.compile(r"(?:\\left)?\(([^()\[\]]*,[^()\[\]]*?)(?:\\right)?\)")
_MATRIX = re.compile(r"\\begin\{([pb]matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_PLAIN_FRACTION = re.compile(r"(-?)\\frac\{([0-9]+)\}\{([0-9]+)\}")


def _replace(pattern: str, replacement: str) -> Callable[[str], str | None]:
    """A notation that replaces a regular expression; it does not apply where nothing changes."""

    def write(reference: str) -> str | None:
        written = re.sub(pattern, replacement, reference)
        return written if written != reference else None

    return write


def _grouped_by(separator: str) -> Callable[[str], str | None]:
    """Whole numbers of four digits and more, in groups of three."""

    def write(reference: str) -> str | None:
        if not _WHOLE.fullmatch(reference):
            return None
        return f"{int(reference):,}".replace(",", separator)

    return write


def _regrouped_by(separator: str) -> Callable[[str], str | None]:
    """References in groups of three, grouped in another way or not at all."""

    def write(reference: str) -> str | None:
        if not _GROUPED.fullmatch(reference):
            return None
        written = re.sub(r"(?:,\\!|,|\{,\}) ?", lambda _: separator, reference)
        return written if written != reference else None

    return write


def _around(before: str, after: str) -> Callable[[str], str | None]:
    """Text before and after any reference that does not have it already."""
    return lambda reference: None if reference.startswith(before or "\0") else before + reference + after


def _number_with(after: str) -> Callable[[str], str | None]:
    """Text after a plain number."""
    return lambda reference: reference + after if _NUMBER.fullmatch(reference) else None


def _array(reference: str) -> str | None:
    matrix = _MATRIX.fullmatch(reference)
    if matrix is None:
        return None
    columns = "c" * (matrix[2].partition(r"\\")[0].count("&") + 1)
    return rf"\left[\begin{{array}}{{{columns}}}{matrix[2]}\end{{array}}\right]"


def _named_tuple(reference: str) -> str | None:
    values = _TUPLE.fullmatch(reference)
    if values is None or "infty" in reference:
        return None
    return f"({','.join('pqrstu'[: values[1].count(',') + 1])})={reference}"


def _decimal_fractions(reference: str) -> str | None:
    """The fractions of a tuple or a matrix as decimals of six digits."""
    if not _TUPLE.fullmatch(reference) and not _MATRIX.fullmatch(reference):
        return None
    text = re.sub(r"(?<!\w)(-?)([0-9]+)/([0-9]+)(?!\w)", r"\1\\frac{\2}{\3}", reference)
    written = _PLAIN_FRACTION.sub(lambda match: f"{match[1]}{int(match[2]) / int(match[3]):.6f}", text)
    return written if written != text else None


def _boxes(reference: str, joint: str) -> str | None:
    """Every value of a list in a separate box."""
    text = re.sub(r"^\\\{|\\\}$", "", reference)
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 2 or re.search(r"[(\[]|\\!|\\begin|\{$", text) or _GROUPED.fullmatch(text):
        return None
    boxes = [rf"$\boxed{{{part}}}$" for part in parts]
    return f"The solutions are {', '.join(boxes[:-1])}{joint}{boxes[-1]}."


def _roots_as_powers(reference: str) -> str | None:
    apart = re.sub(r"(?<=[0-9]) ?(?=\\sqrt)", r" \\cdot ", reference)
    return _replace(r"\\sqrt\{?([0-9]+)\}?", r"\1^{1/2}")(apart) if r"\sqrt" in reference else None


_TUPLES = ["(3, 2)", "(-1, 6)", "(8, -2)", "(0, 5)", "(15, -29)", "(4, 7)", "(12, 1)", "(-3, -4)"]
_PAIRS = [(p, q) for p in _TUPLES for q in _TUPLES if p != q][:32]
_BOUNDS = [(a, b) for a in (-7, -2, 0, 1) for b in (2, 5, 7, 10, 13, 21, 30, 100)]
_SIDES = [(r"\le", "[", r"\le", "]"), ("<", "(", "<", ")"), (r"\le", "[", "<", ")"), ("<", "(", r"\leq", "]")]
_INEQUALITIES = [
    (f"{a} {left} x {right} {b}", rf"x \in {opening}{a}, {b}{closing}")
    for n, (a, b) in enumerate(_BOUNDS)
    for left, opening, right, closing in [_SIDES[n % 4]]
]
_RATIOS = [(n, d) for d in (3, 7, 8, 9, 11) for n in (1, 2, 5, 10, 13, -4, -20)]
_UNITS = ["cm", "meters", "inches", "square units", "miles per hour", "dollars", "degrees", "hours"]
_NUMBERS_WITH_UNITS = [(number, unit) for number in ("12", "3.5", r"\frac{3}{4}", "1200") for unit in _UNITS]


def _units_in(command: str) -> list[tuple[str, str, str]]:
    return [
        ("How much is it?", rf"{number} \text{{ {unit}}}", rf"{number}\{command}{{ {unit}}}")
        for number, unit in _NUMBERS_WITH_UNITS
    ]


_WORDS = [
    "Evelyn", "east", "ellipse", "even", "Tuesday", "(B)", "(E)", "yes", "hyperbola", "Navin", "odd",
    "circle", "neither", "red", "parabola", "north", "(A)", "Saturday", "no", "two lines", "positive", "sphere", "blue",
    "acute", "Monday", "isosceles", "point", "right triangle", "negative", "false",
]  # fmt: skip


def _words_in(before: str, after: str) -> list[tuple[str, str, str]]:
    return [("Which one?", rf"\text{{{word}}}", before + word + after) for word in _WORDS]


_THOUSANDS = range(1234, 4_000_000, 119_847)


def _thousands(written: str, gold: str = "") -> list[tuple[str, str, str]]:
    """Numbers in groups of three, separated by `written` instead of the reference's `gold`."""
    return [("How many?", f"{n:,}".replace(",", gold), f"{n:,}".replace(",", written)) for n in _THOUSANDS]


NOTATIONS = [
    Notation("thin separators `3,\\!125`", _grouped_by(r",\!"), _thousands(r",\!")),
    Notation("`3{,}125`", _grouped_by("{,}"), _thousands("{,}")),
    Notation("`3,125`", _grouped_by(","), _thousands(",")),
    Notation("`3\\,125`", _grouped_by(r"\,"), _thousands(r"\,")),
    Notation("`14400` for `14,\\!400`", _regrouped_by(""), _thousands("", r",\!")),
    Notation("`14{,}400` for `14,\\!400`", _regrouped_by("{,}"), _thousands("{,}", r",\!")),
    Notation("`14,400` for `14,\\!400`", _regrouped_by(","), _thousands(",", r",\!")),
    Notation("`\\cfrac`", _replace(r"\\[dt]?frac", r"\\cfrac")),
    Notation("`\\dfrac`", _replace(r"\\[t]?frac", r"\\dfrac")),
    Notation("`\\tfrac`", _replace(r"\\[d]?frac", r"\\tfrac")),
    Notation("`a/b` for `\\frac{a}{b}`", lambda reference: f"{match[1]}{match[2]}/{match[3]}"
             if (match := _PLAIN_FRACTION.fullmatch(reference)) else None),
    Notation("a period at the end of the box", lambda reference: f"{reference}."),
    Notation("`\\[\\boxed{…}.\\]`", lambda reference: rf"\[\boxed{{{reference}}}.\]"),
    Notation("`$…$` in the box", lambda reference: f"${reference}$"),
    Notation("`\\(…\\)` in the box", lambda reference: rf"\({reference}\)"),
    Notation("`\\displaystyle`", lambda reference: rf"\displaystyle {reference}"),
    Notation("`\\left(`, `\\right)`", lambda reference: None if r"\left" in reference else
             _replace(r"\)", r"\\right)")(_replace(r"\(", r"\\left(")(reference) or reference), [
        ("Which point?", f"({a}, {b})", rf"\left({a}, {b}\right)") for a, b in _BOUNDS]),
    Notation("`\\bigl(`, `\\bigr)`", lambda reference: None if r"\left" in reference else
             _replace(r"\)", r"\\bigr)")(_replace(r"\(", r"\\bigl(")(reference) or reference), [
        ("Which point?", f"({a}, {b})", rf"\bigl({a}, {b}\bigr)") for a, b in _BOUNDS]),
    Notation("units in `\\textbf{}`", _replace(r"\\(?:text|mbox)\{", r"\\textbf{"), _units_in("textbf")),
    Notation("units in `\\mbox{}`", _replace(r"\\text\{", r"\\mbox{"), _units_in("mbox")),
    Notation("units in `\\mathrm{}`", _replace(r"\\(?:text|mbox)\{", r"\\mathrm{"), _units_in("mathrm")),
    Notation("units written plainly", _replace(r"\\(?:text|mbox)\{([^{}]*)\}", r"\1"), [
        (problem, gold, f"{number} {unit}") for (problem, gold, _), (number, unit) in
        zip(_units_in("text"), _NUMBERS_WITH_UNITS, strict=True)]),
    Notation("words written plainly", _replace(r"^\\text\{([^{}]*)\}$", r"\1"), _words_in("", "")),
    Notation("words in `\\textbf{}`", _replace(r"^\\text\{([^{}]*)\}$", r"\\textbf{\1}"), _words_in(r"\textbf{", "}")),
    Notation("words in `\\mbox{}`", _replace(r"^\\text\{([^{}]*)\}$", r"\\mbox{\1}"), _words_in(r"\mbox{", "}")),
    Notation("words in `\\mathrm{}`", _replace(r"^\\text\{([^{}]*)\}$", r"\\mathrm{\1}"), _words_in(r"\mathrm{", "}")),
    Notation("`(p,q)=(3,2)`", _named_tuple, [
        ("Find the pair $(p,q)$.", f"({b}, {a})", f"(p,q)=({b}, {a})") for a, b in _BOUNDS]),
    Notation("`x \\in [-2,7]` for `-2 \\le x \\le 7`", lambda reference: None, [
        ("For which $x$?", gold, written) for gold, written in _INEQUALITIES]),
    Notation("`[-2,7]` for `x \\in [-2,7]`", lambda reference: None, [
        ("For which $x$?", written, written.removeprefix(r"x \in ")) for _, written in _INEQUALITIES]),
    Notation("`\\text{ or }` between tuples", lambda reference: None, [
        ("Find all pairs.", f"{p}, {q}", rf"{p} \text{{ or }} {q}") for p, q in _PAIRS]),
    Notation("`\\text{ and }` between tuples", lambda reference: None, [
        ("Find all pairs.", f"{p}, {q}", rf"{p} \text{{ and }} {q}") for p, q in _PAIRS]),
    Notation("`\\left[\\begin{array}…` for a matrix", _array, [
        ("Find the matrix.", rf"\begin{{pmatrix}} {a} & {b} \\ {b} & {-a} \end{{pmatrix}}",
         rf"\left[\begin{{array}}{{cc}} {a} & {b} \\ {b} & {-a} \end{{array}}\right]") for a, b in _BOUNDS]),
    Notation("`bmatrix` for `pmatrix`", _replace("pmatrix", "bmatrix"), [
        ("Find the matrix.", rf"\begin{{pmatrix}} {a} & {b} \\ {b} & {-a} \end{{pmatrix}}",
         rf"\begin{{bmatrix}}{a}&{b}\\{b}&{-a}\end{{bmatrix}}") for a, b in _BOUNDS]),
    Notation("six digits in a tuple", lambda gold: None if "matrix" in gold else _decimal_fractions(gold), [
        ("Which point?", rf"\left(\frac{{{n}}}{{{d}}}, 2\right)", f"({n / d:.6f}, 2)") for n, d in _RATIOS]),
    Notation("six digits in a matrix", lambda gold: _decimal_fractions(gold) if "matrix" in gold else None, [
        ("Which vector?", rf"\begin{{pmatrix}} \frac{{{n}}}{{{d}}} \\ 2 \end{{pmatrix}}",
         rf"\begin{{pmatrix}} {n / d:.6f} \\ 2 \end{{pmatrix}}") for n, d in _RATIOS]),
    Notation("several boxes with `and`", lambda reference: _boxes(reference, " and "), [
        ("Solve for $x$.", f"{a}, {b}", rf"$x=\boxed{{{a}}}$ and $x=\boxed{{{b}}}$" if n % 2 else
         rf"\boxed{{{b}}} and \boxed{{{a}}}") for n, (a, b) in enumerate(_BOUNDS)]),
    Notation("several boxes with `or`", lambda reference: _boxes(reference, ", or "), [
        ("Solve for $x$.", rf"\{{{a}, {b}\}}", rf"\boxed{{{a}}} or \boxed{{{b}}}") for a, b in _BOUNDS]),
    Notation("`x = …` before a number", lambda reference: f"x = {reference}" if _NUMBER.fullmatch(reference) else None),
    Notation("spaces `\\;`", _replace(r"(?<=[,+=])(?! ?\\!| ?[0-9]{3}) ?", r"\\; ")),
    Notation("`\\cdot` between factors", _replace(r"(?<=[0-9]) ?(?=\\(?:sqrt|pi))", r" \\cdot "), [
        ("How long?", rf"{a}\sqrt{{{b}}}", rf"{a} \cdot \sqrt{{{b}}}")
        for a in (2, 3, 5, 7, 12) for b in (2, 3, 5, 6, 7, 10)]),
    Notation("`^{\\circ}`", _replace(r"\^\\circ", r"^{\\circ}"), [
        ("What angle?", rf"{a}^\circ", rf"{a}^{{\circ}}") for a in range(10, 170, 5)]),
    Notation("degrees left out", _replace(r"\^\\circ", ""), [
        ("What angle?", rf"{a}^\circ", f"{a}") for a in range(10, 170, 5)]),
    Notation("dollars `\\$46`", lambda reference: rf"\${reference}" if _NUMBER.fullmatch(reference) else None),
    Notation("`\\boldsymbol{…}` in the box", lambda reference: rf"\boldsymbol{{{reference}}}"
             if _NUMBER.fullmatch(reference) else None),
    Notation("roots as powers", _roots_as_powers, [
        ("Find the length.", rf"{a}\sqrt{{{b}}}", rf"{a} \cdot {b}^{{1/2}}")
        for a in (2, 3, 5, 7) for b in (2, 3, 5, 6, 7, 10, 11, 13)]),
    *(Notation(*entry) for entry in MORE_NOTATIONS),
]  # fmt: skip
