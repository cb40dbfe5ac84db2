"""YAML files that may be a stranger's: of bounded size, and without duplicate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

MAX_BYTES = 4 * 2**20
"""Maximum bytes of a YAML file: the evaluation of a thousand environments has as many."""
MAX_NODES = 100_000
"""Maximum values in a file, with aliases counted as what they expand to: a thousand environments with a hundred
settings. A few hundred bytes of aliases to aliases can expand to more than any memory holds."""


class DuplicateKey(yaml.MarkedYAMLError):
    """A duplicate key in a mapping: YAML forbids it, and PyYAML silently keeps the last one."""


class TooLarge(yaml.MarkedYAMLError):
    """More values than `MAX_NODES`, nested more deeply than Python recurses, or an alias within its own value."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        previous_count, is_alias = self._count, self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        self._count += self._sizes.get(id(node), MAX_NODES) if is_alias else 1
        self._sizes[id(node)] = self._count - previous_count
        if self._count > MAX_NODES:
            problem = f"it holds more than {MAX_NODES:,} values, counting what its aliases (*name) stand for"
            raise TooLarge(problem=problem, problem_mark=self.get_mark())
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise DuplicateKey(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                keys.add((key.tag, key.value))
        return node


def load_yaml(text: str) -> Any:
    """The value of YAML text. Raises `yaml.YAMLError`, also for duplicate keys and too many values."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise TooLarge(problem="its values are nested too deeply") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `ConfigError`, with file and line, for anything else."""
    try:
        with path.open("rb") as file:  # it may be a pipe
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"config file {path} is larger than {MAX_BYTES >> 20} MiB")
        loaded = load_yaml(content.decode())
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{location}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a config file holds `key: value` pairs, not a {type(loaded).__name__}")
    return loaded
