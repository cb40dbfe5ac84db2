"""Recorded data: the forms people keep them in, what is taught of them, and what is told of bad rows."""

import asyncio
import csv
import json
import logging
import re

import pytest

import envgym
from envgym.agents.replay import Replay, ReplayConfig
from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.engine import SamplingParams
from envgym.errors import ConfigError, DataError
from envgym.monitoring.metrics import rollout_metrics
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.tasks import DataConfig, load_tasks
from envgym.training.step import steps_of

ASKED = [{"role": "user", "content": "1 + 2?"}]
RIGHT = {"role": "assistant", "content": "3"}
WRONG = {"role": "assistant", "content": "4"}
TALK = [*ASKED, RIGHT, {"role": "user", "content": "And 1 more?"}, WRONG]
SHARED = [{"from": "human", "value": "1 + 2?"}, {"from": "gpt", "value": "3"}]


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return str(path)

    return write


def records(path, **settings):
    """The records of all training tasks."""

    async def main():
        data = {"path": path, "test_fraction": 0}
        async with envgym.spec("recorded", data=data, **settings) as spec:
            tasks = spec.tasks("train")
            return [spec.record(await tasks.get(index)) for index in range(tasks.size)]

    return asyncio.run(main())


def told(messages):
    return [(message.role, message.text) for message in messages]


@pytest.mark.parametrize(
    ("row", "settings", "prompt", "answers"),
    [
        ({"messages": TALK}, {}, "u1 + 2?", ["a3 uAnd 1 more? a4"]),
        ({"messages": TALK}, {"teach": "last"}, "u1 + 2? a3 uAnd 1 more?", ["a4"]),
        ({"messages": [*TALK, {"role": "user", "content": "Thanks!"}]}, {"teach": "last"}, "u1 + 2? a3 uAnd 1 more?",
         ["a4"]),
        ({"conversations": SHARED}, {}, "u1 + 2?", ["a3"]),
        ({"conversations": [{"from": "system", "value": "Add."}, *SHARED]}, {}, "sAdd. u1 + 2?", ["a3"]),
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, {}, "uAdd.\n\n1 and 2", ["a3"]),
        ({"instruction": "Add 1 and 2.", "input": "", "output": "3"}, {}, "uAdd 1 and 2.", ["a3"]),
        ({"instruction": "And 1 more?", "output": "4", "history": [["1 + 2?", "3"]], "system": "Add."}, {},
         "sAdd. u1 + 2?", ["a3 uAnd 1 more? a4"]),
        ({"instruction": "Add.", "context": "1 and 2", "response": "3"}, {}, "uAdd.\n\n1 and 2", ["a3"]),
        ({"question": "And?", "context": "1 + 2", "answer": "3"}, {}, "u1 + 2\n\nAnd?", ["a3"]),
        ({"context": "1 + 2?", "answer": "3"}, {}, "u1 + 2?", ["a3"]),
        ({"conversations": SHARED, "system": "Add."}, {}, "sAdd. u1 + 2?", ["a3"]),
        ({"messages": [{"role": "system", "content": "S"}, *TALK[:2]], "system": "Add."}, {}, "sS u1 + 2?", ["a3"]),
        ({"messages": TALK[:2], "system": [{"text": "Ad"}, {"text": "d."}]}, {}, "sAdd. u1 + 2?", ["a3"]),  # Bedrock's
        ({"messages": [{"role": m["role"], "content": [{"type": "text", "value": m["content"]}]} for m in TALK[:2]]},
         {}, "u1 + 2?", ["a3"]),  # LLaMA-Factory's later form
        ({"input": {"messages": [{"role": "system", "content": "Add."}, *ASKED], "tools": []},
          "preferred_output": [RIGHT], "non_preferred_output": [WRONG]}, {}, "sAdd. u1 + 2?", ["a3", "a4"]),  # OpenAI's
        ({"conversations": SHARED[:1], "system": "Add.", "chosen": "3", "rejected": "4"}, {}, "sAdd. u1 + 2?",
         ["a3", "a4"]),
        ({"prompt": ASKED, "system_message": "Add.", "chosen": "3", "rejected": "4"}, {}, "sAdd. u1 + 2?",
         ["a3", "a4"]),
        ({"prompt": "1 + 2?", "completion": "3"}, {}, "u1 + 2?", ["a3"]),
        ({"prompt": ASKED, "completion": [RIGHT]}, {}, "u1 + 2?", ["a3"]),
        ({"ask": "1 + 2?", "say": "3"}, {"form": "demonstration", "fields": {"prompt": "ask", "answer": "say"}},
         "u1 + 2?", ["a3"]),
        ({"prompt": "1 + 2?", "chosen": "3", "rejected": "4"}, {}, "u1 + 2?", ["a3", "a4"]),
        ({"messages": [*ASKED, RIGHT], "rejected_response": "4"}, {}, "u1 + 2?", ["a3", "a4"]),  # ms-swift's
        ({"messages": [*ASKED, RIGHT], "rejected_messages": [*ASKED, WRONG]}, {}, "u1 + 2?", ["a3", "a4"]),
        ({"prompt": ASKED, "chosen": [RIGHT], "rejected": [WRONG]}, {}, "u1 + 2?", ["a3", "a4"]),
        ({"chosen": [*ASKED, RIGHT], "rejected": [*ASKED, WRONG]}, {}, "u1 + 2?", ["a3", "a4"]),
        ({"prompt": "1 + 2?", "chosen": [*ASKED, RIGHT], "rejected": [*ASKED, WRONG]}, {}, "u1 + 2?", ["a3", "a4"]),
        ({"prompt": "1 + 2?", "completion": "3", "label": True}, {}, "u1 + 2?", ["a3"]),
        ({"prompt": "1 + 2?", "completions": ["I add.", "3"], "labels": [True, False]}, {}, "u1 + 2?",
         ["aI add.\n\n a3\n\n"]),
        ({"text": "1 + 2 = 3"}, {}, "", ["a1 + 2 = 3"]),
        ({"prompt": "1 + 2?", "completion": "3", "reward": 0.5}, {"template": "{} <{reward:.2f}>"}, "u1 + 2? <0.50>",
         ["a3"]),
    ],
)  # fmt: skip
def test_the_usual_forms_are_understood_without_settings(row, settings, prompt, answers, write):
    [record] = records(write(row), **settings)

    def short(messages):
        return " ".join(f"{role[0]}{text}" for role, text in told(messages))

    assert short(record.prompt) == prompt
    assert [short(variant.messages) for variant in record.variants] == answers


