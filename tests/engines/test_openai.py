"""An API as the policy, against a real server that misbehaves in every way a real one does."""

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

import envgym
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.engine import ChatRequest, SamplingParams
from envgym.engines.openai import OpenAIEngine
from envgym.env import EnvSpec
from envgym.episodes.record import from_record, to_record
from envgym.errors import ConfigError, InvalidOutcome, InvalidStep, PromptTooLong
from envgym.images import ImageFolder
from envgym.jobs.components import attempt_settings, make_agent, open_runtime, stage_context_in, start_sampling
from envgym.net import client as http
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.run_folder import RunFolder
from envgym.services import Chat
from envgym.types import Message, Status, StopReason, Task, ToolCall, ToolSpec

ENVGYM = Path(sys.executable).with_name("envgym")
KEY = "sk-very-secret-0123456789"
ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, top_p=0.9, seed=5)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("TEST_KEY", KEY)


def says(text, *, reason="stop", usage=(7, 2), **message):
    counts = {"usage": dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True))} if usage else {}
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}
    return web.json_response({"choices": [choice], **counts})


def call(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def ask(serving, handler, *, tools=(), sampling=SAMPLING, check=False, messages=None, **settings):
    """The reply (or the error) to one request, and the engine's counters."""

    async def main():
        async with serving(handler) as url:
            settings_of = {"timeout": 5.0, "tries": 3, "concurrency": 4, "api_key_env": "TEST_KEY", **settings}
            engine = OpenAIEngine(Chat(model="m", base_url=f"{url}/v1", **settings_of))
            request = ChatRequest("eval/1.0000", messages or (Message("user", "?"),), tuple(tools), sampling)
            try:
                return await (engine.check(sampling) if check else engine.chat(request)), engine.counters
            except envgym.errors.EnvgymError as error:
                return error, engine.counters
            finally:
                await engine.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


def answering(answer):
    async def handler(request):
        return answer() if callable(answer) else web.json_response(answer[1], status=answer[0])

    return handler


# -- what is asked ----------------------------------------------------------------------------------------------


def test_a_turn_is_asked_as_the_api_wants_it(serving):
    asked = []

    async def handler(request):
        assert request.path == "/v1/chat/completions"
        asked.append((request.headers["Authorization"], await request.json()))
        return says("42")

    messages = (
        Message("user", "add"),
        Message("assistant", (), (ToolCall("x", "add", {"a": 1}),)),
        Message("tool", (envgym.types.TextPart("3"),), (), "x", "add"),
    )
    reply, counters = ask(serving, handler, tools=[ADD], messages=messages)
    assert (reply.message.text, reply.stop_reason) == ("42", StopReason.STOP)
    assert (reply.prompt_tokens, reply.completion_tokens) == (7, 2)
    assert dict(counters) == {"requests": 1, "prompt_tokens": 7, "completion_tokens": 2}
    [(authorization, body)] = asked
    assert authorization == f"Bearer {KEY}"
    assert [message["role"] for message in body.pop("messages")] == ["user", "assistant", "tool"]
    assert body == {
        "model": "m", "max_tokens": 8, "temperature": 0.0, "top_p": 0.9, "seed": 5, "tools": [ADD.as_dict()]
    }  # fmt: skip


def test_a_picture_is_asked_about_as_a_data_uri(serving):
    asked = []

    async def handler(request):
        asked.append((await request.json())["messages"])
        return says("red")

    picture = envgym.types.ImagePart.from_value(np.zeros((4, 6, 3), np.uint8))
    prompt = Message("user", ["Which ", picture, "<|im_end|>?"], from_others=True)
    ask(serving, handler, messages=(Message("user", "Hello"), prompt))
    [[hello, message]] = asked
    assert hello == {"role": "user", "content": "Hello"}
    url = f"data:image/png;base64,{base64.b64encode(picture.data).decode()}"
    assert message["content"] == [
        {"type": "text", "text": "Which "},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "< |im_end|>?"},
    ]


def test_a_stored_picture_is_read_and_those_of_tools_results_follow_them(serving, tmp_path):
    """OpenAI's API takes images in messages of the user alone."""
    asked = []

    async def handler(request):
        asked.append((await request.json())["messages"])
        return says("red")

    pictures = [envgym.types.ImagePart.from_value(np.full((4, 6, 3), n, np.uint8)) for n in range(2)]
    stored = [ImageFolder(tmp_path).store(picture) for picture in pictures]
    assert stored[0].data is None
    calls = tuple(ToolCall(f"c{n}", "look", {}) for n in range(2))
    results = [Message("tool", ["See ", image], tool_call_id=f"c{n}") for n, image in enumerate(stored)]
    ask(serving, handler, messages=(Message("user", "?"), Message("assistant", "", calls), *results))
    [[_, _, first, second, images]] = asked
    assert first == {"role": "tool", "content": "See [image 6 x 4]", "tool_call_id": "c0"}
    assert second["content"] == "See [image 6 x 4]"
    urls = [f"data:image/png;base64,{base64.b64encode(picture.data).decode()}" for picture in pictures]
    assert images["role"] == "user"
    assert [part["image_url"]["url"] for part in images["content"][1:]] == urls


