"""The metrics of a training step that need no model.

`docs/reference/metrics.md` lists every logged name, of this module and others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev, variance
from typing import Any

from envgym.errors import RolloutFailed
from envgym.render.spelling import IN_APIS
from envgym.types import Episode, Group, Row, Status

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

    Failed episodes without a reward are left out of training. Where wrong answers fail more often than right ones, the
    episodes that remain look better than the policy is.
    """
    lengths, surprises, turns = list[Attempt](), list[Attempt](), list[Attempt]()
    shares, rewards = list[float](), list[float]()
    for group in groups:
        attempts = _attempts(group)
        for episode in attempts:
            answers = [answer for row in episode.rows for answer in row.answers]
            turns.append((group.id, float(len(answers)), not episode.is_counted))
            for number, (length, surprise) in enumerate(answers):
                failed = not episode.is_counted and number == len(answers) - 1
                lengths.append(((group.id, number), float(length), failed))
                if surprise is not None:
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


Match = Callable[[str], object]
"""True for a completion that spells out a special token as text."""


def rollout_metrics(groups: Sequence[Group], *, sampled: bool = True, spells: Match = IN_APIS.search) -> dict[str, Any]:
    """Rewards, scores, lengths and failures of a step's groups, in total and per member of a mixture.

    Failed episodes without a reward, and failed attempts that were retried, are only counted. Episodes that were not
    `sampled` have no reward and score metrics, since these are constants of the data. `spells` is the policy's
    renderer's.
    """
    record = _outcomes(groups, sampled, spells)
    finished = [episode for group in groups for episode in group.episodes if episode.is_counted]
    if finished and any(surprise is not None for row in finished[0].rows for _, surprise in row.answers):
        record |= _lengths(finished)
    truncated = Counter(episode.outcome.reason for episode in finished if episode.outcome.status is Status.TRUNCATED)
    record |= {f"truncated/{reason}": count / len(finished) for reason, count in sorted(truncated.items())}
    if sampled and len(finished) < sum(len(group.episodes) + len(group.superseded) for group in groups):
        record |= failure_bias(groups)  # some failed
    for name in sorted({group.task.env for group in groups} - {""}):
        member_record = _outcomes([group for group in groups if group.task.env == name], sampled, spells)
        record |= {f"env/{name}/{key.removeprefix('env/')}": value for key, value in member_record.items()}
    return record


def _outcomes(groups: Sequence[Group], sampled: bool, spells: Match) -> dict[str, Any]:
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [episode for episode in episodes if episode.is_counted]
    failed = [episode for episode in episodes if episode.failed]
    failures = [*failed, *(episode for group in groups for episode in group.superseded)]
    first = [episode for episode in finished if sampled and not episode.parent]  # branches begin where a rule says
    rewards = [episode.reward for episode in first if episode.reward is not None]
    scores = [episode.score for episode in first if episode.score is not None]
    record: dict[str, Any] = {"episodes": len(episodes)}
    if n_branches := sum(bool(episode.parent) for episode in episodes):
        record["branches/episodes"] = n_branches
    if n_unrepeated := sum(group.unrepeated for group in groups):
        record["branches/not_repeated"] = n_unrepeated
    if rewards:
        record |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        record |= {"reward/min": min(rewards), "reward/max": max(rewards)}
    if rewards and (flat := [spread == 1 for group in groups if (spread := _distinct_rewards(group)) is not None]):
        record["reward/zero_variance_share"] = fmean(flat)
    if scores:
        record["score/mean"] = fmean(scores)
    for name in sorted({name for episode in finished for name in episode.metrics}):
        record[f"env/{name}"] = fmean(e.metrics[name] for e in finished if name in e.metrics)
    if n_spelled := sum(e.count_messages(spells) if e.n_spelled is None else e.n_spelled for e in finished):
        record["answers/special_tokens"] = n_spelled
    for kind, count in sorted(Counter(episode.outcome.reason for episode in failures).items()):
        record[f"failures/{kind}"] = count
    if episodes:
        record["failures/share"] = len(failed) / len(episodes)
    return record


def _distinct_rewards(group: Group) -> int | None:
    """The number of distinct rewards in a group; None with fewer than two rewards."""
    rewards = [episode.reward for episode in group.episodes if episode.reward is not None and episode.is_counted]
    return len(set(rewards)) if len(rewards) > 1 else None


