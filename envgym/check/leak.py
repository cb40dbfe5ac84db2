"""Check of leaks: can the answer be read off what the policy is shown?

That an answer occurs in its problem proves nothing: "4" is in "4 + 0", and the larger of two numbers is one of them. So
a *rule* is looked for that gives the answer away wherever it is applied: what follows certain words, or stands at a
certain place. The rule is chosen on one half of the tasks and tried on the other.
It counts as a leak when it finds the answer of at least `SHARE` of what chance, the answers of the other tasks, leaves
to find. As the rule was chosen on other tasks, a coin's two faces of eight tasks come by that once in 256 times; more
tasks or more answers, hardly ever.

Answers that say something about their texts without being given away stay below that share: the sum is one of its
operands where the other is 0, the remainder of two numbers is the first of them in half of all cases, but no rule of
these gets four of five right unless something hands the answers out. Tasks that ask for a word to be copied do that.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envgym.rollout.scripted import NO_ACTIONS
from envgym.types import Message

from .play import text_of
from .report import Finding, failed, not_applicable, ok, warning
from .subject import Subject

CHECKS = ("leak",)
TASKS = 240
FEWEST = 16
"""Tasks below which chance alone is often right."""
SHARE = 0.8
CONTEXTS = (32, 16, 8, 4)
"""Lengths, in characters, of the words before an answer that a rule may go by."""
PLACES = range(-3, 3)
SECONDS = 4.0

Rule = Callable[[str], Iterable[str]]


async def check(subject: Subject) -> list[Finding]:
    texts: list[str] = []
    answers: list[str] = []
    in_info = 0
    async for number, task in subject.numbered_tasks(TASKS, SECONDS, fewest=2 * FEWEST):
        answer = written(task.answer) or _demonstrated(subject.demonstrations(task))
        if not answer:
            continue
        played = await subject.play(task, number, NO_ACTIONS)
        if played.first is not None:
            texts.append(text_of(played.first))
            answers.append(answer)
            in_info += any(occurs(answer, str(value)) for key, value in played.info.items() if key != "task")
    if len(texts) < FEWEST:
        return [not_applicable(f"{len(texts)} tasks with an answer are too few (or answers are not known)")]
    return [verdict(texts, answers, in_info)]


def verdict(texts: Sequence[str], answers: Sequence[str], in_info: int = 0) -> Finding:
    """The finding on problems and their answers."""
    if len(set(answers)) == 1:
        return not_applicable("all answers are the same")
    rng = random.Random(0)
    order = list(range(len(texts)))
    rng.shuffle(order)
    half = len(order) // 2
    tried_on, chosen_on = order[:half], order[half:]
    description, rule = choose_rule([texts[i] for i in chosen_on], [answers[i] for i in chosen_on])
    trial = Trial([set(rule(texts[i])) for i in tried_on], [answers[i] for i in tried_on])
    if trial.is_much:
        return failed(
            f"{description} is the answer in {trial.share:.0%} of {half} tasks, and that of another task in "
            f"{trial.by_chance:.0%}",
            "leave the answer out of the observation (unless the task is to copy it)",
        )
    trial = Trial([{answer for answer in set(answers) if occurs(answer, text)} for text in texts], answers)
    found = (
        f"it is in the observation in {trial.share:.0%} of {len(texts)} tasks, another task's in {trial.by_chance:.0%}"
    )
    if in_info:
        found += f"; in the info of reset in {in_info / len(texts):.0%}, which the policy is not shown"
    if trial.is_much:
        return warning(found, "as it should be where it is to be picked out of a text or a list")
    return ok(found)


class Trial:
    """The answers `found` for each task, held against the right `answers`: `share` of them were found for their own
    task, `by_chance` for another."""

    def __init__(self, found: Sequence[set[str]], answers: Sequence[str]) -> None:
        n, counts = len(answers), Counter(answers)
        hits = sum(answer in here for here, answer in zip(found, answers, strict=True))
        self.share = hits / n
        self.by_chance = (sum(counts[answer] for here in found for answer in here) - hits) / (n * (n - 1))

    @property
    def is_much(self) -> bool:
        """True if it is more than can come about without the answers being handed out."""
        return self.share - self.by_chance >= SHARE * (1 - self.by_chance) > 0


# -- rules ------------------------------------------------------------------------------------------------


def choose_rule(texts: Sequence[str], answers: Sequence[str]) -> tuple[str, Rule]:
    """The rule that finds the most answers here, in words and as a function of a text."""
    rules = dict(_rules(texts, answers))
    counts = {
        words: sum(answer in rule(text) for text, answer in zip(texts, answers, strict=True))
        for words, rule in rules.items()
    }
    best = max(counts, key=lambda words: counts[words])
    return best, rules[best]


def _rules(texts: Sequence[str], answers: Sequence[str]) -> Iterable[tuple[str, Rule]]:
    lengths = sorted({len(answer) for answer in answers})
    for length in CONTEXTS:
        before: Counter[str] = Counter()
        for text, answer in zip(texts, answers, strict=True):
            before.update({text[max(0, at - length) : at] for at in places(answer, text)})
        for context, _ in before.most_common(3):
            if context.strip():
                yield f"what follows {context!r}", _after(context, lengths)
    for place in PLACES:
        ordinal = f"{place + 1}." if place >= 0 else f"{-place}. last"
        yield f"the {ordinal} word", _at(place, r"\S+")
        yield f"the {ordinal} number", _at(place, r"-?\d+(?:[./]\d+)?")
    yield "the last line", lambda text: text.strip().splitlines()[-1:]


def _after(context: str, lengths: Sequence[int]) -> Rule:
    """Whatever begins right after `context`, of any length that an answer has, and ends with a word."""

    def rule(text: str) -> Iterable[str]:
        start = text.find(context)
        if start < 0:
            return
        start += len(context)
        for length in lengths:
            if start + length <= len(text) and _ends_at(text, start + length):
                yield text[start : start + length]

    return rule


def _at(place: int, pattern: str) -> Rule:
    compiled = re.compile(pattern)

    def rule(text: str) -> Iterable[str]:
        items = compiled.findall(text)
        if -len(items) <= place < len(items):
            yield items[place]
            yield items[place].strip(".,;:!?()[]{}<>\"'`*$")

    return rule


def places(answer: str, text: str) -> list[int]:
    """The places at which `answer` stands in `text` as words of its own: "4" does not stand in "42"."""
    found, at = [], text.find(answer)
    while at >= 0:
        if _begins_at(text, at) and _ends_at(text, at + len(answer)):
            found.append(at)
        at = text.find(answer, at + 1)
    return found


def occurs(answer: str, text: str) -> bool:
    return bool(places(answer, text))


def _begins_at(text: str, at: int) -> bool:
    return at == 0 or not (text[at - 1].isalnum() and text[at].isalnum())


def _ends_at(text: str, at: int) -> bool:
    return at >= len(text) or not (text[at - 1].isalnum() and text[at].isalnum())


# -- answers ----------------------------------------------------------------------------------------------


def written(answer: Any) -> str:
    """An answer as it would stand in a text; empty for none. A solution with `####` before its answer is that."""
    if answer is None or answer == "":
        return ""
    if isinstance(answer, str):
        return answer.rpartition("####")[2].strip()
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer) if isinstance(answer, int | float) else json.dumps(answer, default=str)


def _demonstrated(variants: Sequence[Sequence[str | Message]]) -> str:
    """The last turn of the shortest demonstration, for tasks that hold no answer."""
    last = [turns[-1] for turns in variants if turns]
    return min((turn.text if isinstance(turn, Message) else turn for turn in last), key=len, default="").strip()