def test_special_tokens_that_tools_spell_are_broken_up(serving):
    """At any depth of a schema, which may be a server's."""
    asked = []

    async def handler(request):
        asked.append((await request.json())["tools"])
        return says("42")

    word, broken = "<|im_end|>[|system|]", "< |im_end|>[ |system|]"
    schema = {"properties": {"a": {"anyOf": [{"enum": [word, 1]}, {"title": word, "default": {word: [word]}}]}}}
    ask(serving, handler, tools=[ToolSpec("add", word, schema)])
    [[tool]] = asked
    assert tool["function"] == {
        "name": "add",
        "description": broken,
        "parameters": {
            "properties": {"a": {"anyOf": [{"enum": [broken, 1]}, {"title": broken, "default": {broken: [broken]}}]}}
        },
    }


def test_special_tokens_are_broken_up_after_the_prompt_alone(serving):
    asked = []

    async def handler(request):
        asked.append([message["content"] for message in (await request.json())["messages"]])
        return says("42")

    tool = Message("tool", (envgym.types.TextPart("<|im_end|>"),), (), "x", "add")
    spelled = [Message(role, "<|im_end|>") for role in ("system", "user", "assistant", "user")]
    ask(serving, handler, messages=(*spelled, tool))
    ask(serving, handler, messages=(spelled[0], tool))
    assert asked == [["<|im_end|>"] * 2 + ["< |im_end|>"] * 3, ["<|im_end|>", "< |im_end|>"]]


def test_extra_renames_and_removes_fields_and_what_is_unset_is_not_sent(serving):
    asked = []

    async def handler(request):
        asked.append(await request.json())
        return says("42")

    sampling = SamplingParams(max_tokens=8, top_k=3)
    extra = {"max_tokens": None, "max_completion_tokens": 9, "top_p": None, "stop": ["\n"], "top_k": None}
    ask(serving, handler, sampling=sampling, extra=extra)
    ask(serving, handler, sampling=sampling, api_key_env="")
    assert [set(body) - {"model", "messages"} for body in asked] == [
        {"max_completion_tokens", "temperature", "stop"},
        {"max_tokens", "temperature", "top_p", "top_k"},
    ]


def test_a_stop_text_of_an_environment_is_sent(serving):
    """A text, as environments give it, and several."""
    asked = []

    async def handler(request):
        asked.append((await request.json()).get("stop"))
        return says("42")

    for stop in ("Observation:", ["a", "b"]):
        ask(serving, handler, sampling=SamplingParams(max_tokens=8).with_overrides({"stop": stop}))
    assert asked == [["Observation:"], ["a", "b"]]
    with pytest.raises(InvalidStep, match="stop"):
        SamplingParams(max_tokens=8).with_overrides({"stop": ""})


# -- what is answered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "stopped"),
    [("stop", "stop"), ("tool_calls", "stop"), (None, "stop"), ("eos", "stop"), ("length", "length")],
)
def test_why_a_turn_ended(serving, reason, stopped):
    reply, _ = ask(serving, answering(lambda: says("a part", reason=reason)))
    assert (reply.message.text, reply.stop_reason) == ("a part", StopReason(stopped))


@pytest.mark.parametrize("count", [-4, True, 10**23, 2**31, 1.5, "7", None, [7]])
def test_a_count_that_is_no_number_of_tokens_is_none(serving, count):
    reply, counters = ask(serving, answering(lambda: says("fine", usage=(count, 2))))
    assert (reply.prompt_tokens, reply.completion_tokens) == (None, 2)
    assert counters["prompt_tokens"] == 0


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": "so", "reasoning_content": "hm"}, "so"),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]}, "so"),
        ({"content": "half \ud83d of it"}, "half ? of it"),
    ],
)
def test_the_text_of_an_answer(serving, message, text):
    answer = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]}
    reply, counters = ask(serving, answering((200, answer)))
    assert reply.message.text == text
    assert (reply.prompt_tokens, reply.completion_tokens) == (None, None)
    assert counters["failures"] == 0


