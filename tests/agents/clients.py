"""Conversations of real clients with a policy: `python clients.py` plays those that standard input lists as JSON.

Each is `[client, url, key, streams, tools, questions]`; standard output gets each one's turns `[text, calls]` as JSON.
"""

from __future__ import annotations

import json
import sys

TOOL = {
    "name": "look_up",
    "description": "Look a name up.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
RESULT = "x is 42"
MAX_TOKENS = 24


def play(client, url, key, streams, tools, questions):
    """Ask the questions one after the other; each call of the tool is answered."""
    ask, turns = CLIENTS[client](url, key, streams, tools), []
    for question in questions:
        text, calls = ask(question)
        turns.append([text, calls])
        while calls:
            text, calls = ask(None)
            turns.append([text, calls])
    return turns


def openai_chat(url, key, streams, tools):
    from openai import OpenAI
    from openai.lib.streaming.chat import ChatCompletionStreamState

    client = OpenAI(base_url=url, api_key=key, max_retries=0)

    def join(chunks, messages):
        state = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(chunk)
        return state.current_completion_snapshot

    return _chat(client.chat.completions.create, join, streams, tools, {"model": "policy"})


def _chat(create, join, streams, tools, settings):
    messages = []
    if tools:
        settings["tools"] = [{"type": "function", "function": TOOL}]

    def ask(question):
        if question is not None:
            messages.append({"role": "user", "content": question})
        asked = {**settings, "messages": messages, "max_tokens": MAX_TOKENS}
        if streams:
            chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
            completion = join(chunks, messages)
        else:
            completion = create(**asked)
        assert completion.usage.completion_tokens > 0
        message = completion.choices[0].message
        sent = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        for call in sent.get("tool_calls", []):
            call["function"].pop("parsed_arguments", None)  # of the library's own
        messages.append(sent)
        calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []]
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        return message.content or "", calls

    return ask


def openai_responses(url, key, streams, tools):
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    items = []
    settings = {"model": "policy", "max_output_tokens": MAX_TOKENS}
    if tools:
        settings["tools"] = [{"type": "function", "strict": False, **TOOL}]

    def ask(question):
        if question is not None:
            items.append({"role": "user", "content": question})
        if streams:
            with client.responses.stream(**settings, input=items) as events:
                first, *_, last = events
            assert (first.type, last.type) == ("response.created", f"response.{last.response.status}")
            response = last.response
        else:
            response = client.responses.create(**settings, input=items)
        assert response.usage.output_tokens == len(response.output[-1].generation_token_ids)
        items.extend(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output)
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        return response.output_text, [[call.name, json.loads(call.arguments)] for call in calls]

    return ask


def anthropic_messages(url, key, streams, tools):
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
    messages = []
    settings = {"model": "policy", "max_tokens": MAX_TOKENS, "system": [{"type": "text", "text": "Be brief."}]}
    if tools:
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        settings |= {"tools": [tool], "tool_choice": {"type": "auto"}}

    def ask(question):
        if question is not None:
            messages.append({"role": "user", "content": question})
        counted = {name: value for name, value in settings.items() if name != "max_tokens"}
        assert client.messages.count_tokens(messages=messages, **counted).input_tokens > 0
        if streams:
            with client.messages.stream(messages=messages, **settings) as events:
                seen = list(events)
                message = events.get_final_message()
            assert (seen[0].type, seen[-1].type) == ("message_start", "message_stop")
            text = "".join(event.text for event in seen if event.type == "text")
            assert text == "".join(block.text for block in message.content if block.type == "text")
        else:
            message = client.messages.create(messages=messages, **settings)
        assert message.usage.output_tokens > 0
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert bool(calls) == (message.stop_reason == "tool_use")
        if calls:
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
            messages.append({"role": "user", "content": results})
        texts = [block.text for block in message.content if block.type == "text"]
        return "".join(texts), [[call.name, call.input] for call in calls]

    return ask


def litellm_chat(url, key, streams, tools):
    return _litellm("openai/policy", url, key, streams, tools)


def litellm_messages(url, key, streams, tools):
    return _litellm("anthropic/policy", url.removesuffix("/v1"), key, streams, tools)


def _litellm(model, url, key, streams, tools):
    import litellm

    settings = {"model": model, "api_base": url, "api_key": key, "num_retries": 0}
    return _chat(litellm.completion, litellm.stream_chunk_builder, streams, tools, settings)


CLIENTS = {
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
    "anthropic_messages": anthropic_messages,
    "litellm_chat": litellm_chat,
    "litellm_messages": litellm_messages,
}

if __name__ == "__main__":
    print(json.dumps([play(*conversation) for conversation in json.load(sys.stdin)]))
