"""The results of episodes that `envgym score` scored again, against their earlier ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envgym.hashing import task_hash
from envgym.types import Episode, Group

from .result import result_of

UNUSED = "unused_turns"
"""Metric: recorded turns that were not used, because the environment ended the episode before them."""
RECORDING = "recording"
"""Truncation reason if the environment needs more turns than were recorded, and failure kind if the recording lacks
turns."""
ALL = "all"


def changes_of(earlier: Sequence[Episode], new: Sequence[Episode]) -> dict[str, Any]:
    """The result of scoring episodes again.

    Keys: episodes, judged, skipped (failed earlier: kind -> count), changed, short (truncated for lack of turns),
    unused (ended before their last turn), failures (kind -> count), compared (the number of episodes behind both of the
    following), earlier and new (`result_of` by part of an evaluation or a rollout, that of all parts first: of the
    episodes with a score, or with a reward, both times, or else of all that were judged).
    """
    pairs = [(old, rescored) for old, rescored in zip(earlier, new, strict=True) if not old.failed]
    finished = [pair for pair in pairs if not pair[1].failed]
    scored = [pair for pair in finished if all(episode.score is not None for episode in pair)]
    rewarded = [pair for pair in finished if all(episode.reward is not None for episode in pair)]
    compared = scored or rewarded or finished
    return {
        "episodes": len(earlier),
        "judged": len(finished),
        "skipped": dict(Counter(old.outcome.reason for old in earlier if old.failed)),
        "changed": sum((old.score, old.reward) != (e.score, e.reward) for old, e in finished),
        "short": sum(e.outcome.reason == RECORDING for _, e in finished),
        "unused": sum(UNUSED in e.metrics for _, e in finished),
        "failures": dict(Counter(e.outcome.reason for _, e in pairs if e.failed)),
        "compared": len(compared),
        "earlier": _results([old for old, _ in compared]),
        "new": _results([rescored for _, rescored in compared]),
    }


def _results(episodes: Sequence[Episode]) -> dict[str, dict[str, Any]]:
    """`result_of` by part, that of all parts first."""
    groups: dict[str, dict[str, Group]] = {ALL: {}}
    for episode in episodes:
        # A key alone does not identify a task: environments, and data files, use the same keys.
        part = part_of(episode)
        problem = f"{part}\0{task_hash(episode.task)}\0{episode.task.key}"
        for name in dict.fromkeys((ALL, part)):
            group = Group(problem, replace(episode.task, id=problem), [])
            groups.setdefault(name, {}).setdefault(problem, group).episodes.append(episode)
    return {name: result_of(list(of_part.values())) for name, of_part in groups.items()}


def part_of(episode: Episode) -> str:
    """Purpose of an episode: a part of an evaluation, a rollout, or "training" for every training step."""
    return "training" if re.fullmatch(r"step-\d+-\d+", episode.purpose) else episode.purpose