def _lengths(finished: Sequence[Episode]) -> dict[str, Any]:
    """Sampled tokens and turns of the episodes, and the share that was truncated."""
    lengths = sorted([episode.n_action_tokens for episode in finished])
    n_sampled = sum([episode.n_new_tokens for episode in finished])
    n_truncated = sum(episode.outcome.status is Status.TRUNCATED for episode in finished)
    counts = [row.turn_counts for episode in finished for row in episode.rows]
    n_turns, n_truncated_turns = map(sum, zip(*counts, strict=True))
    return {
        "tokens/sampled": n_sampled,
        "length/mean": fmean(lengths),
        "length/p50": percentile(lengths, 0.5),
        "length/p90": percentile(lengths, 0.9),
        "length/max": lengths[-1],
        "length/turns": n_turns / len(finished),
        "length/truncated_share": n_truncated / len(finished),
        "length/cut_turns_share": n_truncated_turns / max(1, n_turns),
    }


def held_out_metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in a step's record: the score and its interval, also of a mixture's members, or the
    learner's metrics on recorded episodes."""
    if "score" not in result:
        return {name: value for name, value in result.items() if "/" in name}
    record = {
        "eval/score": result["score"],
        "eval/ci95": result["ci95"],
        "eval/success_rate": result["success"]["rate"],
        "eval/failed_share": sum(result["failures"].values()) / result["n_episodes"],
        "eval/truncated_share": result["truncated"] / result["n_episodes"],
    }
    if (reward := result.get("reward", {}).get("score")) is not None:
        record["eval/reward"] = reward
    for kind in ("pass@k", "pass^k", "majority@k"):
        record |= {f"eval/{kind.replace('k', k)}": value for k, value in result.get(kind, {}).items() if k != "1"}
    for name, member in result.get("envs", {}).items():
        record |= {f"eval/{name}/{key}": member[key] for key in ("score", "ci95")}
        if (reward := member.get("reward", {}).get("score")) is not None:
            record[f"eval/{name}/reward"] = reward
    return record


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the `ordered` values that at least `share` of them do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def token_counts(rows: Sequence[Row], text: Sequence[Row], epochs: int) -> dict[str, int]:
    """Numbers of tokens in a step's optimizer steps: processed, trained on, and (of these) pretraining text."""
    trained, text_tokens = (sum(int((row.loss_weights > 0).sum()) for row in part) * epochs for part in (rows, text))
    processed = sum(len(row.token_ids) for row in [*rows, *text]) * epochs
    counts = {"tokens/trained": trained + text_tokens, "tokens/processed": processed}
    return counts | ({"tokens/pretrain": text_tokens} if text else {})


def speed_metrics(record: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Rates of a step that took `seconds`, from the tokens and phase times in its `record`. A step without sampling
    (supervised training) is measured by its processed tokens."""
    tokens = record.get("tokens/sampled") or record.get("tokens/processed", 0)
    rates = {"seconds/step": seconds, "tokens/per_second": tokens / seconds}
    for phase, name in (("rollout", "tokens/sampled"), ("learn", "tokens/processed")):
        if record.get(name) and record.get(f"seconds/{phase}"):
            rates[f"tokens/per_second_{phase}"] = record[name] / record[f"seconds/{phase}"]
    return rates


def computing_metrics(flops: float, peak_flops: float | None, ranks: int, seconds: float) -> dict[str, float]:
    """The speed of `ranks` devices that took `flops` floating-point operations in `seconds`: `tflops`, 10^12 operations
    per second and device, and `mfu`, their share of a device's `peak_flops` per second, if these are known.

    Source of MFU: A. Chowdhery et al., "PaLM" (2022), section 4.1.
    """
    speed = flops / (seconds * ranks)
    return {"tflops": speed / 1e12} | ({"mfu": speed / peak_flops} if peak_flops else {})


def check_failures(groups: Sequence[Group], max_share: float) -> None:
    """Raise `RolloutFailed`, with the most common reason, if more than `max_share` of the episodes failed and have no
    reward."""
    episodes = [episode for group in groups for episode in group.episodes]
    failed = [episode for episode in episodes if not episode.is_counted]
    if failed and len(failed) > max_share * len(episodes):
        raise RolloutFailed(failure_line(failed, len(episodes)))


def failure_line(failed: Sequence[Episode], n_episodes: int) -> str:
    """The number of failed episodes, and the most common reason."""
    (kind, message), _ = Counter((e.outcome.reason, e.outcome.message) for e in failed).most_common(1)[0]
    return f"{len(failed)} of {n_episodes} episodes failed; the most common failure is {kind}: {message}"
