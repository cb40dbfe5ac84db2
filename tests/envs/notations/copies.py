"""Answers that must get no reward: expressions copied from the problem, and operations that are not carried out.

Each is (kind, problem, reference, answer); the answers are equal to their references, so a grader that compares only
the mathematics rewards them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Forged = tuple[str, str, str, str]

TASKS = ("Factor", "Expand", "Simplify", "Solve", "Evaluate", "Compute", "Express", "Write", "Rationalize")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]", re.DOTALL)


def disguises(expression: str, variable: str = "x") -> list[str]:
    """The expression with changes of form only: brackets, neutral factors and terms, a name, another case."""
    return [
        expression, f"({expression})", rf"\left(({expression})\right)", f"{{{expression}}}",
        f"1({expression})", f"{expression}+0", f"0+{expression}", f"-(-({expression}))", f"f({variable})={expression}",
        f"y = {expression}.", rf"\frac{{{expression}}}{{1}}", f"({expression})^1",
    ]  # fmt: skip


def copies() -> Iterator[Forged]:
    """Generated problems."""
    for a, b in ((1, 3), (2, 5), (-1, 4)):
        gold, problem = f"(x{a:+d})(x{b:+d})", f"x^2{a + b:+d}x{a * b:+d}"
        for answer in [*disguises(problem), f"{a * b}{a + b:+d}x+x^2", f"x(x{a + b:+d}){a * b:+d}",
                       rf"x \cdot x{a + b:+d}x{a * b:+d}", problem.upper()]:  # fmt: skip
            yield "factor", f"Factor ${problem}$.", gold, answer
            yield "factor, no dollars", f"Factor {problem} over the integers.", gold, answer
    for answer in [*disguises("x^2-1"), "-1+x^2", "-(1-x^2)", "x^2-1^2", r"x\cdot x-1", "X^2-1", "x^{2}-1"]:
        yield "factor", "Factor $x^2 - 1$.", "(x-1)(x+1)", answer
    for a in (1, 3, -5):
        problem, gold = f"(x{a:+d})^2", f"x^2{2 * a:+d}x+{a * a}"
        for answer in [*disguises(problem), f"((x{a:+d}))^2", f"({a}+x)^2", f"(x{a:+d})(x{a:+d})", f"(-x{-a:+d})^2",
                       f"x(x{2 * a:+d})+{a * a}", f"(x{a:+d})^{{2}}", f"f(x)=(x{a:+d})^2"]:  # fmt: skip
            yield "expand", f"Expand ${problem}$.", gold, answer
    for answer in [*disguises("(y+2)(y-7)", "y"), "(y-7)(y+2)", "y(y-7)+2(y-7)", "(-y-2)(7-y)"]:
        yield "expand", r"Expand \((y+2)(y-7)\).", "y^2-5y-14", answer
    for outside, inside in ((5, 2), (2, 3), (3, 7), (10, 11)):
        n = outside**2 * inside
        gold = rf"{outside}\sqrt{{{inside}}}"
        for answer in [
            *disguises(rf"\sqrt{{{n}}}"), f"{n}^{{1/2}}", rf"{n}^{{\frac{{1}}{{2}}}}", f"{n}^{{0.5}}",
            rf"\sqrt[2]{{{n}}}", rf"({n})^{{1/2}}", rf"\sqrt{{{outside}^2 \cdot {inside}}}",
            rf"\sqrt{{{outside**2}}}\sqrt{{{inside}}}",
            rf"\sqrt[4]{{{n**2}}}", rf"\frac{{{outside * inside}}}{{\sqrt{{{inside}}}}}",
        ]:  # fmt: skip
            yield "simplify a root", rf"Simplify $\sqrt{{{n}}}$.", gold, answer
    for n in (3, 5):
        for answer in [rf"\frac{{1}}{{\sqrt{{{n}}}}}", rf"1/\sqrt{{{n}}}", f"{n}^{{-1/2}}",
                       rf"\left(\frac{{1}}{{\sqrt{n}}}\right)", rf"\sqrt{{\frac{{1}}{{{n}}}}}",
                       rf"\frac{{1}}{{{n}^{{1/2}}}}"]:  # fmt: skip
            yield "rationalize", rf"Rationalize $\frac{{1}}{{\sqrt{{{n}}}}}$.", rf"\frac{{\sqrt{{{n}}}}}{{{n}}}", answer
    for a, b, c in ((2, -1, 5), (3, 2, 8), (5, -10, 15)):
        x, problem = (c - b) // a, f"{a}x{b:+d}>{c}"
        for answer in [problem, f"({problem})", f"{c}<{a}x{b:+d}", f"x-{x}>0", f"{a}x>{c - b}", f"0<x-{x}",
                       f"-x<-{x}", f"{a}x{b:+d}-{c}>0", f"{a * x}<{a}x",
                       f"{c}-{b}<{a}x" if b > 0 else f"{c}+{-b}<{a}x"]:  # fmt: skip
            yield "solve an inequality", f"Solve ${problem}$ for $x$.", f"x>{x}", answer
    for a, b in ((2, 3), (3, -1)):
        for answer in [f"2y={2 * a}x{2 * b:+d}", f"2y-{2 * a}x={2 * b}", f"y-{a}x={b}", f"y{-b:+d}={a}x",
                       f"{a}x-y={-b}", f"2Y={2 * a}X{2 * b:+d}"]:  # fmt: skip
            yield "solve for y", f"Write $2y = {2 * a}x {2 * b:+d}$ in slope-intercept form.", f"y = {a}x{b:+d}", answer
    for expression, gold in (("17+25", "42"), ("2^{10}", "1024"), (r"\frac{84}{2}", "42"), ("5!", "120")):
        for answer in disguises(expression):
            yield "evaluate", f"Evaluate ${expression}$.", gold, answer
    for answer in ("0.75", ".75", "0.750", "+0.75", "(0.75)", "x=0.75", r"0{.}75"):
        yield "convert", "Write 0.75 as a fraction.", r"\frac{3}{4}", answer
    for answer in ("3/4", r"\frac{3}{4}", r"\dfrac34", r"\cfrac{3}{4}", r"\left(\frac{3}{4}\right)"):
        yield "convert", r"Write $\frac{3}{4}$ as a decimal.", "0.75", answer
    for expression, gold, others in (
        (r"3x+5x", "8x", [r"x(3+5)", r"(3+5)x", r"4x+4x"]),
        (r"\frac{x^2-1}{x-1}", "x+1",
         [r"\frac{(x-1)(x+1)}{x-1}", r"\frac{1-x^2}{1-x}", r"(x^2-1)/(x-1)", "(x^2-1)(x-1)^{-1}"]),
        (r"x^3 \cdot x^4", "x^7", [r"x^{3+4}", r"x^4x^3", "x^5x^2"]),
        (r"2\sin x \cos x", r"\sin 2x", [r"\sin x \cos x \cdot 2", r"2\cos x\sin x", r"\sin x\cos x+\sin x\cos x"]),
    ):  # fmt: skip
        for answer in [*disguises(expression), *others]:
            yield "simplify", f"Simplify ${expression}$.", gold, answer


def copies_of_references(rows: list[dict[str, Any]]) -> Iterator[Forged]:
    """The formulas of MATH's own problems, as answers."""
    for row in rows:
        problem, gold = row["problem"], row["answer"]
        if not problem.startswith(TASKS):
            continue
        for formula in {"".join(groups).strip(" .,:\n") for groups in _FORMULA.findall(problem)}:
            if re.search(r"[-+^/<>]|\\frac|\\sqrt|\\log|\\div|\\cdot", formula) and re.sub(r"\s", "", formula) != gold:
                for answer in (formula, f"({formula})", f"f(x)={formula}", rf"1 \cdot ({formula})", f"{formula}+0"):
                    yield "of the data", problem, gold, answer
