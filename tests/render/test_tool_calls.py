"""Tool calls: what a template writes is read back, and whatever a policy writes is read without an exception."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envgym.errors import TurnRefused
from envgym.render import TextRenderer
from envgym.render.spelling import BREAK
from envgym.render.tool_calls import (
    read_argument_tags,
    read_deepseek,
    read_function_tags,
    read_hermes,
    read_llama,
    read_mistral,
)
from envgym.types import Message, Observation, TextPart, ToolCall, ToolSpec

FORMATS = {
    "qwen2_5": read_hermes, "qwen3": read_hermes, "qwen3_instruct_2507": read_hermes, "llama3_1": read_llama,
    "llama3_2": read_llama, "own": read_mistral, "deepseekv3": read_deepseek, "deepseek_r1_distill": read_deepseek,
    "qwen3_6": read_function_tags, "nemotron_3_nano": read_function_tags, "glm4moe": read_argument_tags,
    # Templates that write no calls, or in a way that is not read: described in words, called as Hermes does.
    "chatml": read_hermes, "llama3": read_hermes, "gemma": read_hermes, "phi3": read_hermes, "gemma4": read_hermes,
    "lfm2_2_5": read_hermes,
}  # fmt: skip
TAGS = (read_function_tags, read_argument_tags)
ONE_CALL = ("llama3_1", "llama3_2")
"""Families whose template refuses several calls in one turn."""
quick = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])

TYPES = {
    "string": st.text(
        # The renderer removes the two code points that it reserves for itself.
        st.characters(codec="utf-8", exclude_characters=f"<>[]｜\r{BREAK}", exclude_categories=["Cc"]),
        max_size=12,
    ),
    "integer": st.integers(-(10**20), 10**20),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(st.integers(0, 9) | st.none() | st.sampled_from(["a", "数", '"'])),
    "object": st.dictionaries(st.sampled_from(["x", "y z", "{"]), st.lists(st.booleans())),
}
SPECS = tuple(
    ToolSpec(
        name,
        "Does it.",
        {"type": "object", "properties": {f"{name}_{kind}": {"type": kind} for kind in TYPES}},
    )
    for name in ("calculate", "look-up", "f1")
)


def calls(limit):
    """Calls of the tools above with arguments of the declared types."""

    def call(spec):
        arguments = {key: TYPES[value["type"]] for key, value in spec.parameters["properties"].items()}
        return st.fixed_dictionaries({}, optional=arguments).map(lambda some: ToolCall("", spec.name, some))

    return st.lists(st.sampled_from(SPECS).flatmap(call), min_size=1, max_size=limit)


def asked(text="12 + 34?", tools=SPECS):
    return Observation(messages=(Message("user", text),), tools=tools)


def begun(renderer, tools=SPECS):
    dialogue = renderer.dialogue()
    dialogue.start(asked(tools=tools))
    return dialogue


def answers(message):
    results = [Message("tool", (TextPart(call.error or "46"),), (), call.id, call.name) for call in message.tool_calls]
    return Observation(messages=tuple(results) or (Message("user", "Go on."),))


def what(calls):
    return [(call.name, dict(call.arguments), call.error) for call in calls]


@pytest.mark.parametrize("family", FORMATS)
def test_what_the_template_writes_is_read_back(chat, family):
    renderer = chat("tekken", family)
    assert renderer.template.call_format is FORMATS[family]
    limit = 1 if family in ONE_CALL else 3

    @quick
    @given(calls(limit), st.sampled_from(["", "I look it up."]))
    def play(made, content):
        turn = Message("assistant", (TextPart(content),), tuple(made))
        dialogue = begun(renderer)
        ids = dialogue.add_demonstration(turn)
        message = begun(renderer).add_policy_turn(ids)
        if content and renderer.template.call_format is read_llama:
            assert message.tool_calls == ()  # a call is the whole of a turn, so that this was an answer
        else:
            assert what(message.tool_calls) == what(made)
            assert content in message.text
        assert dialogue.messages[-1].tool_calls[0].id
        dialogue.add_observation(answers(dialogue.messages[-1]))

    play()


def test_what_is_written_in_plain_text_is_read_back(vocabulary):
    renderer = TextRenderer(vocabulary("tekken"))

    @quick
    @given(calls(3), st.sampled_from(["", "I look it up."]))
    def play(made, content):
        ids = begun(renderer).add_demonstration(Message("assistant", (TextPart(content),), tuple(made)))
        assert what(begun(renderer).add_policy_turn(ids).tool_calls) == what(made)

    play()


MARKUP = {
    read_hermes: ["<tool_call>", "</tool_call>", '{"name": "f1", "arguments": {}}', "{", "}", '"name"', "[" * 3000],
    read_llama: ["<|python_tag|>", '{"name": "f1", "parameters": {}}', "{", "}", ";", '"name"', '{"parameters"'],
    read_mistral: ["[TOOL_CALLS]", "[ARGS]", '[{"name": "f1", "arguments": {}}]', "f1", "[", "{", "}", "[CALL_ID]"],
    read_deepseek: [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>", "function", "f1", "\n```json\n", "{}", "{", "\n```",
    ],
    read_function_tags: [
        "<tool_call>", "<function=f1>", "<function=", "<parameter=f1_integer>", "</parameter>", "</function>",
        "</tool_call>", "1e999", "{",
    ],
    read_argument_tags: [
        "<tool_call>", "f1", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "NaN", "\n",
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", FORMATS)
def test_anything_is_read_without_an_exception(chat, family):
    """Each call has either all it needs or an error that says so; and the conversation goes on with its results."""
    renderer = chat("tekken", family)
    pieces = st.sampled_from([*MARKUP[FORMATS[family]], "<think>", "</think>", " ", '"\\ud83d"', "NaN", "x", "\n"])
    bits = st.lists(pieces, max_size=9).map("".join)

    def broken(ids):
        """A good call with a token taken out or put twice, or cut short."""
        cuts = [lambda i: ids[:i] + ids[i + 1 :], lambda i: ids[: i + 1] + ids[i:], lambda i: ids[:i]]
        return st.builds(lambda cut, at: cut(at), st.sampled_from(cuts), st.integers(0, len(ids) - 1))

    good = calls(1).map(lambda made: begun(renderer).add_demonstration(Message("assistant", (), tuple(made))))
    anchor = renderer.tokenizer.eos_token_id
    turns = st.one_of(bits.map(lambda text: renderer.encode_after(anchor, text)), good.flatmap(broken))

    @quick
    @given(turns, st.sampled_from([*([end] for end in renderer.stop_token_ids), []]))
    def play(ids, end):
        dialogue = begun(renderer)
        message = dialogue.add_policy_turn([*ids, *end])
        for call in message.tool_calls:
            assert len(call.id) == 9
            json.dumps(dict(call.arguments), allow_nan=False)
            if call.error:
                assert call.arguments == {}
                assert call.error.endswith(".")
                assert "\n" not in call.error
            else:
                assert call.name in {tool.name for tool in SPECS}
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
        try:
            extension = dialogue.add_observation(answers(message))
        except TurnRefused:
            assert not message.text.strip()  # some take no turn without text
            return
        assert extension.token_ids

    play()


WRONG = {
    "not JSON": ("<tool_call>\n{'name': 'f1'}\n</tool_call>", "", "not valid JSON: Expecting property name"),
    "cut": ('<tool_call>\n{"name": "f1", "argum', "", "not valid JSON: Unterminated string"),
    "unclosed": ('<tool_call>\n{"name": "f1", "arguments": {}}\n', "f1", "does not end with </tool_call>"),
    "no object": ("<tool_call>\n[1]\n</tool_call>", "", 'a JSON object with "name", a string, and "arguments"'),
    "no name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', "", 'a JSON object with "name"'),
    "no arguments": ('<tool_call>\n{"name": "f1"}\n</tool_call>', "f1", 'of \'f1\' lacks "arguments", a JSON object'),
    "arguments as text": (
        '<tool_call>\n{"name": "f1", "arguments": "{}"}\n</tool_call>', "f1", 'lacks "arguments", a JSON object',
    ),
    "unknown": (
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "g",
        "no tool 'g'; the tools are: calculate, look-up",
    ),
    "infinite": ('<tool_call>\n{"name": "f1", "arguments": {"x": 1e999}}\n</tool_call>', "", "1e999 is no number"),
    "deep": (f'<tool_call>\n{{"name": "f1", "arguments": {{"x": {"[" * 70}{"]" * 70}}}}}\n</tool_call>', "", "deeply"),
    "no text": ('<tool_call>\n{"name": "f1", "arguments": {"x": "\\ud83d"}}\n</tool_call>', "", "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "name", "error"), WRONG.values(), ids=WRONG)
def test_a_malformed_call_says_what_is_wrong(chat, text, name, error):
    renderer = chat("tekken", "qwen2_5")
    message = begun(renderer).add_policy_turn(renderer.encode(f"Well.\n{text}"))
    [call] = message.tool_calls
    assert (call.name, call.arguments) == (name, {})
    assert error in call.error
    assert message.text == f"Well.\n{text}"


def test_one_malformed_call_leaves_the_others(chat):
    renderer = chat("tekken", "qwen2_5")
    good = '<tool_call>\n{"name": "f1", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
    dialogue = begun(renderer)
    message = dialogue.add_policy_turn(renderer.encode(f"{good}\n<tool_call>{{</tool_call>\n{good}<|im_end|>"))
    assert [bool(call.error) for call in message.tool_calls] == [False, True, False]
    assert message.tool_calls[2].arguments == {"x": "</tool_call>"}
    # As it was written, since the template could write it in no other way.
    assert not dialogue.add_observation(answers(message)).fork


def test_calls_are_read_where_tools_are_offered(chat):
    renderer = chat("tekken", "qwen2_5")
    ids = renderer.encode('<tool_call>\n{"name": "f1", "arguments": {}}\n</tool_call>')
    assert begun(renderer, tools=()).add_policy_turn(ids).tool_calls == ()
    assert len(begun(renderer).add_policy_turn(ids).tool_calls) == 1


@pytest.mark.parametrize(("family", "opened"), [("qwen3", "<think>\n"), ("qwen3_6", "")])
def test_a_call_in_a_thought_is_only_thought_of(chat, family, opened):
    renderer = chat("tekken", family)
    call = renderer.template.turn(renderer.template.assistant("", [ToolCall("", "f1", {})]))
    for text, n_calls in [
        (f"{opened}{call}", 0),
        (f"{opened}{call}\n</think>\n\nNo.", 0),
        (f"{opened}Hm.</think>{call}", 1),
    ]:
        assert len(begun(renderer).add_policy_turn(renderer.encode(text)).tool_calls) == n_calls


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("1", {"f1_integer": 1}),
        ("1", {"f1_string": "1"}),
        ("True", {"f1_boolean": True}),
        ("true", {"f1_boolean": True}),
        ("[1, 2]", {"f1_array": [1, 2]}),
        ("[1, 2", {"f1_array": "[1, 2"}),
        ("7 apples", {"f1_integer": "7 apples"}),
        ("null", {"unknown": None}),
        ("two\nlines", {"f1_string": "two\nlines"}),
        ("", {"f1_string": ""}),
    ],
)
def test_an_argument_in_tags_is_what_its_schema_says(chat, text, arguments):
    renderer = chat("tekken", "qwen3_6")
    [key] = arguments
    written = f"</think><tool_call>\n<function=f1>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = begun(renderer).add_policy_turn(renderer.encode(written)).tool_calls
    assert (call.arguments, call.error) == (arguments, "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f1", "parameters": {"x": 1}}', [("f1", {"x": 1})]),
        ('<|python_tag|>{"name": "f1", "parameters": {}}<|eom_id|>', [("f1", {})]),
        ('{"name": "f1", "arguments": {}}\n{"name": "calculate", "parameters": {}}', [("f1", {}), ("calculate", {})]),
        ('{"total": 46}', []),
        ("{46}", []),
        ("The answer is 46.", []),
        ('{"parameters": {}}', [("", {})]),
        ('<|python_tag|>f1.call(x="1")', [("", {})]),
    ],
)
def test_bare_json_is_a_call_where_it_names_something(chat, text, found):
    renderer = chat("tekken", "llama3_1")
    calls = begun(renderer).add_policy_turn(renderer.encode(text)).tool_calls
    assert [(call.name, call.arguments) for call in calls] == found
    assert [bool(call.error) for call in calls] == [not name for name, _ in found]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "f1", "arguments": {"x": 1}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]f1[ARGS]{"x": 1}',
        '[TOOL_CALLS]f1{"x": 1}',
        '[TOOL_CALLS]{"name": "f1", "arguments": {"x": 1}, "id": "too long an id"}',
    ],
)
def test_the_mistral_formats(chat, text):
    """Their marker is a special token: no text, but read."""
    renderer = chat("tekken", "own")
    dialogue = begun(renderer)
    message = dialogue.add_policy_turn([*renderer.encode(text), renderer.stop_token_ids[0]])
    [call] = message.tool_calls
    assert (call.name, call.arguments, call.error) == ("f1", {"x": 1}, "")
    assert call.id == ("abcdefghi" if "abcdefghi" in text else "call00000")
    assert "[TOOL_CALLS]" not in message.text
    extension = dialogue.add_observation(answers(message))
    assert not extension.fork
    assert f'"call_id": "{call.id}"' in renderer.tokenizer.decode(extension.token_ids)


def test_a_later_deepseek_format(chat):
    renderer = chat("tekken", "deepseekv3")
    text = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f1<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    [call] = begun(renderer).add_policy_turn(renderer.encode(f"</think>{text}")).tool_calls
    assert (call.name, call.arguments, call.error) == ("f1", {"x": 1}, "")


def test_ids_of_calls_are_unique_in_a_conversation(chat):
    renderer = chat("tekken", "own")
    dialogue = begun(renderer)
    found = []
    for own in ("call00001", "abcdefghi", "abcdefghi", ""):
        text = f'[TOOL_CALLS][{{"name": "f1", "arguments": {{}}, "id": "{own}"}}]</s>'
        found.append(dialogue.add_policy_turn(renderer.encode(text)).tool_calls[0].id)
        dialogue.add_observation(answers(dialogue.messages[-1]))
    assert found == ["call00001", "abcdefghi", "call00002", "call00003"]


@pytest.mark.parametrize("family", FORMATS)
def test_the_policy_is_told_which_tools_there_are(chat, family):
    """By the template, or in the first message by us; and a tool's results reach it, each once and in order."""
    renderer = chat("tekken", family)
    dialogue = renderer.dialogue()
    prompt = renderer.tokenizer.decode(dialogue.start(asked()))
    if not family.startswith("deepseek"):
        assert "tool_call" in prompt or "Respond in the format" in prompt or "[AVAILABLE_TOOLS]" in prompt
    assert all(f'"{tool.name}"' in prompt or f"<name>{tool.name}<" in prompt for tool in SPECS)
    assert prompt.count("12 + 34?") == 1
    made = tuple(ToolCall("", name, {}) for name in ("f1", "calculate")[: 1 if family in ONE_CALL else 2])
    dialogue.add_demonstration(Message("assistant", (), made))
    calls = dialogue.messages[-1].tool_calls
    results = [
        Message("tool", (TextPart(f"result {number}."),), (), call.id, call.name) for number, call in enumerate(calls)
    ]
    text = renderer.tokenizer.decode(dialogue.add_observation(Observation(messages=tuple(results))).token_ids)
    places = [text.find(f"result {number}.") for number in range(len(calls))]
    assert -1 not in places
    assert places == sorted(places)


