"""Laws of a right training step: numbers that two parts of the code reach on different ways, and that must agree.

What the tokens of a step did to the loss is read from the gradient by their log-probabilities (`Row.pushes`); rewards
and stops from what the environment gave (`Episode.tally`); texts with the tokenizer in the model's folder. None of it
comes from the code that masks, weights, compares, filters or renders. `alarms.yaml` says which value is an alarm.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from envgym.episodes.scores import is_flat
from envgym.types import Episode, Group, Message, Objective, Row, StopReason

if TYPE_CHECKING:
    import numpy as np

    from envgym.learner import Learner
    from envgym.render import Renderer
    from envgym.rollout.config import FilterConfig

SAMPLED_EPISODES = 4
"""Episodes of a step whose texts are read."""
MOST_PAIRS = 4096
"""Pairs of episodes that are compared by reward."""
MIN_ANSWERS = 8
"""Answers that a share of wrongly graded ones is of."""
ROUNDING = 1e-6
NEAR = 0.1
"""Nats between sampler and trainer within which a token counts as sampled from the trainer's policy."""


class Laws:
    """The laws' numbers of one stage. They are read, and nothing is changed."""

    def __init__(self, learner: Learner, renderer: Renderer, model: str, *, judges_groups: bool, samples: bool) -> None:
        self._learner = learner
        self._renderer = renderer
        self._judges_groups = judges_groups
        self._samples = samples
        self._texts = Texts(renderer, Path(model) / "tokenizer.json")
        self._members: dict[str, dict[str, Episode]] = {}
        """The episodes of the groups that wait in the buffer, by id."""
        self._answers: deque[tuple[int, int]] = deque(maxlen=5)
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
        self,
        groups: Sequence[Group],
        batch: Sequence[Group],
        buffered: Sequence[Group],
        *,
        size: int,
        n_missing: int,
        filter: FilterConfig | None,
    ) -> dict[str, float]:
        """The laws of a step's rollout: of all its `groups`, of `size` members each, those of the `batch` to train
        on, and those that stay `buffered`. `n_missing` tasks have no group."""
        with self._timed():
            episodes = [episode for group in groups for episode in group.episodes]
            record = self._losses(groups, batch, buffered, size, n_missing)
            record |= self._drops(groups, [*batch, *buffered], filter)
            finished = [episode for episode in episodes if episode.is_counted and not episode.failed]
            if self._samples and not self._judges_groups:
                record |= reward_errors(finished)
            self._answers.append(misread_answers(finished) if self._samples else (0, 0))
            n_misread, total = (sum(counts) for counts in zip(*self._answers, strict=True))
            if total >= MIN_ANSWERS:
                record["laws/misread_share"] = n_misread / total
            step = max(1, len(finished) // SAMPLED_EPISODES)
            return record | self._texts.read(finished[::step][:SAMPLED_EPISODES])

    def _counts(self, episode: Episode) -> bool:
        return episode.is_counted and (episode.reward is not None or not self._samples)

    def _losses(
        self, groups: Sequence[Group], batch: Sequence[Group], buffered: Sequence[Group], size: int, n_missing: int
    ) -> dict[str, float]:
        """The share of the episodes that were lost: never returned, or not among those of their group when it is taken
        for training; and the length of those that were lost after they ended, as a multiple of the others'."""
        n_unreturned = size * n_missing + sum(
            size - len({episode.member for episode in group.episodes}) for group in groups
        )
        for group in groups:
            self._members[group.id] = {e.id: e for e in group.episodes if self._counts(e)}
        missing: list[Episode] = []
        for group in batch:
            members = {episode.id for episode in group.episodes}
            missing += [e for name, e in self._members.pop(group.id, {}).items() if name not in members]
        waiting = {group.id for group in buffered}
        self._members = {name: members for name, members in self._members.items() if name in waiting}
        trained = [episode for group in batch for episode in group.episodes]
        record = {"laws/lost_share": (max(0, n_unreturned) + len(missing)) / max(1, size * (len(groups) + n_missing))}
        return record | _lengths("lost", missing, trained)

    def _drops(self, groups: Sequence[Group], passed: Sequence[Group], filter: FilterConfig | None) -> dict[str, float]:
        """The share of groups of which the settings do not say that they are dropped, or kept; and their length as a
        multiple of the others'."""
        names = {group.id for group in passed}
        surprising, expected = list[Episode](), list[Episode]()
        n_surprising = 0
        for group in groups:
            members = [episode for episode in group.episodes if self._counts(episode)]
            minimum = self._learner.min_group_size if self._samples else len(group.episodes)
            is_expected = (is_dropped(members, filter) or len(members) < minimum) == (group.id not in names)
            n_surprising += not is_expected
            (expected if is_expected else surprising).extend(members)
        if not groups:
            return {}
        return {"laws/unexplained_drops": n_surprising / len(groups)} | _lengths("dropped", surprising, expected)

    # -- the update -----------------------------------------------------------------------------------------------

    def of_first_pass(
        self, rows: Sequence[Row], metrics: dict[str, float], probe_difference: float | None
    ) -> dict[str, float]:
        """The laws of an update's first pass, over the rows of its first optimizer step, before that. Takes the sums of
        `surprise` out of the pass's `metrics`. `probe_difference`: by how much engine and trainer differ on a fixed
        text, in nats."""
        with self._timed():
            record: dict[str, float] = {}
            sums = [metrics.pop(f"surprise/{name}", 0.0) for name in ("mean", "square", "entropy", "inverse_count")]
            if (surprise := surprise_in_errors(*sums)) is not None:
                record["laws/surprise"] = surprise
            gaps = turn_gaps(rows)
            if gaps["first"] and probe_difference is not None:
                record["laws/sampler_gap"] = fmean(gaps["first"]) / max(1e-3, probe_difference)
            if gaps["first"] and gaps["later"]:
                record["laws/later_turns"] = fmean(gaps["later"]) / max(1e-3, fmean(gaps["first"]))
            if (factor := denominator(rows, self._learner)) is not None:
                record["laws/denominator"] = factor
            return record

    def of_update(self, rows: Sequence[Row], groups: Sequence[Group]) -> dict[str, float]:
        """The laws of an update, over the rows that the learner prepared from `groups`, after their passes."""
        with self._timed():
            record: dict[str, float] = {}
            rows = [row for row in rows if row.segments]
            passed = [row for row in rows if row.pushes is not None]
            if self._learner.roles["actor"].head == "lm" and passed:
                record |= author_shares(passed)
                stops = [e.tally is not None and e.tally.stops for group in groups for e in group.episodes]
                if (share := end_learned_share(passed, self._renderer, stops)) is not None:
                    record["laws/end_learned_share"] = share
            if self._learner.needs_policy_samples:
                record |= self._untrained(rows, groups)
                if (sign := sign_agreement(passed, groups)) is not None:
                    record["laws/sign"] = sign
                returns = self._learner.returns or {}
                episodes = [episode for group in groups for episode in group.episodes]
                if errors := [abs(value - (episodes[index].reward or 0.0)) for index, value in returns.items()]:
                    record["laws/return_error"] = max(errors)
                if (lag := version_lag(groups)) is not None:
                    record["laws/old_versions"] = lag
                n_rows = sum(len(episode.rows) for episode in episodes)
                record["laws/repeated_rows"] = float(max(0, len(rows) - n_rows))
            return record

    def _untrained(self, rows: Sequence[Row], groups: Sequence[Group]) -> dict[str, float]:
        """The share of the sampled tokens of `groups` that have no weight in the loss, but for truncated episodes where
        these are left out."""
        n_trained: dict[int, int] = defaultdict(int)
        for row in rows:
            if row.first_outputs is not None:
                n_trained[row.episode_index] += int((row.loss_weights > 0).sum())
        missing, trained, n_sampled, n_lost = list[Episode](), list[Episode](), 0, 0
        for group in groups:
            rewarded = [episode for episode in group.episodes if episode.reward is not None]
            for episode in rewarded if len(rewarded) >= self._learner.min_group_size else ():
                if not episode.rows or (self._learner.skips_truncated and episode.outcome.truncated):
                    continue
                n_tokens, count = episode.n_action_tokens, n_trained[episode.rows[0].episode_index]
                n_sampled, n_lost = n_sampled + n_tokens, n_lost + max(0, n_tokens - count)
                (missing if count < n_tokens / 2 else trained).append(episode)
        return {"laws/untrained_share": n_lost / max(1, n_sampled)} | _lengths("untrained", missing, trained)


def _lengths(name: str, subset: Sequence[Episode], complement: Sequence[Episode]) -> dict[str, float]:
    """The mean length of some episodes as a multiple of that of others; empty without either."""
    means = [fmean(e.n_action_tokens for e in part) if part else 0.0 for part in (subset, complement)]
    return {f"laws/{name}_length": means[0] / means[1]} if all(means) else {}


def is_dropped(members: Sequence[Episode], filter: FilterConfig | None) -> bool:
    """True if a filter's settings say that a group of these finished episodes is dropped."""
    if filter is None or not members:
        return not members
    if filter.zero_variance and is_flat(members):
        return True
    scores = [episode.score for episode in members if episode.score is not None]
    mean = fmean(scores) if scores else math.nan
    return (filter.min_score is not None and mean <= filter.min_score) or (
        filter.max_score is not None and mean >= filter.max_score
    )


def reward_errors(episodes: Sequence[Episode]) -> dict[str, float]:
    """The largest difference between an episode's reward, the sum of its turns', and what its environment gave."""
    errors = []
    for episode in episodes:
        if episode.tally is None or episode.reward is None:
            continue
        turns = math.fsum(turn.reward or 0.0 for row in episode.rows for turn in row.turns)
        scale = max(1.0, abs(episode.tally.rewards or 0.0))
        errors += [abs(reward - (episode.tally.rewards or 0.0)) / scale for reward in (episode.reward, turns)]
    return {"laws/reward_error": max(errors)} if errors else {}


# ---------------------------------------------------------------------------------------------------------
# Gradients


def author_shares(rows: Sequence[Row]) -> dict[str, float]:
    """`laws/unsampled_share`: the share of the gradient that is at tokens of others than the policy (in a policy
    gradient, at tokens without a sampler's log-probability)."""
    import numpy as np

    total = n_foreign = 0.0
    for row in rows:
        needs_sampling = row.objective is Objective.POLICY_GRADIENT
        sizes, start = np.abs(row.pushes), 0
        for segment in row.segments:
            size, start = float(sizes[start : start + len(segment)].sum()), start + len(segment)
            total += size
            if segment.role != "action" or (needs_sampling and segment.logprobs is None):
                n_foreign += size
    return {"laws/unsampled_share": n_foreign / total} if total else {}


def end_learned_share(rows: Sequence[Row], renderer: Renderer, stops: Sequence[bool]) -> float | None:
    """The share of the turns that ended by themselves and are in the loss, whose last token ends a turn and is in the
    loss too; None without such turns. `stops[i]`: turns of episode i may end with other tokens."""
    good = total = 0
    for row in rows:
        if stops[row.episode_index]:
            continue
        actions, end = [], 0
        for segment in row.segments:
            end += len(segment)
            actions += [(segment, end)] if segment.role == "action" else []
        pairs = list(zip(actions, row.turns, strict=False))
        for (segment, end), turn in pairs if row.objective is Objective.POLICY_GRADIENT else pairs[-1:]:
            if turn.stop_reason is StopReason.STOP and row.pushes[end - len(segment) : end].any():
                total += 1
                good += renderer.ends_turn(segment.token_ids[-1]) and row.pushes[end - 1] != 0
    return good / total if total else None


def sign_agreement(rows: Sequence[Row], groups: Sequence[Group]) -> float | None:
    """How well pushes agree with rewards: of the pairs of episodes of a group (of all groups, where these have one
    member) with other rewards and other mean pushes, the share whose order is the same, minus that of the others."""
    import numpy as np

    episodes = [episode for group in groups for episode in group.episodes]
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        counts = row.loss_weights > 0
        sums[row.episode_index][0] += float(row.pushes[counts].sum() / max(1e-30, row.loss_weights[counts].mean()))
        sums[row.episode_index][1] += float(counts.sum())
    is_single = max([len(group.episodes) for group in groups], default=0) < 2
    by_group: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for index, (push, count) in sums.items():
        if count and (reward := episodes[index].reward) is not None:
            by_group[0 if is_single else episodes[index].group_id].append((reward, push / count))
    agreements = list[float]()
    for pairs in by_group.values():
        values = np.array(pairs[: int(math.sqrt(2 * MOST_PAIRS))])
        products = np.triu(np.prod(np.sign(values[:, None] - values[None]), 2), 1)
        agreements += products[products != 0].tolist()
    return fmean(agreements) if agreements else None


def denominator(rows: Sequence[Row], learner: Learner) -> float | None:
    """The factor by which tokens count more or less in the loss than the learner's settings say, at least 1: of the
    median row, or between rows. None where these do not say it."""
    import numpy as np

    slopes = list[float]()
    for objective in (Objective.POLICY_GRADIENT, Objective.CROSS_ENTROPY):
        members = [row for row in rows if row.objective is objective and row.pushes is not None]
        weights = [_record_weights(row) for row in members]
        totals: dict[int, float] = defaultdict(float)
        for row, weight in zip(members, weights, strict=True):
            totals[row.episode_index] += float(weight.sum())
        is_weighted = objective is Objective.POLICY_GRADIENT
        shares = learner.token_shares(objective, totals)
        if shares is None or (is_weighted and not all("advantages" in row.arrays for row in members)):
            continue
        for row, weight in zip(members, weights, strict=True):
            expected = weight * shares[row.episode_index]
            if is_weighted:
                expected = expected * row.arrays["advantages"]
                if row.first_outputs is not None:
                    expected = np.where(np.abs(row.first_outputs - row.old_logprobs) < NEAR, expected, 0.0)
            actual = np.where(expected != 0, row.pushes, 0.0)
            if (squares := float(np.square(expected).sum())) > 0:
                slopes.append(abs(float((actual * expected).sum())) / squares)
    if not slopes or min(slopes) <= 0:
        return math.inf if slopes else None
    slopes.sort()
    middle, spread = median(slopes), slopes[len(slopes) * 3 // 4] / slopes[len(slopes) // 4]
    return max(middle, 1 / middle, spread)


def _record_weights(row: Row) -> np.ndarray:
    """[T] the weights that the record gives the tokens of a row which its loss has."""
    import numpy as np

    weights = np.concatenate([segment.loss_weights for segment in row.segments]) if row.segments else row.loss_weights
    return np.where(row.loss_weights > 0, np.where(weights > 0, weights, 1.0), 0.0)


# ---------------------------------------------------------------------------------------------------------
# Sampler and trainer


def surprise_in_errors(mean: float, square: float, entropy: float, inverse_count: float) -> float | None:
    """The mean surprise of sampled tokens beyond their distributions' entropy, in standard errors; 0 where it is less
    than 3 % of that entropy. None without tokens."""
    if not inverse_count or square <= 0:
        return None
    return 0.0 if abs(mean) < 0.03 * entropy else mean / math.sqrt(square * inverse_count)


def turn_gaps(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The mean absolute difference of the sampler's log-probabilities from the trainer's, in nats, of each first turn
    and of each later one, in rows that the weights about to be trained have sampled."""
    import numpy as np

    gaps: dict[str, list[float]] = {"first": [], "later": []}
    for row in rows:
        if not row.is_on_policy or row.first_outputs is None:
            continue
        name, start = "first", 0
        for segment in row.segments:
            start += len(segment)
            if segment.role == "action" and segment.logprobs:
                outputs = row.first_outputs[start - len(segment) : start]
                gaps[name].append(float(np.abs(outputs - np.asarray(segment.logprobs)).mean()))
                name = "later"
    return gaps


def version_lag(groups: Sequence[Group]) -> float | None:
    """The share of the sampled rows with tokens of weights older than those that their group was started with, as its
    id says; None without rows of groups with a step in their id."""
    lags = list[bool]()
    for group in groups:
        if (match := re.match(r"step-(\d+)-", group.id)) is None:
            continue
        for row in (row for episode in group.episodes for row in episode.rows):
            lags.append(not row.versions or min(row.versions) < int(match[1]) - 1)
    return fmean(lags) if lags else None


# ---------------------------------------------------------------------------------------------------------
# Texts


class Texts:
    """Compares the conversations of episodes with their tokens, read with the tokenizer in the model's folder."""

    def __init__(self, renderer: Renderer, file: Path) -> None:
        self._renderer = renderer
        self._file = file
        self._tokenizer: Any = None
        self._betweens: dict[tuple[str, bool], tuple[str, str]] = {}

    def read(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """`laws/undecoded_share` of messages that are not among their tokens; `laws/unsampled_texts`, the share of
        episodes in which a turn's tokens hold another's message; `laws/template_drift`, the share of later turns before
        which the text is not what the template writes there, or wrote before."""
        if self._tokenizer is None:
            if not self._file.is_file():
                return {}
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        undecoded, foreign_texts, drifts = list[bool](), list[bool](), list[bool]()
        for episode in episodes:
            last = max((n for n, m in enumerate(episode.messages) if m.role == "assistant"), default=-1)
            messages = episode.messages[: last + 1]
            if not messages or not episode.rows or any(segment.images for r in episode.rows for segment in r.segments):
                continue
            text = "\n".join(self._decode([t for s in row.segments for t in s.token_ids]) for row in episode.rows)
            undecoded += [m.text.strip() not in text for m in messages if self._is_exact(m)]
            foreign_texts.append(self._holds_foreign_text(episode, messages))
            drifts += self._drifts(episode, messages)
        shares = {"undecoded_share": undecoded, "unsampled_texts": foreign_texts, "template_drift": drifts}
        return {f"laws/{name}": fmean(values) for name, values in shares.items() if values}

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _is_exact(self, message: Message) -> bool:
        """True for a message that a template writes unchanged and this tokenizer can write."""
        text = message.text.strip()
        if message.role == "tool" or message.tool_calls or not text or "\ufffd" in text or self._renderer.spells(text):
            return False
        return self._decode(self._tokenizer.encode(text, add_special_tokens=False).ids) == text

    def _holds_foreign_text(self, episode: Episode, messages: Sequence[Message]) -> bool:
        answers = "\n".join(message.text for message in messages if message.role == "assistant")
        texts = [m.text.strip() for m in messages if m.role in ("user", "tool") and self._is_exact(m)]
        turns = [self._decode(s.token_ids) for row in episode.rows for s in row.segments if s.role == "action"]
        return any(text in turn and text not in answers for text in texts for turn in turns)

    def _drifts(self, episode: Episode, messages: Sequence[Message]) -> Iterator[bool]:
        """For each observation of one message between two turns of a single sequence: whether the text around it
        differs from that around earlier ones, or the text after it from that after the first prompt."""
        [row, *more_rows] = episode.rows
        groups: list[list[Message]] = [[]]
        for message in messages:
            groups.append([]) if message.role == "assistant" else groups[-1].append(message)
        roles = [segment.role for segment in row.segments]
        if more_rows or roles != ["prompt", *["action", "feedback"] * (len(groups) - 2), "action"] or not groups[0]:
            return
        texts = [self._decode(segment.token_ids) for segment in row.segments]
        _, is_shown, opening = texts[0].rpartition(groups[0][-1].text.strip())
        for turn, observed in enumerate(groups[1:-1], 1):
            head, body, tail = texts[2 * turn].partition(observed[0].text.strip())
            if len(observed) != 1 or not is_shown or not (body or self._is_exact(observed[0])):
                continue
            has_ended = self._renderer.ends_turn(row.segments[2 * turn - 1].token_ids[-1])
            frame = self._betweens.setdefault((observed[0].role, has_ended), (head, tail))
            yield not body or frame != (head, tail) or tail != opening


# ---------------------------------------------------------------------------------------------------------
# Answers


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def number_of(text: object) -> float | None:
    """The number that a text is, apart from separators between thousands; None for other texts."""
    plain = str(text).replace(",", "").replace("$", "").strip()
    return float(plain) if NUMBER.fullmatch(plain) else None


def misread_answers(episodes: Sequence[Episode]) -> tuple[int, int]:
    """Of the episodes in which the environment has read a number as the answer: those in which the number is not among
    the policy's last words, or in a box before the last one; those that have not got the full score although it is
    the task's answer, or have got it although it is another number. And the number of all."""
    n_misread = total = 0
    for episode in episodes:
        answer, gold = number_of(episode.answer), number_of(episode.task.answer)
        last = next((m for m in reversed(episode.messages) if m.role == "assistant"), None)
        if answer is None or last is None:
            continue
        total += 1
        numbers = [float(text) for text in NUMBER.findall(last.printed.replace(",", ""))]
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", last.text)
        is_elsewhere = abs(answer) not in map(abs, numbers) or (boxes and number_of(boxes[-1]) not in (answer, None))
        is_misgraded = gold is not None and episode.score is not None and (answer == gold) != (episode.score >= 1)
        n_misread += bool(is_elsewhere or is_misgraded)
    return n_misread, total
