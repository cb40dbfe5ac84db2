"""Python's plain values as JSON, and back as they were: an answer `(1, 2)` that came back as `[1, 2]` would be another.

JSON has no tuples, and in its objects no keys but strings. In what an environment's author put into a task, or a user
into options, they are written as `{"$tuple": […]}` and `{"$items": [[key, value], …]}`; so is an object with a key that
begins with `$`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TUPLE, ITEMS = "$tuple", "$items"


def marked(value: Any) -> Any:
    """`value` with what JSON does not have written in what it has; anything else is left to who encodes it."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: marked(item) for key, item in value.items()}
        return {ITEMS: [[marked(key), marked(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [marked(item) for item in value]}
    if isinstance(value, list):
        return [marked(item) for item in value]
    return value


def restored(value: Any, other: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """What `marked` was given. Raises `ValueError` for what it does not write.

    `other`: names that begin with `$` of what else was written as `{"$name": …}`, and what reads each of them.
    """
    if isinstance(value, list):
        return [restored(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(restored(item, other) for item in _listed(value[TUPLE]))
    if value.keys() == {ITEMS}:
        try:
            pairs = map(_listed, _listed(value[ITEMS]))
            return {restored(key, other): restored(item, other) for key, item in pairs}
        except TypeError as error:
            raise ValueError(f"not keys and values: {error}") from None
    if other and len(value) == 1 and (read := other.get(next(iter(value)))):
        return read(next(iter(value.values())))
    return {key: restored(item, other) for key, item in value.items()}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{TUPLE} and {ITEMS} hold lists")
    return value


def restored_names(value: Any) -> dict[str, Any]:
    """As `restored`, of names and their values. Raises `ValueError` also for anything else."""
    found = restored(value)
    if not isinstance(found, dict):
        raise ValueError("names and values are wanted, not a tuple")
    return found