COLOURS = {"Colour": {"enum": ["1", "red"], "type": "string"}, "Level": {"enum": [1, 2]}}
TYPED = {
    "text_or_none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "text_or_number": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "types": {"type": ["string", "null"]},
    "colour": {"$ref": "#/$defs/Colour"},
    "all": {"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"},
    "level": {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]},
    "constant": {"const": "5"},
    "list": {"type": "array", "items": {"type": "string"}},
    "lists_or_text": {"anyOf": [{"type": "array"}, {"type": "string"}]},
    "object": {"type": "object"},
    "any": {},
}


@pytest.mark.parametrize("reader", TAGS)
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text_or_none", "5", "5"),
        ("text_or_none", "true", "true"),
        ("text_or_none", "null", None),
        ("text_or_none", "None", None),
        ("text_or_number", "5", 5),
        ("text_or_number", "True", "True"),
        ("types", "[1]", "[1]"),
        ("colour", "1", "1"),
        ("all", "1", "1"),
        ("level", "1", 1),
        ("level", "None", None),
        ("constant", "5", "5"),
        ("list", "['a', 'it\\'s']", ["a", "it's"]),
        ("list", "(1, None, True)", [1, None, True]),
        ("list", "['a'", "['a'"),
        ("list", "[{1, 2}]", "[{1, 2}]"),
        ("lists_or_text", "['a']", ["a"]),
        ("lists_or_text", "{'a': 1}", "{'a': 1}"),
        ("object", "{'a': [False]}", {"a": [False]}),
        ("any", "['a']", ["a"]),
        ("any", "'a'", "'a'"),
        ("any", "-" * 100_000 + "1", "-" * 100_000 + "1"),
    ],
)
def test_an_argument_in_tags_has_a_type_of_its_schema(reader, name, text, value):
    tool = ToolSpec("f", "", {"type": "object", "properties": TYPED, "$defs": COLOURS})
    written = {
        read_function_tags: f"<tool_call><function=f><parameter={name}>{text}</parameter></function></tool_call>",
        read_argument_tags: f"<tool_call>f<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>",
    }[reader]
    [call] = reader(written, {"f": tool}).calls
    assert call.arguments == {name: value}
    assert type(call.arguments[name]) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": None},
        {"properties": {"a": {"anyOf": None, "oneOf": None, "type": ["string", {}]}}},
        {"properties": {"a": {"type": None, "enum": None}}},
    ],
)
def test_an_argument_of_an_incomplete_schema_is_read(schema):
    text = "<tool_call><function=f><parameter=a>red</parameter></function></tool_call>"
    [call] = read_function_tags(text, {"f": ToolSpec("f", "", schema)}).calls
    assert call.arguments == {"a": "red"}


