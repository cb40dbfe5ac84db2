"""The settings of a run for the page: with dotted keys, and the values that its recipe gives them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from envgym.config.recipes import DEFAULT_MODEL, recipe_names
from envgym.config.words import dotted_keys
from envgym.errors import EnvgymError
from envgym.run_folder import stage_number

BASE = {"env": "recorded", "agent": "multi_turn"}
"""The environment of a recipe without one. A run's own may be a program in its folder, which looking must not start."""
NAMES = ("name", "runs_dir", "evals_dir")
"""Settings of a run's place alone, which no comparison needs."""


def stage_settings(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The settings of a run and its stage, with dotted keys. `folder` is the name of the stage's folder: `2-grpo` holds
    the second of several, any other the last."""
    stages = config.get("stages")
    stages = [stage for stage in stages if isinstance(stage, Mapping)] if isinstance(stages, list) else []
    number = stage_number(folder)
    stage = stages[number - 1 if 0 < number <= len(stages) > 1 else -1] if stages else {}
    settings = {key: value for key, value in config.items() if key != "stages"} | dict(stage)
    return {str(key): value for key, value in dotted_keys(settings) if key not in NAMES}


def changed_settings(config: Mapping[str, Any], folder: str) -> list[tuple[str, Any, Any]] | None:
    """The settings that differ from those of the run's recipe: key, value and the recipe's value. None for a recipe
    that does not ship with envgym: a path from a stranger's settings is not opened."""
    settings = stage_settings(config, folder)
    base = _recipe_config(str(settings.get("recipe")), str(settings.get("model")))
    if base is None:
        return None
    defaults = stage_settings(base, folder)
    return [(key, value, defaults.get(key)) for key, value in settings.items() if value != defaults.get(key)]


@lru_cache(64)
def _recipe_config(recipe: str, model: str) -> dict[str, Any] | None:
    from envgym.config.resolve import resolve

    names = recipe_names()
    if recipe not in names:
        return None
    for env in ({}, BASE):
        try:
            settings = {**env, "model": model if model in names else DEFAULT_MODEL}
            config = resolve(settings, recipe=recipe).model_dump(mode="json")
            for stage, part in itertools.product(config["stages"], env):
                del stage[part]["name"]  # the recipe names none
            return config
        except EnvgymError:  # it has no environment of its own, or needs a setting that no default has
            continue
    return None
