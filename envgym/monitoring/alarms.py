"""Alerts to the user when a metric of a run leaves its healthy range.

`alarms.yaml` lists them. An alarm is raised when its condition becomes true, and again only after it was false.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from envgym.yaml_files import read_yaml

Condition = Callable[[Sequence[float]], bool]
"""True if a metric is out of its range, given its values at all steps so far, the latest last."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm on a `metric` of `metrics.jsonl`, of the policy or (`ROLE/metric`) another role. `text` may contain
    `{value}`, the latest value, and `{evidence}`, that of the metric `evidence`."""

    name: str
    metric: str
    condition: Condition
    text: str
    evidence: str = ""

    def sentence(self, role: str, record: Mapping[str, Any]) -> str:
        """The text for a record; `role` is "" for the policy, else it ends with a slash."""
        evidence = record.get(role + self.evidence)
        number = "an unknown number of" if evidence is None else f"{evidence:.2g}"
        return role.replace("/", ": ") + self.text.format(value=record[role + self.metric], evidence=number)


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """An alarm that was just raised: its name, after its role's (`critic/grad_norm`), and its text."""

    name: str
    text: str


def is_above(values: Sequence[float], limit: float, steps: int) -> bool:
    """True if the last `steps` values are all larger than `limit`."""
    return len(values) >= steps and min(values[-steps:]) > limit


def is_below(values: Sequence[float], limit: float, steps: int) -> bool:
    """True if the last `steps` values are all smaller than `limit`."""
    return len(values) >= steps and max(values[-steps:]) < limit


def falls_below(values: Sequence[float], limit: float, steps: int) -> bool:
    """True if the last `steps` values are all smaller than `limit`, and an earlier one was not."""
    return is_below(values, limit, steps) and max(values) >= limit


def begins_below(values: Sequence[float], limit: float, steps: int) -> bool:
    """True if all values are smaller than `limit`, and there are at least `steps`."""
    return len(values) >= steps and max(values) < limit


def begins_above(values: Sequence[float], limit: float) -> bool:
    """True if the first value is larger than `limit`, and there is no other yet."""
    return len(values) == 1 and values[0] > limit


def mean_below(values: Sequence[float], limit: float, steps: int, min_values: int) -> bool:
    """True if the mean of the last `steps` values is smaller than `limit`, with at least `min_values` values."""
    return len(values) >= max(steps, min_values) and fmean(values[-steps:]) < limit


def jumps(values: Sequence[float], factor: float, floor: float, n_previous: int) -> bool:
    """True if the last value is more than `factor` times the median of the `n_previous` values before it, and above
    `floor`."""
    return len(values) > n_previous and values[-1] > max(floor, factor * median(values[-1 - n_previous : -1]))


def grows(values: Sequence[float], factor: float, floor: float, steps: int) -> bool:
    """True if the mean of the last `steps` values is above `factor` times that of the first, and above `floor`."""
    return len(values) >= 2 * steps and fmean(values[-steps:]) > max(floor, factor * fmean(values[:steps]))


def falls_from_best(values: Sequence[float], share: float, floor: float, steps: int) -> bool:
    """True if the mean of the last `steps` values is below `share` of the best such mean, which is above `floor`."""
    means = [fmean(values[end - steps : end]) for end in range(steps, len(values) + 1)]
    return bool(means) and max(means) > floor and means[-1] < share * max(means)


def sums_up(values: Sequence[float], limit: float, steps: int, negative: bool = True) -> bool:
    """True if the last `steps` values (at least 3 of them, each a standard normal number by chance) add up to more than
    `limit` standard deviations of their sum, or with `negative` also to less than minus that."""
    last = values[-steps:]
    total = sum(last) / math.sqrt(len(last))
    return len(last) >= 3 and (abs(total) if negative else total) > limit


ROLE = re.compile(r"((?!env/|eval/)[^/]+/)?")
"""The role before an alarm's `metric` in a metric's name. Metrics of an environment (`env/…`) raise no alarms."""

_CONDITIONS: tuple[Callable[..., bool], ...] = (
    is_above, is_below, falls_below, begins_below, begins_above, mean_below, jumps, grows, falls_from_best, sums_up,
)  # fmt: skip
CONDITIONS = {condition.__name__.removeprefix("is_"): condition for condition in _CONDITIONS}
"""The conditions of `alarms.yaml`."""


def _alarm(name: str, entry: dict[str, Any]) -> Alarm:
    [(condition, arguments)] = entry.pop("when").items()
    return Alarm(name=name, condition=partial(CONDITIONS[condition], **arguments), **entry)


ALARMS = tuple(_alarm(*item) for item in read_yaml(Path(__file__).with_name("alarms.yaml")).items())


def metric_and_sentence(name: str, record: Mapping[str, Any]) -> tuple[str, str] | None:
    """The metric and the text of an alarm that was raised in a record; None for an unknown alarm or without its
    number."""
    for alarm in ALARMS:
        role = str(name).removesuffix(alarm.name)
        value = record.get(role + alarm.metric)
        if name == role + alarm.name and ROLE.fullmatch(role) and isinstance(value, int | float):
            return role + alarm.metric, alarm.sentence(role, record)
    return None


class Alarms:
    """The alarms of a run, updated with one record of metrics after the other."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._active: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Number of times each alarm was raised."""

    def observe(self, record: Mapping[str, Any]) -> list[RaisedAlarm]:
        """Add a step's record. Returns the alarms that are raised at it."""
        raised = []
        for alarm in ALARMS:
            for key in record:
                role = key.removesuffix(alarm.metric)  # empty, or as in critic/grad_norm
                if not key.endswith(alarm.metric) or not ROLE.fullmatch(role):
                    continue
                name = role + alarm.name
                values = self._values.setdefault(name, [])
                values.append(float(record[key]))
                holds = alarm.condition(values)
                if holds and name not in self._active:
                    self.counts[name] += 1
                    raised.append(RaisedAlarm(name, alarm.sentence(role, record)))
                self._active = self._active | {name} if holds else self._active - {name}
        return raised
