"""Responses API objects: what is said in them is read back, and what a real client's models require is there."""

from __future__ import annotations

import json

import pytest

from envgym.agents.external import responses_api as responses
from envgym.types import Message, TextPart, ToolCall, ToolSpec

WEATHER = ToolSpec("get_weather", "Tell the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
TALK = (
    Message("system", "Be brief."),
    Message("user", "Weather in Oslo and Rome?"),
    Message(
        "assistant",
        (TextPart("I look."),),
        (ToolCall("call_1", "get_weather", {"city": "Oslo"}), ToolCall("call_2", "get_weather", {"city": "Rome"})),
    ),
    Message("tool", (TextPart("rain"),), tool_call_id="call_1", name="get_weather"),
    Message("tool", (TextPart("sun"),), tool_call_id="call_2", name="get_weather"),
    Message("assistant", "Rain and sun."),
)


def test_a_conversation_is_read_back_as_it_was_said():
    items = responses.input_items(TALK)
    assert [item["type"] for item in items] == [
        "message", "message", "message", "function_call", "function_call", "function_call_output",
        "function_call_output", "message",
    ]  # fmt: skip
    assert json.loads(items[3]["arguments"]) == {"city": "Oslo"}
    assert responses.messages_of(json.loads(json.dumps(items))) == TALK


def test_input_may_be_text_and_instructions_come_first():
    assert responses.messages_of("hi", "Be brief.") == (Message("system", "Be brief."), Message("user", "hi"))


def test_developers_are_the_system_and_reasoning_is_left_out():
    said = responses.messages_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
    )
    assert [(message.role, message.text) for message in said] == [("system", "Be brief."), ("user", "ab"),
                                                                   ("assistant", "")]  # fmt: skip
    assert said[2].tool_calls == (ToolCall("c", "f", {}),)


@pytest.mark.parametrize(
    ("input", "says"),
    [
        (3, "input is text or a list of items, not int"),
        (["x"], "input item 0: 'str' object has no attribute 'get'"),
        ([{"role": "tool", "content": "x"}], "role is one of user, assistant, system, developer, not 'tool'"),
        ([{"role": "user"}], "content of a message is text or a list of its parts, not NoneType"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b"}]}],
            "input item 0: an image is not given as the text 'http://a/b': .*; addresses of the web are not read",
        ),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "'input_image' without an image"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "a part of type 'input_file'"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}], "a JSON object as text"),
        ([{"type": "function_call", "call_id": "c", "arguments": "{}"}], "'name' is text, not NoneType"),
        ([{"role": "user", "content": [{"type": "input_text", "text": 3}]}], "a part of type 'input_text'"),
        ([{"type": "computer_call"}], "the type 'computer_call' is no message, call or result"),
    ],
)
def test_what_cannot_be_read_is_named(input, says):
    with pytest.raises(responses.MalformedItem, match=says.replace("[", r"\[")):
        responses.messages_of(input)


def test_instructions_are_text():
    with pytest.raises(responses.MalformedItem, match="instructions are text, not int"):
        responses.messages_of("hi", 3)


def test_tools_are_read_back():
    assert responses.tools_of(responses.tool_items([WEATHER])) == (WEATHER,)
    assert responses.tools_of(None) == ()
    [bare] = responses.tools_of([{"type": "function", "name": "now"}])
    assert bare.parameters == {"type": "object", "properties": {}}
    with pytest.raises(responses.MalformedItem, match="tools: one is 'web_search', and only function tools"):
        responses.tools_of([{"type": "web_search"}])


def test_a_call_that_cannot_be_read_is_no_item():
    broken = Message("assistant", (TextPart("<tool_call>{"),), (ToolCall("x", "f", error="not JSON"),))
    [item] = responses.output_items(broken)
    assert (item["type"], item["content"][0]["text"]) == ("message", "<tool_call>{")


def test_tokens_are_on_the_last_item_of_a_call():
    items = responses.with_tokens(responses.output_items(TALK[2]), [1, 2], (3, 4), (-0.5, -1.0))
    assert [set(responses.TOKEN_FIELDS) & set(item) for item in items] == [set(), set(), set(responses.TOKEN_FIELDS)]
    assert [items[-1][name] for name in responses.TOKEN_FIELDS] == [[1, 2], [3, 4], [-0.5, -1.0]]


def test_a_response_is_what_the_real_client_reads():
    models = pytest.importorskip("openai.types.responses")
    whole = responses.response(
        responses.output_items(TALK[2]), model="m", tools=responses.tool_items([WEATHER]), usage=responses.usage(5, 2)
    )
    read = models.Response.model_validate(json.loads(json.dumps(whole)), strict=False)
    assert (read.status, read.object, read.usage.total_tokens) == ("completed", "response", 7)
    assert [type(item).__name__ for item in read.output] == [
        "ResponseOutputMessage", "ResponseFunctionToolCall", "ResponseFunctionToolCall",
    ]  # fmt: skip
    assert read.tools[0].name == "get_weather"


def test_a_response_that_was_cut_says_so():
    cut = responses.response([], truncated=True, metadata={"a": "b"})
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["metadata"] == {"a": "b"}