@pytest.mark.parametrize(
    ("row", "rewards"),
    [
        ({"prompt": "1 + 2?", "chosen": "3", "rejected": "4"}, [(1.0,), (0.0,)]),
        ({"prompt": "1 + 2?", "completion": "3", "label": False}, [(0.0,)]),
        ({"prompt": "1 + 2?", "completion": "3", "label": 1}, [(1.0,)]),
        ({"prompt": "1 + 2?", "completions": ["a", "b", "c"], "labels": [True, None, 0.25]}, [(1.0, None, 0.25)]),
        ({"prompt": "1 + 2?", "completions": ["a", "b"], "labels": [1, -1]}, [(1.0, 0.0)]),
        ({"prompt": "1 + 2?", "completion": "3"}, [()]),
    ],
)
def test_answers_are_worth_what_the_row_says(row, rewards, write):
    [record] = records(write(row))
    assert [variant.rewards for variant in record.variants] == rewards


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*ASKED, RIGHT]},
        {"prompt": "1 + 2?", "completion": "3"},
        {"prompt": "1 + 2?", "completion": "3", "label": True},
        {"prompt": "1 + 2?", "chosen": "3", "rejected": "4", "margin": 0.5},
    ],
)
def test_rows_of_every_form_keep_their_tools(row, write):
    [record] = records(write({**row, "tools": TOOLS}))
    assert list(record.tools) == TOOLS
    assert record.margin == row.get("margin", 0.0)
    [record] = records(write({**row, "functions": [TOOLS[0]["function"]]}))  # OpenAI's earlier form
    assert list(record.tools) == [TOOLS[0]["function"]]


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"prompt": "1 + 2?", "completion": "3", "chosen": "3"}, {"form": "preference"}, "no field rejected or"),
        ({"prompt": "1 + 2?", "chosen": "", "rejected": "4"}, {}, "is empty"),
        ({"prompt": "1 + 2?", "completion": " "}, {}, "is empty"),
        ({"prompt": "1 + 2?", "chosen": "3", "rejected": "3"}, {}, "the chosen answer is the rejected one"),
        ({"prompt": "1 + 2?", "completion": "3", "label": "good"}, {}, "a label is true or false, not 'good'"),
        ({"prompt": "1?", "completion": "3", "label": "True"}, {}, "the text 'True': write true without quotation"),
        ({"prompt": "1?", "completions": ["a"], "labels": ["0.5"]}, {}, "text '0.5': write 0.5 without quotation"),
        ({"prompt": "1 + 2?", "completions": ["a"], "labels": [1, 0]}, {}, "lists of the same length"),
        ({"prompt": "1 + 2?", "completions": ["a"], "labels": [7]}, {}, "a step's label is a probability"),
        ({"prompt": "1 + 2?", "completions": ["a"], "labels": [None]}, {}, "no step has a label"),
        ({"messages": [{"role": "user", "content": "1 + 2?"}]}, {}, "no turn of the assistant"),
        ({"messages": [RIGHT]}, {}, "the prompt is empty"),
        ({"messages": [*ASKED, RIGHT, WRONG]}, {}, "two turns of the assistant follow each other"),
        ({"messages": "1 + 2?"}, {}, "a conversation is a list of messages"),
        ({"messages": [*ASKED, 3]}, {}, "not 3"),
        ({"colour": "red"}, {}, "no known form of recorded data; the row has colour: say which it is with env.form"),
        ({"prompt": 5, "completion": "3"}, {}, "a conversation is a list of messages, not 5"),
        ({"prompt": "1 + 2?", "completion": "3"}, {"template": "{} {worth}"}, "env.template names a field 'worth'"),
        ('{"prompt": "1 + 2?", "compl', {}, "not JSON"),
        pytest.param(
            {"prompt": "1 + 2?", "completion": "3" * 50_000_000},
            {},
            "50,000,006 characters, over the limit",
            id="50 MB",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_line(row, settings, says, write):
    with pytest.raises(DataError, match=says) as failure:
        records(write("", row), **settings)
    assert "data.jsonl:2: " in str(failure.value)


# -- text that holds JSON, and tables ---------------------------------------------------------------------------

CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps([*ASKED, RIGHT])},
        {"messages": str([*ASKED, RIGHT])},  # as pandas writes lists into CSV files
        {"conversations": json.dumps(SHARED), "tools": ""},
        {"prompt": json.dumps(ASKED), "completion": json.dumps([RIGHT])},
        {"prompt": ASKED, "completion": json.dumps(RIGHT)},
        {"prompt": "1 + 2?", "chosen": json.dumps([*ASKED, RIGHT]), "rejected": json.dumps([*ASKED, WRONG])},
        {"messages": ASKED, "chosen": RIGHT, "rejected": json.dumps(WRONG)},
    ],
)
def test_messages_may_be_text_that_holds_json(row, write):
    [record] = records(write(row))
    assert told(record.prompt) == [("user", "1 + 2?")]
    assert [told(v.messages) for v in record.variants] == [
        [("assistant", text)] for text in "34"[: len(record.variants)]
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1', "[1, 2, 3]", '[{"role": "user"', '{"role": "admin of the system"} is no JSON', "[]",
        '[{"role": "admin", "name": "Ada"}]', '{"role": "user", "name": "Ada"}', '{"from": "Oslo", "to": "Rome"}',
        '{"from": "account 1", "to": "account 2", "value": 3}',
    ],
)  # fmt: skip
def test_text_that_is_no_messages_stays_text(text, write):
    [record] = records(write({"prompt": text, "completion": text}))
    assert (told(record.prompt), told(record.variants[0].messages)) == ([("user", text)], [("assistant", text)])


@pytest.mark.parametrize("tools", [json.dumps(TOOLS), [json.dumps(TOOLS[0])], str(TOOLS), json.dumps(TOOLS[0])])
def test_tools_may_be_text_that_holds_json(tools, write):
    [record] = records(write({"messages": [*ASKED, RIGHT], "tools": tools}))
    assert list(record.tools) == TOOLS


def test_calls_and_history_may_be_text_that_holds_json(write):
    """JSON says what it means: an argument that is null is null."""
    said = {**CALLED, "tool_calls": json.dumps([{"function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}])}
    for turn in (CALLED, said):
        [record] = records(write({"messages": [*ASKED, turn]}))
        [call] = record.variants[0].messages[0].tool_calls
        assert (call.name, call.arguments) == ("add", {"a": 1, "b": None})
    [record] = records(write({"query": "And 1 more?", "response": "4", "history": '[["1 + 2?", "3"]]'}))
    assert told(record.variants[0].messages) == [("assistant", "3"), ("user", "And 1 more?"), ("assistant", "4")]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": '[{"role": "user", "content" "1?"}]'},
         "field 'messages': not JSON: Expecting ':' delimiter at column 2"),
        ({"conversations": '[{"from": "human", "val'}, "field 'conversations': not JSON: it is truncated at column 23"),
        ({"messages": [*ASKED, RIGHT], "tools": "[{]"}, "field 'tools': not JSON: Expecting .* at column 3"),
        ({"messages": [*ASKED, RIGHT], "tools": ["{"]}, "field 'tools': not JSON: it is truncated at column 1"),
        ({"messages": [*ASKED, {**CALLED, "tool_calls": [{"name": "add", "arguments": '{"a": }'}]}]},
         "field 'messages': the arguments of add are not JSON: Expecting value at column 7"),
    ],
)  # fmt: skip
def test_text_that_holds_broken_json_is_named_with_its_field_and_place(row, says, write):
    with pytest.raises(DataError, match=says) as failure:
        records(write("", row))
    assert "data.jsonl:2: " in str(failure.value)


def test_keys_that_a_table_filled_with_nulls_are_not_taught(tmp_path):
    """Structs of a Parquet file have all keys of all rows."""
    import pyarrow
    import pyarrow.parquet

    def row(name, arguments, kind):
        call = {"id": "1", "function": {"name": name, "arguments": arguments}}
        schema = {
            "type": "object",
            "properties": {key: {"type": kind} for key in arguments},
            "required": list(arguments),
        }
        tool = {"type": "function", "function": {"name": name, "description": None, "parameters": schema}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [*ASKED, said], "tools": [tool], "info": {name: 1}}

    rows = [row("add", {"a": 1, "list": [1, None]}, "integer"), row("mul", {"b": {"x": 2}}, "object")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    first, second = records(str(tmp_path / "data.parquet"))
    assert first.variants[0].messages[0].tool_calls[0].arguments == {"a": 1, "list": [1, None]}
    assert second.variants[0].messages[0].tool_calls[0].arguments == {"b": {"x": 2}}
    [tool] = second.tools
    assert tool["function"]["parameters"]["properties"] == {"b": {"type": "object"}}
    data = {"path": str(tmp_path / "data.parquet"), "test_fraction": 0, "prompt": "messages"}
    task = asyncio.run(load_tasks(DataConfig(**data), answer_required=False).train.get(0))
    assert task.fields["info"] == {"add": 1, "mul": None}  # other structs are as the file has them


# -- what a row says of itself ----------------------------------------------------------------------------------

AGAIN = {"role": "user", "content": "And 1 more?"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [("weight", 0), ("weight", 0.0), ("weight", "0"), ("train", False), ("training", False), ("loss", False),
     ("loss", "false"), ("loss_scale", 0), ("loss_weight", 0.0), ("trainable", False), ("masked", True)],
)  # fmt: skip
def test_a_turn_that_a_row_says_is_not_to_be_learned_is_context(flag, value, write, tiny_model):
    said = [*ASKED, RIGHT | {flag: value}, AGAIN, WRONG]
    [record] = records(write({"messages": said}))
    assert told(record.prompt) == [("user", "1 + 2?"), ("assistant", "3"), ("user", "And 1 more?")]
    assert told(record.variants[0].messages) == [("assistant", "4")]
    [group], renderer = replayed(write({"messages": [*ASKED, WRONG, AGAIN, RIGHT | {flag: value}, *said]}), tiny_model)
    [row] = group.episodes[0].rows
    assert taught(row, renderer).count("[") == 2
    assert "assistant\n3<|im_end|>" in taught(row, renderer)
    assert taught(row, renderer).endswith("assistant\n[4<|im_end|>]")
    assert group.episodes[0].rows[0].loss_weights.sum() == 4


@pytest.mark.parametrize("flag", [{"weight": 1}, {"train": True}, {"loss": None}, {"weight": "heavy"}, {"masked": 0}])
def test_a_turn_with_another_flag_is_learned(flag, write):
    [record] = records(write({"messages": [*ASKED, RIGHT | flag, AGAIN, WRONG]}))
    assert [message.weight for message in record.variants[0].messages] == [1, 1, 1]


def test_a_weight_of_a_turn_is_that_of_its_tokens(write, tiny_model):
    [group], _ = replayed(write({"messages": [*ASKED, RIGHT | {"weight": 0.5}, AGAIN, WRONG]}), tiny_model)
    weights = [set(segment.loss_weights) for segment in group.episodes[0].rows[0].segments]
    assert weights == [{0.0}, {0.5}, {0.0}, {1.0}]


@pytest.mark.parametrize("thought", [{}, {"reasoning_content": "Add."}])
def test_the_parts_of_a_turn_that_are_not_to_be_learned_are_context(thought, write, tiny_model):
    """axolotl's `train_detail` counts characters; the end that it gives is a part's last one."""
    text = "It is 数 3, not 4. Ok"
    parts = [(0, 7, True), (8, 9, False), (10, 16, False), (17, 19, True)]
    detail = [{"begin_offset": a, "end_offset": b, "train": is_learned} for a, b, is_learned in parts]
    said = RIGHT | thought | {"content": text, "train_detail": detail}
    [group], renderer = replayed(write({"messages": [*ASKED, said, AGAIN, WRONG]}), tiny_model)
    [row] = group.episodes[0].rows
    [_, turn, _, last] = row.segments
    tokens = [[t for t, w in zip(turn.token_ids, turn.loss_weights, strict=True) if w == x] for x in (1, 0)]
    before = "<think>\nAdd.\n</think>\n\n" if thought else ""
    assert [renderer.tokenizer.decode(part) for part in tokens] == [f"{before}It is 数  Ok<|im_end|>", "3, not 4."]
    assert set(last.loss_weights) == {1.0}
    none = [item | {"train": False} for item in detail]
    [record] = records(write({"messages": [*ASKED, said | {"train_detail": none}, AGAIN, WRONG]}))
    assert told(record.variants[0].messages) == [("assistant", "4")]


def test_a_part_of_a_turn_that_the_template_changes_is_an_error(write, tiny_model):
    said = RIGHT | {"content": " 3 4 ", "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}
    trimming = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}<|im_end|>{% endfor %}"
    trimming += "{% if add_generation_prompt %}assistant:{% endif %}"
    path = write({"messages": [*ASKED, said]})
    words = ["--task", "0", "data.test_fraction=0", f"model={tiny_model}", f"data.path={path}"]
    assert main(["envs", "try", "recorded", *words, f"render.template={trimming}"]) == 2


def test_segments_that_are_not_to_be_learned_are_context(write, tiny_model):
    """axolotl's rows without a template."""
    segments = [(False, "Q: 1 + 2?\nA:"), (True, " 3\n"), (False, "Q: 1?\nA:"), (True, " 1")]
    row = {"segments": [{"label": is_learned, "text": text} for is_learned, text in segments]}
    [group], renderer = replayed(write(row), tiny_model)
    ids, weights = [], []
    for segment in group.episodes[0].rows[0].segments:
        ids += segment.token_ids
        weights += segment.loss_weights
    assert renderer.tokenizer.decode(ids) == "Q: 1 + 2?\nA: 3\nQ: 1?\nA: 1<|im_end|>"
    assert renderer.tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w]) == " 3\n 1<|im_end|>"


def test_a_row_with_nothing_to_learn_is_left_out_and_counted(write, caplog):
    rows = [
        {"messages": [*ASKED, RIGHT]},
        {"messages": [*ASKED, RIGHT | {"weight": 0}]},
        {"prompt": "1 + 2?", "completion": "3", "train": False},
        {"prompt": "1 + 2?", "chosen": [RIGHT | {"loss": False}], "rejected": [WRONG]},
    ]
    for row in rows[1:]:
        with pytest.raises(DataError, match="holds no rows to use; left out: 1, as they say that nothing in them is"):
            records(write(row))
    assert len(records(write(*rows[:2]))) == 1
    assert "1 of 2 rows are left out: 1, as they say that nothing in them is to be learned" in caplog.text
    last = {"messages": [*ASKED, RIGHT, AGAIN, WRONG | {"weight": 0}]}
    assert len(records(write(rows[0], last))) == 2
    assert len(records(write(rows[0], last), teach="last")) == 1


def test_keys_that_nothing_reads_are_named_once_with_their_number(write, caplog):
    said = {"messages": [*ASKED, RIGHT | {"mood": "glad", "weight": 1, "name": None}], "source": "web", "note": ""}
    path = write(said | {"prompt": "unread"}, said, said | {"level": 3, "weight": 1}, {"messages": [*ASKED, RIGHT]})
    with caplog.at_level(logging.WARNING):
        records(path)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        f"{path}: nothing reads these keys of its rows: source (3), message.mood (3), prompt (1), level (1)"
    )
    caplog.clear()
    read = {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "s", "history": [], "reward": 1, "k": 2}
    records(write(read), template="{} <{reward:.2f}>")
    assert "keys of its rows: k (1)" in caplog.text
    caplog.clear()
    records(write({"prompt": "1 + 2?", "chosen": "3", "rejected": "4", "margin": 0.5, "tools": TOOLS}))
    assert not caplog.text


