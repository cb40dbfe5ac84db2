"""Tasks and options that arrive as they were sent: an answer `(1, 2)` that came as `[1, 2]` would be another answer.

JSON has no tuples, and in its objects no keys but strings. In what an environment's author put into a task, or a user
into options, they are written as `{"$tuple": […]}` and `{"$items": [[key, value], …]}`; so is an object with a key that
begins with `$`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, ValidationInfo, WrapSerializer

from envgym.types import Task

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


def restored(value: Any) -> Any:
    """What `marked` was given. Raises `ValueError` for what it does not write."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(restored(item) for item in _listed(value[TUPLE]))
    if value.keys() == {ITEMS}:
        try:
            return {restored(key): restored(item) for key, item in map(_listed, _listed(value[ITEMS]))}
        except TypeError as error:
            raise ValueError(f"not keys and values: {error}") from None
    return {key: restored(item) for key, item in value.items()}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{TUPLE} and {ITEMS} hold lists")
    return value


def _restored_object(value: Any) -> dict[str, Any]:
    found = restored(value)
    if not isinstance(found, dict):
        raise ValueError("names and values are wanted, not a tuple")
    return found


def _marked_task(task: Task, write: Callable[[Task], dict[str, Any]]) -> dict[str, Any]:
    rest = write(dataclasses.replace(task, answer=None, fields={}))
    return {**rest, "answer": marked(task.answer), "fields": marked(task.fields)}


def _restored_task(task: Task, info: ValidationInfo) -> Task:
    if info.mode != "json":  # made here
        return task
    return dataclasses.replace(task, answer=restored(task.answer), fields=_restored_object(task.fields))


def _restored_options(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    return _restored_object(options) if info.mode == "json" else options


def _marked_record(record: dict[str, Any]) -> dict[str, Any]:
    task = record["task"]
    return {**record, "task": {**task, "answer": marked(task["answer"]), "fields": marked(task["fields"])}}


def _restored_record(record: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    task = record.get("task")
    if info.mode != "json" or not isinstance(task, dict):  # who reads the record says what is wrong with it
        return record
    exact = {name: restored(task[name]) for name in ("answer", "fields") if name in task}
    return {**record, "task": {**task, **exact}}


ExactTask = Annotated[Task, AfterValidator(_restored_task), WrapSerializer(_marked_task)]
ExactOptions = Annotated[dict[str, Any], AfterValidator(_restored_options), PlainSerializer(marked)]
ExactRecord = Annotated[dict[str, Any], AfterValidator(_restored_record), PlainSerializer(_marked_record)]
"""An episode's record, whose task is exact."""