@pytest.mark.parametrize(
    ("written", "name", "arguments", "error"),
    [
        (call("add", '{"a": 1}'), "add", {"a": 1}, ""),
        (call("add", ""), "add", {}, ""),
        (call("add", {"a": 1}), "add", {"a": 1}, ""),  # some servers parse it themselves
        (call("add", '{"a": 1'), "add", {}, "not valid JSON"),
        (call("add", '{"a": 1} and'), "add", {}, "not one JSON object"),
        (call("add", "[1]"), "add", {}, "not one JSON object"),
        (call("sub", '{"a": 1}'), "sub", {}, "There is no tool 'sub'; the tools are: add"),
        (call(None, "{}"), "", {}, "names a tool"),
        ("nonsense", "", {}, "names a tool"),
    ],
)
def test_tool_calls_are_read_and_broken_ones_say_what_is_wrong(serving, written, name, arguments, error):
    reply, _ = ask(serving, answering(lambda: says(None, reason="tool_calls", tool_calls=[written])), tools=[ADD])
    [read] = reply.message.tool_calls
    assert (read.name, read.arguments) == (name, arguments)
    assert bool(read.error) == bool(error)
    assert error in read.error
    assert read.id == ("c1" if isinstance(written, dict) else read.id) != ""


def test_calls_have_ids_of_their_own_and_none_are_read_where_none_were_offered(serving):
    handler = answering(
        lambda: says("", tool_calls=[call("add", "{}", ""), call("add", "{}", "c"), call("add", "{}", "c")])
    )
    reply, _ = ask(serving, handler, tools=[ADD])
    ids = [read.id for read in reply.message.tool_calls]
    assert ids[1] == "c"
    assert len({*ids, ""}) == 4
    reply, _ = ask(serving, handler)
    assert reply.message.tool_calls == ()


# -- what goes wrong --------------------------------------------------------------------------------------------


