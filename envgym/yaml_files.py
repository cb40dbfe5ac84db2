"""YAML files that may be somebody else's: of bounded size, and no key given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

MOST_BYTES = 4 * 2**20
"""Bytes of a YAML file: the evaluation of a thousand environments has as many."""
MOST_NODES = 100_000
"""Values in one, those behind an alias counted wherever it stands: a thousand environments with a hundred settings. A
few hundred bytes of aliases to aliases can stand for more than any memory holds."""


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
