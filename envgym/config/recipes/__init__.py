"""Recipes: named YAML files that compose environments, agents, learners and settings into stages.

A recipe with `new_model` makes a model from scratch; its name, or the path of its file, can stand wherever a model can.
Its `model_settings` are the defaults of runs on that model. The model of `starter` ships with envgym, in the folder of
its name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from envgym.config.words import expand_keys
from envgym.disk import cache_folder
from envgym.errors import ConfigError, NameNotFound, did_you_mean
from envgym.yaml_files import read_yaml

FOLDER = Path(__file__).parent
DEFAULT_RECIPE = "grpo"
DEFAULT_MODEL = "starter"
SUFFIXES = (".yaml", ".yml")
OF_NEW_MODEL = ("new_model", "model_settings")
"""Keys of a recipe that are not settings of a run."""
RATES = "rates"
"""Key of a recipe that names its default learning rates by the model's size."""


def recipe_names() -> list[str]:
    """The names of the recipes that ship with envgym."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """The settings in a recipe's file; `name` is a shipped recipe or the path of a YAML file."""
    return {key: value for key, value in _read_recipe(name).items() if key != RATES}


def rates_of_recipe(name: str, learner: str | None = None) -> str | None:
    """The recipe's row of default learning rates (`envgym/config/learning_rates.yaml`); None if it has a rate of its
    own, or if `learner` is not the one that those rates are for."""
    settings = _read_recipe(name)
    component = settings.get("learner")
    trained_by = component.get("name") if isinstance(component, dict) else component
    return settings.get(RATES) if learner in (None, trained_by) else None


def _read_recipe(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith(SUFFIXES) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.parent != FOLDER:
            raise ConfigError(f"recipe file {name} does not exist")
        raise NameNotFound(f"no recipe {name!r}.{did_you_mean(name, recipe_names())} See: envgym config recipes")
    settings: dict[str, Any] = expand_keys(read_yaml(path))
    return settings


def makes_model(name: str) -> bool:
    """True if `name` is a recipe that makes a model: a shipped one or the path of a YAML file. Raises `ConfigError` for
    a file without `new_model`."""
    if not name.endswith(SUFFIXES):
        return name in recipe_names() and "new_model" in load_recipe(name)
    if "new_model" not in load_recipe(name):
        raise ConfigError(f"recipe {name} makes no model: it has no new_model, which gives the model's size")
    return True


def recipe_model_folder(name: str) -> Path:
    """The folder of the model that a recipe makes: the shipped one, or else the one in the cache, which may not exist
    yet. That depends on the recipe's settings alone: changed contents of a data file that it names make no new model.
    """
    shipped = FOLDER / name
    if name in recipe_names() and shipped.is_dir():
        return shipped
    recipe = load_recipe(name)
    recipe.pop("model_settings", None)
    key = hashlib.sha256(yaml.safe_dump(recipe).encode()).hexdigest()[:12]
    return cache_folder("models") / f"{Path(name).stem}-{key}"
