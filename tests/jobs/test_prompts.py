"""The block at the start of a run: the first prompt as the model gets it, its template, tools, columns, the longest."""

import asyncio
import json

import pytest

import envgym
from envgym.config.resolve import resolve
from envgym.jobs.prompts import announce, survey
from envgym.render import RenderConfig, load_tokenizer, make_renderer
from envgym.types import Message, Observation, ToolSpec

QUESTIONS = ["1 + 2?", "Add these numbers for me: " + "12 and " * 40, "3 + 4?"]


@pytest.fixture
def said(tiny_model, tmp_path):
    """said(observation, …): the lines of a run on three tasks whose first episodes begin with `observation`."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": 3}) + "\n" for text in QUESTIONS))
    data = {"path": str(path), "test_fraction": 0}

    def run(observation, *, context=4096, kind="auto", has_template=True):
        async def longest():
            async with envgym.spec("math_verify", data=data) as spec:
                return await survey(spec, "train", renderer)

        tokenizer = load_tokenizer(str(tiny_model))
        if not has_template:
            tokenizer.chat_template = None
        renderer = make_renderer(kind, tokenizer)
        [stage] = resolve({"env": "math_verify", "model": str(tiny_model), "render": RenderConfig(kind=kind)}).stages
        lines = []
        announce(stage, renderer, asyncio.run(longest()), context, lines.append)
        assert lines == []  # until there is a prompt
        ids = renderer.prompt(observation)
        renderer.prompt(Observation(messages="Another."))
        return lines, tokenizer.decode(ids)

    return run


def asked(*messages, tools=()):
    return Observation(messages=messages, tools=tools)


def test_the_first_prompt_is_said_once_with_its_template_and_tools(said):
    tool = ToolSpec("look_up", "", {"type": "object", "properties": {}})
    lines, prompt = said(asked(Message.system("Be brief."), Message.user("1 + 2?"), tools=(tool,)))
    first, template, *_ = lines
    assert first.splitlines()[0] == "first prompt, as the model gets it:"
    assert "\n".join(line[2:] for line in first.splitlines()[1:]).strip() == prompt.strip()
    assert "Be brief." in first
    assert template == "template: the tokenizer's chat template; tools: look_up"


def test_names_of_tools_that_a_server_makes_up_are_cut(said):
    tool = ToolSpec("t" * 5000, "", {"type": "object", "properties": {}})
    [line] = [line for line in said(asked(Message.user("1 + 2?"), tools=(tool,)))[0] if line.startswith("template: ")]
    assert len(line) == 1000
    assert line.endswith("tttt…")


def test_the_longest_prompt_is_measured_against_the_context(said):
    [*_, line] = said(asked(Message.user("1 + 2?")))[0]
    n_tokens = int(line.split()[5])
    assert line == f"longest prompt in the data: {n_tokens} tokens (task sums-2), context 4096"
    for context, fits in ((n_tokens, False), (n_tokens + 1, True)):
        [*_, line] = said(asked(Message.user("1 + 2?")), context=context)[0]
        assert ("no room to answer" not in line) is fits


@pytest.mark.parametrize(
    ("settings", "observation", "says"),
    [
        ({"has_template": False}, asked(Message.user("Hi")),
         "none, lines from `User:` to `Assistant:`, since this model has no chat template"),
        ({"kind": "text"}, asked(Message.user("Hi")), "none, lines from `User:` to `Assistant:`"),
        ({"kind": "raw"}, asked(Message.user("Hi")), "none, plain text"),
        ({}, Observation(text="Once"), "none, plain text"),
    ],
)  # fmt: skip
def test_a_prompt_without_a_chat_template_says_so(said, settings, observation, says):
    assert said(observation, **settings)[0][1] == f"template: {says}; tools: none"


async def columns(env, path, **settings):
    data = {"path": str(path), "test_fraction": 0, **settings}
    async with envgym.spec(env, data=data) as spec:
        return spec.columns


@pytest.mark.parametrize(
    ("env", "row", "settings", "says"),
    [
        ("math_verify", {"question": "1?", "answer": 1, "level": 3}, {},
         "prompt question; answer answer; not shown, for the environment alone level"),
        ("math_verify", {"body": "Ellen has 2 balls.", "question": "How many?", "answer": 2, "key": "a"}, {"id": "key"},
         "prompt body, question; answer answer; id key"),
        ("math_verify", {"body": "B", "question": "How many?", "answer": 2, "system": "Add."}, {"prompt": "question"},
         "prompt question; answer answer; system message system; not shown, for the environment alone body"),
        ("math_verify", {"question": "1?", "answer": 2, "system": "", "system_prompt": "Add."}, {},
         "prompt question; answer answer; system message system_prompt; not shown, for the environment alone system"),
        ("math_verify", {"a": 1, "b": 2, "answer": 3, "hint": ""}, {"template": "{a} + {b}?"},
         "prompt a, b; answer answer; not shown, for the environment alone hint"),
        ("recorded", {"prompt": "1?", "response": "2", "source": "me"}, {}, "read prompt, response; not read source"),
    ],
)  # fmt: skip
def test_the_columns_are_said_by_their_use(env, row, settings, says, tmp_path):
    (path := tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert asyncio.run(columns(env, path, **settings)) == f"columns: {says}"


def test_the_columns_stand_with_the_first_prompt(said):
    lines = said(asked(Message.user("1 + 2?")))[0]
    assert lines[2] == "columns: prompt question; answer answer"
