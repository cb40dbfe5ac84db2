"""Laws of a right training step: numbers that two parts of the code reach on different ways, and that must agree.

What the tokens of a step do to the loss is read from the gradient by their log-probabilities (`Row.pushes`); rewards
and stops from what the environment gave (`Episode.tally`); texts with the tokenizer in the model's folder. None of it
comes from the code that masks, weights, compares, filters or renders. `alarms.yaml` says which value is an alarm.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from envgym.types import Episode, Group, Objective, Row, StopReason

from .law_texts import Texts, misgraded_answers, misread_answers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from envgym.learner import Learner
    from envgym.render import Renderer
    from envgym.rollout.config import FilterConfig
    from envgym.types.episodes import FloatArray

READ_EPISODES, SAMPLED_EPISODES = 16, 4
"""Episodes of a step whose last answers are read, and of these the ones that are compared with their tokens."""
MOST_ROWS = 64
"""Rows of a step whose tokens and versions are read, in whole groups."""
MOST_COUNTED = 256
"""Episodes of a step whose grades are compared, and whose tokens in the loss are counted, in whole groups."""
MOST_MEMBERS = 64
"""Episodes of a group that are compared by reward."""
MIN_ANSWERS = 12
"""Answers that a share of wrongly graded ones is of."""
NEAR = 0.1
"""Nats between sampler and trainer within which a token counts as sampled from the trainer's policy."""


