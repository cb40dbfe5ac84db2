"""Alarms: a sentence for people when a number of a run leaves its healthy range.

Each alarm is an entry of `ALARMS`. It is raised where its condition begins to hold, and again only after it has ceased
to. The ranges are wide: a run that learns should raise none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Condition = Callable[[Sequence[float]], bool]
"""Whether a number is out of its range, from its values at all steps so far, the latest last."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """`metric` is a name of `metrics.jsonl`, of the policy and, behind its name, of any other role. `says` may show the
    latest `{value}`."""

    name: str
    metric: str
    condition: Condition
    says: str


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm that has just begun: its name, behind a role's where it is about one, and its sentence."""

    name: str
    text: str


def above(limit: float, steps: int) -> Condition:
    """The last `steps` values are all larger than `limit`."""
    return lambda values: len(values) >= steps and min(values[-steps:]) > limit


def below(limit: float, steps: int) -> Condition:
    """The last `steps` values are all smaller than `limit`."""
    return lambda values: len(values) >= steps and max(values[-steps:]) < limit


def falls_below(limit: float, steps: int) -> Condition:
    """The last `steps` values are all smaller than `limit`, and some before were not."""
    return lambda values: below(limit, steps)(values) and max(values) >= limit


def begins_below(limit: float, steps: int) -> Condition:
    """All values are smaller than `limit`, and there are `steps` of them."""
    return lambda values: len(values) >= steps and max(values) < limit


def mean_below(limit: float, steps: int, after: int) -> Condition:
    """The mean of the last `steps` values is smaller than `limit`, from the step `after` on."""
    return lambda values: len(values) >= max(steps, after) and fmean(values[-steps:]) < limit


def jumps(factor: float, floor: float, before: int) -> Condition:
    """The last value is more than `factor` times the median of the `before` ones before it, and larger than `floor`."""

    def condition(values: Sequence[float]) -> bool:
        return len(values) > before and values[-1] > max(floor, factor * median(values[-1 - before : -1]))

    return condition


def grows(factor: float, floor: float, steps: int) -> Condition:
    """The mean of the last `steps` values is more than `factor` times that of the first, and larger than `floor`."""

    def condition(values: Sequence[float]) -> bool:
        if len(values) < 2 * steps:
            return False
        return fmean(values[-steps:]) > max(floor, factor * fmean(values[:steps]))

    return condition


def falls_from_best(share: float, floor: float, steps: int) -> Condition:
    """The mean of the last `steps` values is less than `share` of the best mean of as many, which is above `floor`."""

    def condition(values: Sequence[float]) -> bool:
        means = [fmean(values[end - steps : end]) for end in range(steps, len(values) + 1)]
        return bool(means) and max(means) > floor and means[-1] < share * max(means)

    return condition


