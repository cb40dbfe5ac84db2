r"""Numbers as people write them: `-3`, `1,000`, `0.5`, `\frac{1}{2}`, `1.2\times10^{5}`, `46\%`, `x = 12\text{ cm}`.

A numeral is a value without an operation to carry out: `60+8`, `2^{10}` and `\frac{136}{2}` are no numerals.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

TOLERANCE = Fraction(1, 10**6)
"""Relative difference up to which two numbers agree, if one of them has a decimal point."""

_EMPHASIS = re.compile(r"\\(?:text|boldsymbol)\{([^{}]*[0-9][^{}]*)\}")
_NAME = re.compile(r"(\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\(\w+\))?)\s*=\s*")
_UNSIGNED = r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)"
_DECIMAL = rf"(?:{_UNSIGNED}?\.[0-9]+|{_UNSIGNED}\.?)"
_RATIO = r"(?:\\frac\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|([0-9]+)\s*/\s*([0-9]+))"
_DECIMAL_NUMBER = re.compile(_DECIMAL)
_FRACTION = re.compile(_RATIO)
_MIXED = re.compile(rf"([0-9]+)\s*(?:(?=\\)|\s){_RATIO}")
RATIO_PATTERN, MIXED_PATTERN = _RATIO, _MIXED.pattern
_TIMES = r"(?:\\times|\\cdot|×|\*)"
_POWER_OF_TEN = re.compile(
    rf"({_DECIMAL})(?:\s*{_TIMES}\s*10\s*\^\s*(?:\{{([+-]?[0-9]{{1,4}})\}}|([0-9]))|[eE]([+-]?[0-9]{{1,4}}))"
)
POWER_OF_TEN_PATTERN = _POWER_OF_TEN.pattern
_ANY = re.compile(
    rf"(?<![\w.])(?:{_POWER_OF_TEN.pattern}|{_MIXED.pattern}|{_RATIO}|{_DECIMAL}(?<!\.))(?![\w}}]|[.,][0-9]|\s*\\?%)"
)
_TO_CONVERT = re.compile(rf"\b(?i:write|express|convert|change|rewrite)\s+\$?({_DECIMAL}\s*\\?%)")
_POWER_OF_UNIT = r"(?:\s*(?:\^\s*\{?[23]\}?|[²³]))?"
_WORDS = re.compile(rf"\s*\\(?:text|operatorname)\{{([^{{}}]*)\}}({_POWER_OF_UNIT})")
_LETTERS = re.compile(rf"(\s*)([A-Za-z][A-Za-z/. ]*?)({_POWER_OF_UNIT})")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)")

# The spellings of each unit. Every other word is its own unit.
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
    """A number, and the way it was written."""

    value: Fraction
    form: Form
    exact: bool
    """True without a decimal point."""
    reduced: bool = True
    """False for a fraction that can be reduced."""
    name: str = ""
    unit: str = ""

    @property
    def notation(self) -> tuple[str, Fraction]:
        """The form and the size, the same for all positions of the decimal point: `75%`, `7.5e-1` and `0.75`."""
        return self.form.replace("power of ten", "digits"), abs(self.value / 100 if self.unit == "%" else self.value)


def read(text: str) -> Numeral | None:
    """Read `text`, in plain notation, as a numeral; None if it is none."""
    text = text.replace("{,}", ",").replace("{.}", ".").replace(r"\%", "%").replace(r"\$", "$")
    text = _EMPHASIS.sub(r"\1", text).strip()
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
    r"""True if the answer is the number of the reference. With `percent`, the problem asks for a percentage: then
    `46\%` is 46, else 0.46."""
    if answer.name and gold.name and answer.name != gold.name:
        return False
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if gold.reduced and not answer.reduced:
        return False
    value, gold_value = answer.value, gold.value
    if answer.unit == "%" and not gold.unit and not percent:
        value /= 100
    elif gold.unit == "%" and not answer.unit and value != gold_value:
        gold_value /= 100
    if gold.exact and (answer.exact or gold.form == "digits"):
        return value == gold_value
    return abs(value - gold_value) <= TOLERANCE * max(abs(value), abs(gold_value))


def is_copied(number: Numeral, gold: Numeral, problem: str) -> bool:
    r"""True if the problem holds the number, and the reference has it in another form. Signs, percent and powers of ten
    do not count: `.750`, `75\%` and `7.5\times10^{-1}` are the `0.75` to be converted."""
    if number.form == gold.form and (number.value == gold.value or (number.unit == "%") == (gold.unit == "%")):
        return False
    texts = [match[0] for match in _ANY.finditer(problem)] + _TO_CONVERT.findall(problem)
    copies = [numeral for text in texts if (numeral := read(text)) and numeral.notation == number.notation]
    return bool(copies) and not any((numeral.form, numeral.value) == (gold.form, gold.value) for numeral in copies)


def _unwrapped(text: str) -> str:
    text = text.strip()
    content = text[1:-1]
    if text.startswith("(") and text.endswith(")") and "(" not in content and ")" not in content:
        return content.strip()
    return text


def _without_unit(text: str) -> tuple[str, str, int]:
    """The text before a unit, the unit, and the factor of the number (`3 million`)."""
    match = re.match(r"([+-]?)\s*[$€£]\s*", text)
    if match:
        return match[1] + text[match.end() :], text[match.end(1) :].strip()[0], 1
    if text.endswith("%"):
        return text[:-1].strip(), "%", 1
    start = _end_of_number(text)
    suffix = text[start:]
    if not suffix.strip(" ."):
        return text, "", 1
    if _DEGREES.fullmatch(suffix):
        return text[:start], "°", 1
    if match := _WORDS.fullmatch(suffix):
        spelling, bare = match[1], False
    elif match := _LETTERS.fullmatch(suffix):
        spelling, bare = match[2], True
    else:
        return text, "", 1
    words = spelling.lower().replace(".", " ").split()
    scale = _SCALES.get(words[0], 1) if words else 1
    if scale > 1:
        del words[0]
    unit = _unit(words, re.sub(r"\D", "", match.groups()[-1].replace("²", "2").replace("³", "3")))
    if bare and not unit and not all(len(word) > 2 or word in UNITS for word in "/".join(words).split("/")):
        return text, "", 1  # `2x` is a product, `5 ab` too, and `2x/x`
    if bare and not match[1] and len(spelling) == 1:
        return text, "", 1  # and so is `2m`
    if len(words) > 4 or any(not re.fullmatch(r"[a-z/]+", word) or word in _NO_UNITS for word in words):
        return text, "", 1
    return text[:start], unit, scale


def _unit(words: list[str], power: str) -> str:
    """The name of a unit in one spelling; empty where a word is not in `UNITS` (`apples`)."""
    parts: list[str] = []
    for word in " ".join(words).replace("/", " per ").split():
        if word in ("square", "sq", "cubic"):
            power = "3" if word == "cubic" else "2"
        elif word == "per":
            parts.append("/")
        else:
            unit = UNITS.get(word) or UNITS.get(word.removesuffix("s"))
            if unit is None:
                return ""
            parts.append(unit)
    return "".join(parts) + (f"^{power}" if power else "")


def _end_of_number(text: str) -> int:
    """The end of the number, where a unit may begin."""
    end = 0
    for pattern in (_POWER_OF_TEN, _MIXED, _FRACTION, _DECIMAL_NUMBER):
        match = re.compile(rf"[+-]?\s*(?:{pattern.pattern})").match(text)
        end = max(end, match.end() if match else 0)
    return end


def _unsigned(text: str) -> tuple[Fraction, Form, bool, bool] | None:
    """The value of a number without a sign, its form, whether it is exact, and whether it is reduced; None for other
    text."""
    if _DECIMAL_NUMBER.fullmatch(text):
        return _decimal(text), "digits", "." not in text.rstrip("."), True
    if match := _POWER_OF_TEN.fullmatch(text):
        mantissa = _decimal(match[1])
        exponent = int(next(group for group in match.groups()[1:] if group is not None))
        return mantissa * Fraction(10) ** exponent, "power of ten", "." not in match[1], 1 <= mantissa < 10
    for pattern, form in ((_FRACTION, "fraction"), (_MIXED, "mixed")):
        if match := pattern.fullmatch(text):
            integer, *parts = match.groups() if form == "mixed" else ("0", *match.groups())
            top, bottom = (int(part) for part in parts if part is not None)
            if bottom == 0 or (form == "mixed" and top < 0):
                return None
            reduced = bottom > 1 and math.gcd(top, bottom) == 1 and (form == "fraction" or top < bottom)
            return int(integer) + Fraction(top, bottom), "mixed" if form == "mixed" else "fraction", True, reduced
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", text).rstrip("."))
