"""Encodes bodies as strict JSON. Entries of `info` that JSON cannot represent are omitted and named; others raise."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from envgym.errors import DataError, InvalidStep
from envgym.types import ImagePart, Task, check_json
from envgym.types.messages import change_images

from .wire import Opening, Step, Stepped

MAX_BITS = 4096
"""Bits of the largest integer in `info`: Python itself reads some 14,000 from text at most."""
MAX_DEPTH = 100
"""Depth of nesting in `info`: JSON readers follow some 200 levels, and an object that contains itself has no end."""
# Made once: that takes longer than to encode a step. An object that contains itself is a RecursionError anyway.
_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, check_circular=False, separators=(",", ":"))


def encode(body: BaseModel) -> bytes:
    """The body as strict JSON, in UTF-8.

    Raises `InvalidStep` where a task, an observation or options hold a value that JSON cannot represent: a set, bytes,
    a number that is not finite; in options also a tuple.
    """
    if _is_typed(body):  # most steps; four times as fast
        with contextlib.suppress(PydanticSerializationError):
            return body.__pydantic_serializer__.to_json(body, warnings="error")
    try:
        if isinstance(body, Opening):
            check_json(body.options, "options")
        return _STRICT.encode(body.model_dump()).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStep(f"{type(body).__name__} cannot be sent as JSON: {error}") from None


def load_images(task: Task) -> Task:
    """The task with the content of its prompt's images, to be sent. Raises `InvalidStep` for one that is not here."""
    return task if isinstance(task.prompt, str) else replace(task, prompt=change_images(task.prompt, load_image))


def load_image(image: ImagePart) -> ImagePart:
    """The image with its content. Raises `InvalidStep` if that is not here: pydantic would send something else."""
    try:
        return replace(image, data=image.read())
    except DataError as error:
        raise InvalidStep(str(error)) from None


def _is_typed(body: BaseModel) -> bool:
    """Tell whether every value in it is of a type that JSON has: pydantic alone would write a set as a list, and a
    number that is not finite as null. The `info` of a `Stepped` went through `encodable_info`."""
    if isinstance(body, Stepped):
        observation = body.observation
        return not (observation.sampling or observation.tools or any(m.tool_calls for m in observation.messages))
    return isinstance(body, Step) and not body.action.tool_calls


def encodable_info(info: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`info` as JSON can carry it, and the dotted names of the entries that were omitted.

    Tuples become lists; arrays and scalars of numpy or torch become lists and numbers. Dropped are entries with
    any other object, a number that is not finite, or a key that is not a string: a guessed text form
    would be a value of another type.
    """
    return _entries(info, 1)


def _entries(info: Mapping[str, Any], depth: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`encodable_info` at a depth. Raises `RecursionError` below the maximum depth."""
    entries: dict[str, Any] = {}
    dropped: list[str] = []
    for key, value in info.items():
        try:
            if not isinstance(key, str):
                raise TypeError
            key.encode()
            if isinstance(value, Mapping):
                entries[key], inner = _entries(value, _next_depth(depth))
                dropped += [f"{key}.{name}" for name in inner]
            else:
                entries[key] = _json_value(value, depth)
        except Exception as error:  # `tolist` of an unknown object may raise anything
            if isinstance(error, RecursionError) and depth > 1:
                raise  # drop the top-level entry: the dotted name of the deep one would be unreadable
            dropped.append(repr(key) if not isinstance(key, str) else key.encode("utf-8", "replace").decode())
    return entries, tuple(dropped)


def _next_depth(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise RecursionError
    return depth + 1


def _json_value(value: Any, depth: int) -> Any:
    """The value in JSON's own types. Raises an error for a value that JSON cannot represent."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        value.encode()  # raises for lone surrogates
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("too long")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("not finite")
        return value
    if isinstance(value, Mapping):
        entries, dropped = _entries(value, _next_depth(depth))
        if dropped:
            raise TypeError("holds something that is not JSON")
        return entries
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        inner_depth = _next_depth(depth)
        return [_json_value(item, inner_depth) for item in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist(), depth)
    raise TypeError("not JSON")