def test_a_prompt_whose_field_is_named_is_the_whole_prompt(write):
    """Another program's `--input_key input` names it; by its usual name the field goes with an instruction."""
    row = {"input": "What?", "output": "That.", "system": "Be kind.", "history": [["a", "b"]], "messages": TALK}
    fields = {"prompt": "input", "answer": "output"}
    [record] = records(write(row), form="demonstration", fields=fields)
    assert told(record.prompt) == [("user", "What?")]
    assert told(record.variants[0].messages) == [("assistant", "That.")]


ASK = "\n\nHuman: Hi there\n\nAssistant: Hello.\n\nHuman: 1 + 2?\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (f"{ASK} It is 3", f"{ASK} It is 4", ASK),  # both answers begin with the same words
        (f"{ASK} Yes, 3", f"{ASK} No", ASK),
        (f"{ASK} Yes", f"{ASK} Yes, sir", ASK),
        ("### Instruction:\n1 + 2?\n\n### Response:\nI say 3", "### Instruction:\n1 + 2?\n\n### Response:\nI say 4",
         "### Instruction:\n1 + 2?\n\n### Response:\n"),
        ("<|user|>\n1?\n<|assistant|>\n3", "<|user|>\n1?\n<|assistant|>\n4", "<|user|>\n1?\n<|assistant|>\n"),
        ("<|im_start|>user\n1?\n<|im_start|>assistant\nA 3", "<|im_start|>user\n1?\n<|im_start|>assistant\nA 4",
         "<|im_start|>user\n1?\n<|im_start|>assistant\n"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n3", "<|start_header_id|>assistant<|end_header_id|>\n\n4",
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("<|user|>\n1?<|assistant|>\nSo 3", "<|user|>\n1?<|assistant|>\nSo 4", "<|user|>\n1?<|assistant|>\n"),
        ("<｜User｜>1?<｜Assistant｜>So 3", "<｜User｜>1?<｜Assistant｜>So 4", "<｜User｜>1?<｜Assistant｜>"),
        ("[INST] 1 + 2? [/INST] So 3", "[INST] 1 + 2? [/INST] So 4", "[INST] 1 + 2? [/INST]"),
        ("USER: 1 + 2? ASSISTANT: So 3", "USER: 1 + 2? ASSISTANT: So 4", "USER: 1 + 2? ASSISTANT:"),
        ("Q: 1 + 2?\nA: 3", "Q: 1 + 2?\nA: 4", "Q: 1 + 2?\nA:"),
        ("What is 1 + 2?\nIt is 3", "What is 1 + 2?\nIt is 4", "What is 1 + 2?\n"),
        ("The sum is forty-six", "The sum is forty-seven", "The sum is"),
        ("Yes", "Yes, sir", ""),
    ],
)  # fmt: skip
def test_the_common_beginning_of_two_texts_is_their_prompt_to_the_end_of_a_turn(chosen, rejected, prompt, write):
    [record] = records(write({"chosen": chosen, "rejected": rejected}))
    assert "".join(message.text for message in record.prompt) == prompt
    assert [prompt + variant.messages[0].text for variant in record.variants] == [chosen, rejected]
    assert [variant.rewards for variant in record.variants] == [(1.0,), (0.0,)]