@dataclass(eq=False)
class Laws:
    """The laws' numbers of one stage. They are read, and nothing is changed."""

    learner: Learner
    renderer: Renderer
    model: str
    filter: FilterConfig | None
    """The settings, if they may drop groups."""
    judges_groups: bool
    """The environment gives rewards to whole groups, so that they are not those of its steps."""
    samples: bool
    """The groups are sampled from the policy, not recorded."""

    def __post_init__(self) -> None:
        self._is_language = self.learner.roles["actor"].head == "lm"
        self._texts = Texts(self.renderer, Path(self.model) / "tokenizer.json")
        self._members: dict[str, dict[str, Episode]] = {}
        """The episodes of the groups that wait in the buffer, by id."""
        self._answers: deque[tuple[list[bool], list[bool]]] = deque(maxlen=5)
        """For answers of the last steps, whether they were graded wrongly, and whether they were read wrongly."""
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """The seconds that the laws took since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start

    # -- the rollout ----------------------------------------------------------------------------------------------

    def of_rollout(
        self, groups: Sequence[Group], batch: Sequence[Group], buffered: Sequence[Group], size: int, n_missing: int
    ) -> dict[str, float]:
        """The laws of a step's rollout: of all its `groups`, of `size` members each, those of the `batch` to train on,
        and those that stay `buffered`. `n_missing` tasks have no group."""
        with self._timed():
            finished = [e for group in groups for e in group.episodes if e.is_counted and not e.failed]
            read = finished[:: max(1, len(finished) // READ_EPISODES)][:READ_EPISODES]
            record = numbers(missing_groups=float(max(0, n_missing))) | self._losses(groups, batch, buffered, size)
            record |= self._drops(groups, {group.id for group in [*batch, *buffered]})
            if self.samples:
                record |= numbers(reward_error=reward_error(finished, has_tallies=not self.judges_groups))
                graded = finished[:: stride_of(len(finished), MOST_COUNTED)]
                self._answers.append((misgraded_answers(graded), misread_answers(read)))
                shares = [share_of(list(chain(*steps))) for steps in zip(*self._answers, strict=True)]
                record |= numbers(misgraded_share=shares[0], misread_share=shares[1])
            return record | self._texts.read(read[:: max(1, len(read) // SAMPLED_EPISODES)])

    def _counts(self, episode: Episode) -> bool:
        return episode.is_counted and (episode.reward is not None or not self.samples)

    def _losses(
        self, groups: Sequence[Group], batch: Sequence[Group], buffered: Sequence[Group], size: int
    ) -> dict[str, float]:
        """The share of the episodes that were lost: never returned, or not among those of their group when it is in
        the batch; and the length of those that had ended, as a multiple of the others'."""
        n_unreturned = sum(size - len({e.member for e in group.episodes if not e.parent}) for group in groups)
        self._members |= {g.id: {e.id: e for e in g.episodes if self._counts(e)} for g in groups}
        trained = [episode for group in batch for episode in group.episodes]
        names = {episode.id for episode in trained}
        missing = [e for group in batch for name, e in self._members.get(group.id, {}).items() if name not in names]
        waiting = {group.id for group in buffered}
        self._members = {name: members for name, members in self._members.items() if name in waiting}
        share = (max(0, n_unreturned) + len(missing)) / max(1, size * len(groups))
        return numbers(lost_share=share, lost_length=length_ratio(missing, trained))

    def _drops(self, groups: Sequence[Group], names: set[str]) -> dict[str, float]:
        """The share of groups of which the settings do not say that they are dropped, or stay under one of the `names`;
        and their length as a multiple of the others'."""
        surprising, expected, n_surprising = list[Episode](), list[Episode](), 0
        for group in groups:
            members = [episode for episode in group.episodes if self._counts(episode)]
            minimum = self.learner.min_group_size if self.samples else len(group.episodes)
            is_expected = (len(members) < minimum or is_dropped(members, self.filter)) == (group.id not in names)
            n_surprising += not is_expected
            (expected if is_expected else surprising).extend(members)
        share = n_surprising / max(1, len(groups))
        return numbers(unexplained_drops=share, dropped_length=length_ratio(surprising, expected))

    # -- the update -----------------------------------------------------------------------------------------------

    def of_rows(self, rows: Sequence[Row], groups: Sequence[Group]) -> dict[str, float]:
        """The laws of the rows that the learner prepared from `groups`, before their passes."""
        with self._timed():
            weights = [(row, row.loss_weights) for row in sample_of(rows) if row.segments]
            record = numbers(unsampled_share=unsampled_share(weights)) if self._is_language else {}
            if self.samples:
                record |= numbers(old_versions=version_lag(groups[:: stride_of(len(rows), MOST_ROWS)]))
            if self.samples and self.learner.needs_policy_samples:
                episodes = [episode for group in groups for episode in group.episodes]
                returns = (self.learner.returns or {}).items()
                errors = [abs(value - (episodes[index].reward or 0.0)) for index, value in returns]
                n_distinct = min(len({*map(id, rows)}), sum(len(episode.rows) for episode in episodes))
                n_repeated = max(0, len(rows) - n_distinct, len(episodes) - len({episode.id for episode in episodes}))
                record |= numbers(return_error=max(errors, default=None), repeated_rows=float(n_repeated))
            return record

    def of_first_pass(self, rows: Sequence[Row], probe_difference: float | None) -> dict[str, float]:
        """The laws of an update's first pass, over the rows of its first optimizer step, before that.
        `probe_difference`: by how much engine and trainer differ on a fixed text, in nats."""
        with self._timed():
            # The groups that a filter leaves are no sample of the policy's distribution.
            surprise = surprise_in_errors(rows) if self.filter is None else None
            gap, later_gap = turn_gaps(sample_of(rows))
            gaps = numbers(sampler_gap=gap_ratio(gap, probe_difference), later_turns=gap_ratio(later_gap, gap))
            return numbers(surprise=surprise) | gaps | denominators(rows, self.learner)

    def of_update(self, rows: Sequence[Row], groups: Sequence[Group]) -> dict[str, float]:
        """The laws of an update, over the rows that the learner prepared from `groups`, after their passes."""
        with self._timed():
            passed = [(row, row.pushes) for row in sample_of(rows) if row.segments and row.pushes is not None]
            if not self._is_language or not passed:  # the policy may wait for its critic
                return {}
            stops = [e.tally is not None and e.tally.stops for group in groups for e in group.episodes]
            ends = end_learned_share(passed, self.renderer, stops)
            record = numbers(unsampled_share=unsampled_share(passed), end_learned_share=ends)
            if self.learner.needs_policy_samples:
                record |= self._untrained(rows, groups)
                if self.learner.returns is not None:  # else rewards are shaped, and need not decide
                    read = [row for row, _ in passed]
                    record |= numbers(sign=sign_agreement(read, groups, has_tallies=not self.judges_groups))
            return record

    def _untrained(self, rows: Sequence[Row], groups: Sequence[Group]) -> dict[str, float]:
        """The share of the sampled tokens of `groups` that no row with a weight for them was passed with, but for
        truncated episodes where these are left out."""
        n = stride_of(len(rows), MOST_COUNTED)
        passed = [row for row in rows if row.first_outputs is not None and row.group_index % n == 0]
        counts = episode_sums(passed, joined(passed, "loss_weights") > 0)
        missing, trained, n_sampled, n_lost = list[Episode](), list[Episode](), 0, 0.0
        for group in groups[::n]:
            rewarded = [episode for episode in group.episodes if episode.reward is not None]
            for episode in rewarded if len(rewarded) >= self.learner.min_group_size else ():
                if not episode.rows or (self.learner.skips_truncated and episode.outcome.truncated):
                    continue
                n_tokens, count = episode.n_new_tokens, counts[episode.rows[0].episode_index]
                n_sampled, n_lost = n_sampled + n_tokens, n_lost + max(0, n_tokens - count)
                (missing if count < n_tokens / 2 else trained).append(episode)
        share = n_lost / max(1, n_sampled)
        return numbers(untrained_share=share, untrained_length=length_ratio(missing, trained))