def written(renderer, argument):
    """The text of a call as the template writes it."""
    text = renderer.template.turn(
        renderer.template.assistant("", [ToolCall("abcdefghi", "f1", {"f1_string": argument})])
    )
    end = "<｜tool▁call▁end｜>"  # DeepSeek's first turns end with it too
    return f"{text.removesuffix(end)}{end}" if "<｜tool▁call▁begin｜>" in text else text


@pytest.mark.parametrize("mark", ["</think>", "<think>", "Write </think> and <think>."])
@pytest.mark.parametrize("family", FORMATS)
def test_marks_of_thoughts_in_an_argument_are_its_text(chat, family, mark):
    renderer = chat("tekken", family)
    dialogue = begun(renderer)
    closed = "Hm.</think>" if dialogue._opens_thought else ""
    message = dialogue.add_policy_turn([*renderer.encode(closed + written(renderer, mark)), renderer.stop_token_ids[0]])
    assert what(message.tool_calls) == [("f1", {"f1_string": mark}, "")]


@pytest.mark.parametrize(
    ("before", "is_text"),
    [("<think>\n", True), ("A <think> tag:\n", True), ("I use </think>.\n", False), ("<think>Hm.</think>\n", False)],
)
@pytest.mark.parametrize("family", [name for name in FORMATS if FORMATS[name] is not read_llama])
def test_a_call_after_marks_of_thoughts_is_a_call_unless_the_template_has_a_thought_there(
    chat, family, before, is_text
):
    """A thought without an end is one for templates that write thoughts."""
    renderer = chat("tekken", family)
    ids = [*renderer.encode(before + written(renderer, "x </think>")), renderer.stop_token_ids[0]]
    calls = begun(renderer).add_policy_turn(ids).tool_calls
    is_thought = is_text and renderer.template.writes_thoughts
    assert what(calls) == ([] if is_thought else [("f1", {"f1_string": "x </think>"}, "")])


def test_a_thought_that_names_the_mark_of_calls_hides_none(chat):
    renderer = chat("tekken", "qwen3")
    call = '<tool_call>\n{"name": "f1", "arguments": {}}\n</tool_call>'
    for thought in ("I write <tool_call> next.", f"Perhaps {call}?"):
        text = f"<think>\n{thought}\n</think>\n\n{call}"
        assert len(begun(renderer).add_policy_turn(renderer.encode(text)).tool_calls) == 1


def test_repeated_marks_of_arguments_are_read_in_linear_time():
    text = "<tool_call>NAME" + "<arg_key></arg_key><arg_value>" * 50_000 + "</tool_call>"  # would take hours else
    [call] = read_argument_tags(text, {}).calls
    assert call.error
