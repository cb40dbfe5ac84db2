"""Roles, calls and thoughts of other programs' files: what a row says reaches the policy, or an error says what not."""

import asyncio
import json
from importlib.metadata import files

import numpy as np
import pytest

import envgym
from envgym.agents.replay import Replay, ReplayConfig
from envgym.config.resolve import resolve
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, DataError, InvalidStep
from envgym.jobs.components import make_agent
from envgym.jobs.prompts import survey
from envgym.render import load_tokenizer, make_renderer
from envgym.types import Message, Observation, as_messages

RULE, ASKED, SAID = {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}, "3 it is"
SYSTEM = {"role": "system", "content": "You add."}
ANSWERED = {"role": "assistant", "content": SAID}
CALL = {"name": "add", "arguments": {"numbers": [1, 2]}}
TOOLS = [{"name": "add", "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}}}]
DROPS_ROLES = ["qwen2_5", "qwen3", "glm4moe", "deepseekv3", "phi3"]


def prompt(renderer, *messages):
    observation = Observation(messages=as_messages(list(messages)))
    return renderer.tokenizer.decode(renderer.prompt(observation))


def taught(renderer, tmp_path, row):
    """The texts of a recording's rows, with marks around what is trained on."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))

    async def rows():
        async with envgym.spec("recorded", data={"path": str(path), "test_fraction": 0}) as spec, spec.make() as env:
            await survey(spec, "train", renderer)
            agent, task = Replay(renderer, ReplayConfig()), await spec.tasks("train").get(0)
            return (await agent.replay(CheckedEnv(env, spec), task, seed=0, recording_index=0)).rows

    texts = []
    for segment in (segment for row in asyncio.run(rows()) for segment in row.segments):
        text = renderer.tokenizer.decode(segment.token_ids)
        texts.append(f"⟦{text}⟧" if segment.role == "action" else text)
    return "".join(texts)


@pytest.mark.parametrize("family", [*DROPS_ROLES, "llama3_1", "qwen3_6", "chatml", "gemma3"])
def test_a_developer_is_the_system(chat, family):
    renderer = chat("tekken", family)
    text = prompt(renderer, RULE, ASKED)
    assert text == prompt(renderer, {**RULE, "role": "system"}, ASKED)
    assert "Be brief." in text


@pytest.mark.parametrize("family", [*DROPS_ROLES, "deepseek_r1_distill", "qwen3_6", "qwen3_vl", "gptoss"])
def test_instructions_of_system_and_developer_are_both_read(chat, family):
    text = prompt(chat("tekken", family), SYSTEM, RULE, ASKED)
    assert text.index("You add.") < text.index("Be brief.") < text.index("1 + 2?")


@pytest.mark.parametrize("family", DROPS_ROLES)
def test_a_role_that_a_template_leaves_out_is_refused_and_another_writes_it(chat, family):
    critic = {"role": "critic", "content": "Are you sure?"}
    with pytest.raises(InvalidStep, match="leaves out messages of the role 'critic'"):
        prompt(chat("tekken", family), ASKED, ANSWERED, critic, ASKED)
    assert "critic\nAre you sure?" in prompt(chat("starter", "chatml"), ASKED, ANSWERED, critic, ASKED)


@pytest.mark.parametrize("family", DROPS_ROLES)
def test_a_prompt_with_a_role_that_a_template_leaves_out_is_noted_before_the_run(chat, family, tmp_path):
    critic = {"role": "critic", "content": "Are you sure?"}
    rows = [{"prompt": [ASKED], "answer": "3"}, {"prompt": [ASKED, ANSWERED, critic], "answer": "3"}]
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    async def notes():
        async with envgym.spec("math_verify", data={"path": str(path), "test_fraction": 0}) as spec:
            return (await survey(spec, "train", chat("tekken", family))).notes

    *_, note = asyncio.run(notes())
    assert note.startswith("task rows-2, as it is in the data: ")
    assert "leaves out messages of the role 'critic'" in note


def test_a_later_system_message_that_takes_the_place_of_the_first_is_refused(chat):
    renderer = chat("tekken", "deepseekv3")
    later = [ASKED, ANSWERED, {**RULE, "role": "system"}, ASKED]
    assert "Be brief." in prompt(renderer, *later)  # alone it is read
    text = prompt(chat("tekken", "deepseekv3"), SYSTEM, *later)
    assert "You add." in text
    assert "Be brief." in text
    with pytest.raises(InvalidStep, match="leaves out messages of the role 'system' after the first message"):
        prompt(chat("tekken", "deepseek_r1_distill"), SYSTEM, *later)


def test_a_role_that_is_left_out_is_found_before_the_run_with_its_row(chat, tmp_path):
    row = {"messages": [ASKED, ANSWERED, {"role": "critic", "content": "Sure?"}, ANSWERED]}
    with pytest.raises(DataError, match=r"task rows-1: the chat template of .* leaves out .* 'critic'"):
        taught(chat("tekken", "qwen3"), tmp_path, row)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "glm4moe", "llama3_1", "chatml"])
@pytest.mark.parametrize("role", ["function_call", "tool_call"])
def test_a_turn_that_is_a_call_is_taught_as_a_call(chat, tmp_path, family, role):
    renderer = chat("tekken", family)
    turns = [
        {"from": "human", "value": "1 + 2?"},
        {"from": role, "value": json.dumps(CALL)},
        {"from": "observation", "value": "three"},
        {"from": "gpt", "value": SAID},
    ]
    calls = [{"type": "function", "id": "", "function": CALL}]
    same = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "three"},
        ANSWERED,
    ]
    text = taught(renderer, tmp_path, {"conversations": turns, "tools": TOOLS})
    assert text == taught(renderer, tmp_path, {"messages": same, "tools": TOOLS})
    call, answer = text.split("⟦")[1:]
    assert "add" in call.split("⟧")[0]
    assert "[1, 2]" in call.split("⟧")[0]
    assert "three" in call.split("⟧")[1]
    assert SAID in answer.split("⟧")[0]


@pytest.mark.parametrize(
    ("turns", "text", "names"),
    [
        ([("gpt", "I add."), ("function_call", json.dumps(CALL))], "I add.", ["add"]),
        ([("function_call", json.dumps([CALL, {**CALL, "name": "sum"}]))], "", ["add", "sum"]),
        ([("tool_call", CALL), ("tool_call", {"name": "sum", "arguments": "{}"})], "", ["add", "sum"]),
        ([("function_call", f"<think>[a] {{b}}</think>\n{json.dumps(CALL)}")], "<think>[a] {b}</think>", ["add"]),
        ([("Function_Call", {"function": CALL})], "", ["add"]),
    ],
)
def test_calls_in_turns_of_their_own(turns, text, names):
    [message] = as_messages(
        [{"role": "assistant" if role == "gpt" else role, "content": value} for role, value in turns]
    )
    assert (message.role, message.text) == ("assistant", text)
    assert [call.name for call in message.tool_calls] == names
    assert message.tool_calls[0].arguments == {"numbers": [1, 2]}


def test_the_apis_earlier_form_of_a_call_is_a_call_and_its_result_a_tools():
    call, result = as_messages(
        [
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "add", "arguments": '{"numbers": [1, 2]}'},
            },
            {"role": "function", "name": "add", "content": "3"},
        ]
    )
    assert [(call.name, call.arguments) for call in call.tool_calls] == [("add", {"numbers": [1, 2]})]
    assert (result.role, result.name, result.text) == ("tool", "add", "3")


@pytest.mark.parametrize("value", ["add(1, 2)", '{"name": "add"', "", '["add"]'])
def test_a_turn_that_should_be_a_call_and_is_none_is_named(value):
    with pytest.raises(ValueError, match=r"a turn that calls a function is JSON|a call names its function"):
        as_messages([{"role": "function_call", "content": value}])


THOUGHT = "I add 1 and 2."


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "qwen3_8", "glm4moe", "nemotron_3_nano", "deepseek_r1_distill"])
def test_a_recorded_thought_is_taught(chat, tmp_path, family, field):
    text = taught(chat("tekken", family), tmp_path, {"messages": [ASKED, {**ANSWERED, field: THOUGHT}]})
    prompt, _, answer = text.partition("⟦")
    assert answer.count(THOUGHT) == 1
    assert answer.count("</think>") == 1
    assert (prompt + answer).count("<think>") == 1
    assert answer.index(THOUGHT) < answer.index("</think>") < answer.index(SAID)


def test_a_thought_goes_where_the_template_takes_it(chat, tmp_path):
    row = {"messages": [ASKED, {**ANSWERED, "reasoning_content": THOUGHT}]}
    text = taught(chat("tekken", "muse_glimmer"), tmp_path, row)
    assert f"<|message|>{THOUGHT}<|eom|>" in text
    assert "<think>" not in text


def test_thoughts_among_the_parts_and_in_the_text_count_once():
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": SAID}]
    inline = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
    assert as_messages([{"role": "assistant", "content": parts}])[0].text == inline
    assert as_messages([{"role": "assistant", "content": inline, "reasoning": THOUGHT}])[0].text == inline
    assert as_messages([{"role": "assistant", "content": SAID, "reasoning_content": None}])[0].text == SAID


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x"}}, "the text 'http://x': .* of the web are not read"),
        ({"type": "image", "image": "/etc/passwd"}, "an image is not given as the text '/etc/passwd': give a pathlib"),
        ({"type": "image"}, "a message has a part of type 'image' without an image"),
        ({"type": "video", "video": "x"}, "a message has a part of type 'video', which is not read here"),
    ],
)
def test_a_part_that_is_neither_text_nor_an_image_is_one_sentence(part, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        as_messages([{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}])


def test_a_picture_for_a_model_of_text_is_refused(tiny_model):
    picture = Message.user("What is it?", np.zeros((4, 4, 3), np.uint8))
    dialogue = make_renderer("chat", load_tokenizer(tiny_model)).dialogue()
    with pytest.raises(InvalidStep, match=f"a message has an image, and {tiny_model} takes text alone"):
        dialogue.begin(Observation(messages=(picture,)))
    dialogue.start(Observation(messages=(Message.user("What is it?"),)))
    dialogue.add_policy_turn([5, 0])
    with pytest.raises(InvalidStep, match=f"a message has an image, and {tiny_model} takes text alone"):
        dialogue.add_observation(Observation(messages=(picture,)))


def test_a_policy_that_writes_in_channels_is_refused_and_its_recordings_are_not(tiny_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [ASKED, ANSWERED]}))
    [path] = [file.locate() for file in files("trl") if file.name == "gptoss.jinja"]
    settings = {"model": str(tiny_model), "render": {"template": str(path)}}
    [stage] = resolve({"env": "math_verify", **settings}).stages
    with pytest.raises(ConfigError, match=r"writes in channels .*, as GPT-OSS does, and envgym does not read them"):
        make_agent(stage, stage.model)
    [stage] = resolve({"recipe": "sft", "data": {"path": str(tmp_path / "rows.jsonl")}, **settings}).stages
    assert "<|channel|>final<|message|>3 it is" in taught(
        make_agent(stage, stage.model).renderer, tmp_path, {"messages": [ASKED, ANSWERED]}
    )