def numbers(**laws: float | None) -> dict[str, float]:
    """The laws that have a number, by the names of their metrics."""
    return {f"laws/{name}": number for name, number in laws.items() if number is not None}


def length_ratio(subset: Sequence[Episode], complement: Sequence[Episode]) -> float | None:
    """The mean length of some episodes as a multiple of that of others; None without either."""
    if not subset or not complement:
        return None
    means = [fmean([episode.n_action_tokens for episode in part]) for part in (subset, complement)]
    return means[0] / means[1] if all(means) else None


def is_dropped(members: Sequence[Episode], filter: FilterConfig | None) -> bool:
    """True if a filter's settings say that a group of these finished episodes is dropped."""
    if filter is None or not members:
        return not members
    scores = [episode.score for episode in members if episode.score is not None]
    values = scores if len(scores) == len(members) else [episode.reward for episode in members]
    mean = fmean(scores) if scores else math.nan
    return (
        (filter.zero_variance and len(set(values)) < 2)
        or (filter.min_score is not None and mean <= filter.min_score)
        or (filter.max_score is not None and mean >= filter.max_score)
    )


def reward_error(episodes: Sequence[Episode], *, has_tallies: bool) -> float | None:
    """The largest difference between an episode's reward, the sum of its turns' and, with tallies, what its environment
    gave."""
    errors = list[float]()
    for episode in episodes:
        if episode.reward is None:
            continue
        sums = [math.fsum([turn.reward or 0.0 for row in episode.rows for turn in row.turns])]
        sums += [episode.tally.rewards or 0.0] if has_tallies and episode.tally is not None else []
        errors += [abs(total - episode.reward) / max(1.0, abs(total)) for total in sums]
    return max(errors, default=None)


def share_of(verdicts: Sequence[bool]) -> float | None:
    """The share of true ones, if they are enough."""
    return fmean(verdicts) if len(verdicts) >= MIN_ANSWERS else None


# ---------------------------------------------------------------------------------------------------------
# Gradients


