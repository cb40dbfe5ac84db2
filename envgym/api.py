"""Runs from Python: the same settings as on the command line, the same results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config.resolve import resolve
from .config.words import nest_keys
from .monitoring.display import Display
from .monitoring.terminal import open_display

if TYPE_CHECKING:
    from .evaluation.suite import Suite


def train(
    settings: Mapping[str, Any], *, recipe: str | None = None, file: str | Path | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Run a recipe and return its summary (what `summary.json` holds), as `envgym train` does.

    `settings` are nested or dotted keys: `{"env": "math_verify", "learner.lr": 1e-4}`. Raises `EnvgymError` for
    whatever the user can mend.
    """
    from .training.run import train as run

    config = resolve(nest_keys(settings.items()), recipe=recipe, file=file)
    with Display() if quiet else open_display() as display:
        return run(config, display=display)


def evaluate(settings: Mapping[str, Any], *, suite: str | Suite | None = None, quiet: bool = False) -> dict[str, Any]:
    """Measure `settings["model"]` on a suite or, without one, on the held-out tasks of `settings["env"]`, as
    `envgym eval` does. Returns what `result.json` holds: see `envgym.evaluation.policy.run_evaluation`."""
    from .evaluation.policy import new_evaluation, run_evaluation
    from .training.new_model import make_model

    evaluation = new_evaluation(nest_keys(settings.items()), suite=suite)
    with Display() if quiet else open_display() as display:
        return run_evaluation(evaluation, display, make_model=make_model)
