"""Scripts that play an environment without a policy."""

import random

from envgym.check.scripts import monkey, value_of
from envgym.types import Observation, ToolSpec


def test_a_monkey_calls_the_tools_that_it_was_offered_also_where_they_are_not_repeated():
    tool = ToolSpec("look", "Look at a place.", {"type": "object", "properties": {"place": {"type": "string"}}})
    script = monkey(0)
    first = script(0, Observation(text="a door", tools=(tool,)))
    later = [script(turn, Observation(text="a wall")) for turn in range(1, 12)]
    called = [call.name for action in (first, *later) for call in action.tool_calls]
    assert called
    assert set(called) == {"look"}
    assert any(action.text for action in later if not action.tool_calls)


def test_a_constant_of_a_schema_may_be_false():
    constants = [0, False, None, "x"]
    assert [value_of({"const": value}, random.Random(0), ["word"]) for value in constants] == constants
