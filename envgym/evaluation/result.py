"""Results of evaluated episodes: scores with their intervals, and what was left out of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any

from envgym.env import EnvSpec
from envgym.monitoring.metrics import percentile
from envgym.types import Episode, Group, Status

from .statistics import Mean, clustered_mean, known, majority_at_k, pass_at_k, pass_hat_k, within_between_variance

Values = Mapping[str, Sequence[float]]
"""Numbers of episodes, by their group."""


def result_of(groups: Sequence[Group], *, success: float = 1.0, cluster: str | None = None) -> dict[str, Any]:
    """Result of the groups of one environment, as JSON's own types. None stands for a number that does not exist.

    score, ci95, stderr, n_tasks: the mean of the tasks' mean scores, its 95% interval and standard error, and the
      tasks that have a score. Errors are clustered by task or, with `cluster`, by that field of the tasks.
    reward: the same of rewards, where they are not the scores.
    success: `rate`, `ci95` and the `threshold` from which on a score is a success.
    pass@k, pass^k, majority@k: by k, estimated without bias from the finished episodes of each task; k doubles up to
      the episodes a task was given. A task with fewer is left out (`tasks_at_k` counts those that are in); where all
      are, the k is absent. Majorities exist where the environment reads answers.
    variance: of scores `within` tasks and `between` them.
    n_episodes; failures (kind -> count), left out of every number above; unscored, finished without a score;
    truncated (count) and truncated_by (limit -> count), which count with what they earned; played_again, attempts
      that failed and were played again.
    tokens (sampled), turns (mean), seconds (median `p50` and `p95` of an episode), metrics (means of the
      environment's own).
    envs: of a mixture, all this for each member.
    """
    result = _result_of(groups, success, cluster)
    if members := sorted({group.task.env for group in groups} - {""}):
        result["envs"] = {
            name: _result_of([group for group in groups if group.task.env == name], success, cluster)
            for name in members
        }
    return result


def _result_of(groups: Sequence[Group], success: float, cluster: str | None) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [episode for episode in episodes if not episode.failed]
    scores, rewards = _by_group(groups, "score"), _by_group(groups, "reward")
    clusters = _clusters(groups, cluster)
    successes = {id: [float(score >= success - 1e-9) for score in of] for id, of in scores.items()}
    rate = clustered_mean(successes, clusters).as_dict()
    limits = Counter(episode.outcome.reason for episode in finished if episode.outcome.status is Status.TRUNCATED)
    return {
        **clustered_mean(scores, clusters).as_dict(),
        **({} if rewards == scores else {"reward": clustered_mean(rewards, clusters).as_dict()}),
        "success": {"threshold": success, "rate": rate["score"], "ci95": rate["ci95"]},
        **_at_k(groups, scores, successes),
        "tasks_at_k": {str(k): sum(len(won) >= k for won in successes.values()) for k in ks(_samples(groups))},
        "variance": {name: known(value) for name, value in asdict(within_between_variance(scores)).items()},
        "n_episodes": len(episodes),
        "failures": dict(Counter(episode.outcome.reason for episode in episodes if episode.failed)),
        "unscored": sum(episode.score is None for episode in finished),
        "truncated": sum(limits.values()),
        "truncated_by": dict(limits),
        "played_again": sum(episode.attempt for episode in episodes),
        "tokens": sum(map(sampled_tokens, finished)),
        "turns": fmean(map(n_turns, finished)) if finished else None,
        "seconds": _quantiles([episode.seconds for episode in finished]),
        "metrics": _metrics(finished),
    }


FEWEST_RANKS = 4
"""Rewards that pass for ranks: two or three different marks are as often given by who judges each answer by itself."""


def doubt_of(spec: EnvSpec, groups: Sequence[Group]) -> str:
    """A sentence where the score may say nothing of the policy: the environment judges a task's answers together, and
    every task has the same mean, as it has by ranks; of a single task, its rewards look like ranks. Empty elsewhere.

    Tasks of which an episode failed are left aside: ranks among fewer may have another mean.
    """
    judged = [group for group in groups if spec.of(group.task).scores_groups]
    whole = [group for group in judged if not any(episode.failed for episode in group.episodes)]
    of_tasks = [rewards for rewards in _by_group(whole, "reward").values() if rewards]
    means = [fmean(rewards) for rewards in of_tasks]
    if not means or max(means) - min(means) > 1e-9 or (len(means) == 1 and not _are_ranks(of_tasks[0])):
        return ""
    each = f"each of {len(means)} tasks" if len(means) > 1 else "its only task, whose rewards are evenly spaced,"
    return (
        f"{spec.id} judges the answers to a task together, and {each} has the mean reward "
        f"{means[0]:.3f}: if it compares them with each other (by rank, say), that tells nothing of the policy"
    )


def _are_ranks(rewards: Sequence[float]) -> bool:
    """True for at least `FEWEST_RANKS` different rewards with one distance between each two neighbours."""
    ordered = sorted(rewards)
    steps = [after - before for before, after in pairwise(ordered)]
    return len(ordered) >= FEWEST_RANKS and min(steps) > 1e-9 and max(steps) - min(steps) < 1e-9


def mean_score(groups: Sequence[Group], cluster: str | None = None) -> Mean:
    """The score of `result_of`, as a suite's mean is made of."""
    return clustered_mean(_by_group(groups, "score"), _clusters(groups, cluster))


def sampled_tokens(episode: Episode) -> int:
    """Tokens the policy sampled: recorded ones, or those that an API counted."""
    return sum(row.n_action_tokens for row in episode.rows) or int(episode.metrics.get("completion_tokens", 0))


def n_turns(episode: Episode) -> int:
    return sum(len(row.turns) for row in episode.rows)


def ks(samples: int) -> list[int]:
    """1, 2, 4, … and `samples` itself."""
    doubled = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*doubled, samples]


