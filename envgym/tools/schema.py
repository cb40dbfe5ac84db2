"""A function's parameters: the JSON schema of its arguments, and the check of a call against it.

Both are those of a pydantic model with one field per parameter. Descriptions come from the annotations, else from the
docstring in Google, NumPy or reST style.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from envgym.errors import ConfigError, did_you_mean

_MAPS_OF_SCHEMAS = ("properties", "$defs", "patternProperties", "dependentSchemas")
_VALUES = ("default", "const", "enum", "examples")
_SHOWN_PROBLEMS = 3
_ERROR_LENGTH = 300


_cache: WeakKeyDictionary[Callable[..., Any], dict[bool, Parameters]] = WeakKeyDictionary()


class WrongArguments(Exception):
    """Invalid arguments of a tool call; the message is one line for the policy."""


def read_parameters(function: Callable[..., Any], noun: str) -> Parameters:
    """The parameters of a function; see `Parameters`. Cached, because methods are offered again in each episode."""
    plain = getattr(function, "__func__", function)
    if not inspect.isfunction(plain):
        return Parameters(function, noun)
    kinds = _cache.setdefault(plain, {})
    is_method = inspect.ismethod(function)
    if is_method not in kinds:
        kinds[is_method] = Parameters(function, noun)
    return kinds[is_method]


class Parameters:
    """The parameters of a function; `noun` is its name in messages ("tool 'search'").

    `description` is the docstring before its sections, `schema` the JSON schema of the arguments. Raises `ConfigError`
    for a function without a schema.
    """

    def __init__(self, function: Callable[..., Any], noun: str) -> None:
        self._names, self._positional = [], []
        fields: dict[str, Any] = {}
        hints = _hints(function, noun)
        self.description, descriptions = _docstring(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(
                    f"{noun} has the parameter {parameter}: a tool needs a fixed number of named parameters"
                )
            if parameter.name not in hints:
                raise ConfigError(f"{noun}: parameter {parameter.name!r} needs a type, as in {parameter.name}: str")
            if parameter.kind == parameter.POSITIONAL_ONLY:
                self._positional.append(parameter.name)
            self._names.append(parameter.name)
            hint, default = _describe_hint(hints[parameter.name]), parameter.default
            if isinstance(default, FieldInfo):
                hint, default = Annotated[hint, default], default.get_default(call_default_factory=True)
            default = ... if default is parameter.empty or default is PydanticUndefined else default
            # Fields are numbered: `copy` or `model_config` are not valid names in a pydantic model.
            fields[f"field_{len(fields)}"] = (hint, Field(default, alias=parameter.name))
            _check_type(parameter.name, hints[parameter.name], noun)
        self._model: type[BaseModel] = create_model("Arguments", **fields)
        self.schema = {"type": "object", "properties": {}, **_schema(self._model.model_json_schema)}
        for name, schema in self.schema["properties"].items():
            if "description" not in schema and name in descriptions:
                schema["description"] = descriptions[name]

    def read(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments to call the function with. Raises `WrongArguments`."""
        problems = [self._unknown(str(name)) for name in arguments if name not in self._names]
        try:
            values = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            problems += [_describe(problem) for problem in error.errors(include_url=False)]
        if problems:
            raise WrongArguments(" ".join("; ".join(problems[:_SHOWN_PROBLEMS]).split()))
        read = {name: getattr(values, f"field_{index}") for index, name in enumerate(self._names)}
        return [read.pop(name) for name in self._positional], read

    def _unknown(self, name: str) -> str:
        hint = did_you_mean(name, self._names) or f" There is {', '.join(self._names) or 'none'}."
        return f"there is no argument {name[:60]!r}.{hint}"


def _describe(problem: ErrorDetails) -> str:
    name = ".".join(map(str, problem["loc"]))[:60]
    if problem["type"] == "missing":
        return f"argument {name!r} is missing"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"argument {name!r}: {reason[:1].lower()}{reason[1:]}, not {problem['input']!r:.60}"


def _hints(function: Callable[..., Any], noun: str) -> dict[str, Any]:
    """The parameters' types, with string annotations resolved."""
    annotated = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(annotated, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ConfigError(f"{noun}: its types cannot be resolved: {error}") from None
    hints.pop("return", None)
    return hints


def _describe_hint(hint: Any) -> Any:
    """Convert the string in `Annotated[int, "description"]` to pydantic's `Field(description=…)`."""
    if get_origin(hint) is not Annotated:
        return hint
    plain, *extras = get_args(hint)
    extras = [Field(description=extra) if isinstance(extra, str) else extra for extra in extras]
    return Annotated[(plain, *extras)]


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """A docstring's description of the function, and of each parameter."""
    from docstring_parser import ParseError, parse

    text = inspect.getdoc(function) or ""
    if not inspect.isroutine(function):  # an instance: the docstring of `__call__`, else of its class
        text = inspect.getdoc(type(function).__call__) or text
    try:
        docstring = parse(text)
    except ParseError:
        return text.strip(), {}
    descriptions = {}
    for parameter in docstring.params:
        for name in parameter.arg_name.split(","):  # NumPy's `a, b : int`
            descriptions[name.strip()] = " ".join((parameter.description or "").split())
    return (docstring.description or "").strip(), {name: text for name, text in descriptions.items() if text}


def _check_type(name: str, hint: Any, noun: str) -> None:
    """Raise `ConfigError` for a parameter whose type pydantic cannot describe."""
    try:
        _schema(TypeAdapter(hint).json_schema)
    except PydanticUserError as error:
        kind = getattr(hint, "__name__", None) or str(hint)
        # For other codes pydantic's message only explains how to disable its checks.
        reason = f" ({error.message.splitlines()[0]})" if error.code == "typed-dict-version" else ""
        raise ConfigError(f"{noun}: parameter {name!r} is a {kind}, which has no JSON schema{reason}") from None


def _schema(make_schema: Callable[[], dict[str, Any]]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic warns when it omits a default that is not JSON
        return without_titles(make_schema())


def without_titles(schema: Any) -> Any:
    """A schema without the titles that pydantic derives from every name."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if value is None and key not in _VALUES:  # a server may send an empty field so
            continue
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            result[key] = {name: without_titles(inner) for name, inner in value.items()}
        elif key in _VALUES:
            result[key] = value
        elif key != "title":
            result[key] = without_titles(value)
    return result


def to_line(text: str) -> str:
    """The text in one line, truncated."""
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_LENGTH else f"{line[:_ERROR_LENGTH]}…"
