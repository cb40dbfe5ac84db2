r"""Numbers as people write them: `-3`, `1,000`, `0.5`, `\frac{1}{2}`, `1.2\times10^{5}`, `46\%`, `x = 12\text{ cm}`.

A numeral is a value: nothing in it is left to be carried out. `60+8`, `2^{10}` and `\frac{136}{2}` are none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

TOLERANCE = Fraction(1, 10**6)
"""Relative difference up to which two numbers agree, where one of them has a point."""

_EMPHASIS = re.compile(r"\\(?:text|boldsymbol)\{([^{}]*[0-9][^{}]*)\}")
_NAME = re.compile(r"(\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\(\w+\))?)\s*=\s*")
_UNSIGNED = r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)"
_DECIMAL = rf"(?:{_UNSIGNED}?\.[0-9]+|{_UNSIGNED}\.?)"
_RATIO = r"(?:\\frac\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|([0-9]+)\s*/\s*([0-9]+))"
_DECIMAL_NUMBER = re.compile(_DECIMAL)
_FRACTION = re.compile(_RATIO)
_MIXED = re.compile(rf"([0-9]+)\s*(?:(?=\\)|\s){_RATIO}")
_TIMES = r"(?:\\times|\\cdot|×|\*)"
_POWER_OF_TEN = re.compile(
    rf"({_DECIMAL})(?:\s*{_TIMES}\s*10\s*\^\s*(?:\{{([+-]?[0-9]{{1,4}})\}}|([0-9]))|[eE]([+-]?[0-9]{{1,4}}))"
)
_ANY = re.compile(
    rf"(?<![\w.])(?:{_POWER_OF_TEN.pattern}|{_MIXED.pattern}|{_RATIO}|{_DECIMAL}(?<!\.))(?![\w}}]|[.,][0-9]|\s*\\?%)"
)
_POWER_OF_UNIT = r"(?:\s*(?:\^\s*\{?[23]\}?|[²³]))?"
_WORDS = re.compile(rf"\s*\\(?:text|operatorname)\{{([^{{}}]*)\}}({_POWER_OF_UNIT})")
_LETTERS = re.compile(rf"(\s*)([A-Za-z][A-Za-z/. ]*?)({_POWER_OF_UNIT})")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)")

# One name for what is written in several ways. Other words are units of their own.
_UNITS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram",
    "kg": "kilogram", "lb": "pound lbs", "oz": "ounce", "s": "second sec", "min": "minute", "h": "hour hr",
    "day": "", "week": "", "month": "", "year": "", "ml": "milliliter millilitre", "l": "liter litre", "mph": "",
    "$": "dollar usd", "cent": "", "°": "degree", "%": "percent", "rad": "radian", "unit": "",
}  # fmt: skip
UNITS = {word: unit for unit, words in _UNITS.items() for word in (unit, *words.split())}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = {"or", "and", "not", "maybe", "perhaps", "possibly", "if", "but", "to", "either", "than", "else", "no"}

Form = Literal["digits", "fraction", "mixed", "power of ten"]


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number, and how it was written."""

    value: Fraction
    form: Form
    exact: bool
    """Without a point."""
    reduced: bool = True
    """No fraction that could be made simpler."""
    name: str = ""
    unit: str = ""


def read(text: str) -> Numeral | None:
    """The numeral that `text`, in plain notation, is, or None."""
    text = _cleaned(text)
    name = ""
    if match := _NAME.match(text):
        name, text = match[1], text[match.end() :]
    text, unit, scale = _without_unit(_unwrapped(text))
    text = _unwrapped(text)
    sign = -1 if text.startswith("-") else 1
    number = _unsigned(text[1:].lstrip() if text[:1] in ("-", "+") else text)
    if number is None:
        return None
    value, form, exact, reduced = number
    return Numeral(sign * value * scale, form, exact, reduced, name, unit)


def agree(answer: Numeral, gold: Numeral, *, percent: bool = False) -> bool:
    r"""True if the answer is the number that the reference is. With `percent`, the problem asks for one in percent:
    there `46\%` is 46, and elsewhere 0.46."""
    if answer.name and gold.name and answer.name != gold.name:
        return False
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if gold.reduced and not answer.reduced:
        return False
    value, right = answer.value, gold.value
    if answer.unit == "%" and not gold.unit and not percent:
        value /= 100
    elif gold.unit == "%" and not answer.unit and value != right:
        right /= 100
    if gold.exact and (answer.exact or gold.form == "digits"):
        return value == right
    return abs(value - right) <= TOLERANCE * max(abs(value), abs(right))


