"""Anthropic's messages: what a request may hold, how it is read, and how it is refused."""

from __future__ import annotations

import pytest

from envgym.agents.external.chat_api import Refusal
from envgym.agents.external.messages_api import MessagesRequest, messages_of, tools_of
from envgym.types import Message, ToolCall, ToolSpec

QUESTION = {"role": "user", "content": "?"}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def image(**place):
    return {**place, "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_a_conversation_with_tools_is_read_in_its_order():
    read = messages_of(
        [
            {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Oslo?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
                    {"type": "tool_use", "id": "b", "name": "news", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        [{"type": "text", "text": "You are "}, {"type": "text", "text": "kind."}],
    )
    assert read == (
        Message("system", ["You are ", "kind."]),
        Message("user", ["Weather in ", "Oslo?"]),
        Message("assistant", "I look.", (ToolCall("a", "weather", {"city": "Oslo"}), ToolCall("b", "news"))),
        Message("tool", "rain", tool_call_id="a", name="weather"),
        Message("tool", "", tool_call_id="b", name="news"),
        Message("user", "Be brief."),
    )


def test_tools_of_the_user_are_read():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    [bare, custom] = tools_of(
        [{"name": "now", "input_schema": {"type": "object"}},
         {"type": "custom", "name": "weather", "description": "Tell it.", "input_schema": schema}]
    )  # fmt: skip
    assert (bare, custom) == (ToolSpec("now", "", {"type": "object"}), ToolSpec("weather", "Tell it.", schema))
    assert tools_of(None) == ()


@pytest.mark.parametrize(
    ("choice", "n_tools", "needs_call"),
    [(None, 1, False), ({"type": "auto"}, 1, False), ({"type": "any"}, 1, True), ({"type": "none"}, 0, False)],
)
def test_a_choice_of_tools_is_that_of_chat_completions(choice, n_tools, needs_call):
    tools = [{"name": "now", "input_schema": {}}]
    request = MessagesRequest.parse(
        {"messages": [QUESTION], "max_tokens": 5, "tools": tools, "tool_choice": choice, "stop_sequences": ["a", "b"]}
    )
    assert (len(request.tools), request.needs_call, request.max_tokens) == (n_tools, needs_call, 5)
    assert request.stop == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (None, "the body is a JSON object"),
        ({"messages": []}, "messages is a list of at least one message"),
        ({"messages": ["x"]}, "messages.0: a message's role is user or assistant"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0: a message's role is user or assistant"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is text or a list of blocks, not NoneType"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0 is a block, not str"),
        ({"messages": [{"role": "user", "content": [image()]}]},
         "messages.0.content.0.source: the file of an image cannot be read (it is no image)"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [image()]}]}]},
         "messages.0.content.0.0.source: the file of an image cannot be read (it is no image)"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}]},
         "messages.0.content.0.source: an image is in the request, as base64: nothing is fetched"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [image()]}, QUESTION]},
         "messages.1.content.0: a block of type 'image' of the assistant cannot be read: use text"),
        ({"system": [image()]}, "system.0: a block of type 'image' cannot be read: use text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages.0.content.0: a block of type 'tool_use' of the user cannot be read: use text"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
         "messages.1.content.0.input is an object, not NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
         "messages.0.content.0.text is text, not int"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "The answer is"}]}, "the last message is the assist"),
        ({"system": 3}, "system is text or a list of blocks, not int"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is a whole number of at least 1, not 0"),
        ({"stop_sequences": "x" * 3, "tools": [{"type": "bash_20250124", "name": "bash"}]},
         "tools.0: one is 'bash_20250124', and only tools with an input_schema can be offered"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is an object, not NoneType"),
        ({"stop_sequences": [1]}, "the texts that stop an answer are text or a list of at most 64"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "'tool_choice' cannot be {\"type\": \"tool\", "),
        ({"tool_choice": {"type": []}}, "'tool_choice' cannot be"),
        ({"tool_choice": "any"}, "'tool_choice' cannot be"),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers' cannot be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format' cannot be set"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_its_place(changes, says):
    body = None if changes is None else {"model": "m", "max_tokens": 8, "messages": [QUESTION], **changes}
    with pytest.raises(Refusal) as refusal:
        MessagesRequest.parse(body)
    assert str(refusal.value).startswith(says)
    assert "\n" not in str(refusal.value)
    assert MessagesRequest.error_body(refusal.value) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": str(refusal.value)},
    }
