"""Results of evaluated episodes: scores with their intervals, and the episodes excluded from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from envgym.env import EnvSpec
from envgym.monitoring.metrics import percentile
from envgym.types import Episode, Group, Status, Task

from .statistics import (
    Mean,
    clustered_mean,
    majority_at_k,
    pass_at_k,
    pass_hat_k,
)

Values = Mapping[str, Sequence[float]]
"""Numbers of a group's episodes, by the group's id."""


def result_of(groups: Sequence[Group], *, success: float = 1.0, cluster: str | None = None) -> dict[str, Any]:
    """Result of the groups of one environment, as JSON's own types. None stands for a number that does not exist.

    score, ci95, stderr, n_tasks: the mean of the tasks' mean scores, its 95% interval and standard error, and the
      tasks that have a score. Errors are clustered by task or, with `cluster`, by that field of the tasks.
    reward: the same for rewards, if they are not the scores.
    success: `rate`, `ci95` and the `threshold`: a score of at least this is a success.
    pass@k, pass^k, majority@k: by k, estimated without bias from the finished episodes of each task; k doubles up to
      the episodes per task. A task with fewer finished episodes is excluded (`tasks_at_k`: the number of tasks); a k
      without tasks is absent. Majorities exist if the environment reads answers.
    n_episodes; failures (kind -> count), excluded from every number above but the rewarded_failures (a count), which
      have a reward by `rollout.failed_reward`; unscored, finished without a score;
    truncated (count) and truncated_by (limit -> count), included with their rewards and scores; played_again, failed
      attempts that were retried.
    tokens (sampled), turns (mean), seconds (median `p50` and `p95` of an episode), metrics (means of the
      environment's own).
    envs: for a mixture, all of this per member.
    """
    result = _result_of(groups, success, cluster)
    if members := sorted({group.task.env for group in groups} - {""}):
        result["envs"] = {
            name: _result_of([group for group in groups if group.task.env == name], success, cluster)
            for name in members
        }
    return result


def _result_of(groups: Sequence[Group], success: float, cluster: str | None) -> dict[str, Any]:
    """`result_of` without the members of a mixture."""
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [episode for episode in episodes if episode.is_counted]
    scores, rewards = _values_by_group(groups, "score"), _values_by_group(groups, "reward")
    clusters = _clusters(groups, cluster)
    successes = {id: [float(score >= success - 1e-9) for score in values] for id, values in scores.items()}
    rate = clustered_mean(successes, clusters).as_dict()
    limits = Counter(episode.outcome.reason for episode in finished if episode.outcome.status is Status.TRUNCATED)
    return {
        **clustered_mean(scores, clusters).as_dict(),
        **({} if rewards == scores else {"reward": clustered_mean(rewards, clusters).as_dict()}),
        "success": {"threshold": success, "rate": rate["score"], "ci95": rate["ci95"]},
        **_metrics_at_k(groups, scores, successes),
        "tasks_at_k": {str(k): sum(len(won) >= k for won in successes.values()) for k in ks(_samples(groups))},
        "n_episodes": len(episodes),
        "failures": dict(Counter(episode.outcome.reason for episode in episodes if episode.failed)),
        "rewarded_failures": sum(episode.failed and episode.is_counted for episode in episodes),
        "unscored": sum(episode.score is None for episode in finished),
        "truncated": sum(limits.values()),
        "truncated_by": dict(limits),
        "played_again": sum(episode.attempt for episode in episodes),
        "tokens": sum(map(sampled_tokens, finished)),
        "turns": fmean(map(n_turns, finished)) if finished else None,
        "seconds": _quantiles([episode.seconds for episode in finished]),
        "metrics": _metrics(finished),
    }


def score_warning(spec: EnvSpec, groups: Sequence[Group]) -> str:
    """A warning if there are rewards but no score, or if the score may not measure the policy, else "".

    It may not if the environment judges a group's completions together and each of several tasks has the same mean
    reward, as ranks have. Tasks with a failed episode are ignored, because ranks among fewer have another mean.
    """
    finished = [episode for group in groups for episode in group.episodes if episode.is_counted]
    if finished and all(episode.score is None and episode.reward is not None for episode in finished):
        return (
            f"{spec.id} has rewards outside [0, 1] and therefore no score: compare the mean reward, or let step return "
            'a score in info["score"]'
        )
    jointly_scored = [group for group in groups if spec.spec_for(group.task).scores_groups]
    valid = [group for group in jointly_scored if all(episode.is_counted for episode in group.episodes)]
    means = [fmean(rewards) for rewards in _values_by_group(valid, "reward").values() if rewards]
    if len(means) < 2 or max(means) - min(means) > 1e-9:
        return ""
    return (
        f"{spec.id} judges the completions of a task together, and each of {len(means)} tasks has the mean reward "
        f"{means[0]:.3f}: if it ranks them, the mean does not measure the policy"
    )


def mean_score(groups: Sequence[Group], cluster: str | None = None) -> Mean:
    """The score of `result_of`, with the counts that a suite's mean needs."""
    return clustered_mean(_values_by_group(groups, "score"), _clusters(groups, cluster))


def sampled_tokens(episode: Episode) -> int:
    """Number of tokens that the policy sampled: the recorded ones, or an API's count."""
    return episode.n_action_tokens or int(episode.metrics.get("completion_tokens", 0))


def n_turns(episode: Episode) -> int:
    return sum(len(row.turns) for row in episode.rows)


def ks(samples: int) -> list[int]:
    """1, 2, 4, … and `samples` itself."""
    doubled = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*doubled, samples]