def _by_group(groups: Sequence[Group], what: str) -> dict[str, list[float]]:
    return {
        group.id: [
            value for episode in group.episodes if not episode.failed and (value := getattr(episode, what)) is not None
        ]
        for group in groups
    }


def _clusters(groups: Sequence[Group], field: str | None) -> dict[str, str]:
    """The cluster of each group: its task, which may come twice, or the value of the tasks' `field`."""
    if field is None:
        return {group.id: group.task.key for group in groups}
    return {group.id: str(group.task.fields.get(field, group.task.key)) for group in groups}


def _at_k(groups: Sequence[Group], scores: Values, successes: Values) -> dict[str, dict[str, float]]:
    votes = {
        group.id: [episode.answer for episode in group.episodes if not episode.failed and episode.score is not None]
        for group in groups
    }
    answered = any(answer is not None for of in votes.values() for answer in of)
    found: dict[str, dict[str, float]] = {"pass@k": {}, "pass^k": {}}
    if answered:
        found["majority@k"] = {}
    for k in ks(_samples(groups)):
        of_tasks = {
            "pass@k": [pass_at_k(len(won), int(sum(won)), k) for won in successes.values()],
            "pass^k": [pass_hat_k(len(won), int(sum(won)), k) for won in successes.values()],
            "majority@k": [majority_at_k(votes[id], scores[id], k) for id in votes] if answered else [],
        }
        for name, estimates in of_tasks.items():
            if known := [estimate for estimate in estimates if estimate is not None]:
                found[name][str(k)] = fmean(known)
    return found


def _samples(groups: Sequence[Group]) -> int:
    return max((len(group.episodes) for group in groups), default=1)


def _metrics(finished: Sequence[Episode]) -> dict[str, float]:
    names = dict.fromkeys(name for episode in finished for name in episode.metrics)
    return {name: fmean(e.metrics[name] for e in finished if name in e.metrics) for name in names}


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    return {"p50": percentile(ordered, 0.5), "p95": percentile(ordered, 0.95)} if ordered else None