ALARMS = (
    Alarm(
        "mismatch",
        "mismatch/mean_abs",
        above(0.05, steps=2),
        "sampler and trainer differ by {value:.2g} nats a token on average, so what is learned from is not what the "
        "policy would say; try engine.dtype or workers.dtype=float32, or a correction (learner.correction.kind)",
    ),
    Alarm(
        "correction_drops",
        "correction/dropped_share",
        above(0.5, steps=3),
        "{value:.0%} of the tokens are dropped because sampler and trainer differ on them: little is left to learn "
        "from; find out why they differ (mismatch/*), or widen learner.correction's bounds",
    ),
    Alarm(
        "entropy_collapse",
        "policy/entropy",
        falls_below(0.005, steps=5),
        "the policy's entropy is down to {value:.2g} nats a token: it says the same whatever the reward, and will not "
        "find anything better; try a lower learner.lr, a higher learner.clip_high or some learner.entropy_coef",
    ),
    Alarm(
        "no_entropy",
        "policy/entropy",
        begins_below(0.005, steps=5),
        "the policy's entropy has been near 0 from the start ({value:.2g} nats a token): it says the same every time, "
        "and no reward can teach it anything else; try a higher rollout.temperature, or another model, or one that was "
        "first shown how it is done (see: envgym config recipes)",
    ),
    Alarm(
        "entropy_growth",
        "policy/entropy",
        grows(3.0, floor=1.0, steps=5),
        "the policy's entropy has grown to {value:.2g} nats a token, three times what it began with: it is becoming "
        "noise; try a lower learner.lr or learner.entropy_coef",
    ),
    Alarm(
        "clip_fraction",
        "policy/clip_fraction",
        above(0.5, steps=3),
        "{value:.0%} of the tokens are beyond the clip range and teach nothing: the policy moves too far in one step; "
        "try a lower learner.lr, or fewer learner.minibatches or learner.epochs",
    ),
    Alarm(
        "large_update",
        "policy/approx_kl",
        above(0.5, steps=3),
        "a step moves the policy by {value:.2g} nats a token from the one that sampled; try a lower learner.lr, or "
        "fewer learner.minibatches or learner.epochs",
    ),
    Alarm(
        "ratio_high",
        "policy/ratio/max",
        above(100.0, steps=3),
        "some tokens are {value:.3g} times as likely to the policy as when they were sampled, and sway the whole "
        "step; try a lower learner.lr, or learner.dual_clip",
    ),
    Alarm(
        "ratio_low",
        "policy/ratio/min",
        below(1e-4, steps=5),  # of one token in thousands, which comes and goes while a healthy run rises
        "some tokens are only {value:.1g} times as likely to the policy as when they were sampled: it unlearns them "
        "in one step; try a lower learner.lr",
    ),
    Alarm(
        "kl",
        "policy/kl",
        above(2.0, steps=3),
        "the policy is {value:.2g} nats a token away from its reference and no longer speaks its language; try a "
        "larger learner.kl.coef or a lower learner.lr",
    ),
    Alarm(
        "grad_norm",
        "grad_norm",
        jumps(20.0, floor=10.0, before=10),
        "the gradient's norm jumped to {value:.3g}; one such step is clipped away, more of them mean a learner.lr that "
        "is too high or rewards of very different sizes",
    ),
    Alarm(
        "overflow",
        "overflow",
        above(0.0, steps=5),
        "float16 overflows at every step, so that none is taken; try workers.dtype=bfloat16",
    ),
    Alarm(
        "no_variance",
        "reward/zero_variance_share",
        above(0.95, steps=5),
        "in {value:.0%} of the groups every episode has the same reward, and those teach nothing; try easier or harder "
        "tasks, a larger rollout.group_size, curriculum.skip or rollout.filter.zero_variance",
    ),
    Alarm(
        "reward_collapse",
        "reward/mean",
        falls_from_best(0.5, floor=0.1, steps=10),
        "the reward has fallen to {value:.3g}, less than half of what it had reached; go back to a checkpoint with a "
        "lower learner.lr or a larger learner.kl.coef, and look at rollouts/",
    ),
    Alarm(
        "truncation",
        "length/truncated_share",
        above(0.5, steps=5),
        "{value:.0%} of the episodes run into a limit before they are done; try a larger rollout.max_tokens or "
        "engine.max_model_len (truncated/* says which limit), or a penalty on length (learner.shaping)",
    ),
    Alarm(
        "cut_turns",
        "length/cut_turns_share",
        above(0.9, steps=3),
        "rollout.max_tokens cuts {value:.0%} of the turns before they are done, and with them the tool call or the "
        "answer that they were to hold; try a larger rollout.max_tokens",
    ),
    Alarm(
        "failures",
        "failures/share",
        above(0.1, steps=3),
        "{value:.0%} of the episodes fail, and are left out of what is learned; failures/* says how, rollouts/ why",
    ),
    Alarm(
        "explained_variance",
        "value/explained_variance",
        mean_below(-0.5, steps=10, after=30),
        "the critic explains returns worse than a constant would ({value:.2g}): advantages are noise; try a higher "
        "roles.critic.lr, more steps of critic warm-up, or a critic that starts from a reward model",
    ),
    Alarm(
        "short_batch",
        "filter/filled_share",
        below(1.0, steps=1),
        "rollout.filter.max_rounds rounds gave only {value:.0%} of a step's groups, which it learned from; most tasks "
        "are too easy or too hard by now: change them, or let more rounds be played",
    ),
)


class Alarms:
    """Listens to a run, one record of metrics after the other."""

    def __init__(self, alarms: Sequence[Alarm] = ALARMS) -> None:
        self._alarms = alarms
        self._values: dict[str, list[float]] = {}
        self._on: set[str] = set()
        self.counts: Counter[str] = Counter()
        """How often each alarm was raised."""

    def hear(self, record: Mapping[str, Any]) -> list[Raised]:
        """Take note of a step's numbers; returns the alarms that begin with it."""
        raised = []
        for alarm in self._alarms:
            for key in record:
                if key != alarm.metric and not _is_of_a_role(key, alarm.metric):
                    continue
                name = alarm.name if key == alarm.metric else f"{key.partition('/')[0]}/{alarm.name}"
                values = self._values.setdefault(name, [])
                values.append(float(record[key]))
                holds = alarm.condition(values)
                if holds and name not in self._on:
                    self.counts[name] += 1
                    role = "" if key == alarm.metric else f"{key.partition('/')[0]}: "
                    raised.append(Raised(name, role + alarm.says.format(value=values[-1])))
                self._on = self._on | {name} if holds else self._on - {name}
        return raised


def _is_of_a_role(key: str, metric: str) -> bool:
    """Whether a name is that of a metric behind a role's (`critic/grad_norm`); what an environment calls its own
    numbers (`env/…`) is its own affair."""
    role, _, rest = key.partition("/")
    return rest == metric and role not in ("env", "eval")
