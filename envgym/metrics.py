"""What a step's episodes say about the run: the numbers of `metrics.jsonl` that need no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from .errors import RolloutFailed
from .types import Episode, Group, Status


def rollout_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Rewards, scores, lengths and failures of the groups a step played, over all and for each member of a mixture.

    Failed episodes are counted, no more; so are the failed attempts that were played again.
    """
    record = _outcomes(groups)
    finished = [episode for group in groups for episode in group.episodes if not episode.failed]
    lengths = [sum(row.n_action_tokens for row in episode.rows) for episode in finished]
    if lengths and any(segment.logprobs for row in finished[0].rows for segment in row.segments):
        record |= {"tokens/sampled": sum(lengths), "length/mean": fmean(lengths), "length/max": max(lengths)}
        record["length/truncated_share"] = fmean(e.outcome.status is Status.TRUNCATED for e in finished)
    for name in sorted({group.task.env for group in groups} - {""}):
        of_member = _outcomes([group for group in groups if group.task.env == name])
        record |= {f"env/{name}/{key.removeprefix('env/')}": value for key, value in of_member.items()}
    return record


def _outcomes(groups: Sequence[Group]) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [episode for episode in episodes if not episode.failed]
    failed = [episode for group in groups for episode in [*group.episodes, *group.lost] if episode.failed]
    rewards = [episode.reward for episode in finished if episode.reward is not None]
    scores = [episode.score for episode in finished if episode.score is not None]
    record: dict[str, Any] = {"episodes": len(episodes)}
    if rewards:
        record |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        record["reward/zero_variance_share"] = fmean(_is_flat(group) for group in groups)
    if scores:
        record["score/mean"] = fmean(scores)
    for name in sorted({name for episode in finished for name in episode.metrics}):
        record[f"env/{name}"] = fmean(e.metrics[name] for e in finished if name in e.metrics)
    for kind, count in sorted(Counter(episode.outcome.reason for episode in failed).items()):
        record[f"failures/{kind}"] = count
    return record


def _is_flat(group: Group) -> bool:
    return len({episode.reward for episode in group.episodes if not episode.failed}) < 2


def check_failures(groups: Sequence[Group], max_share: float) -> None:
    """Raise `RolloutFailed`, with the commonest reason, where too many of the episodes failed to go on."""
    episodes = [episode for group in groups for episode in group.episodes]
    failed = [episode for episode in episodes if episode.failed]
    if failed and len(failed) > max_share * len(episodes):
        raise RolloutFailed(
            f"{len(failed)} of {len(episodes)} episodes failed; the commonest failure is {_commonest(failed)}"
        )


def _commonest(failed: Sequence[Episode]) -> str:
    (kind, message), _ = Counter((e.outcome.reason, e.outcome.message) for e in failed).most_common(1)[0]
    return f"{kind}: {message}"