def _values_by_group(groups: Sequence[Group], field: str) -> dict[str, list[float]]:
    return {
        group.id: [
            value for episode in group.episodes if episode.is_counted and (value := getattr(episode, field)) is not None
        ]
        for group in groups
    }


def _clusters(groups: Sequence[Group], field: str | None) -> dict[str, str]:
    """The cluster of each group. A task may have several groups."""
    return {group.id: cluster_of(group.task, field) for group in groups}


def cluster_of(task: Task, field: str | None) -> str:
    """The cluster of a task: its key or, with `field`, the value of that field of it."""
    return task.key if field is None else str(task.fields.get(field, task.key))


def _metrics_at_k(groups: Sequence[Group], scores: Values, successes: Values) -> dict[str, dict[str, float]]:
    """`pass@k`, `pass^k` and, if episodes have answers, `majority@k`, each by k as text."""
    votes = {
        group.id: [episode.answer for episode in group.episodes if episode.is_counted and episode.score is not None]
        for group in groups
    }
    has_answers = any(answer is not None for task_votes in votes.values() for answer in task_votes)
    metrics: dict[str, dict[str, float]] = {"pass@k": {}, "pass^k": {}}
    if has_answers:
        metrics["majority@k"] = {}
    for k in ks(_samples(groups)):
        estimates_by_name = {
            "pass@k": [pass_at_k(len(won), int(sum(won)), k) for won in successes.values()],
            "pass^k": [pass_hat_k(len(won), int(sum(won)), k) for won in successes.values()],
            "majority@k": [majority_at_k(votes[id], scores[id], k) for id in votes] if has_answers else [],
        }
        for name, estimates in estimates_by_name.items():
            if numbers := [estimate for estimate in estimates if estimate is not None]:
                metrics[name][str(k)] = fmean(numbers)
    return metrics


def _samples(groups: Sequence[Group]) -> int:
    return max((len(group.episodes) for group in groups), default=1)


def _metrics(finished: Sequence[Episode]) -> dict[str, float]:
    names = dict.fromkeys(name for episode in finished for name in episode.metrics)
    return {name: fmean(e.metrics[name] for e in finished if name in e.metrics) for name in names}


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    return {"p50": percentile(ordered, 0.5), "p95": percentile(ordered, 0.95)} if ordered else None
