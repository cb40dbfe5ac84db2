"""Settings as nested mappings: parsed from `key=value` overrides, and merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from envgym.errors import ConfigError
from envgym.settings import deep_merge
from envgym.tasks.config import data_settings
from envgym.yaml_files import DuplicateKey, load_yaml

AUTO = "auto"
COMPONENTS = ("env", "agent", "learner")
LENGTHS = ("steps", "epochs")
"""Settings of a stage's length; a stage has one of them."""
WARMUPS = ("warmup_steps", "warmup_ratio")
"""Settings of a learner's warm-up; a learner has one of them."""
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?e[-+]?\d+", re.IGNORECASE)
"""Numbers that YAML reads as text."""


def parse_overrides(
    words: Sequence[str], takes_text: Callable[[str, Any], bool] = lambda key, value: False
) -> dict[str, Any]:
    """`key=value` words, dotted for nested keys, as a nested mapping; later words win. Values in quotes, lists,
    mappings, numbers, true, false and null are parsed as YAML; all others are text, and so is the unquoted value of a
    setting that is text: `takes_text` is called with a key and YAML's value."""
    pairs = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(f"{word!r} is not a key=value setting")
        bare = text.lstrip()
        try:
            value = float(text) if NUMBER.fullmatch(text) else load_yaml(text)
        except yaml.YAMLError as error:
            if isinstance(error, DuplicateKey) and bare.startswith("{") and not takes_text(key, {}):
                raise ConfigError(f"{word}: {error.problem}") from None
            value = text
        # Other text is not YAML's: it would fold lines, end at a number sign, and read templates as mappings.
        is_yaml = bare.startswith(("{", "[")) or (isinstance(value, int | float | None) and not bare.startswith("#"))
        if not bare.startswith(("'", '"')) and (not is_yaml or takes_text(key, value)):
            value = text
        pairs.append((key, value))
    return nest_keys(pairs)


def nest_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings with dotted keys as a nested mapping; later ones win."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merge(result, value)
    return result


def expand_keys(settings: Any, depth: int = 1) -> Any:
    """The settings of a run, or of its stages, with dotted keys (`learner.lr`, and `kl.coef` in `learner`) as nested
    ones, down to `depth` groups within groups. Deeper mappings have keys of their own. Raises `ConfigError` for a key
    that is not text."""
    if isinstance(settings, list):
        return [expand_keys(stage, depth) for stage in settings]
    if not isinstance(settings, Mapping) or depth < 0:
        return settings
    if invalid := [key for key in settings if not isinstance(key, str)]:
        raise ConfigError(f"key {invalid[0]!r}: must be text, the name of a setting")
    is_list = isinstance(settings.get("stages"), list)
    depths = {"roles": 2, "model_settings": 1, "stages": 1 if is_list else 2} if depth == 1 else {}
    expanded = {
        key: value if "." in key else expand_keys(value, depths.get(key, depth - 1)) for key, value in settings.items()
    }
    return nest_keys(expanded.items()) if any("." in key for key in expanded) else expanded


def dotted_keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted keys, the reverse of `nest_keys`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The nested settings that differ, by their dotted keys: both values, None for a key that one side lacks."""
    old, new = dict(dotted_keys(a)), dict(dotted_keys(b))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`deep_merge`, but a component with another name drops the settings of the old one."""
    if "data" in overrides:
        overrides = {**overrides, "data": data_settings(overrides["data"])}
    for key in ("render", "engine"):  # the kind alone may be given
        if key in base and key in overrides:
            base, overrides = ({**part, key: component_mapping(part[key], "kind")} for part in (base, overrides))
    components = {}
    for key in COMPONENTS:
        if key in overrides:
            value, old = component_mapping(overrides[key]), component_mapping(base.get(key) or {})
            if not isinstance(value, Mapping):
                hint = " or a reward function; envgym.reward([f, g]) makes one of several" if key == "env" else ""
                raise ConfigError(
                    f"key {key!r} is a name, or a name and settings, not {value!r:.60}. In Python it may also be a "
                    f"class{hint}"
                )
            components[key] = value if changes_name(old, value) else deep_merge(old, value)
    return {**deep_merge(base, overrides), **components}


def merge_stage(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`merge` of a stage's settings. A length in `overrides` replaces that of `base`. Raises `ConfigError` if there are
    two."""
    lengths = [key for key in LENGTHS if overrides.get(key) is not None]
    if len(lengths) > 1:
        raise ConfigError("steps and epochs both set the length of training: give one")
    return merge(base, {**overrides, **{key: None for key in LENGTHS if lengths and key not in lengths}})


def without_warmup(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's settings `base` without their learner's warm-up, if `overrides` set one."""
    learner = component_mapping(base.get("learner") or {})
    override = component_mapping(overrides.get("learner") or {})
    if not (isinstance(override, Mapping) and isinstance(learner, Mapping) and any(key in override for key in WARMUPS)):
        return dict(base)
    return {**base, "learner": {key: value for key, value in learner.items() if key not in WARMUPS}}


def component_mapping(value: Any, key: str = "name") -> Any:
    """A component as a mapping, also if only its name is given, the value of `key`."""
    return {key: value} if isinstance(value, str) else value


def changes_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True if `new` is another component than `old`. `auto` may become any component, so it changes nothing."""
    return "name" in new and "name" in old and new["name"] != old["name"] and AUTO not in (new["name"], old["name"])