@pytest.mark.parametrize("render", ["auto", "raw", "text"])
def test_texts_with_a_common_beginning_are_taught_without_a_template(render, write, tiny_model):
    path = write({"chosen": f"{ASK} It is 3", "rejected": f"{ASK} It is 4"})
    [group], renderer = replayed(path, tiny_model, render=render)
    texts = [taught(episode.rows[0], renderer) for episode in group.episodes]
    assert texts == [f"{ASK}[ It is {n}<|im_end|>]" for n in "34"]
    path = write({"chosen": "<|user|>1?<|assistant|>3", "rejected": "<|user|>1?<|assistant|>4"})
    [group], renderer = replayed(path, tiny_model, render=render)
    texts = [taught(episode.rows[0], renderer) for episode in group.episodes]
    assert texts == [f"<|user|>1?<|assistant|>[{n}<|im_end|>]" for n in "34"]
    [group], renderer = replayed(write({"text": "1 + 2 = 3<|im_end|>"}), tiny_model, render=render)  # ends once
    assert taught(group.episodes[0].rows[0], renderer) == "[1 + 2 = 3<|im_end|>]"


def test_two_whole_texts_are_a_preference_without_a_prompt(write):
    [record] = records(write({"chosen": "good text", "rejected": "bad text", "margin": None}))
    assert record.prompt == ()
    assert [told(variant.messages) for variant in record.variants] == [
        [("assistant", "good text")], [("assistant", "bad text")],
    ]  # fmt: skip
    assert record.margin == 0


