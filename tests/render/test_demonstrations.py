"""A recorded turn is what the template itself writes of it, up to the token that ends the turn."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envgym.types import Message, Observation, TextPart, ToolCall, ToolSpec

STABLE = ["chatml", "qwen2_5", "llama3", "llama3_1", "gemma", "gemma3", "phi3", "cohere2", "lfm2_2_5", "own"]
THINKING = {"qwen3": "<think>\n\n</think>\n\n", "qwen3_6": "\n</think>\n\n", "nemotron_3_nano": "\n</think>\n\n"}
ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})

words = st.sampled_from(["hello", "hell", " there", "12", "naïve", "数学", "🙂", "\n\n", "  ", "{", "."])
texts = st.lists(words, min_size=1, max_size=6).map("".join).map(str.strip).filter(bool)
quick = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])


def asked(text, **fields):
    return Observation(messages=(Message("user", text),), **fields)


def template(tokenizer, messages, **options):
    return tokenizer.apply_chat_template([m.as_dict() for m in messages], tokenize=False, **options)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("tekken", family) for family in STABLE),
        ("sentencepiece", "own"),
        ("sentencepiece", "gemma"),
        ("starter", "own"),
    ],
)
def test_prompts_and_demonstrations_are_the_whole_conversation(chat, name, family):
    """In text and in ids, and with nothing of what follows the end of the turn."""
    renderer = chat(name, family)
    tokenizer = renderer.tokenizer

    @quick
    @given(st.lists(texts, min_size=4, max_size=4))
    def play(said):
        dialogue = renderer.dialogue()
        row = dialogue.start(asked(said[0]))
        row += dialogue.add_demonstration(said[1])
        extension = dialogue.add_observation(asked(said[2]))
        assert not extension.fork
        row += extension.token_ids
        row += dialogue.add_demonstration(Message("assistant", said[3]))
        assert [message.text for message in dialogue.messages] == said
        assert row[-1] == renderer.stop_token_ids[-1]
        whole = template(tokenizer, dialogue.messages)
        text = tokenizer.decode(row)
        assert whole.startswith(text)
        assert row == tokenizer.encode(text, add_special_tokens=False)
        # What a policy that says the same is taken to say.
        assert dialogue.add_policy_turn(renderer.encode_after(None, said[1])).text == said[1]

    play()


@pytest.mark.parametrize(("family", "thought"), THINKING.items())
def test_an_answer_without_thoughts_is_written_as_the_model_writes_it(chat, family, thought):
    """The template opens a thought, or expects an empty one: prompt and demonstration fit together all the same."""
    renderer = chat("tekken", family)
    dialogue = renderer.dialogue()
    prompt = dialogue.start(asked("12 + 34?"))
    end = renderer.template.end_of_turn
    assert renderer.tokenizer.decode(dialogue.add_demonstration("46")) == f"{thought}46{end}"
    if family != "nemotron_3_nano":  # which writes an empty thought in another way than the one it opens
        text = renderer.tokenizer.decode(prompt) + f"{thought}46{end}\n"
        assert text == template(renderer.tokenizer, [Message("user", "12 + 34?"), Message("assistant", "46")])
    # The thought is dropped when the user speaks again.
    extension = dialogue.add_observation(asked("Sure?"))
    assert extension.fork
    assert "\n\n46" not in renderer.tokenizer.decode(extension.token_ids)


@pytest.mark.parametrize("family", ["qwen3_6", "deepseekv3", "deepseek_r1_distill", "nemotron_3_nano"])
@pytest.mark.parametrize("recorded", ["<think>\nI add.\n</think>\n\n46", "I add.\n</think>\n\n46"])
def test_a_recorded_thought_goes_on_from_the_one_that_the_prompt_opens(chat, family, recorded):
    renderer = chat("tekken", family)
    dialogue = renderer.dialogue()
    text = renderer.tokenizer.decode(dialogue.start(asked("12 + 34?")))
    text += renderer.tokenizer.decode(dialogue.add_demonstration(recorded))
    assert text.endswith(f"<think>\nI add.\n</think>\n\n46{renderer.template.end_of_turn}")
    assert text.count("<think>") == text.count("</think>") == 1


@pytest.mark.parametrize(("eos", "n_stops"), [("<|im_end|>", 1), (None, 2)])
def test_a_demonstration_ends_with_the_templates_own_token(chat, eos, n_stops):
    """Also where the tokenizer's end token is another."""
    renderer = chat("tekken" if eos is None else "starter", "qwen2_5", eos)
    dialogue = renderer.dialogue()
    dialogue.start(asked("12 + 34?"))
    assert renderer.tokenizer.decode(dialogue.add_demonstration("46")) == "46<|im_end|>"
    assert len(renderer.stop_token_ids) == n_stops


def test_a_template_without_an_end_of_turn_gets_the_tokenizers(chat):
    renderer = chat("tekken", "glm4moe")
    assert renderer.template.end_of_turn == ""
    dialogue = renderer.dialogue()
    dialogue.start(asked("12 + 34?"))
    assert renderer.tokenizer.decode(dialogue.add_demonstration("46")) == "\n<think></think>\n46</s>"


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1", "own", "qwen3_instruct_2507", "chatml", "gemma", "phi3"])
def test_a_demonstrated_call_and_its_result_are_the_whole_conversation(chat, family):
    renderer = chat("tekken", family)
    dialogue = renderer.dialogue()
    row = dialogue.start(asked("1 + 2?", tools=(ADD,)))
    row += dialogue.add_demonstration(Message("assistant", (), (ToolCall("", "add", {"a": 1}),)))
    [call] = dialogue.messages[-1].tool_calls
    extension = dialogue.add_observation(
        Observation(messages=(Message("tool", (TextPart("3."),), (), call.id, "add"),))
    )
    assert not extension.fork
    row += extension.token_ids + dialogue.add_demonstration("It is 3.")
    text = renderer.tokenizer.decode(row)
    assert row == renderer.tokenizer.encode(text, add_special_tokens=False)
    if family not in ("chatml", "gemma", "phi3"):
        messages = [
            Message("user", "1 + 2?"),
            Message("assistant", (), (call,)),
            Message("tool", (TextPart("3."),), (), call.id, "add"),
            Message("assistant", "It is 3."),
        ]
        assert template(renderer.tokenizer, messages, tools=[ADD.as_dict()]).startswith(text)
    else:
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text


def test_a_demonstration_in_raw_text(chat):
    """The answer and what ends it; nothing else is put around it."""
    for name, family in [("tekken", "qwen3"), ("sentencepiece", "own"), ("tekken", "llama3")]:
        renderer = chat(name, family)
        dialogue = renderer.dialogue()
        dialogue.start(Observation(text="Q: 12 + 34?\nA:"))
        end = renderer.template.end_of_turn
        assert renderer.decode_after(dialogue.add_demonstration(" 46 ")) == f" 46 {end}"


@pytest.mark.parametrize("family", ["qwen2_5", "deepseekv3"])
def test_a_call_is_written_in_its_own_letters(chat, family):
    """Also by a template that takes arguments as text, as DeepSeek's does."""
    dialogue = chat("tekken", family).dialogue()
    dialogue.start(asked("1 + 2?", tools=(ADD,)))
    row = dialogue.add_demonstration(Message("assistant", (), (ToolCall("", "add", {"a": "Zürich 数"}),)))
    assert '{"a": "Zürich 数"}' in chat("tekken", family).tokenizer.decode(row)
