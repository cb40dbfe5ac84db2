"""Settings of a component that a later layer replaces: the new one shares some, the others are dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from .known_settings import config_class


def split_settings(kind: str, old: Mapping[str, Any], name: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the component `old` that the one called `name` shares, and the others. `kind` is `env`, `agent`
    or `learner`.

    Two components share the settings of their common base class, such as every learner's learning rate. Settings that
    only have the same name may differ in meaning. Environments share nothing.
    """
    settings = {key: value for key, value in old.items() if key != "name"}
    if kind == "env":
        return {}, settings
    old_class, new_class = config_class(kind, old["name"]), config_class(kind, name)
    if settings.keys() >= old_class.model_fields.keys() - {"name"}:
        # A saved config holds every default; the old component's defaults are not meant for the new one.
        defaults = old_class.model_construct().model_dump(mode="json", warnings=False)
        settings = dict(_without_defaults(defaults, settings))
    bases = (base for base in old_class.__mro__ if issubclass(base, BaseModel) and issubclass(new_class, base))
    shared = {key: settings.pop(key) for key in next(bases).model_fields if key in settings}
    return shared, settings


def _without_defaults(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that differ from the defaults."""
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := dict(_without_defaults(default, value)):
                yield key, inner
        elif key not in defaults or value != default:
            yield key, value
