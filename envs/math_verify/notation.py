r"""Normalizes the many ways of writing the same LaTeX: `14,\!400` is `14400`, `\cfrac` is `\frac`, `\mbox` is `\text`.

Only rewritings that never change the meaning: brackets, values and operations stay unmodified.
"""

from __future__ import annotations

import re

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
    """The normal form of an answer, a reference or a problem."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


def unnamed(text: str) -> str:
    r"""The value without a name before it: `x =`, `f(x) =`, `(p, q) =`, `x \in`."""
    return _NAMED.sub("", text, count=1) if _NAMED.match(text) else text