async def cut_short(request):
    """Close the connection in the middle of an answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


FAULTS = {
    "429": lambda: web.Response(status=429, headers={"Retry-After": "0.05"}),
    "500": lambda: web.json_response({"error": {"message": "boom"}}, status=500),
    "html": lambda: web.Response(text="<html>maintenance</html>", content_type="text/html"),
    "garbage": lambda: web.Response(body=b"\xff\xfe{"),
    "a list": lambda: web.json_response(["what"]),
    "no choice": lambda: web.json_response({"choices": []}),
    "no message": lambda: web.json_response({"choices": [{"finish_reason": "stop"}]}),
    "an error with 200": lambda: web.json_response({"error": {"message": "overloaded"}}),
    "given up": lambda: says("", reason="abort"),
}


def faulty(fault, faults, then):
    """A handler that fails `faults` times and then answers by `then`; `seen` counts its requests."""
    seen = []

    async def handler(request):
        seen.append(request)
        if len(seen) > faults:
            return then(request)
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "cut short":
            return await cut_short(request)
        return FAULTS[fault]()

    return handler, seen


@pytest.mark.parametrize("fault", [*FAULTS, "hang", "cut short"])
def test_a_passing_fault_is_ridden_out(serving, fault):
    handler, seen = faulty(fault, 2, lambda request: says("fine"))
    reply, counters = ask(serving, handler, timeout=1.0)
    assert reply.message.text == "fine"
    assert (len(seen), counters["requests"], counters["retries"], counters["failures"]) == (3, 3, 2, 0)


@pytest.mark.parametrize("fault", [*FAULTS, "hang", "cut short"])
def test_a_lasting_fault_is_a_failure_of_the_engine_that_may_pass(serving, fault):
    handler, seen = faulty(fault, 9, lambda request: says("fine"))
    error, counters = ask(serving, handler, timeout=1.0)
    assert isinstance(error, InvalidOutcome)
    assert (error.kind, error.retryable) == ("engine", True)
    assert re.match(r"m at http://\S+/v1 .* in 3 tries$", str(error))
    assert (len(seen), counters["requests"], counters["failures"]) == (3, 3, 1)


def test_a_pause_beyond_measure_is_not_waited_for(serving):
    handler = answering(lambda: web.Response(status=429, headers={"Retry-After": "86400"}))
    error, counters = ask(serving, handler)
    assert "asks to wait 86400 s" in str(error)
    assert counters["requests"] == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((401, {"error": {"message": f"bad key {KEY}"}}), "engine"),
        ((400, {"error": {"message": "top_p is not supported", "code": "unsupported_parameter"}}), "engine"),
        ((413, {"error": "the body is too large"}), "engine"),
    ],
)
def test_a_refusal_is_final_and_tells_no_secret(serving, answer, kind):
    error, counters = ask(serving, answering(answer))
    assert (error.kind, error.retryable, counters["requests"]) == (kind, False, 1)
    assert KEY not in str(error)


def test_an_answer_that_a_filter_withheld_is_no_answer(serving):
    error, counters = ask(serving, answering(lambda: says("", reason="content_filter")))
    assert (error.kind, error.retryable, counters["failures"]) == ("content_filter", False, 1)


@pytest.mark.parametrize(
    "answer",
    [
        (400, {"error": {"message": "Too long.", "code": "context_length_exceeded"}}),
        (400, {"error": {"message": "This model's maximum context length is 512 tokens. However, your prompt …"}}),
        (400, {"error": {"message": "prompt is too long: 213462 tokens > 200000 maximum"}}),
        (400, {"error": {"message": "the request exceeds the available context size", "type": "exceed_context_size"}}),
        (400, {"error": {"message": "The input token count (40000) exceeds the maximum number of tokens allowed"}}),
    ],
)
def test_a_conversation_that_does_not_fit_is_told_apart(serving, answer):
    error, counters = ask(serving, answering(answer))
    assert isinstance(error, PromptTooLong)
    assert counters["requests"] == 1


# -- before anything is played ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, {"error": {"message": f"bad {KEY}"}}), r"401 \(bad \[secret\]\); check the key or token in \$TEST_KEY"),
        ((403, {}), r"403 .*in \$TEST_KEY"),
        ((404, {"error": {"message": "no model m"}}), r"404 \(no model m\); engine.base_url is the address before"),
        ((400, {"error": {"message": "no top_p"}}), r"400 \(no top_p\); .*engine.extra.top_p=null"),
        ((400, {"error": {"message": "maximum context length is 4"}}), "lower rollout.max_tokens"),
    ],
)  # fmt: skip
def test_what_refuses_every_question_ends_it_with_one_line(serving, answer, told):
    error, counters = ask(serving, answering(answer), check=True)
    assert isinstance(error, ConfigError)
    assert re.search(told, str(error))
    assert "\n" not in str(error)
    assert KEY not in str(error)
    assert counters["requests"] == 1


def test_a_key_without_a_name_is_asked_for(serving):
    error, _ = ask(serving, answering((401, {})), check=True, api_key_env="")
    assert "engine.api_key_env names its variable" in str(error)


def test_what_may_pass_is_only_told(serving):
    said, counters = ask(serving, answering((503, {})), check=True)
    assert said.endswith("answers 503 (no reason given)")
    assert counters["requests"] == 1
    assert ask(serving, answering(lambda: says("OK")), check=True)[0] == ""


def test_nobody_there_and_no_key(monkeypatch):
    async def main():
        settings = {"timeout": 5.0, "tries": 3, "concurrency": 4}
        engine = OpenAIEngine(Chat(model="m", base_url="http://127.0.0.1:1/v1", **settings))
        with pytest.raises(
            ConfigError, match=r"cannot be reached .*is engine.base_url right, and the server running\?"
        ):
            await engine.check(SAMPLING)
        with pytest.raises(InvalidOutcome, match="cannot be reached") as failure:  # in the middle of an evaluation
            await engine.chat(ChatRequest("1", (Message("user", "?"),), (), SAMPLING))
        assert (failure.value.kind, failure.value.retryable) == ("engine", True)
        await engine.close()
        monkeypatch.delenv("TEST_KEY")
        with pytest.raises(ConfigError, match="environment variable TEST_KEY, which should hold its API key, is not"):
            OpenAIEngine(Chat(model="m", base_url="http://127.0.0.1:1/v1", api_key_env="TEST_KEY", **settings))

    asyncio.run(main())


# -- settings ---------------------------------------------------------------------------------------------------

API = {"kind": "openai", "base_url": "http://h/v1"}


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"kind": "openai"}, "engine.kind=openai needs engine.base_url"),
        ({"base_url": "http://h/v1"}, "engine.base_url is for engine.kind=openai: leave it out with engine.kind=auto"),
        ({"kind": "vllm", "tries": 2}, "engine.tries is for engine.kind=openai"),
        ({**API, "max_model_len": 512}, "engine.max_model_len is decided by the server"),
        ({**API, "args": {"x": 1}}, "engine.args is decided by the server"),
        ({**API, "api_key_env": KEY}, "this is the name of an environment variable, not the key itself"),
        ({**API, "base_url": "h/v1"}, "a URL looks like http://127.0.0.1:8000"),
        ({**API, "base_url": "http://me:x@h/v1"}, "must hold no password"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(engine, told):
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        resolve({"env": "math_verify", "model": "m", "engine": engine})
    assert "\n" not in str(refused.value)


def test_a_model_of_an_api_has_nothing_of_one_that_has_its_name_here():
    config = resolve({"env": "math_verify", "model": "starter", "engine": API})
    assert config.stages[0].rollout.max_tokens > 16  # the starter's


def test_an_api_cannot_be_trained(tmp_path, capsys):
    from envgym.cli import main

    words = ["engine.kind=openai", "engine.base_url=http://h/v1", f"runs_dir={tmp_path / 'runs'}"]
    assert main(["train", "--env", "math_verify", "--model", "m", *words]) == 2
    assert "engine.kind=openai gives no tokens to train on" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def agent_of(**settings):
    stage = resolve({"env": "math_verify", "model": "m", "engine": API, **settings}).stages[0]
    return make_agent(stage, "m")


def test_the_agent_that_plays_the_same_by_messages():
    given = {
        "multi_turn": {"max_turns": 3, "max_tokens": 90},
        "tool_calling": {},
        "single_turn": {},
        "chat": {"tools": False},
    }
    agents = {name: agent_of(agent={"name": name, **own}) for name, own in given.items()}
    assert {type(agent).__name__ for agent in agents.values()} == {"ChatAgent"}
    settings = [(a.config.max_turns, a.config.max_tokens, a.config.tools) for a in agents.values()]
    assert settings == [(3, 90, False), (None, None, True), (1, None, False), (None, None, False)]


def test_agents_and_engines_that_do_not_understand_each_other_are_refused():
    for name, own in {"external": {"command": "true"}, "replay": {}, "openrlhf_executor": {}}.items():
        with pytest.raises(ConfigError, match=f"run by the agent {name}, which needs tokens"):
            agent_of(agent={"name": name, **own}, learner="sft")
    with pytest.raises(ConfigError, match="agent chat uses messages, which needs"):
        agent_of(agent="chat", engine={"kind": "auto"})


# -- an evaluation ----------------------------------------------------------------------------------------------


class Sum(envgym.Env):
    """Two numbers to add; the answer is right or wrong."""

    async def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        return self.task.prompt, {}

    async def step(self, action):
        return (), float(action.text.strip() == self.task.answer), True, False, {"answer": action.text}


class Display:
    """What is told while something goes on."""

    def __init__(self):
        self.notes = []

    def phase(self, text):
        pass

    def note(self, text):
        self.notes.append(text)


def evaluate(serving, handler, tmp_path, n_tasks, monkeypatch=None, engine=None, **settings):
    """Groups of an evaluation as the command plays it, and what was noted. With `monkeypatch` the environment is `Sum`,
    whatever the settings name."""
    display = Display()

    async def main():
        async with serving(handler) as url:
            api = {"kind": "openai", "base_url": f"{url}/v1", "timeout": 1.0, "tries": 2, **(engine or {})}
            config = resolve({"env": "math_verify", "model": "m", "engine": api, **settings})
            stage = config.stages[0]
            if monkeypatch is not None:
                monkeypatch.setattr(type(stage), "make_spec", lambda self: EnvSpec("sum", Sum))
            folder = RunFolder(tmp_path)
            spec = stage.make_spec()
            async with open_runtime(config, folder) as runtime, stage_context_in(config, runtime, spec) as place:
                agent = make_agent(stage, "m")
                sampler, context = await start_sampling(config, stage, [place], agent, "m", display)
                runner = Runner(place.spec, agent, sampler, stage.rollout, **attempt_settings(config, context))
                tasks = [Task(f"t{n}", f"{n}+{n}", answer=str(2 * n)) for n in range(n_tasks)]
                if monkeypatch is None:
                    tasks = [await place.spec.tasks("test").get(n) for n in range(n_tasks)]
                play = SamplingPlan("eval", stage.rollout.sampling(agent.renderer.stop_token_ids), 1)
                return await runner.roll_out(tasks, play)

    return asyncio.run(asyncio.wait_for(main(), 60)), display.notes


def test_every_failure_is_counted_by_kind_and_none_is_a_zero(serving, tmp_path, monkeypatch):
    """Each task meets a fault of its own, always: what is left are the right and the wrong answers, and those cut."""
    faults = ["429", "500", "html", "garbage", "no choice", "hang", "cut short", "an error with 200"]
    seen = []

    async def handler(request):
        question = (await request.json())["messages"][-1]["content"]
        if "+" not in question:
            return says("OK")
        seen.append(question)
        number = int(question.partition("+")[0])
        if number < len(faults):
            return await faulty(faults[number], 9, None)[0](request)
        if number == len(faults):
            return says("", reason="content_filter")
        if number == len(faults) + 1:
            return web.json_response({"error": {"message": "maximum context length is 3"}}, status=400)
        if number == len(faults) + 2:
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        if number == len(faults) + 3:
            return says("2", reason="length")
        return says(str(2 * number) if number % 2 else "no idea", usage=None)

    rollout = {"retries": 1, "refills": 0}
    groups, notes = evaluate(serving, handler, tmp_path, 20, monkeypatch, rollout=rollout)
    episodes = [group.episodes[0] for group in groups]
    assert notes == []
    kinds = [episode.outcome.reason for episode in episodes if episode.failed]
    assert kinds == ["engine"] * 8 + ["content_filter", "prompt_too_long", "engine"]
    assert all(episode.score is None and episode.reward is None for episode in episodes if episode.failed)
    assert all(episode.outcome.message for episode in episodes if episode.failed)
    assert [episode.outcome.retryable for episode in episodes[:11]] == [True] * 8 + [False] * 3
    assert (episodes[11].outcome.status, episodes[11].outcome.reason) == (Status.TRUNCATED, "length")
    assert [episode.score for episode in episodes[12:]] == [0.0, 1.0] * 4
    # What may pass was played twice, with two tries each; what may not, was asked once.
    assert [seen.count(f"{n}+{n}") for n in range(20)] == [4] * 8 + [1] * 12
    [row] = episodes[13].rows
    assert (row.segments, len(row.turns)) == ([], 1)


def test_faults_that_pass_leave_no_trace_in_the_scores(serving, tmp_path, monkeypatch):
    """Every request fails once in one of many ways, whichever episode it is of."""
    count, kinds = 0, [*FAULTS, "hang", "cut short"]
    failed = set()

    async def handler(request):
        nonlocal count
        question = (await request.json())["messages"][-1]["content"]
        if "+" in question and question not in failed:
            failed.add(question)
            count += 1
            return await faulty(kinds[count % len(kinds)], 9, None)[0](request)
        return says(str(2 * int(question.partition("+")[0])) if "+" in question else "OK")

    engine, rollout = {"timeout": 5.0}, {"retries": 0, "refills": 0}  # a busy machine may take a second for an answer
    groups, _ = evaluate(serving, handler, tmp_path, 33, monkeypatch, engine, rollout=rollout)
    assert [group.episodes[0].score for group in groups] == [1.0] * 33
    assert sum(episode.metrics["completion_tokens"] for group in groups for episode in group.episodes) == 66


def test_an_environment_with_tools_is_played_over_several_turns(serving, tmp_path):
    """Every policy first calls what is not there, then writes broken JSON, then looks up what is asked."""

    async def handler(request):
        body = await request.json()
        told = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if "tools" not in body:
            return says("OK")
        question = body["messages"][0]["content"]
        last = told[-1] if told and told[-1].strip().isdigit() else re.search(r"\d+", question)[0]
        asked = (
            [call("nothing", "{}", "a")],
            [call("get", '{"key": ', "b")],
            *[[call("get", f'{{"key": {last}}}', "c")]] * 2,
        )
        if len(told) == 4:
            return says(last)
        # The API is told again what was called, in a form that it takes.
        calls = [c for message in body["messages"] for c in message.get("tool_calls", ())]
        assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in calls)
        assert [c["id"] for c in calls] == ["a", "b", "c", "c"][: len(told)]
        return says(None, reason="tool_calls", tool_calls=asked[len(told)])

    groups, _ = evaluate(serving, handler, tmp_path, 8, env={"name": "tool_use", "hops": [2]})
    episodes = [group.episodes[0] for group in groups]
    assert [episode.score for episode in episodes] == [1.0] * 8
    assert {(episode.metrics["tool_calls"], episode.metrics["tool_malformed"]) for episode in episodes} == {(4, 2)}
    assert {(len(episode.rows), len(episode.rows[0].turns)) for episode in episodes} == {(1, 5)}
    assert {episode.metrics["completion_tokens"] for episode in episodes} == {10}


def test_an_environment_that_asks_the_policy_itself_is_refused(serving, tmp_path):
    game = {"name": "textarena", "opponent": "policy"}
    with pytest.raises(ConfigError, match=r"asks the policy itself \(opponent\), which engine.kind=openai cannot be"):
        evaluate(serving, answering(lambda: says("OK")), tmp_path, 1, env=game)


def test_seeds_are_sent_in_deterministic_mode_alone(serving, tmp_path, monkeypatch):
    seeds = []

    async def handler(request):
        seeds.append((await request.json()).get("seed"))
        return says("0")

    evaluate(serving, handler, tmp_path, 4, monkeypatch)
    assert seeds == [None] * 5
    seeds.clear()
    evaluate(serving, handler, tmp_path, 4, monkeypatch, deterministic=True)
    first = sorted(seeds)
    assert len(set(first)) == 5
    seeds.clear()
    evaluate(serving, handler, tmp_path, 4, monkeypatch, deterministic=True)
    assert sorted(seeds) == first


def test_as_many_requests_are_in_flight_as_the_rollout_plays(serving, tmp_path, monkeypatch):
    now = most = 0

    async def handler(request):
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.05)
        now -= 1
        return says("0")

    evaluate(serving, handler, tmp_path, 12, monkeypatch, rollout={"concurrency": 3})
    assert most == 3


def test_waiting_for_the_rate_limit_is_not_the_episode_s_time(serving, tmp_path, monkeypatch):
    settings = {"engine": {"requests_per_minute": 600}, "rollout": {"episode_timeout": 0.5, "retries": 0}}
    groups, _ = evaluate(serving, answering(lambda: says("0")), tmp_path, 15, monkeypatch, **settings)
    assert [group.episodes[0].outcome.status for group in groups] == [Status.COMPLETED] * 15


def test_an_api_that_is_busy_at_first_is_asked_all_the_same(serving, tmp_path, monkeypatch):
    handler, _ = faulty("500", 1, lambda request: says("0"))
    groups, notes = evaluate(serving, handler, tmp_path, 2, monkeypatch)
    assert [group.episodes[0].score for group in groups] == [1.0, 0.0]
    assert len(notes) == 1
    assert re.search(r"answers 500 \(boom\); continuing, since this may be transient", notes[0])


def test_the_key_is_written_nowhere(serving, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    keys = []

    async def handler(request):
        keys.append(request.headers["Authorization"])
        if "+" not in (await request.json())["messages"][-1]["content"]:
            return says("OK")
        return web.json_response({"error": {"message": f"bad key {KEY}"}}, status=401)

    engine = {"api_key_env": "TEST_KEY"}
    groups, _ = evaluate(serving, handler, tmp_path, 2, monkeypatch, engine=engine, rollout={"refills": 0})
    assert keys == [f"Bearer {KEY}"] * 3
    records = [to_record(group.episodes[0]) for group in groups]
    assert "bad key [secret]" in json.dumps(records)
    saved = resolve({"env": "math_verify", "model": "m", "engine": {**API, **engine}}).to_yaml()
    assert "api_key_env: TEST_KEY" in saved
    assert KEY not in json.dumps([records, saved, caplog.text])


def test_a_key_in_place_of_its_variable_is_not_repeated():
    with pytest.raises(ConfigError) as refused:
        resolve({"env": "math_verify", "model": "m", "engine": {**API, "api_key_env": KEY}})
    assert str(refused.value).endswith("this is the name of an environment variable, not the key itself")


# -- a real server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    """The address of vLLM's own server with the starter, named `policy` there, and a key that it asks for."""
    model = subprocess.run([ENVGYM, "model", "starter"], capture_output=True, text=True, check=True, timeout=600)
    folder = model.stdout.strip().splitlines()[-1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    words = ["--model", folder, "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--api-key", KEY, "--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # Not `vllm serve`: the CPU build, which has another name, does not start by it.
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
        start_new_session=True,
    )
    try:
        began = time.monotonic()
        while "Application startup complete" not in log.read_text():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < began + 300, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def evaluated(folder, *words):
    """An evaluation by the program: its result, and its episodes by group."""
    words = [*words, "--name", "it"]
    done = subprocess.run([ENVGYM, *words], cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    lines = (folder / "evals" / "it" / "episodes.jsonl").read_text().splitlines()
    episodes = [from_record(json.loads(line)) for line in lines]
    return json.loads((folder / "evals" / "it" / "result.json").read_text()), {e.group_id: e for e in episodes}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_api_gives_the_scores_of_the_same_model_in_our_own_engine(vllm_server, tmp_path):
    """The command of the page, against vLLM's server, and the same tasks on vLLM as we run it."""
    page = (Path(__file__).parents[2] / "docs" / "evaluation" / "api_policy.md").read_text()
    [command] = re.findall(r"^envgym (eval --env .*)$", page.replace("\\\n", " "), re.MULTILINE)
    words = [
        re.sub(r"^engine.base_url=.*/v1$", f"engine.base_url={vllm_server}/v1", word)
        for word in shlex.split(command.replace("MY_KEY", "TEST_KEY").replace("my-model", "policy"))
    ]
    assert f"engine.base_url={vllm_server}/v1" in words
    same = ["eval.tasks=256", "rollout.max_tokens=16", "eval.greedy=true"]
    for name in ("api", "own"):
        (tmp_path / name).mkdir()
    result, by_api = evaluated(tmp_path / "api", *words, *same)
    own_result, by_engine = evaluated(tmp_path / "own", "eval", "--env", "math_verify", "--model", "starter", *same)
    assert result["failures"] == own_result["failures"] == {}
    assert by_api.keys() == by_engine.keys()
    assert len(by_api) == 512
    pairs = [(by_api[group], by_engine[group]) for group in by_api]
    # The server wrote the prompts that our renderer writes, and counts what was sampled as we do.
    assert all(a.task.id == e.task.id for a, e in pairs)
    assert all(a.metrics["prompt_tokens"] == len(e.rows[0].segments[0].token_ids) for a, e in pairs)
    greedy = [(a, e) for a, e in pairs if a.group_id.startswith("greedy")]
    assert len(greedy) == 256
    assert sum(a.messages[-1] == e.messages[-1] for a, e in greedy) >= 250  # ties in the last bit may fall either way
    # Sampled at temperature 1, paired by task.
    sampled = [(a.score, e.score) for a, e in pairs if not a.group_id.startswith("greedy")]
    assert len(sampled) == 256
    differences = [a - e for a, e in sampled]
    mean = sum(differences) / 256
    error = (sum((d - mean) ** 2 for d in differences) / 255 / 256) ** 0.5
    scores = [[run["envs"][name]["score"] for name in ("math_verify", "greedy")] for run in (result, own_result)]
    print(f"api and own, sampled and greedy: {scores}; difference {mean:.3f}, standard error {error:.3f}")
    assert abs(mean) < 3 * error
    (low, high), (own_low, own_high) = (r["envs"]["math_verify"]["ci95"] for r in (result, own_result))
    assert max(low, own_low) < min(high, own_high)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_suite_scores_the_same_by_an_api_and_by_our_own_engine(vllm_server, tmp_path):
    suite = ["eval", "--suite", "arithmetic", "eval.tasks=128", "rollout.max_tokens=16"]
    api = ["engine.kind=openai", f"engine.base_url={vllm_server}/v1", "engine.api_key_env=TEST_KEY"]
    for name in ("api", "own"):
        (tmp_path / name).mkdir()
    by_api, _ = evaluated(tmp_path / "api", *suite, "--model", "policy", *api)
    by_engine, _ = evaluated(tmp_path / "own", *suite, "--model", "starter")
    assert by_api["failures"] == by_engine["failures"] == {}
    assert by_api["envs"].keys() == by_engine["envs"].keys()
    for a, e in [(by_api, by_engine), *zip(by_api["envs"].values(), by_engine["envs"].values(), strict=True)]:
        print(f"api {a['score']:.3f} {a['ci95']}, own {e['score']:.3f} {e['ci95']}")
        assert max(a["ci95"][0], e["ci95"][0]) < min(a["ci95"][1], e["ci95"][1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_server_that_refuses_is_told_in_one_line(vllm_server, tmp_path, monkeypatch):
    monkeypatch.setenv("WRONG_KEY", "sk-wrong")
    for words, told in {
        ("policy", f"{vllm_server}/v1", "WRONG_KEY"): r"answers 401 .*check the key or token in \$WRONG_KEY",
        ("other", f"{vllm_server}/v1", "TEST_KEY"): r"answers 404 .*`other` does not exist",
        ("policy", vllm_server, "TEST_KEY"): r"answers 404 .*engine.base_url is the address before /chat/completions",
        ("policy", f"{vllm_server}/v1", "UNSET_KEY"): "variable UNSET_KEY, which should hold its API key, is not set",
    }.items():
        model, base_url, variable = words
        settings = ["engine.kind=openai", f"engine.base_url={base_url}", f"engine.api_key_env={variable}"]
        done = subprocess.run(
            [ENVGYM, "eval", "--env", "math_verify", "--model", model, *settings],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 2
        [line] = [line for line in done.stderr.splitlines() if "error" in line]
        assert re.search(told, line)
        assert "sk-wrong" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_teacher_behind_it_teaches_what_one_in_the_run_does(vllm_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEST_KEY", KEY)
    words = [
        "--recipe",
        "distill",
        "--env",
        "math_verify",
        "rollout.tasks_per_step=8",
        "eval.every=0",
        "epochs=null",
        "steps=3",
    ]
    words += ["learner.top_k=4", "learner.lr=1e-3", "deterministic=true"]
    api = [
        f"roles.teacher.base_url={vllm_server}/v1",
        "roles.teacher.model=policy",
        "roles.teacher.api_key_env=TEST_KEY",
    ]
    records = []
    for name, teacher in (("own", ["roles.teacher.model=starter"]), ("api", api)):
        assert main(["train", *words, *teacher, "--name", name]) == 0
        records.append([json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").open()][-3:])
    for own, by_api in zip(*records, strict=True):
        assert by_api["distill/kl"] == pytest.approx(own["distill/kl"], abs=1e-4)
        assert by_api["loss"] == pytest.approx(own["loss"], abs=1e-4)
    assert records[0][-1]["distill/kl"] > 1e-3  # the student has moved away
