"""What `/aggregate_metrics` says of finished rollouts: statistics of every number in them, by task and over all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.envs.nemo_gym.protocol import FAILURE_CLASS, number

TASK = "_ng_task_index"


def aggregate(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean, max, min, median and sample standard deviation (0 of one value) of each numeric field and of the tokens in
    `response.usage`, as `mean/reward` and so on. Rollouts that failed are no part of it; neither are fields whose names
    begin with `_`."""
    numbers = [(result.get(TASK, 0), _numbers(result)) for result in results if not result.get(FAILURE_CLASS)]
    tasks = sorted({task for task, _ in numbers})
    overall = _statistics([fields for _, fields in numbers])
    return {
        "group_level_metrics": [
            {TASK: task, **_statistics(own), "num_rollouts": len(own)}
            for task in tasks
            for own in [[fields for of, fields in numbers if of == task]]
        ],
        "agent_metrics": overall,
        "key_metrics": {name: value for name, value in overall.items() if name.startswith("mean/")},
    }


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    usage = usage if isinstance(usage, Mapping) else {}
    found = {name: number(value) for name, value in {**result, **usage}.items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if value is not None}


def _statistics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        found[f"mean/{name}"] = statistics.fmean(values)
        found[f"max/{name}"] = max(values)
        found[f"min/{name}"] = min(values)
        found[f"median/{name}"] = statistics.median(values)
        found[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found
