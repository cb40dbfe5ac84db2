"""Alarms: a sentence for people when a number of a run leaves its healthy range.

`alarms.yaml` lists them. An alarm is raised where its condition begins to hold, and again only after it has ceased to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

Condition = Callable[[Sequence[float]], bool]
"""A test for a number out of its range, given its values at all steps so far, the latest last."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """`metric` is a name of `metrics.jsonl`, of the policy and, behind its name, of any other role. `text` may hold
    `{value}`, the latest one."""

    name: str
    metric: str
    condition: Condition
    text: str

    def sentence(self, role: str, value: float) -> str:
        """Its sentence for a value of the `role`, which ends with a slash, or of the policy (empty)."""
        return role.replace("/", ": ") + self.text.format(value=value)


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm that has just begun: its name, behind a role's where it is about one, and its sentence."""

    name: str
    text: str


def above(values: Sequence[float], limit: float, steps: int) -> bool:
    """The last `steps` values are all larger than `limit`."""
    return len(values) >= steps and min(values[-steps:]) > limit


def below(values: Sequence[float], limit: float, steps: int) -> bool:
    """The last `steps` values are all smaller than `limit`."""
    return len(values) >= steps and max(values[-steps:]) < limit


def falls_below(values: Sequence[float], limit: float, steps: int) -> bool:
    """The last `steps` values are all smaller than `limit`, and some before were not."""
    return below(values, limit, steps) and max(values) >= limit


def begins_below(values: Sequence[float], limit: float, steps: int) -> bool:
    """All values are smaller than `limit`, and there are `steps` of them."""
    return len(values) >= steps and max(values) < limit


def mean_below(values: Sequence[float], limit: float, steps: int, after: int) -> bool:
    """The mean of the last `steps` values is smaller than `limit`, from the step `after` on."""
    return len(values) >= max(steps, after) and fmean(values[-steps:]) < limit


def jumps(values: Sequence[float], factor: float, floor: float, before: int) -> bool:
    """The last value is more than `factor` times the median of the `before` ones before it, and larger than `floor`."""
    return len(values) > before and values[-1] > max(floor, factor * median(values[-1 - before : -1]))


def grows(values: Sequence[float], factor: float, floor: float, steps: int) -> bool:
    """The mean of the last `steps` values is more than `factor` times that of the first, and larger than `floor`."""
    return len(values) >= 2 * steps and fmean(values[-steps:]) > max(floor, factor * fmean(values[:steps]))


def falls_from_best(values: Sequence[float], share: float, floor: float, steps: int) -> bool:
    """The mean of the last `steps` values is less than `share` of the best mean of as many, which is above `floor`."""
    means = [fmean(values[end - steps : end]) for end in range(steps, len(values) + 1)]
    return bool(means) and max(means) > floor and means[-1] < share * max(means)


ROLE = re.compile(r"((?!env/|eval/)[^/]+/)?")
"""The part of a metric's name before an alarm's `metric`. Numbers of an environment (`env/…`) raise no alarms."""

CONDITIONS: dict[str, Callable[..., bool]] = {
    function.__name__: function
    for function in (above, below, falls_below, begins_below, mean_below, jumps, grows, falls_from_best)
}


def _read(file: Path) -> tuple[Alarm, ...]:
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    alarms = []
    for name, entry in entries.items():
        [(condition, arguments)] = entry["when"].items()
        alarms.append(Alarm(name, entry["metric"], partial(CONDITIONS[condition], **arguments), entry["text"]))
    return tuple(alarms)


ALARMS = _read(Path(__file__).with_name("alarms.yaml"))


def sentence(name: str, record: Mapping[str, Any]) -> str | None:
    """The sentence of an alarm that a record names as raised; None where there is no such alarm, or no number."""
    for alarm in ALARMS:
        role = str(name).removesuffix(alarm.name)
        value = record.get(role + alarm.metric)
        if name == role + alarm.name and ROLE.fullmatch(role) and isinstance(value, int | float):
            return alarm.sentence(role, value)
    return None


class Alarms:
    """Watches a run, one record of metrics after the other."""

    def __init__(self, alarms: Sequence[Alarm] = ALARMS) -> None:
        self._alarms = alarms
        self._values: dict[str, list[float]] = {}
        self._on: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Times that each alarm was raised."""

    def observe(self, record: Mapping[str, Any]) -> list[Raised]:
        """Add a step's numbers. Returns the alarms that begin with it."""
        raised = []
        for alarm in self._alarms:
            for key in record:
                role = key.removesuffix(alarm.metric)  # empty, or as in critic/grad_norm
                if not key.endswith(alarm.metric) or not ROLE.fullmatch(role):
                    continue
                name = role + alarm.name
                values = self._values.setdefault(name, [])
                values.append(float(record[key]))
                holds = alarm.condition(values)
                if holds and name not in self._on:
                    self.counts[name] += 1
                    raised.append(Raised(name, alarm.sentence(role, values[-1])))
                self._on = self._on | {name} if holds else self._on - {name}
        return raised
