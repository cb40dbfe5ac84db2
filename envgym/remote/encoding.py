"""Bodies to strict JSON: what must arrive whole raises, and of `info` what JSON cannot carry is left out by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from envgym.errors import InvalidStep

# Made once: it takes longer to make one than to encode a step. What refers to itself is a RecursionError all the same.
_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, check_circular=False, separators=(",", ":"))


def encode(body: BaseModel) -> bytes:
    """The body as strict JSON, in UTF-8.

    Raises `InvalidStep` where a field that must arrive whole (a task, an observation, options) holds something
    JSON has no word for: a set, bytes, a number that is not finite.
    """
    try:
        return _STRICT.encode(body.model_dump()).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStep(f"{type(body).__name__} cannot be sent as JSON: {error}") from None


def encodable_info(info: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`info` as JSON can carry it, and the dotted names of the entries that had to be left out.

    Tuples become lists; arrays and scalars of numpy or torch become lists and numbers. Dropped are entries with
    any other object, a number that is not finite, or a key that is not a string: guessing a text form for them
    would hand the reader a value of another type.
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in info.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            kept[key], inner = encodable_info(value)
            dropped += [f"{key}.{name}" for name in inner]
            continue
        try:
            if not isinstance(key, str):
                raise TypeError
            kept[key] = _encodable(value)
        except (TypeError, ValueError):
            dropped.append(str(key))
    return kept, tuple(dropped)


def _encodable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("not finite")
        return value
    if isinstance(value, Mapping):
        kept, dropped = encodable_info(value)
        if dropped:
            raise TypeError("holds something that is not JSON")
        return kept
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_encodable(item) for item in value]
    if hasattr(value, "tolist"):
        return _encodable(value.tolist())
    raise TypeError("not JSON")
