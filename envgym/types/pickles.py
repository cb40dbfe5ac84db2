"""Short pickles of small dataclasses. By default, `dataclasses` looks every field up in Python, which is most of the
time of sending an episode with many turns to another process."""

from __future__ import annotations

import copyreg
from dataclasses import fields
from operator import attrgetter
from typing import Any

_NAMES: dict[type, tuple[str, ...]] = {}


def pickle_by_values(*classes: type) -> None:
    """Pickle the instances of these classes, which have slots, as the values of their fields. An instance is rebuilt
    without `__post_init__`, as by `pickle`."""
    for cls in classes:
        names = _NAMES[cls] = tuple(field.name for field in fields(cls))
        copyreg.pickle(cls, _reducer(cls, names))


def _reducer(cls: type, names: tuple[str, ...]) -> Any:
    values_of = attrgetter(*names) if len(names) > 1 else lambda instance: (getattr(instance, names[0]),)
    if hasattr(cls, "__post_init__"):
        return lambda instance: (_rebuild, (cls, *values_of(instance)))
    return lambda instance: (cls, values_of(instance))


def _rebuild(cls: type, *values: Any) -> Any:
    instance: Any = object.__new__(cls)
    for name, value in zip(_NAMES[cls], values, strict=True):
        object.__setattr__(instance, name, value)
    return instance
