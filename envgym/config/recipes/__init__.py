"""Recipes: named YAML files that compose environments, agents, learners and settings into stages.

A recipe that holds `new_model` makes a model out of nothing, and its name, or the path of its file, may be given
wherever a model is asked for; its `model_settings` are what a run on that model starts from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from envgym.errors import ConfigError, NameNotFound, did_you_mean

FOLDER = Path(__file__).parent
DEFAULT_RECIPE = "grpo"
DEFAULT_MODEL = "starter"
SUFFIXES = (".yaml", ".yml")
OF_NEW_MODEL = ("new_model", "model_settings")
"""Keys of a recipe that are no settings of a run."""
MOST_BYTES = 4 * 2**20
"""Bytes of a YAML file: the evaluation of a thousand environments has as many."""
MOST_NODES = 100_000
"""Values in one, those behind an alias counted wherever it stands: a thousand environments with a hundred settings. A
few hundred bytes of aliases to aliases can stand for more than any memory holds."""


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


class DuplicateKey(yaml.MarkedYAMLError):
    """A key that one mapping has twice: YAML forbids it, and PyYAML keeps the last one without a word."""


class TooLarge(yaml.MarkedYAMLError):
    """More values than `MOST_NODES`, deeper ones than Python follows, or an alias within what it stands for."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        before, is_alias = self._count, self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        self._count += self._sizes.get(id(node), MOST_NODES) if is_alias else 1
        self._sizes[id(node)] = self._count - before
        if self._count > MOST_NODES:
            problem = f"it holds more than {MOST_NODES:,} values, counting what its aliases (*name) stand for"
            raise TooLarge(problem=problem, problem_mark=self.get_mark())
        return node

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
    """The value of YAML text. Raises `yaml.YAMLError`, also for a key that is given twice and for too many values."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise TooLarge(problem="its values lie too deep in each other") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises `ConfigError` with file and line otherwise."""
    try:
        with path.open("rb") as file:  # which may be a pipe
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"config file {path} is larger than {MOST_BYTES >> 20} MiB")
        loaded = load_yaml(content.decode())
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
