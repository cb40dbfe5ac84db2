"""What the policy is told of a typed function, and what it is told of arguments that do not fit."""

import asyncio
import enum
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from envgym.errors import ConfigError
from envgym.tools import Tool
from envgym.tools.schema import Parameters, WrongArguments, without_titles


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A place."""

    x: int
    y: int = 0
    title: str = Field("", description="What stands there.")


class Range(TypedDict, total=False):
    low: float
    high: float


@dataclass
class Box:
    width: int


def google(word: str, n: int = 3) -> str:
    """Look a word up.

    It is searched for in all volumes.

    Args:
        word (str): The word
            to look up.
        n: How many entries.

    Returns:
        The entries.
    """
    return word * n


def numpy(word: str, n: int = 3) -> str:
    """Look a word up.

    It is searched for in all volumes.

    Parameters
    ----------
    word : str
        The word
        to look up.
    n : int, optional
        How many entries.

    Returns
    -------
    str
        The entries.
    """
    return word * n


def rest(word: str, n: int = 3) -> str:
    """Look a word up.

    It is searched for in all volumes.

    :param word: The word
        to look up.
    :param int n: How many entries.
    :returns: The entries.
    """
    return word * n


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_the_schema_of_a_documented_function(function):
    assert Tool.from_function(function).spec.as_dict() == {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": "Look a word up.\n\nIt is searched for in all volumes.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "The word to look up."},
                    "n": {"type": "integer", "default": 3, "description": "How many entries."},
                },
                "required": ["word"],
            },
        },
    }


NULL = {"type": "null"}
COUNT = {"type": "integer", "description": "One or more."}
PAIR = {"type": "array", "maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "string"}]}
TYPES = [
    (int, {"type": "integer"}),
    (float, {"type": "number"}),
    (bool, {"type": "boolean"}),
    (str, {"type": "string"}),
    (Any, {}),
    (list[int], {"type": "array", "items": {"type": "integer"}}),
    (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
    (Literal[1], {"type": "integer", "const": 1}),
    (int | None, {"anyOf": [{"type": "integer"}, NULL]}),
    (Optional[str], {"anyOf": [{"type": "string"}, NULL]}),  # noqa: UP045
    (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    (Annotated[int, Field(ge=1, description="One or more.")], {**COUNT, "minimum": 1}),
    (Annotated[int, "One or more."], COUNT),
    (tuple[int, str], PAIR),
]


@pytest.mark.parametrize(("hint", "schema"), TYPES, ids=[str(hint) for hint, _ in TYPES])
def test_the_schema_of_a_type(hint, schema):
    def function(value):
        pass

    function.__annotations__ = {"value": hint}
    assert Tool.from_function(function).spec.parameters == {
        "type": "object", "properties": {"value": schema}, "required": ["value"],
    }  # fmt: skip


def test_nested_types_are_described_once():
    def place(point: Point, others: list[Point], colour: Colour, span: Range, box: Box) -> None:
        pass

    schema = Tool.from_function(place).spec.parameters
    assert schema["$defs"]["Point"] == {
        "type": "object",
        "description": "A place.",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "integer", "default": 0},
            # a property may be called `title`; the titles that pydantic makes up are gone
            "title": {"type": "string", "default": "", "description": "What stands there."},
        },
        "required": ["x"],
    }
    assert schema["$defs"]["Colour"] == {"type": "string", "enum": ["red", "blue"]}
    assert schema["properties"]["point"] == {"$ref": "#/$defs/Point"}
    assert schema["properties"]["others"] == {"type": "array", "items": {"$ref": "#/$defs/Point"}}
    assert '"title": "' not in json.dumps(schema)


def test_without_parameters_or_docstring():
    def now() -> str:
        return "late"

    assert Tool.from_function(now).spec.as_dict()["function"] == {
        "name": "now", "description": "", "parameters": {"type": "object", "properties": {}},
    }  # fmt: skip


def test_the_annotation_says_more_than_the_docstring():
    def function(n: Annotated[int, Field(description="From here.")], m: "int" = 1):
        """Do it.

        Args:
            n: From there.
            m, k: The other one.
        """

    properties = Tool.from_function(function).spec.parameters["properties"]
    assert [properties[name]["description"] for name in "nm"] == ["From here.", "The other one."]


def test_methods_and_callable_instances():
    class Shop:
        def price(self, item: str) -> int:
            """The price of an item."""
            return len(item)

        def __call__(self, item: str) -> int:
            """Buy an item."""
            return len(item)

    shop = Shop()
    assert Tool.from_function(shop.price).spec.parameters["properties"] == {"item": {"type": "string"}}
    assert Tool.from_function(shop).spec.name == "Shop"
    assert Tool.from_function(shop, name="buy").spec.as_dict()["function"] == {
        "name": "buy",
        "description": "Buy an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    }


def test_what_a_method_takes_is_found_out_once():
    """Each episode has an instance of its own, and offers its methods anew."""

    class Shop:
        def __init__(self, price):
            self._price = price

        def price(self, item: str) -> int:
            return self._price

    one, other = Tool.from_function(Shop(1).price), Tool.from_function(Shop(2).price)
    assert one.spec.parameters is other.spec.parameters
    assert [asyncio.run(tool.run({"item": "tea"})) for tool in (one, other)] == [1, 2]
    with pytest.raises(ConfigError, match="parameter 'self' needs a type"):
        Tool.from_function(Shop.price)


def untyped(x):
    pass


def anything(*words: str):
    pass


def options(**options: int):
    pass


def callback(then: Callable[[], int]):
    pass


def instance(shop: inspect.Signature):
    pass


def unknown(x: "NoSuchType"):  # noqa: F821
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, r"tool 'untyped': parameter 'x' needs a type, as in x: str"),
        (anything, r"tool 'anything' has the parameter \*words: str: a tool needs a fixed number"),
        (options, r"tool 'options' has the parameter \*\*options: int"),
        (callback, r"tool 'callback': parameter 'then' is a Callable, which has no JSON schema"),
        (instance, r"tool 'instance': parameter 'shop' is a Signature, which has no JSON schema"),
        (unknown, r"tool 'unknown': its types cannot be resolved: name 'NoSuchType' is not defined"),
        (lambda: 1, r"not '<lambda>': give it a name"),
        ("search", r"a tool is a function, not 'search'"),
    ],
)
def test_what_cannot_be_a_tool(function, message):
    with pytest.raises(ConfigError, match=message) as error:
        Tool.from_function(function)
    assert "\n" not in str(error.value)


# -- arguments --------------------------------------------------------------------------------------------


def test_arguments_become_what_the_types_say():
    def place(point: Point, colour: Colour, /, n: int, copy: bool = False, *, model_config: float | None = None):
        pass

    positional, named = Parameters(place, "tool 'place'").read({"point": {"x": "3"}, "colour": "red", "n": 2.0})
    assert positional == [Point(x=3), Colour.RED]
    assert named == {"n": 2, "copy": False, "model_config": None}


def test_defaults_are_not_shared_between_calls():
    def collect(words: list[str] = []) -> None:  # noqa: B006
        pass

    parameters = Parameters(collect, "tool 'collect'")
    parameters.read({})[1]["words"].append("x")
    assert parameters.read({})[1] == {"words": []}


def test_a_default_may_be_a_pydantic_field():
    def look(word: str = Field(description="The word.", min_length=2), n: int = Field(3, ge=1)) -> None:
        pass

    parameters = Parameters(look, "tool 'look'")
    assert parameters.schema == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "minLength": 2, "description": "The word."},
            "n": {"type": "integer", "default": 3, "minimum": 1},
        },
        "required": ["word"],
    }
    assert parameters.read({"word": "ab"}) == ([], {"word": "ab", "n": 3})
    with pytest.raises(WrongArguments, match="argument 'n': input should be greater than or equal to 1, not 0"):
        parameters.read({"word": "ab", "n": 0})


def test_a_default_that_is_not_json_is_left_out_of_the_schema(recwarn):
    def wait(until: Any = object()) -> None:  # noqa: B008
        pass

    assert Tool.from_function(wait).spec.parameters == {"type": "object", "properties": {"until": {}}}
    assert not recwarn.list


NOT_INT = "input should be a valid integer"
NOT_READ = f"{NOT_INT}, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({}, ["argument 'word' is missing"]),
        ({"word": "a", "m": 1}, ["there is no argument 'm'. There is word, n, at."]),
        ({"wrd": "a"}, ["there is no argument 'wrd'. Did you mean 'word'?", "argument 'word' is missing"]),
        ({"word": 3}, ["argument 'word': input should be a valid string, not 3"]),
        ({"word": "a", "n": "many"}, [f"argument 'n': {NOT_READ}, not 'many'"]),
        ({"word": "a", "at": {"x": 1, "y": "?"}}, [f"argument 'at.y': {NOT_READ}, not '?'"]),
        ({"word": "a", "n": None, "at": {}}, [f"argument 'n': {NOT_INT}, not None", "argument 'at.x' is missing"]),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, problems):
    def look(word: str, n: int = 3, at: Point = Point(x=1)) -> None:  # noqa: B008
        pass

    with pytest.raises(WrongArguments) as error:
        Parameters(look, "tool 'look'").read(arguments)
    assert str(error.value) == "; ".join(problems)


def test_a_long_or_hostile_value_stays_in_one_short_line():
    def look(n: int) -> None:
        pass

    with pytest.raises(WrongArguments) as error:
        Parameters(look, "tool 'look'").read({"n": "a\nb" * 10_000, "x\ny" * 1000: 1})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_empty_fields_of_a_servers_schema_are_left_out():
    schema = {"type": "object", "properties": None, "required": None, "default": None}
    assert without_titles(schema) == {"type": "object", "default": None}
