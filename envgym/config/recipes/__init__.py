"""Recipes: named YAML files that compose environments, agents, learners and settings into stages.

A recipe that holds `new_model` makes a model out of nothing, and its name may be given wherever a model is
asked for; its `model_settings` are what a run on that model starts from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from envgym.errors import ConfigError, NameNotFound, did_you_mean

FOLDER = Path(__file__).parent
DEFAULT_RECIPE = "grpo"
DEFAULT_MODEL = "starter"


def recipe_names() -> list[str]:
    """The names of the recipes that ship with envgym."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """A recipe's settings as they stand in its file; `name` is a shipped recipe or the path of a YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.parent != FOLDER:
            raise ConfigError(f"recipe file {name} does not exist")
        raise NameNotFound(f"no recipe {name!r}.{did_you_mean(name, recipe_names())} See: envgym config recipes")
    return read_yaml(path)


def makes_model(name: str) -> bool:
    """True if `name` is a shipped recipe that makes a model."""
    return name in recipe_names() and "new_model" in load_recipe(name)


class DuplicateKey(yaml.MarkedYAMLError):
    """A key that one mapping has twice: YAML forbids it, and PyYAML keeps the last one without a word."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise DuplicateKey(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def load_yaml(text: str) -> Any:
    """The value of YAML text. Raises `yaml.YAMLError`, also for a key that is given twice."""
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises `ConfigError` with file and line otherwise."""
    try:
        loaded = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a config file holds `key: value` pairs, not a {type(loaded).__name__}")
    return loaded
