"""Comparison of calls with the allowed ones, by the rules of the Berkeley Function Calling Leaderboard for Python:
values have the declared type, and texts are compared without case, spaces and some punctuation (Patil et al., 2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.types import ToolCall

ANY = "any"
"""The answer to a request that needs a call, whichever it is."""
TYPES: dict[str, type] = {
    "string": str, "any": str, "integer": int, "float": float, "number": float, "boolean": bool,
    "array": list, "tuple": list, "dict": dict, "object": dict,
}  # fmt: skip
_IGNORED = re.compile(r"[ ,./\-_*^]")
Function = Mapping[str, Any]


def tool_name(name: str) -> str:
    """A function's name without dots, which many chat templates and APIs do not allow."""
    return name.replace(".", "_")


def are_right(calls: Sequence[ToolCall], answer: Any, functions: Sequence[Function]) -> bool:
    """True if `calls` are those of `answer`, in any order."""
    if answer == ANY:
        return any(not call.error for call in calls)
    if len(calls) != len(answer):
        return False
    remaining = list(calls)
    for function, allowed in _expected(answer, functions):
        matches = [number for number, call in enumerate(remaining) if _is_right(call, function, allowed)]
        if not matches:
            return False
        del remaining[matches[0]]
    return True


def is_function(value: Any) -> bool:
    """True if `value` describes a function: its name, and the properties of its parameters."""
    if not (
        isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("parameters"), dict)
    ):
        return False
    properties = value["parameters"].get("properties", {})
    return isinstance(properties, dict) and all(isinstance(schema, dict) for schema in properties.values())


def is_well_formed(answer: Any, functions: Sequence[Function]) -> bool:
    """True if every call of `answer` names one of the functions and lists allowed values."""
    if not isinstance(answer, list):
        return bool(answer == ANY)
    names = {function["name"] for function in functions}
    return all(
        isinstance(call, dict) and len(call) == 1 and call.keys() <= names
        and all(isinstance(arguments, dict) for arguments in call.values())
        and all(isinstance(values, list) for arguments in call.values() for values in arguments.values())
        for call in answer
    )  # fmt: skip


def example_calls(answer: Any, functions: Sequence[Function]) -> list[tuple[str, dict[str, Any]]]:
    """Calls that are right, as name and arguments."""
    if answer == ANY:
        return [(tool_name(functions[0]["name"]), {})]
    calls = []
    for function, allowed in _expected(answer, functions):
        required = function["parameters"].get("required", ())
        arguments = {name: values for name, values in allowed.items() if name in required or "" not in values}
        calls.append((tool_name(function["name"]), {name: _example(values) for name, values in arguments.items()}))
    return calls


def _expected(answer: Any, functions: Sequence[Function]) -> list[tuple[Function, Mapping[str, list[Any]]]]:
    """The function and the allowed arguments of each expected call."""
    by_name = {function["name"]: function for function in functions}
    return [(by_name[name], allowed) for call in answer for name, allowed in call.items()]


def _is_right(call: ToolCall, function: Function, allowed: Mapping[str, list[Any]]) -> bool:
    arguments, schema = call.arguments, function["parameters"]
    properties = schema.get("properties", {})
    if call.error or call.name != tool_name(function["name"]):
        return False
    if not {*schema.get("required", ())} <= arguments.keys() <= properties.keys() & allowed.keys():
        return False
    if any("" not in values for name, values in allowed.items() if name not in arguments):
        return False
    return all(_is_allowed(value, allowed[name], properties[name]) for name, value in arguments.items())


def _is_allowed(value: Any, allowed: list[Any], schema: Mapping[str, Any]) -> bool:
    type_name = _type_name(schema)
    declared = TYPES.get(type_name, str)
    items = TYPES.get(_type_name(schema.get("items") or {}), str) if declared is list else None
    if type_name in ("float", "number") and type(value) is int:
        value = float(value)
    # Where the allowed values are of another type, such as the name of a variable, that is the right one.
    allowed_type = _type_of_first(allowed) or declared
    if type(value) not in (declared, allowed_type):
        return False
    if isinstance(value, list) and items is not None and not any(_has_items(value, form, items) for form in allowed):
        return False
    if allowed_type is not declared:
        return value in allowed
    if declared is dict:
        return any(_is_allowed_mapping(value, form) for form in allowed if form != "")
    if items is dict:
        forms = [form for form in allowed if len(form) == len(value)]
        return any(all(map(_is_allowed_mapping, value, form)) for form in forms)
    if declared is list:
        return [_plain(item) for item in value] in [[_plain(item) for item in form] for form in allowed]
    return _plain(value) in [_plain(form) for form in allowed]


def _type_name(schema: Mapping[str, Any]) -> str:
    """The name of a schema's type; `any` if it names none, or several."""
    return name if isinstance(name := schema.get("type"), str) else "any"


def _has_items(value: list[Any], form: Any, declared: type) -> bool:
    """True if the items have the declared type, or that of an allowed list's first item."""
    return not isinstance(form, list) or all(type(item) in (declared, _type_of_first(form)) for item in value)


def _is_allowed_mapping(value: Any, form: Any) -> bool:
    if not (isinstance(value, dict) and isinstance(form, dict) and value.keys() <= form.keys()):
        return False
    if any("" not in values for key, values in form.items() if key not in value):
        return False
    return all(_plain(item) in [_plain(choice) for choice in form[key]] for key, item in value.items())


def _plain(value: Any) -> Any:
    """A text as it is compared; any other value is unchanged."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _type_of_first(allowed: Sequence[Any]) -> type | None:
    return next((type(value) for value in allowed if value != ""), None)


def _first(allowed: Sequence[Any]) -> Any:
    return next((value for value in allowed if value != ""), "")


def _example(allowed: list[Any]) -> Any:
    """A value that is allowed."""
    value = _first(allowed)
    if isinstance(value, dict):
        return _example_mapping(value)
    if isinstance(value, list):
        return [_example_mapping(item) if isinstance(item, dict) else item for item in value]
    return value


def _example_mapping(form: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _first(values) for key, values in form.items() if "" not in values}