def stride_of(count: int, limit: int) -> int:
    """The smallest n for which every n-th of `count` are at most `limit`."""
    return max(1, -(-count // limit))


def sample_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of every n-th group, so that they are about `MOST_ROWS`."""
    n = stride_of(len(rows), MOST_ROWS)
    return [row for row in rows if row.group_index % n == 0]


def joined(rows: Sequence[Row], name: str) -> FloatArray:
    """The arrays of this name of rows, one after the other."""
    import numpy as np

    return np.concatenate([getattr(row, name) for row in rows] or [np.zeros(0, np.float32)])


def row_sums(rows: Sequence[Row], values: NDArray[Any]) -> list[float]:
    """The sum of each row's values, which are those of the rows one after the other."""
    import numpy as np

    starts = np.cumsum([0, *(len(row.loss_weights) for row in rows[:-1])])
    return np.add.reduceat(values, starts, dtype=np.float64).tolist() if rows else []


def episode_sums(rows: Sequence[Row], values: NDArray[Any]) -> Mapping[int, float]:
    """The same of each episode, by its index; 0 for others."""
    sums = defaultdict[int, float](float)
    for row, total in zip(rows, row_sums(rows, values), strict=True):
        sums[row.episode_index] += total
    return sums


def turn_spans(row: Row) -> list[tuple[int, int, bool]]:
    """The first token of each turn, the one after its last, and whether the policy has sampled it."""
    spans, start = list[tuple[int, int, bool]](), 0
    for segment in row.segments:
        end = start + len(segment.token_ids)
        if segment.role == "action":
            spans.append((start, end, segment.logprobs is not None))
        start = end
    return spans


def unsampled_share(rows: Sequence[tuple[Row, FloatArray]]) -> float | None:
    """The share of the weights, or pushes, [T] of rows that is at tokens of others than the policy (in a policy
    gradient, at tokens without a sampler's log-probability)."""
    total = sampled_total = 0.0
    for row, values in rows:
        sizes, needs_sampling = abs(values), row.objective is Objective.POLICY_GRADIENT
        total += float(sizes.sum())
        for start, end, is_sampled in turn_spans(row):
            sampled_total += float(sizes[start:end].sum()) if is_sampled or not needs_sampling else 0.0
    return max(0.0, 1 - sampled_total / total) if total else None


def end_learned_share(
    rows: Sequence[tuple[Row, FloatArray]], renderer: Renderer, stops: Sequence[bool]
) -> float | None:
    """The share of the turns that ended by themselves and are in the loss, whose last token ends a turn and is in the
    loss too; None without such turns. The rows are given with their pushes. `stops[i]`: turns of episode i may end with
    other tokens."""
    good = total = 0
    noise = 1e-3 * max((float(abs(pushes).max()) for _, pushes in rows), default=0.0)  # a KL term alone is noise
    for row, pushes in rows:
        if stops[row.episode_index]:
            continue
        pairs = list(zip(turn_spans(row), row.turns, strict=False))
        for (start, end, _), turn in pairs if row.objective is Objective.POLICY_GRADIENT else pairs[-1:]:
            is_learned = "advantages" not in row.arrays or row.arrays["advantages"][start:end].any()
            if turn.stop_reason is StopReason.STOP and is_learned and (abs(pushes[start:end]) > noise).any():
                total += 1
                good += renderer.ends_turn(int(row.token_ids[end - 1])) and pushes[end - 1] != 0
    return good / total if total else None


def sign_agreement(rows: Sequence[Row], groups: Sequence[Group], *, has_tallies: bool) -> float | None:
    """How well pushes agree with rewards: of the pairs of episodes of a group (of all groups, where these have one
    member) with other rewards and other mean pushes, the share whose order is the same, minus that of the others."""
    import numpy as np

    episodes = [episode for group in groups for episode in group.episodes]
    is_trained = joined(rows, "loss_weights") > 0
    counts = episode_sums(rows, is_trained)
    signs = episode_sums(rows, is_trained * np.sign(joined(rows, "pushes")))
    is_single = max([len(group.episodes) for group in groups], default=0) < 2
    by_group: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for index, count in counts.items():
        episode = episodes[index]
        tally = episode.tally if has_tallies and not episode.failed else None
        reward = episode.reward if tally is None else tally.rewards
        if count and reward is not None:
            by_group[0 if is_single else episode.group_id].append((reward, signs[index] / count))
    agreements = list[float]()
    for pairs in by_group.values():
        values = np.array(pairs[:MOST_MEMBERS])
        products = np.triu(np.prod(np.sign(values[:, None] - values[None]), 2), 1)
        agreements += products[products != 0].tolist()
    return fmean(agreements) if agreements else None


def denominators(rows: Sequence[Row], learner: Learner) -> dict[str, float]:
    """`laws/denominator`: the factor by which tokens count more or less in the loss than the learner's settings say, at
    least 1: of the median row, or between rows. `laws/unpushed_share`: the share of the rows that have no part in it.
    Empty where the settings do not say it."""
    import numpy as np

    parts: tuple[list[tuple[float, float]], ...] = [], []
    """The squares of what each row's pushes must be, and these times what they are: by the trainer's policy, and by the
    sampler's, since the old policy may be either."""
    for objective in (Objective.POLICY_GRADIENT, Objective.CROSS_ENTROPY):
        members = [row for row in rows if row.objective is objective and row.pushes is not None]
        has_advantages = objective is Objective.POLICY_GRADIENT
        weights = joined(members, "loss_weights")
        shares = learner.token_shares(objective, episode_sums(members, weights > 0 if has_advantages else weights))
        read = sample_of(members)
        if not read or shares is None or (has_advantages and not all("advantages" in row.arrays for row in members)):
            continue
        expected, ratios = joined(read, "loss_weights"), np.ones(1)
        if has_advantages:
            gaps = joined(read, "first_outputs") - joined(read, "old_logprobs")
            is_near = (expected > 0) & (np.abs(gaps) < NEAR)
            expected = np.where(is_near, np.concatenate([row.arrays["advantages"] for row in read]), 0.0)
            ratios = np.exp(np.where(is_near, gaps, 0.0))
        lengths = [len(row.loss_weights) for row in read]
        expected = expected * np.repeat([shares[row.episode_index] for row in read], lengths)
        pushes = joined(read, "pushes")
        for part, values in zip(parts, (expected, expected * ratios), strict=True):
            part += zip(row_sums(read, np.square(values)), map(abs, row_sums(read, pushes * values)), strict=True)
    factors, unpushed_shares = list[float](), list[float]()
    for part in parts:
        noise = 0.01 * max((square for square, _ in part), default=0.0)
        slopes = [product / square for square, product in part if square > noise]
        pushed = sorted(slope for slope in slopes if slope > 1e-6)
        unpushed_shares += [1 - len(pushed) / len(slopes)] if slopes else []
        if pushed:
            spread = pushed[len(pushed) * 7 // 8] / pushed[len(pushed) // 8]
            factors.append(max(median(pushed), 1 / median(pushed), spread))
    return numbers(unpushed_share=next(iter(unpushed_shares), None), denominator=min(factors, default=None))


# ---------------------------------------------------------------------------------------------------------
# Sampler and trainer


def surprise_in_errors(rows: Sequence[Row]) -> float | None:
    """The mean surprise, -log p, of sampled tokens beyond the entropy of their distributions, in standard errors: 0 but
    for chance if they were drawn from these. 0 as well where it is less than 3 % of the entropy. None without tokens,
    or with rows that other weights sampled: then those of these weights may be the short ones."""
    import numpy as np

    if not all(row.is_on_policy and row.first_outputs is not None for row in rows):
        return None
    is_sampled = np.isfinite(joined(rows, "old_logprobs"))
    if not is_sampled.any():
        return None
    entropies, logprobs = (joined(rows, name)[is_sampled].astype(np.float64) for name in ("entropies", "first_outputs"))
    excess = -logprobs - entropies
    # Where one token is nearly certain, others come too rarely for their squares. Over a language model's tokens of
    # entropies H from 0.0001 to 3 nats the variance of -log p is about H (2 - 1.6 log H): measured with the starter.
    expected = entropies * (2 - 1.6 * np.log(np.clip(entropies, 1e-12, 1.0)))
    variance = max(float(np.square(excess).sum()), float(expected.sum()))
    is_small = not variance or abs(excess.sum()) < 0.03 * entropies.sum()
    return 0.0 if is_small else float(excess.sum()) / math.sqrt(variance)


def turn_gaps(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """The mean absolute difference of the sampler's log-probabilities from the trainer's, in nats, over first turns and
    over later ones, in rows that the weights about to be trained have sampled. A long turn counts as a short one."""
    gaps, later_gaps = list[float](), list[float]()
    for row in rows:
        if not row.is_on_policy or row.first_outputs is None:
            continue
        differences = abs(row.first_outputs - row.old_logprobs)
        for number, (start, end, _) in enumerate(turn_spans(row)):
            if start < end and math.isfinite(mean := float(differences[start:end].mean())):
                (later_gaps if number else gaps).append(mean)
    return fmean(gaps) if gaps else None, fmean(later_gaps) if later_gaps else None


def gap_ratio(gap: float | None, reference: float | None) -> float | None:
    """A gap as a multiple of another one, which counts as a thousandth of a nat if it is less."""
    return None if gap is None or reference is None else gap / max(1e-3, reference)


def version_lag(groups: Sequence[Group]) -> float | None:
    """The share of the sampled rows with tokens of weights older than those that their group was started with, as its
    id says; None without rows of groups with a step in their id."""
    lags = list[bool]()
    for group in groups:
        if match := re.match(r"step-(\d+)-", group.id):
            rows = [row for episode in group.episodes for row in episode.rows]
            lags += [not row.versions or row.versions[0] < int(match[1]) - 1 for row in rows]
    return fmean(lags) if lags else None
