"""Plain text: conversations of models without a template, and environments that speak in raw text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envgym.errors import InvalidStep
from envgym.render import TextRenderer, make_renderer
from envgym.types import Message, Observation, TextPart, ToolCall, ToolSpec

ADD = ToolSpec("add", "Adds.", {"type": "object"})
VOCABULARIES = ["tekken", "sentencepiece", "starter"]


def told(text, role="user", **fields):
    return Observation(messages=(Message(role, text),), **fields)


def unbegun(tokenizer, row):
    """A row without the token that it begins with, where the tokenizer has one."""
    if tokenizer.bos_token_id is None:
        return row
    assert row[0] == tokenizer.bos_token_id
    return row[1:]


@pytest.fixture(params=VOCABULARIES)
def renderer(request, vocabulary):
    return TextRenderer(vocabulary(request.param))


def test_a_conversation_in_plain_text(renderer):
    tokenizer, eos = renderer.tokenizer, renderer.tokenizer.eos_token
    dialogue = renderer.dialogue()
    row = dialogue.start(Observation(messages=(Message("system", "Be brief."), Message("user", "12?"))))
    said = [*renderer.encode_after(row[-1], " 12."), tokenizer.eos_token_id]
    assert dialogue.add_policy_turn(said).text.strip() == "12."
    first = dialogue.add_observation(told("13?"))
    cut = renderer.encode_after(row[-1], " thir")
    dialogue.add_policy_turn(cut)
    second = dialogue.add_observation(told("Go on."))
    assert not first.fork
    assert not second.fork
    whole = [*row, *said, *first.token_ids, *cut, *second.token_ids]
    assert tokenizer.decode(unbegun(tokenizer, whole)) == (
        f"System: Be brief.\nUser: 12?\nAssistant: 12.{eos}\nUser: 13?\nAssistant: thir{eos}\nUser: Go on.\nAssistant:"
    )


def test_tools_in_plain_text(renderer):
    tokenizer, eos = renderer.tokenizer, renderer.tokenizer.eos_token
    dialogue = renderer.dialogue()
    row = dialogue.start(told("1 + 2?", tools=(ADD,)))
    assert tokenizer.decode(unbegun(tokenizer, row)) == (
        'You may call these tools:\n{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}\n'
        'To call one, write:\n<tool_call>\n{"name": "tool_name", "arguments": {"argument": "value"}}\n</tool_call>\n\n'
        "User: 1 + 2?\nAssistant:"
    )
    ids = dialogue.add_demonstration(Message("assistant", (TextPart("I add."),), (ToolCall("", "add", {"a": 1}),)))
    written = ' I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert renderer.decode_after(ids) == written + eos
    again = renderer.dialogue()
    again.start(told("1 + 2?", tools=(ADD,)))
    [call] = again.add_policy_turn(ids).tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1}, "")
    results = Observation(messages=(Message("tool", (TextPart("3"),), tool_call_id=call.id, name="add"),))
    assert renderer.decode_after(again.add_observation(results).token_ids) == "\nTool: 3\nAssistant:"


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_raw_text_is_appended_as_text(chat, vocabulary, name, kind):
    renderer = chat(name, "own") if kind == "chat" else TextRenderer(vocabulary(name))
    tokenizer = renderer.tokenizer
    quick = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
    texts = st.text(st.sampled_from("ab .\n12數🙂"), min_size=1)

    @quick
    @given(st.lists(texts, min_size=3, max_size=3), st.booleans())
    def play(said, ended):
        dialogue = renderer.dialogue()
        first = dialogue.start(Observation(text=said[0]))
        assert first == tokenizer.encode(said[0])
        turn = renderer.encode_after(first[-1], said[1]) + [tokenizer.eos_token_id] * ended
        assert dialogue.add_policy_turn(turn).text.strip() == said[1].strip()
        extension = dialogue.add_observation(Observation(text=said[2]))
        assert not extension.fork
        # The text alone, without glue or a word's space that nobody wrote.
        assert renderer.decode_after(extension.token_ids) == said[2]
        assert [message.text for message in dialogue.messages[::2]] == said[::2]

    play()


def test_raw_text_begins_as_the_tokenizer_begins_texts(vocabulary):
    renderer = TextRenderer(vocabulary("sentencepiece"))
    bos = renderer.tokenizer.bos_token_id
    assert renderer.prompt(Observation(text="Once")) == renderer.tokenizer.encode("Once")
    assert renderer.prompt(Observation(text="Once"))[0] == bos
    assert renderer.prompt(Observation(text="<s>Once")).count(bos) == 1
    assert bos not in renderer.dialogue().add_observation(Observation(text="upon")).token_ids
    bare = TextRenderer(vocabulary("tekken"))  # which has such a token and does not put it
    assert bare.prompt(Observation(text="Once")) == bare.tokenizer.encode("Once")


@pytest.mark.parametrize("raw_first", [True, False])
def test_messages_after_raw_text_go_on_in_plain_text_alone(chat, vocabulary, raw_first):
    text, message = Observation(text="You are in a dark room."), told("And now?")
    for renderer in (chat("starter", "own"), TextRenderer(vocabulary("starter"))):
        dialogue = renderer.dialogue()
        dialogue.start(text if raw_first else message)
        dialogue.add_policy_turn(renderer.encode("north<|im_end|>"))
        if not raw_first:
            dialogue.add_observation(text)
            dialogue.add_policy_turn(renderer.encode("north<|im_end|>"))
        if isinstance(renderer, TextRenderer):
            extension = dialogue.add_observation(message)
            assert renderer.tokenizer.decode(extension.token_ids) == "\nUser: And now?\nAssistant:"
            assert not extension.fork
        else:
            with pytest.raises(InvalidStep, match=r"follows one of raw text.*set render=text") as refused:
                dialogue.add_observation(message)
            assert "\n" not in str(refused.value)


def test_an_opening_text_token_is_not_lost(vocabulary):
    """A space before the first word of a turn is the policy's, also where decoding alone would take it away."""
    renderer = TextRenderer(vocabulary("sentencepiece"))
    ids = renderer.encode_after(renderer.tokenizer.eos_token_id, " hello")
    assert renderer.tokenizer.decode(ids) == "hello"
    assert renderer.decode_after(ids) == " hello"


def test_raw_texts_follow_each_other_directly(vocabulary):
    """A prompt that was written for the model is read as it stands, the tokens of a chat template in it too."""
    tokenizer = vocabulary("starter")
    renderer = make_renderer("raw", tokenizer)
    written = "<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n"
    dialogue = renderer.dialogue()
    row = dialogue.start(told(written))
    assert row == tokenizer.encode(written, add_special_tokens=False)
    said = dialogue.add_demonstration("34")
    assert said[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row + said) == f"{written}34{tokenizer.eos_token}"
    assert tokenizer.decode(dialogue.add_observation(told("And 13?")).token_ids) == "And 13?"


def test_raw_texts_begin_as_the_tokenizer_begins_them(vocabulary):
    tokenizer = vocabulary("sentencepiece")
    assert make_renderer("raw", tokenizer).prompt(told("12?")) == tokenizer.encode("12?")
