"""Frozen dataclasses in pickles: equal, without the checks of their construction, and short."""

import copy
import copyreg
import pickle
from array import array

import pytest

from envgym.engine import Generation, Request, SamplingParams
from envgym.types import Action, Message, Observation, Outcome, StopReason, Task, TextPart, ToolCall, VersionSpan

INSTANCES = [
    VersionSpan(1, 2, 3),
    TextPart("x"),
    Message("user", ["a", "b"], name="n"),
    Message("assistant", "", (ToolCall("f", {"x": 1}, "1"),)),
    Task("t", (Message("user", "?"),), {"a": [1]}, {"b": None}, 0.5, 3, "member"),
    Observation(messages=(Message("user", "?"),), sampling={"max_tokens": 3}),
    Action("x", array("i", [1, 2])),
    Outcome.fail("timeout", "too long", retryable=True),
    SamplingParams(4, 0.5, stop=("x",)),
    Request("r", array("i", [1]), SamplingParams(1), 2.0),
    Generation(array("i", [1]), array("f", [-1.0]), StopReason.STOP, (VersionSpan(0, 0, 1),)),
]


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: type(instance).__name__)
def test_a_pickled_instance_is_equal_and_short(instance):
    data = pickle.dumps(instance, protocol=5)
    assert pickle.loads(data) == instance
    assert copy.deepcopy(instance) == instance
    assert type(instance) in copyreg.dispatch_table
    assert (b"_rebuild" in data) == hasattr(type(instance), "__post_init__"), "an instance was checked when it was made"
