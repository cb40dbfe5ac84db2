"""Special tokens that somebody types: characters in what others wrote, tokens elsewhere; and every other text keeps its
ids."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from envgym.monitoring.metrics import rollout_metrics
from envgym.render import ChatRenderer, NoRenderer, RawRenderer, TextRenderer
from envgym.render.spelling import BREAK, Speller, escape_for_api, mark_after_prompt
from envgym.types import Episode, Group, Message, Observation, Outcome, Task, TextPart, ToolCall

from .test_dialogues import CASES, WORDS

CHARACTERS = settings(
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def added(renderer):
    """The tokens that nobody may type: id -> text."""
    return {index: text for index, text in renderer.added_tokens.items() if len(text.strip()) > 1}


def among(renderer, ids):
    """The added tokens among ids."""
    tokens = added(renderer)
    return [token for token in ids if token in tokens]


@pytest.mark.parametrize("name", ["tekken", "sentencepiece", "starter"])
def test_each_added_token_is_written_in_characters_that_read_as_before(vocabulary, name):
    renderer = TextRenderer(vocabulary(name))
    tokens = [*added(renderer).values()]
    texts = ["".join(f"{before}{token}{after}" for token in tokens) for before, after in (("", ""), ("a ", " b"), "<>")]
    for text in texts:
        ids = renderer.encode_after(renderer.tokenizer.eos_token_id, renderer.speller.escape(text))
        assert among(renderer, ids) == []
        assert renderer.decode_after(ids) == text


@pytest.mark.parametrize("name", ["tekken", "sentencepiece", "starter"])
def test_the_characters_are_those_of_a_tokenizer_that_knows_no_added_tokens(vocabulary, name):
    """The reference: the same tokenizer, read from its own file without them."""
    renderer = TextRenderer(vocabulary(name))
    saved = json.loads(renderer.tokenizer.backend_tokenizer.to_str())
    reference = Tokenizer.from_str(json.dumps(saved | {"added_tokens": [], "post_processor": None}))

    @CHARACTERS
    @given(st.data())
    def check(data):
        tokens = sorted(added(renderer).values())
        text = data.draw(st.lists(st.sampled_from([*tokens[:40], *WORDS]), min_size=1, max_size=8).map("".join))
        expected = reference.encode(text, add_special_tokens=False).ids
        assert renderer.encode(renderer.speller.escape(text)) == expected

    check()


@pytest.mark.parametrize("name", ["tekken", "sentencepiece", "starter"])
def test_the_tokens_around_typed_ones_stay(vocabulary, name):
    """Each piece keeps the ids it has by itself between two special tokens."""
    renderer = TextRenderer(vocabulary(name))
    end = renderer.tokenizer.eos_token

    @CHARACTERS
    @given(st.data())
    def check(data):
        tokens = sorted(added(renderer).values())[:12]
        texts = st.lists(st.sampled_from([*tokens, *WORDS]), max_size=4).map("".join)
        pieces = [renderer.speller.escape(text) for text in data.draw(st.lists(texts, min_size=1, max_size=4))]
        expected = [renderer.encode_after(renderer.tokenizer.eos_token_id, piece) for piece in pieces]
        ids = renderer.encode(end + end.join(pieces))
        assert ids == [token for piece in expected for token in (renderer.tokenizer.eos_token_id, *piece)]

    check()


FAMILIES = ("qwen3", "llama3_1", "deepseekv3", "gptoss", "own")
EACH = [case for case in CASES if case[0] != "tekken" or case[1] in FAMILIES]


@pytest.mark.parametrize(("vocabulary_name", "family", "eos"), EACH)
def test_what_others_typed_ends_no_turn(chat, vocabulary_name, family, eos):
    """There are the same added tokens around a word that spells all of the template's as around a plain one. What the
    policy said is never touched; where a new row holds it, it is in characters there."""
    renderer = chat(vocabulary_name, family, eos)
    written = [token for token in added(renderer).values() if token in renderer.tokenizer.chat_template]
    word = f"w{''.join(written[:12])}w"
    assert among(renderer, renderer.encode(word)) != []

    def row(answer, reply):
        dialogue = renderer.dialogue()
        ids = dialogue.start(Observation((Message("user", "Ask."),)))
        said = [*renderer.encode_after(ids[-1], renderer.speller.escape(answer)), renderer.stop_token_ids[-1]]
        assert dialogue.add_policy_turn(said).text == answer
        return dialogue.add_observation(Observation((Message("user", reply),)))

    plain, replied, answered = row("plain", "plain"), row("plain", word), row(word, "plain")
    assert among(renderer, replied.token_ids) == among(renderer, plain.token_ids)
    assert word in renderer.decode_after(replied.token_ids)
    assert replied.fork == answered.fork == plain.fork
    if plain.fork:
        assert among(renderer, answered.token_ids) == among(renderer, plain.token_ids)
    else:
        assert answered.token_ids == plain.token_ids


def test_messages_of_the_prompt_and_raw_text_keep_their_special_tokens(vocabulary):
    """What the data says is the data's own; a tool's result in it is a tool's, and a player's words can be marked."""
    tokenizer = vocabulary("starter")
    text = "<|im_end|>"
    result = Message("tool", (TextPart(text),), (), "call00001", "add")
    user = Message("user", text)

    def tokens(renderer, *messages):
        return len(among(renderer, renderer.prompt(Observation(messages))))

    for make, before in ((TextRenderer, 0), (RawRenderer, 0), (ChatRenderer, 3)):
        renderer = make(tokenizer)
        plain = tokens(renderer, Message("user", "plain"))
        assert tokens(renderer, user) == plain + 1
        assert tokens(renderer, replace(user, from_others=True)) == plain >= before
        assert tokens(renderer, Message("user", "plain"), result) == tokens(
            renderer, Message("user", "plain"), replace(result, content=(TextPart("plain"),))
        )
        dialogue = renderer.dialogue()
        ids = dialogue.start(Observation(text=text))
        assert len(among(renderer, ids)) == 1
        dialogue.add_policy_turn(renderer.encode("46"))
        assert len(among(renderer, dialogue.add_observation(Observation(text=text)).token_ids)) == 1


def test_a_text_prompts_replies_are_characters_and_a_raw_ones_are_not(vocabulary):
    """`render=raw` is for prompts that an environment writes as the model is to read them."""
    for make, added_tokens in ((TextRenderer, 0), (RawRenderer, 1)):
        renderer = make(vocabulary("starter"))
        dialogue = renderer.dialogue()
        dialogue.start(Observation((Message("user", "Ask."),)))
        dialogue.add_policy_turn([*renderer.encode("46"), renderer.stop_token_ids[0]])
        extension = dialogue.add_observation(Observation((Message("user", "<|im_start|>"),)))
        assert len(among(renderer, extension.token_ids)) == added_tokens


def test_arguments_and_demonstrations(chat):
    """A call's arguments are the policy's words where they are rendered again; a recorded answer is the data's."""
    renderer = chat("starter", "qwen3", "<|im_end|>")
    arguments = {"a": ["<|im_end|>", {"<|im_start|>": 1}]}
    call = Message("assistant", (), (ToolCall("call00001", "add", arguments),))
    rows = {}
    for from_others in (False, True):
        turns = (Message("user", "Ask."), replace(call, from_others=from_others), Message("user", "So?"))
        rows[from_others] = renderer.prompt(Observation(turns))
    texts = [renderer.tokenizer.decode(row) for row in rows.values()]
    assert texts[0] == texts[1]
    assert len(among(renderer, rows[False])) == len(among(renderer, rows[True])) + 2
    dialogue = renderer.dialogue()
    dialogue.start(Observation((Message("user", "Ask."),)))
    assert len(among(renderer, dialogue.add_demonstration("<|im_start|>46"))) == 2


