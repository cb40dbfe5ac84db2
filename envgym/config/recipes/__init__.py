"""Recipes: named YAML files that compose environments, agents, learners and settings into stages.

A recipe that holds `new_model` makes a model out of nothing, and its name, or the path of its file, may be given
wherever a model is asked for; its `model_settings` are what a run on that model starts from.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from envgym.disk import cache_folder
from envgym.errors import ConfigError, NameNotFound, did_you_mean
from envgym.yaml_files import read_yaml

FOLDER = Path(__file__).parent
DEFAULT_RECIPE = "grpo"
DEFAULT_MODEL = "starter"
SUFFIXES = (".yaml", ".yml")
OF_NEW_MODEL = ("new_model", "model_settings")
"""Keys of a recipe that are no settings of a run."""


def recipe_names() -> list[str]:
    """The names of the recipes that ship with envgym."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """A recipe's settings as they stand in its file; `name` is a shipped recipe or the path of a YAML file."""
    path = Path(name) if name.endswith(SUFFIXES) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.parent != FOLDER:
            raise ConfigError(f"recipe file {name} does not exist")
        raise NameNotFound(f"no recipe {name!r}.{did_you_mean(name, recipe_names())} See: envgym config recipes")
    return read_yaml(path)


def makes_model(name: str) -> bool:
    """True if `name` is a recipe that makes a model, a shipped one or the path of a YAML file. Raises `ConfigError` for
    a file that makes none."""
    if not name.endswith(SUFFIXES):
        return name in recipe_names() and "new_model" in load_recipe(name)
    if "new_model" not in load_recipe(name):
        raise ConfigError(f"recipe {name} makes no model: it has no new_model, which gives the model's size")
    return True


def recipe_model_folder(name: str) -> Path:
    """The folder of the model that a recipe makes, which may be yet to come. Only what stands in the recipe counts: new
    contents of a data file that it names make no new model."""
    makes_it = {key: value for key, value in load_recipe(name).items() if key != "model_settings"}
    key = hashlib.sha256(yaml.safe_dump(makes_it).encode()).hexdigest()[:12]
    return cache_folder("models") / f"{Path(name).stem}-{key}"