def holds(problem: str, number: Numeral) -> bool:
    """True if the problem holds this number in this form, whatever its sign: `.750` is the `0.75` to be converted."""
    numbers = (read(match[0]) for match in _ANY.finditer(problem))
    return any(held and held.form == number.form and abs(held.value) == abs(number.value) for held in numbers)


def _cleaned(text: str) -> str:
    text = text.replace("{,}", ",").replace("{.}", ".").replace(r"\%", "%").replace(r"\$", "$")
    return _EMPHASIS.sub(r"\1", text).strip()


def _unwrapped(text: str) -> str:
    text = text.strip()
    inside = text[1:-1]
    if text.startswith("(") and text.endswith(")") and "(" not in inside and ")" not in inside:
        return inside.strip()
    return text


def _without_unit(text: str) -> tuple[str, str, int]:
    """The text before a unit, the unit, and what the number is to be multiplied by (`3 million`)."""
    match = re.match(r"([+-]?)\s*[$€£]\s*", text)
    if match:
        return match[1] + text[match.end() :], text[match.end(1) :].strip()[0], 1
    if text.endswith("%"):
        return text[:-1].strip(), "%", 1
    start = _end_of_number(text)
    rest = text[start:]
    if not rest.strip(" ."):
        return text, "", 1
    if _DEGREES.fullmatch(rest):
        return text[:start], "°", 1
    if match := _WORDS.fullmatch(rest):
        words, bare = match[1], False
    elif match := _LETTERS.fullmatch(rest):
        words, bare = match[2], True
    else:
        return text, "", 1
    found = words.lower().replace(".", " ").split()
    scale = _SCALES.get(found[0], 1) if found else 1
    if scale > 1:
        del found[0]
    unit = _unit(found, re.sub(r"\D", "", match.groups()[-1].replace("²", "2").replace("³", "3")))
    if bare and not unit and not all(len(word) > 2 for word in found):
        return text, "", 1  # `2x` is a product, `5 ab` too
    if bare and not match[1] and len(words) == 1:
        return text, "", 1  # and so is `2m`
    if len(found) > 4 or any(not re.fullmatch(r"[a-z/]+", word) or word in _NO_UNITS for word in found):
        return text, "", 1
    return text[:start], unit, scale


def _unit(words: list[str], power: str) -> str:
    """One name for a unit however it is spelled; none where a word is no unit that is known here (`apples`)."""
    named: list[str] = []
    for word in " ".join(words).replace("/", " per ").split():
        if word in ("square", "sq", "cubic"):
            power = "3" if word == "cubic" else "2"
        elif word == "per":
            named.append("/")
        else:
            unit = UNITS.get(word) or UNITS.get(word.removesuffix("s"))
            if unit is None:
                return ""
            named.append(unit)
    return "".join(named) + (f"^{power}" if power else "")


def _end_of_number(text: str) -> int:
    """The end of the number, where a unit may begin."""
    end = 0
    for pattern in (_POWER_OF_TEN, _MIXED, _FRACTION, _DECIMAL_NUMBER):
        match = re.compile(rf"[+-]?\s*(?:{pattern.pattern})").match(text)
        end = max(end, match.end() if match else 0)
    return end


def _unsigned(text: str) -> tuple[Fraction, Form, bool, bool] | None:
    """The value of a number without a sign, its form, whether it is exact, and whether it is reduced."""
    if _DECIMAL_NUMBER.fullmatch(text):
        return _decimal(text), "digits", "." not in text.rstrip("."), True
    if match := _POWER_OF_TEN.fullmatch(text):
        mantissa = _decimal(match[1])
        exponent = int(next(group for group in match.groups()[1:] if group is not None))
        return mantissa * Fraction(10) ** exponent, "power of ten", "." not in match[1], 1 <= mantissa < 10
    for pattern, form in ((_FRACTION, "fraction"), (_MIXED, "mixed")):
        if match := pattern.fullmatch(text):
            whole, *parts = match.groups() if form == "mixed" else ("0", *match.groups())
            above, below = (int(part) for part in parts if part is not None)
            if below == 0 or (form == "mixed" and above < 0):
                return None
            reduced = below > 1 and math.gcd(above, below) == 1 and (form == "fraction" or above < below)
            return int(whole) + Fraction(above, below), "mixed" if form == "mixed" else "fraction", True, reduced
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", text).rstrip("."))
