"""How a rollout is cut into optimizer steps, the learning rate of each, and what they log together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from envgym.learner import LearnerConfig, LearnRow


def cut(rows: Sequence[LearnRow], parts: int) -> list[list[LearnRow]]:
    """Rows in `parts` consecutive pieces of about as many units each; a unit is never cut."""
    units = list(dict.fromkeys(row.unit for row in rows))
    parts = min(parts, len(units))
    piece = {unit: index * parts // len(units) for index, unit in enumerate(units)}
    return [[row for row in rows if piece[row.unit] == index] for index in range(parts)]


def learning_rate(config: LearnerConfig, optimizer_step: int, loop_steps: int) -> float:
    """The learning rate of the `optimizer_step`-th step (from 0) of a run of `loop_steps`."""
    total = loop_steps * config.epochs * config.minibatches
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
    if optimizer_step < warmup:
        return config.lr * (optimizer_step + 1) / warmup
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (optimizer_step - warmup) / max(1, total - warmup))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left)


def over_steps(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What several optimizer steps logged, as one: the mean of each number over the steps that have it, the largest of
    those whose names end in `/max`, the smallest of `/min`."""
    values: dict[str, list[float]] = {}
    for step in logged:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: _together(name, own) for name, own in values.items()}


def _together(name: str, values: Sequence[float]) -> float:
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return math.fsum(values) / len(values)