def test_thoughts_and_calls_in_the_policys_words_stay_tokens():
    marks = {number: AddedToken(text, special=False) for number, text in enumerate(["<think>", "</think>", "<|user|>"])}
    words = {
        9: AddedToken("word", special=False),
        10: AddedToken("  ", special=False),
        11: AddedToken("§", special=True),
    }
    speller = Speller(marks | words)
    text = "<think>a word  § </think><|user|>"
    assert speller.escape_policy_text(text) == f"<think>a word  § </think><{BREAK}|user|>"
    assert speller.escape(text) == f"<{BREAK}think>a word  § <{BREAK}/think><{BREAK}|user|>"
    plain = "x < y, <b>, [1], < |user|>"
    assert speller.escape(plain) is plain


def test_tokens_that_overlap_are_all_broken():
    speller = Speller({0: AddedToken("<|a|>", special=True), 1: AddedToken("|><|", special=True)})
    broken = speller.escape("<|a|><|a|><<|a|>|a|>")
    assert not any(token in broken for token in ("<|a|>", "|><|"))
    assert broken.replace(BREAK, "") == "<|a|><|a|><<|a|>|a|>"


@pytest.mark.parametrize("normalized", [False, True])
def test_where_characters_would_be_the_token_again_a_space_breaks_it_up(normalized):
    """A vocabulary of words knows the token as a word; a token that is looked for in rewritten text is found there."""
    words = {"[UNK]": 0, "<end>": 1, "a": 2, "<": 3, "end>": 4}
    backend = Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="[UNK]")
    tokenizer.add_tokens([AddedToken("<end>", special=True, normalized=normalized)], special_tokens=True)
    renderer = TextRenderer(tokenizer)
    assert renderer.encode("a <end> a") == [2, 1, 2]
    assert renderer.encode(renderer.speller.escape("a <end> a") + " <end>") == [2, 3, 4, 2, 1]


def test_answers_are_measured_by_the_tokens_of_the_policys_tokenizer():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    special = ["<turn|>", "[CLS]", "[THINK]", "<fim_prefix>", "<think>"]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    renderer = TextRenderer(tokenizer)
    for text, spells in [("a", False), ("<think>a</s>", False), *((f"a {token} a", True) for token in special[:4])]:
        assert renderer.spells(text) == spells
        answer = Episode("e", Task("t"), Outcome.finish(), messages=[Message("assistant", text)])
        record = rollout_metrics([Group("g", answer.task, [answer])], spells=renderer.spells)
        assert record.get("answers/special_tokens", 0) == spells
    assert NoRenderer().spells("</s>")  # what an API's tokenizer has is not known here


def test_what_is_broken_up_for_apis():
    kept = "x < |y| > z, <b>, [1, 2], [IN], <|>, a|b, <s-1>"
    assert escape_for_api(kept) == kept
    assert escape_for_api("<|im_end|><｜User｜></s><s>[/INST]<end_of_turn>") == (
        "< |im_end|>< ｜User｜>< /s>< s>[ /INST]< end_of_turn>"
    )
    few = [Message(role, "x") for role in ("system", "user", "assistant", "user")]
    assert [message.from_others for message in mark_after_prompt(few)] == [False, False, True, True]
