"""Rendering: prompts are exactly the tokens the model was made for, with two real byte-pair tokenizers.

What is right is said by mistral_common, which makes the ids of a conversation without templates, from the same
vocabularies, with code of its own.
"""

import subprocess
import sys
from pathlib import Path

import mistral_common
import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from envgym.errors import ConfigError
from envgym.render import ChatRenderer, TextRenderer, load_tokenizer, make_renderer
from envgym.types import Message, Observation, as_messages

DATA = Path(mistral_common.__file__).parent / "data"
CONVERSATION = [
    {"role": "user", "content": "What is 12 + 34?\nThink first: \\boxed{}, naïve 数学 🙂."},
    {"role": "assistant", "content": "46, of course."},
    {"role": "user", "content": "And twice that?"},
]


@pytest.fixture(scope="module", params=["tekken", "sentencepiece"])
def real(request):
    """(renderer, what mistral_common makes of a conversation) of a vocabulary."""
    renderer = make_renderer("auto", load_tokenizer(str(request.getfixturevalue(f"{request.param}_folder"))))
    file = {"tekken": "tekken_240911.json", "sentencepiece": "mistral_instruct_tokenizer_240323.model.v3"}[
        request.param
    ]
    return renderer, MistralTokenizer.from_file(str(DATA / file))


@pytest.fixture(scope="module")
def tiny(tiny_model):
    return load_tokenizer(str(tiny_model))


def ids_of(tokenizer, conversation):
    kinds = {"user": UserMessage, "assistant": AssistantMessage}
    messages = [kinds[message["role"]](content=message["content"]) for message in conversation]
    return list(tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens)


def observed(conversation):
    return Observation(messages=as_messages(conversation))


@pytest.mark.parametrize("length", [1, 3])
def test_a_prompt_is_the_ids_the_model_was_made_for(real, length):
    renderer, reference = real
    prompt = renderer.prompt(observed(CONVERSATION[:length]))
    assert prompt == ids_of(reference, CONVERSATION[:length])


def test_a_prompt_is_what_the_template_tokenizes_to(real):
    renderer, _ = real
    tokenizer = renderer.tokenizer
    own = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert renderer.prompt(observed(CONVERSATION)) == own


def test_a_prompt_begins_with_one_beginning_token(real):
    """Though a template writes it and one of the two tokenizers puts it before whatever it encodes."""
    renderer, _ = real
    prompt = renderer.prompt(observed(CONVERSATION))
    assert prompt[0] == renderer.tokenizer.bos_token_id
    assert prompt.count(renderer.tokenizer.bos_token_id) == 1


def test_a_demonstration_is_the_ids_of_the_whole_conversation(real):
    """What a replay teaches: prompt, answer and the token that ends the turn."""
    renderer, reference = real
    [prompt, answer] = CONVERSATION[:2]
    dialogue = renderer.dialogue()
    taught = dialogue.start(observed([prompt])) + dialogue.add_demonstration(answer["content"])
    # mistral_common wants a user's turn last; what comes before it is the conversation so far.
    whole = ids_of(reference, CONVERSATION)
    assert whole[: len(taught)] == taught
    assert taught[-1] == renderer.tokenizer.eos_token_id == renderer.stop_token_ids[0]


def test_an_answers_text_comes_back_without_what_ends_it(real):
    renderer, _ = real
    dialogue = renderer.dialogue()
    dialogue.start(observed(CONVERSATION[:1]))
    assert renderer.text(dialogue.add_demonstration("46, of course.")) == "46, of course."
    assert dialogue.messages[-1] == Message("assistant", "46, of course.")


def test_decoding_and_encoding_again_does_not_give_the_same_ids(real):
    """Why ids are kept: the same text in other pieces, as a policy may well sample it."""
    renderer, _ = real
    whole = renderer.encode("hello")
    pieces = [renderer.tokenizer.convert_tokens_to_ids(letter) for letter in "hello"]
    assert renderer.text(pieces) == "hello"
    assert len(pieces) > len(whole)
    assert renderer.encode(renderer.text(pieces)) == whole != pieces


# -- the two kinds ----------------------------------------------------------------------------------------


def test_chat_is_the_template_with_the_policys_turn_opened(tiny):
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    messages = (Message("system", "Be brief."), Message("user", "12 + 34?"))
    prompt = ChatRenderer(tiny).prompt(Observation(messages=messages))
    assert tiny.decode(prompt) == text
    assert prompt.count(tiny.eos_token_id) == 2


def test_text_is_plain_lines_and_the_policys_name(tiny):
    messages = (Message("system", "Be brief."), Message("user", "12 + 34?"))
    prompt = TextRenderer(tiny).prompt(Observation(messages=messages))
    assert tiny.decode(prompt) == "System: Be brief.\nUser: 12 + 34?\nAssistant:"


def test_text_begins_as_the_model_expects_texts_to_begin(real):
    tokenizer = real[0].tokenizer
    prompt = TextRenderer(tokenizer).prompt(Observation(messages=(Message("user", "Hi"),)))
    assert prompt[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in prompt[1:]


@pytest.mark.parametrize("kind", [ChatRenderer, TextRenderer])
def test_raw_text_is_not_templated(tiny, kind):
    text = "Once upon a time <|im_start|>"
    prompt = kind(tiny).prompt(Observation(text=text))
    assert tiny.decode(prompt) == text
    assert tiny.convert_tokens_to_ids("<|im_start|>") in prompt  # special tokens that stand in it are those tokens


def test_auto_takes_the_template_where_there_is_one(tiny, tiny_model):
    assert isinstance(make_renderer("auto", tiny), ChatRenderer)
    assert isinstance(make_renderer("text", tiny), TextRenderer)
    bare = load_tokenizer(str(tiny_model))
    bare.chat_template = None
    assert isinstance(make_renderer("auto", bare), TextRenderer)
    with pytest.raises(ConfigError, match="no chat template: set render=text"):
        make_renderer("chat", bare)


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"model .*: its tokenizer cannot be loaded \(") as refused:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_common_tokenizer_loads_without_the_models_of_transformers(tiny_model):
    program = f"""
import sys
from envgym.render import load_tokenizer, make_renderer
tokenizer = load_tokenizer({str(tiny_model)!r})
make_renderer("auto", tokenizer)
print(tokenizer.encode("12 + 34?"), "torch" in sys.modules)
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained({str(tiny_model)!r}).encode("12 + 34?"), False)
"""
    ours, theirs = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    assert ours == theirs