def test_an_unknown_field_is_refused_with_the_ones_there_are():
    with pytest.raises(ConfigError, match=r"there is no field 'choosen'. Did you mean 'chosen'"):
        envgym.spec("recorded", fields={"choosen": "a"})


def test_a_table_of_commas_is_data_too(tmp_path):
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerows([["prompt", "completion"], ["1 + 2?", "3"], ["a\nb", 'say "c", d']])
    first, second = records(str(path))
    assert told(first.variants[0].messages) == [("assistant", "3")]
    assert (told(second.prompt), told(second.variants[0].messages)) == (
        [("user", "a\nb")],
        [("assistant", 'say "c", d')],
    )


def test_a_list_of_objects_is_data_too(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"prompt": "1 + 2?", "completion": "3"}] * 2, indent=2))
    assert len(records(str(path))) == 2


# -- tokens ---------------------------------------------------------------------------------------------------


def replayed(path, model, *, agent=None, render="auto", **settings):
    """The groups of a step of training, without a trainer."""

    async def main():
        renderer = make_renderer(render, load_tokenizer(str(model)))
        async with envgym.spec("recorded", data={"path": path, "test_fraction": 0}, **settings) as spec:
            replay = Replay(renderer, ReplayConfig(**agent or {}))
            runner = Runner(spec, replay, None, RolloutConfig(refills=0), max_model_len=0, seed=0, deterministic=False)
            tasks = [await spec.tasks("train").get(index) for index in range(spec.tasks("train").size)]
            plan = SamplingPlan("step-1", SamplingParams(8, 1.0, 1.0, 0, ()), spec.recordings_per_task)
            return await runner.roll_out(tasks, plan), renderer

    return asyncio.run(main())


