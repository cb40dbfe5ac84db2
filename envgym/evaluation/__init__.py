"""Evaluation: a policy on held-out tasks, with intervals, and failures counted apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envgym.config import RunConfig
    from envgym.display import Display


def evaluate_policy(config: RunConfig, display: Display) -> dict[str, Any]:
    """See `policy.evaluate_policy`, which is imported when this is called."""
    from .policy import evaluate_policy as evaluate

    return evaluate(config, display)
