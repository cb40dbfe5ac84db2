"""The base of every group of settings, and pydantic's complaints in one line."""

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
"""The rules that pydantic's kinds of problem stand for, in our words."""


class Settings(BaseModel):
    """Base of every group of settings. Unknown keys are refused, and so are numbers that are no settings: infinity and
    NaN, `true` and `false` (which Python takes for 1 and 0), and what does not fit into 64 bits."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_a_number_where_one_belongs(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = set(_types_in(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {bool, Any, object} or not kinds & {int, float}:
            return value
        for one in leaves(value):
            if isinstance(one, bool):
                raise ValueError("must be a number")
            if isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise ValueError("must fit into 64 bits")
        return value


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types and values that an annotation is made of; those of a literal by their types."""
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


def validated(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Build a settings model. Raises `ConfigError`, in one line that begins with `where`."""
    try:
        return model(**values)
    except ValidationError as error:
        raise settings_error(error, model, where) from None


def settings_error(error: ValidationError, model: type[BaseModel], where: str = "") -> ConfigError:
    """One line for the first problem pydantic found, after `where`; an unknown key names its nearest neighbour."""
    prefix = f"{where}: " if where else ""
    problems = error.errors()
    # A key that is unknown is often the misspelt one of another that is missing.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = known_keys(model, first["loc"][:-1])
        return UnknownKey(f"{prefix}unknown key {key!r}", key, did_you_mean(key.rpartition(".")[2], known), known)
    if first["type"] == "missing":
        return ConfigError(f"{prefix}key {key!r} is required")
    if first["type"] in ("model_type", "dict_type"):
        return ConfigError(f"{prefix}key {key!r} holds keys of its own ({key}.…), not {first['input']!r:.60}")
    if first["type"] in ("tuple_type", "list_type"):
        return ConfigError(f"{prefix}key {key!r} holds a list ([…, …]), not {first['input']!r:.60}")
    rule = RULES.get(first["type"])
    problem = rule.format(**first.get("ctx", {})) if rule else first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] == "secret" else f", got {first['input']!r:.60}"  # it may be a key itself
    return ConfigError(f"{prefix}key {key!r}: {problem[:1].lower()}{problem[1:]}{got}")


def known_keys(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """The field names of the nested model at `path` within `model`; parts of it may be keys of a mapping."""
    here: Any = model
    for part in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            info = here.model_fields.get(str(part))
            here = info.annotation if info else None
        else:
            here = (get_args(here) or (None,))[-1]  # what a mapping or a list holds
        if isinstance(here, UnionType):  # `Model | None` counts as Model
            here = next(choice for choice in get_args(here) if choice is not type(None))
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, key by key."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = deep_merge(result[key], value) if both else value
    return result
