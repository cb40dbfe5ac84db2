r"""The last number of a completion, for policies that write prose: of `She pays **$1,200**.` it is `1,200`.

The common scoring of word problems (the flexible extraction of lm-evaluation-harness, the chain-of-thought papers) also
takes the last number, without separators, currency and the final period. Here a fraction, a power and a time are one
number each, not two, and an exponent (`12 m^2`) and the digits in a name (`H2O`) are none.
"""

from __future__ import annotations

import re

from .numerals import MIXED_PATTERN, POWER_OF_TEN_PATTERN, RATIO_PATTERN

LAST_NUMBER = "last_number"

_SEPARATOR = re.compile(r"(?<=[0-9])(?:,\s*\\!|\{,\}|\\[,!])\s*(?=[0-9]{3}(?![0-9]))")
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
_SIGN = r"(?:(?<![\w)\]}%.$-])(?P<sign>-)\\?[$€£]?|\\?[$€£](?P<inner>-))?"
_START = r"(?<![A-Za-z0-9^])(?<![A-Za-z]_)(?<![0-9]\.)(?<!\^\{)(?<!\^-)(?<!\^\{-)"
_PERCENT = r"\s?\\?(?:%|per ?cent\b)"
_LAST = re.compile(
    rf"{_SIGN}{_START}(?P<number>[0-9]{{1,2}}:[0-9]{{2}}(?![0-9])|{POWER_OF_TEN_PATTERN}"
    rf"|[0-9]+(?:\^|\*\*)(?:\{{-?[0-9]+\}}|-?[0-9]+)|{MIXED_PATTERN}(?![/0-9])|(?<!/){RATIO_PATTERN}(?![/0-9])"
    rf"|{_INTEGER}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?P<percent>{_PERCENT})?(?P<scale>\s(?:thousand|[mbtr]+illion)\b)?"
)


def last_number(text: str) -> str | None:
    """The last number of `text` as it is written, with its sign, a percent sign and a scale (`3 million`) but without
    currency and unit; None if there is none."""
    text = text.replace("−", "-").replace("\u00a0", " ").replace("\u202f", " ")
    text = re.sub(r"\\[cdt]frac(?![A-Za-z])", r"\\frac", _SEPARATOR.sub("", text))
    matches = list(_LAST.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    sign = "-" if match["sign"] or match["inner"] else ""
    return sign + match["number"] + ("%" if match["percent"] else match["scale"] or "")
