"""The base class of all settings, and pydantic's errors in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from .errors import ConfigError, UnknownKey, did_you_mean

Model = TypeVar("Model", bound=BaseModel)

RULES = {
    "greater_than": "must be more than {gt:.12g}",
    "greater_than_equal": "must be at least {ge:.12g}",
    "less_than": "must be less than {lt:.12g}",
    "less_than_equal": "must be at most {le:.12g}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be text",
}
"""Kind of pydantic error -> the rule that was broken, in plain words."""


class Settings(BaseModel):
    """Base of every group of settings. Rejects unknown keys and, for numbers, infinity and NaN, `true` and `false`
    (1 and 0 to Python), and integers beyond 64 bits."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = set(_types_in(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {bool, Any, object} or not kinds & {int, float}:
            return value
        for leaf in leaves(value):
            if isinstance(leaf, bool):
                raise ValueError("must be a number")
            if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
                raise ValueError("must fit into 64 bits")
        return value


def as_list(value: Any) -> Any:
    """A single value as a list of it, for a setting of one or several."""
    return [value] if isinstance(value, str | int | float) else value


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types in an annotation, at every depth; a literal counts as the type of its values."""
    inner = get_args(annotation)
    if not inner:
        yield annotation if isinstance(annotation, type) or annotation is Any else type(annotation)
    for part in inner:
        yield from _types_in(part)


def leaves(value: Any) -> Iterator[Any]:
    """The values in mappings and lists, at every depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def validate_settings(model: type[Model], values: Mapping[str, Any], context: str = "") -> Model:
    """Build a settings model. Raises `ConfigError`, in one line that begins with `context`."""
    try:
        return model(**values)
    except ValidationError as error:
        raise settings_error(error, model, context) from None


def settings_error(error: ValidationError, model: type[BaseModel], context: str = "") -> ConfigError:
    """One line with the first problem that pydantic reports, after `context`; for an unknown key the closest known
    one."""
    prefix = f"{context}: " if context else ""
    problems = error.errors()
    # Unknown keys first: one is often the misspelling of another that is missing.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    path, word = _without_union(first["loc"], problems)
    key = ".".join(str(part) for part in path)
    if first["type"] == "extra_forbidden":
        names = known_keys(model, first["loc"][:-1])
        parent, dot, name = key.rpartition(".")
        hint = did_you_mean(name, names).replace("'", f"'{parent}{dot}", 1)
        return UnknownKey(f"{prefix}unknown key {key!r}", key, hint, names)
    if first["type"] == "missing":
        return ConfigError(f"{prefix}key {key!r} is required")
    if first["type"] in ("model_type", "dict_type"):
        return ConfigError(f"{prefix}key {key!r} holds nested keys ({key}.…), not {first['input']!r:.60}")
    if first["type"] in ("tuple_type", "list_type"):
        return ConfigError(f"{prefix}key {key!r} holds a list ([…, …]){word}, not {first['input']!r:.60}")
    rule = RULES.get(first["type"])
    problem = rule.format(**first.get("ctx", {})) if rule else first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] == "secret" else f", got {first['input']!r:.60}"  # the value may be a secret key
    if isinstance(first["input"], bool) and first["type"] != "secret":
        got += " (YAML reads no, off, yes and on without quotes as false and true)"
    elif (
        first["type"] == "string_type" and first["input"] is not None and not isinstance(first["input"], Mapping | list)
    ):
        got += " (in YAML, write it in quotes)"
    return ConfigError(f"{prefix}key {key!r}: {problem[:1].lower()}{problem[1:]}{word}{got}")


def _without_union(path: tuple[Any, ...], problems: Sequence[Any]) -> tuple[tuple[Any, ...], str]:
    """`path`, and the words that are allowed there beside a number or a list (`, or 'auto'`). For such a key pydantic
    reports a problem per kind of value, with the kind as part of the path."""
    for problem in problems:
        *outer, kind = problem["loc"] or ("",)  # a whole group's problem has no path
        if str(kind).startswith("literal[") and path[: len(outer)] == tuple(outer):
            inner = path[len(outer) + 1 :]
            word = "" if inner or path == problem["loc"] else f", or {problem['ctx']['expected']}"
            return (*outer, *inner), word
    return path, ""


def known_keys(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """The field names of the nested model at `path` within `model`; parts of the path may be keys of a mapping."""
    kind: Any = model
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            info = kind.model_fields.get(str(part))
            kind = info.annotation if info else None
        else:
            kind = (get_args(kind) or (None,))[-1]  # the values of a mapping or a list
        if isinstance(kind, UnionType):  # `Model | None` counts as Model
            kind = next(choice for choice in get_args(kind) if choice is not type(None))
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def deep_merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with the values of `overrides`; mappings are merged key by key."""
    result = dict(base)
    for key, value in overrides.items():
        are_mappings = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = deep_merge(result[key], value) if are_mappings else value
    return result
