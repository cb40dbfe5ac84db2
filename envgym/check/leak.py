"""Check of leaks: does the observation contain the reference answer?

An answer that occurs in its problem proves nothing: "4" is in "4 + 0", and the larger of two numbers is one of them. So
the check searches a *rule* that gives the answer in every task: the text after certain words, or at a certain position.
The rule is chosen on one half of the tasks and tested on the other. It is a leak if it finds the answer in a share of
tasks that is above chance (the answers of other tasks) by at least `SHARE` of the remaining fraction. For eight tasks
with two equally likely answers this happens by chance once in 256 times; with more tasks or answers hardly ever.

Answers that correlate with their texts stay below that fraction: a sum equals one operand if the other is 0, and a
remainder is the first number in half of all cases, but no such rule is right in four of five tasks. Tasks whose answer
is copied from the text do count as leaks.
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
from .report import Finding, failure, not_applicable, ok, warning
from .subject import Subject

CHECKS = ("leak",)
TASKS = 240
MIN_TASKS = 16
"""With fewer tasks, a rule is often right by chance."""
SHARE = 0.8
CONTEXTS = (32, 16, 8, 4)
"""Lengths, in characters, of the contexts before an answer that rules use."""
PLACES = range(-3, 3)
SECONDS = 4.0

Rule = Callable[[str], Iterable[str]]


async def check(subject: Subject) -> list[Finding]:
    """The finding on reference answers (or those that demonstrations end with) in the first observation."""
    texts: list[str] = []
    answers: list[str] = []
    in_info = 0
    async for number, task in subject.numbered_tasks(TASKS, SECONDS, fewest=2 * MIN_TASKS):
        answer = answer_text(task.answer) or _demonstrated_answer(subject.demonstrations(task))
        if not answer:
            continue
        episode = await subject.play(task, number, NO_ACTIONS)
        if episode.opening is not None:
            texts.append(text_of(episode.opening))
            answers.append(answer)
            in_info += any(occurs(answer, str(value)) for key, value in episode.info.items() if key != "task")
    if len(texts) < MIN_TASKS:
        return [not_applicable(f"{len(texts)} tasks with an answer are too few (or the answers are unknown)")]
    return [leak_finding(texts, answers, in_info)]


def leak_finding(texts: Sequence[str], answers: Sequence[str], in_info: int = 0) -> Finding:
    """A failure if a rule, chosen on half of the `texts`, finds the answers of the other half; a warning if answers
    occur anywhere in their own texts. `in_info`: the number of tasks with the answer in the info of reset."""
    if len(set(answers)) == 1:
        return not_applicable("all answers are the same")
    rng = random.Random(0)
    order = list(range(len(texts)))
    rng.shuffle(order)
    n_tried = len(order) // 2
    test_half, rule_half = order[:n_tried], order[n_tried:]
    description, rule = choose_rule([texts[i] for i in rule_half], [answers[i] for i in rule_half])
    trial = Trial([set(rule(texts[i])) for i in test_half], [answers[i] for i in test_half])
    if trial.is_leak:
        return failure(
            f"{description} is the answer in {trial.share:.0%} of {n_tried} tasks, and that of another task in "
            f"{trial.chance_share:.0%}",
            "remove the answer from the observation (unless the task is to copy it)",
        )
    trial = Trial([{answer for answer in set(answers) if occurs(answer, text)} for text in texts], answers)
    n_tasks, chance = f"{trial.share:.0%} of {len(texts)} tasks", f"{trial.chance_share:.0%}"
    message = f"it is in the observation in {n_tasks}, another task's in {chance}"
    if in_info:
        message += f"; in the info of reset in {in_info / len(texts):.0%}, which the policy does not see"
    if trial.is_leak:
        return warning(message, "fine if the task is to find it in a text or a list")
    return ok(message)


class Trial:
    """The `candidates` of a rule per task, compared with the reference `answers`. `share`: the fraction of tasks whose
    candidates have their answer; `chance_share`: the same for answers of other tasks."""

    def __init__(self, candidates: Sequence[set[str]], answers: Sequence[str]) -> None:
        n, counts = len(answers), Counter(answers)
        hits = sum(answer in task_candidates for task_candidates, answer in zip(candidates, answers, strict=True))
        self.share = hits / n
        self.chance_share = (
            sum(counts[answer] for task_candidates in candidates for answer in task_candidates) - hits
        ) / (n * (n - 1))

    @property
    def is_leak(self) -> bool:
        """True if `share` exceeds `chance_share` by at least `SHARE` of the rest."""
        return self.share - self.chance_share >= SHARE * (1 - self.chance_share) > 0


# -- rules ------------------------------------------------------------------------------------------------


def choose_rule(texts: Sequence[str], answers: Sequence[str]) -> tuple[str, Rule]:
    """The rule that finds the most answers, as (description, function of a text)."""
    rules = dict(_rules(texts, answers))
    counts = {
        words: sum(answer in rule(text) for text, answer in zip(texts, answers, strict=True))
        for words, rule in rules.items()
    }
    best = max(counts, key=lambda words: counts[words])
    return best, rules[best]


def _rules(texts: Sequence[str], answers: Sequence[str]) -> Iterable[tuple[str, Rule]]:
    """Candidate rules as (description, function of a text): the text after a common context, a word or number at a
    position, the last line."""
    lengths = sorted({len(answer) for answer in answers})
    for length in CONTEXTS:
        contexts: Counter[str] = Counter()
        for text, answer in zip(texts, answers, strict=True):
            contexts.update({text[max(0, start - length) : start] for start in places(answer, text)})
        for context, _ in contexts.most_common(3):
            if context.strip():
                yield f"the text after {context!r}", _following_rule(context, lengths)
    for position in PLACES:
        ordinal = f"{position + 1}." if position >= 0 else f"{-position}. last"
        yield f"the {ordinal} word", _position_rule(position, r"\S+")
        yield f"the {ordinal} number", _position_rule(position, r"-?\d+(?:[./]\d+)?")
    yield "the last line", lambda text: text.strip().splitlines()[-1:]


def _following_rule(context: str, lengths: Sequence[int]) -> Rule:
    """The texts right after `context` of each answer length that end at a word boundary."""

    def rule(text: str) -> Iterable[str]:
        start = text.find(context)
        if start < 0:
            return
        start += len(context)
        for length in lengths:
            if start + length <= len(text) and _is_boundary(text, start + length):
                yield text[start : start + length]

    return rule


def _position_rule(position: int, pattern: str) -> Rule:
    """The match of `pattern` number `position` (negative: from the end), as it is and without punctuation around it."""
    compiled = re.compile(pattern)

    def rule(text: str) -> Iterable[str]:
        items = compiled.findall(text)
        if -len(items) <= position < len(items):
            yield items[position]
            yield items[position].strip(".,;:!?()[]{}<>\"'`*$")

    return rule


def places(answer: str, text: str) -> list[int]:
    """The indices of `answer` in `text`, at word boundaries: "4" does not occur in "42"."""
    starts, start = [], text.find(answer)
    while start >= 0:
        if _is_boundary(text, start) and _is_boundary(text, start + len(answer)):
            starts.append(start)
        start = text.find(answer, start + 1)
    return starts


def occurs(answer: str, text: str) -> bool:
    return bool(places(answer, text))


def _is_boundary(text: str, index: int) -> bool:
    """True if a word may begin or end before the character at `index`."""
    return index in (0, len(text)) or not (text[index - 1].isalnum() and text[index].isalnum())


# -- answers ----------------------------------------------------------------------------------------------


def answer_text(answer: Any) -> str:
    """An answer as text; empty for none. Of a solution, the part after `####`."""
    if answer is None or answer == "":
        return ""
    if isinstance(answer, str):
        return answer.rpartition("####")[2].strip()
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer) if isinstance(answer, int | float) else json.dumps(answer, default=str)


def _demonstrated_answer(variants: Sequence[Sequence[str | Message]]) -> str:
    """The last turn of the shortest demonstration, for tasks without an answer."""
    last = [turns[-1] for turns in variants if turns]
    return min((turn.text if isinstance(turn, Message) else turn for turn in last), key=len, default="").strip()
