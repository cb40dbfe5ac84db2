"""Measures of the dependence of failures on the policy's answers.

Failed episodes without a reward are left out. Where wrong answers fail more often than right ones, the episodes that
remain look better than the policy is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean, variance

from envgym.types import Episode, Group, Segment

Attempt = tuple[Hashable, float, bool]
"""An answer: what it is compared within, its value, and whether the episode failed after it."""


def failure_bias(groups: Sequence[Group]) -> dict[str, float]:
    """Differences between the answers after which episodes failed and the others, in standard errors:
    `failures/by_length` (tokens), `by_turns`, `by_surprise` (mean negative log-probability) and `by_reward` (a group's
    share of failures against the mean reward of its finished members).

    Each is about a standard normal number if failures are independent of the answers, and absent without a comparison.
    `by_length` and `by_surprise` compare answers of the same turn and group; `by_turns` compares members of a group,
    and only positive values mean anything: an episode that fails at random has fewer turns. Retried attempts count, and
    failures with a reward do not.
    """
    lengths, surprises, turns = list[Attempt](), list[Attempt](), list[Attempt]()
    shares, rewards = list[float](), list[float]()
    for group in groups:
        attempts = _attempts(group)
        for episode in attempts:
            answers = [segment for row in episode.rows for segment in row.segments if segment.role == "action"]
            turns.append((group.id, float(len(answers)), not episode.is_counted))
            for number, answer in enumerate(answers):
                failed = not episode.is_counted and number == len(answers) - 1
                lengths.append(((group.id, number), float(len(answer)), failed))
                if (surprise := _surprise(answer)) is not None:
                    surprises.append(((group.id, number), surprise, failed))
        finished = [episode.reward for episode in attempts if episode.is_counted and episode.reward is not None]
        if finished:
            shares.append(fmean(not episode.is_counted for episode in attempts))
            rewards.append(fmean(finished))
    values = {
        "length": _stratified(lengths),
        "turns": _stratified(turns),
        "surprise": _stratified(surprises),
        "reward": _correlation(shares, rewards),
    }
    return {f"failures/by_{name}": value for name, value in values.items() if value is not None}


def _attempts(group: Group) -> list[Episode]:
    """The attempts at a group's task in which the policy answered."""
    return [episode for episode in [*group.episodes, *group.superseded] if any(row.turns for row in episode.rows)]


def _surprise(answer: Segment) -> float | None:
    return -fmean(answer.logprobs) if answer.logprobs else None


def _stratified(attempts: Iterable[Attempt]) -> float | None:
    """The sum over strata of the failed attempts' values minus their expectation, in standard deviations of random
    labels within each stratum (a stratified permutation test). None if no stratum has both kinds and unequal values."""
    strata: dict[Hashable, list[tuple[float, bool]]] = defaultdict(list)
    for stratum, value, failed in attempts:
        strata[stratum].append((value, failed))
    difference = squares = 0.0
    for members in strata.values():
        values = [value for value, _ in members]
        failed_values = [value for value, failed in members if failed]
        n_failed, n_finished = len(failed_values), len(members) - len(failed_values)
        if n_failed and n_finished:
            difference += sum(failed_values) - n_failed * fmean(values)
            squares += n_failed * n_finished / len(members) * variance(values)
    return difference / math.sqrt(squares) if squares > 0 else None


def _correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The correlation of two series times the root of their length less one, which has the variance 1 if the series
    are independent; None for fewer than three values or a constant."""
    if len(left) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        return None
    means = fmean(left), fmean(right)
    products = sum((x - means[0]) * (y - means[1]) for x, y in zip(left, right, strict=True))
    squares = sum((x - means[0]) ** 2 for x in left) * sum((y - means[1]) ** 2 for y in right)
    return products / math.sqrt(squares) * math.sqrt(len(left) - 1)