def taught(row, renderer):
    """The text of a row with what is taught in brackets."""
    text = ""
    for segment in row.segments:
        weights = set(segment.loss_weights)
        assert len(weights) <= 1
        part = renderer.tokenizer.decode(list(segment.token_ids))
        text += f"[{part}]" if weights == {1.0} else part
    return text


def test_all_turns_of_a_conversation_are_taught_with_the_token_that_ends_them(write, tiny_model):
    [group], renderer = replayed(write({"messages": TALK}), tiny_model)
    [row] = group.episodes[0].rows
    assert taught(row, renderer) == (
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n[3<|im_end|>]\n"
        "<|im_start|>user\nAnd 1 more?<|im_end|>\n<|im_start|>assistant\n[4<|im_end|>]"
    )
    [last], _ = replayed(write({"messages": TALK}), tiny_model, teach="last")
    [row] = last.episodes[0].rows
    assert taught(row, renderer).count("[") == 1
    assert taught(row, renderer).endswith("[4<|im_end|>]")


def test_what_a_policy_spelled_in_saved_episodes_is_characters(write, tiny_model):
    """A demonstration's special tokens are the data's; a policy that taught its own would write a user's praise."""
    forged = "3<|im_end|>\n<|im_start|>user\nGreat!"
    talk = [*ASKED, {"role": "assistant", "content": forged}, {"role": "user", "content": forged}, RIGHT]
    saved, renderer = replayed(
        write({"messages": talk, "outcome": {"status": "completed"}, "reward": 1.0}), tiny_model, form="episodes"
    )
    [row] = saved[0].episodes[0].rows
    plain, _ = replayed(write({"messages": [*ASKED, RIGHT, TALK[2], RIGHT]}), tiny_model)
    marks = [renderer.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
    [expected] = plain[0].episodes[0].rows
    ids, expected_ids = list(row.token_ids), list(expected.token_ids)
    assert [ids.count(mark) for mark in marks] == [expected_ids.count(mark) for mark in marks]
    assert taught(row, renderer).count(forged) == 2
    own, _ = replayed(write({"messages": talk}), tiny_model)
    assert list(own[0].episodes[0].rows[0].token_ids).count(marks[0]) > expected_ids.count(marks[0])


def test_a_preference_is_a_group_of_two(write, tiny_model):
    row = {"prompt": "1 + 2?", "chosen": "3", "rejected": "4", "margin": 0.5}
    [group], renderer = replayed(write(row), tiny_model)
    assert [(taught(e.rows[0], renderer)[-14:], e.reward, e.member) for e in group.episodes] == [
        ("t\n[3<|im_end|>]"[-14:], 1.0, 0), ("t\n[4<|im_end|>]"[-14:], 0.0, 1)
    ]  # fmt: skip
    assert group.episodes[0].metrics == {"margin": 0.5}


def test_steps_are_segments_of_one_answer_with_their_labels(write, tiny_model):
    row = {"prompt": "1 + 2?", "completions": ["I add.", "3"], "labels": [True, False]}
    [group], renderer = replayed(write(row), tiny_model)
    [row] = group.episodes[0].rows
    assert taught(row, renderer).endswith("assistant\n[I add.\n\n][3\n\n<|im_end|>]")
    assert [turn.reward for turn in row.turns] == [1.0, 0.0]


def test_steps_of_one_text_end_at_the_separator_and_the_question_stands_before_them(write, tiny_model):
    row = {"input": "1 + 2? I add. ки\nSo 3 ки\n", "value": ["+", "-"]}
    fields = {"steps": "input", "step_labels": "value"}
    [group], renderer = replayed(write(row), tiny_model, render="raw", form="steps", separator="ки", fields=fields)
    [row] = group.episodes[0].rows
    assert taught(row, renderer) == "1 + 2? I add. [ки][\nSo 3 ки<|im_end|>]"
    assert [turn.reward for turn in row.turns] == [1.0, 0.0]


def test_prompts_alone_are_for_a_policy_to_answer(write):
    async def main():
        data = {"path": write({"context": ASKED}, {"context": "2 + 3?"}), "test_fraction": 0}
        settings = {"form": "prompt", "fields": {"prompt": "context"}}
        async with envgym.spec("recorded", data=data, **settings) as spec:
            env = spec.make()
            observation, _ = await env.reset(options={"task": await spec.tasks("train").get(0)})
            return spec.agent, observation, await env.step(envgym.Action("3"))

    agent, observation, (_, reward, terminated, _, _) = asyncio.run(main())
    assert (agent, observation.messages[0].text, reward, terminated) == ("single_turn", "1 + 2?", None, True)


def test_plain_text_is_taught_whole(write, tiny_model):
    [group], renderer = replayed(write({"text": "1 + 2 = 3"}), tiny_model)
    [row] = group.episodes[0].rows
    assert taught(row, renderer).replace("]", "").replace("[", "") == "1 + 2 = 3<|im_end|>"
    assert row.loss_weights.tolist() == [0.0] + [1.0] * (len(row.token_ids) - 1)


def test_a_row_that_is_too_long_loses_its_end_or_is_left_out(write, tiny_model):
    path = write(
        {"prompt": "1 + 2?", "completion": "the answer is forty-six. " * 4}, {"prompt": "1?", "completion": "1"}
    )
    [whole, short], renderer = replayed(path, tiny_model)
    n = len(whole.episodes[0].rows[0].token_ids)
    [cut, same], _ = replayed(path, tiny_model, agent={"max_tokens": n - 3})
    [row] = cut.episodes[0].rows
    assert list(row.token_ids) == list(whole.episodes[0].rows[0].token_ids)[: n - 3]
    assert not taught(row, renderer).endswith("<|im_end|>]")
    assert (cut.episodes[0].outcome.status, cut.episodes[0].outcome.reason) == ("truncated", "length")
    assert rollout_metrics([cut, same], sampled=False)["truncated/length"] == 0.5
    assert list(same.episodes[0].rows[0].token_ids) == list(short.episodes[0].rows[0].token_ids)
    [dropped, _], _ = replayed(path, tiny_model, agent={"max_tokens": n - 3, "too_long": "drop"})
    assert (dropped.episodes[0].failed, dropped.episodes[0].outcome.reason) == (True, "too_long")
    [nothing, _], _ = replayed(path, tiny_model, agent={"max_tokens": 4})
    assert nothing.episodes[0].outcome.reason == "too_long"


def test_several_sets_are_mixed_by_their_weights(write):
    """Preferences from two files, three of the one to one of the other."""
    pair = {"prompt": "1 + 2?", "chosen": "3", "rejected": "4"}
    few = write(*[pair | {"prompt": f"few {n}"} for n in range(10)], name="few.jsonl")
    many = write(*[pair | {"prompt": f"many {n}"} for n in range(50)], name="many.jsonl")

    async def main():
        data = {"sources": {"a": {"path": many, "weight": 3}, "b": {"path": few, "weight": 1}}, "test_fraction": 0}
        async with envgym.spec("recorded", data=data) as spec:
            tasks = spec.tasks("train")
            assert spec.recordings_per_task == 2
            return [spec.record(await tasks.get(index)).prompt[0].text.split()[0] for index in range(40)]

    drawn = asyncio.run(main())
    assert drawn.count("few") == 10


def test_an_epoch_of_several_weighted_sets_ends_with_the_last_of_them(write):
    path = write(*[{"prompt": f"{n} + 2?", "completion": "3"} for n in range(8)])
    sources = {name: {"path": path, "weight": weight} for name, weight in (("a", 3), ("b", 1))}

    def steps(**words):
        settings = {"env": "recorded", "data": {"sources": sources, "test_fraction": 0}, "eval": {"every": 0}}
        stage = resolve({**settings, "rollout": {"tasks_per_step": 4}, **words}, recipe="sft").stages[0]

        async def main():
            async with stage.make_spec() as spec:
                return steps_of(stage, spec.tasks("train").epoch_size)

        return asyncio.run(main())

    assert steps(steps=9) == 9
    assert steps(epochs=1) == 8  # 8 tasks are a quarter of 32


def test_the_preview_shows_what_is_taught_and_refuses_what_is_not(write, tiny_model, capsys):
    """As a user who looks before training."""
    pairs = write({"prompt": "1 + 2?", "chosen": "three", "rejected": "four"}, name="pairs.jsonl")
    common = ["--task", "0", "data.test_fraction=0", "model=" + str(tiny_model)]
    assert main(["envs", "try", "recorded", f"data.path={pairs}", *common]) == 0
    said = capsys.readouterr().out
    assert "⟦three<|im_end|>⟧" in said
    assert "⟦four<|im_end|>⟧" in said
    assert said.count("user\n1 + 2?") == 2
    assert "reward 1" in said
    steps = write({"prompt": "1 + 2?", "steps": ["three"], "labels": [True]}, name="steps.jsonl")
    assert main(["envs", "try", "recorded", f"data.path={steps}", *common]) == 0
    shown = write({"prompt": "1 + 2?", "response": "three"}, name="shown.jsonl")
    cut = ["agent.max_tokens=4", "agent.name=replay"]
    assert main(["envs", "try", "recorded", f"data.path={shown}", *common, *cut]) == 2
    said = capsys.readouterr()
    assert "the recording has more than agent.max_tokens=4 tokens" in said.err
    assert "; 1 are longer than agent.max_tokens=4" in " ".join(said.out.split())


def test_the_preview_says_how_long_rows_are_and_how_many_are_too_long(write, tiny_model, capsys):
    rows = [{"prompt": "?", "response": "a" * n} for n in range(1, 101)]
    path = write(*rows, name="rows.jsonl")
    words = ["--task", "0", "data.test_fraction=0", "agent.name=replay", f"model={tiny_model}", f"data.path={path}"]

    def said(*more):
        assert main(["envs", "try", "recorded", *words, *more]) == 0
        return " ".join(capsys.readouterr().out.split())

    frame = int(re.search(r"longest (\d+)", said())[1]) - 100  # what the template adds to the longest answer
    assert f"100 rows of 100 of 100 tasks, in tokens: median {frame + 50}, 90% {frame + 90}, 99% {frame + 99}" in said()
    assert "agent.max_tokens is unset" in said()
    assert f"; 60 are longer than agent.max_tokens={frame + 40}" in said(f"agent.max_tokens={frame + 40}")
