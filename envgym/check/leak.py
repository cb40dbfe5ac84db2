"""Check of leaks: is the reference answer in the observation, or can the reward be had without the task?

An answer that occurs in its problem proves nothing: "4" is in "4 + 0", and the larger of two numbers is one of them. So
the share of tasks whose answer is in their own observation is compared with chance, the share of those in which the
answer of another task is.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from envgym.rollout.scripted import NO_ACTIONS

from .play import text_of
from .report import Finding, not_applicable, ok, warning
from .subject import Subject, take_in_time

CHECKS = ("leak",)
TASKS = 100
MIN_TASKS = 16
"""With fewer tasks, answers are often in their problems by chance."""
SHARE = 0.8
"""The share of the difference between chance and all tasks from which it is a leak."""
SECONDS = 4.0


async def check(subject: Subject) -> list[Finding]:
    """The finding on reference answers in the first observation, or on other ways to a reward that is not earned."""
    tasks = await subject.tasks(TASKS)
    forgeries = Counter(filter(None, (subject.spec.spec_for(task).forgery(task) for task in tasks)))
    if forgeries:
        message = "; ".join(f"{count} of {len(tasks)} tasks: {text}" for text, count in forgeries.items())
        return [warning(message, "read episodes with high rewards before you trust them")]
    texts, answers = [], []
    for number, task in take_in_time(tasks, SECONDS, fewest=2 * MIN_TASKS):
        answer = answer_text(task.answer)
        episode = await subject.play(task, number, NO_ACTIONS)
        if answer and episode.opening is not None:
            texts.append(text_of(episode.opening))
            answers.append(answer)
    if len(texts) < MIN_TASKS:
        return [not_applicable(f"{len(texts)} tasks with an answer are too few (or the answers are unknown)")]
    return [leak_finding(texts, answers)]


def leak_finding(texts: Sequence[str], answers: Sequence[str]) -> Finding:
    """A warning if the answers are in their own texts far more often than in those of other tasks."""
    if len(set(answers)) == 1:
        return not_applicable("all answers are the same")
    hits = [[occurs(answer, text) for answer in answers] for text in texts]
    share = statistics.fmean(row[i] for i, row in enumerate(hits))
    chance = statistics.fmean(hit for i, row in enumerate(hits) for j, hit in enumerate(row) if i != j)
    message = f"it is in the observation in {share:.0%} of {len(texts)} tasks, another task's in {chance:.0%}"
    if share - chance >= SHARE * (1 - chance) > 0:
        return warning(message, "remove it, unless the task is to find it in a text or a list, or to copy it")
    return ok(message)


def occurs(answer: str, text: str) -> bool:
    """True if `answer` is in `text` between the borders of words: "4" does not occur in "42"."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def answer_text(answer: Any) -> str:
    """An answer as text; empty for none. Of a solution, the part after `####`."""
    if answer is None or answer == "":
        return ""
    if isinstance(answer, str):
        return answer.rpartition("####")[2].strip()
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer) if isinstance(answer, int | float) else json.dumps(answer, default=str)
