"""Later turns, with real templates and real merging vocabularies: what the policy is shown is at every turn what the
template writes of the conversation, and what it said is never touched.

The oracle is the template itself, applied to the whole conversation by the tokenizer's own method.
"""

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from envgym.errors import InvalidStep, TurnRefused
from envgym.render import ChatRenderer
from envgym.types import Message, Observation, ToolSpec

STABLE = ["chatml", "qwen2_5", "qwen3", "llama3", "llama3_1", "gemma", "gemma3", "phi3", "cohere2", "lfm2_2_5", "own"]
"""Which write a turn without thoughts and without spaces around it the same way for ever."""
UNSTABLE = ["qwen3_6", "deepseekv3", "deepseek_r1_distill", "glm4moe", "nemotron_3_nano", "gptoss"]
"""Which open a thought that they do not keep, or end turns in more than one way."""
CASES = [
    *(("tekken", family, None) for family in [*STABLE, *UNSTABLE]),
    ("sentencepiece", "own", None),
    ("sentencepiece", "llama3_1", None),
    ("sentencepiece", "chatml", None),
    ("starter", "own", None),
    ("starter", "qwen3", "<|im_end|>"),
    ("starter", "qwen2_5", "<|im_end|>"),
    ("starter", "phi3", "<|end|>"),
]

WORDS = ["hello", "hell", "o", " there", "12", "+", "naïve", "数学", "🙂", "e\u0301", "\n", "\n\n", " ", "  ", "{", "."]
texts = st.lists(st.sampled_from([*WORDS, "</think>"]), min_size=1, max_size=8).map("".join)
plain = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join).map(str.strip).filter(bool)
quick = settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class Conversation:
    """The oracle's side of a conversation: messages, and the text that the policy has in front of it."""

    def __init__(self, renderer, messages):
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.messages = messages
        self.shown = self.whole()

    def whole(self, messages=None, **options):
        options = {"add_generation_prompt": True, **options}
        return self.tokenizer.apply_chat_template(messages or self.messages, tokenize=False, **options)

    def spelled(self, ids):
        """Text of ids in the middle of a conversation."""
        anchor = self.tokenizer.eos_token
        return self.tokenizer.decode([self.tokenizer.eos_token_id, *ids]).removeprefix(anchor)

    def encoded(self, text, last):
        """Ids of a text after a token."""
        special = self.tokenizer.added_tokens_decoder.get(last)
        before = special.content if special else self.tokenizer.eos_token
        return self.tokenizer.encode(before + text, add_special_tokens=False)[1:]

    def forms(self, message, body):
        """What a template may be told that the policy said: its text; or, special tokens included, what it spelled,
        where the template goes on from exactly that. A thought that the prompt opened is given with its beginning, or,
        where it never ended, as a thought."""
        opened = self.shown.rstrip().endswith("<think>")
        if opened and "</think>" not in body:
            yield {"role": "assistant", "content": "", "reasoning_content": body}
        for content in (message.text, body):
            opening = "<think>\n" if opened and "</think>" in content else ""
            yield {"role": "assistant", "content": opening + content}

    def go_on(self, message, said, body, user):
        """The conversation with a turn and what comes after it: whether it goes on from what the policy saw and said,
        and its text. Raises `InvalidStep` where the template takes it in no form."""
        seen = self.shown + self.spelled(said)
        found = []
        for form in self.forms(message, self.spelled(body)):
            messages = [*self.messages, form, user]
            try:
                found.append((messages, self.whole(messages)))
            except Exception:
                continue
            if found[-1][1].startswith(seen):
                self.messages, self.shown = found[-1]
                return self.shown[len(seen) :]
        if not found:
            raise InvalidStep("refused")
        self.messages, self.shown = found[0]
        return None


def observed(*messages, **fields):
    return Observation(messages=tuple(Message(m["role"], m["content"]) for m in messages), **fields)


def asked(text):
    return {"role": "user", "content": text}


def turns(renderer):
    """Token ids of a turn as a policy may sample it: merged as the tokenizer would, in single letters, or anything at
    all; ended by the end of turn, by another token that the engine stops at, or cut."""
    tokenizer = renderer.tokenizer
    ends = set(renderer.stop_token_ids)

    def encode(text):
        return tokenizer.encode(tokenizer.eos_token + text, add_special_tokens=False)[1:]

    merged = texts.map(encode)
    letters = texts.map(lambda text: [token for letter in text for token in encode(letter)])
    anything = st.lists(st.integers(0, len(tokenizer) - 1).filter(lambda token: token not in ends), max_size=12)
    end = st.sampled_from([*([token] for token in renderer.stop_token_ids), []])
    return st.tuples(st.one_of(merged, letters, anything), end).map(lambda parts: [*parts[0], *parts[1]])


@pytest.mark.parametrize(("name", "family", "eos"), CASES)
def test_the_policy_reads_what_the_template_writes(chat, name, family, eos):
    renderer = chat(name, family, eos)
    tokenizer = renderer.tokenizer
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}

    @quick
    @given(st.data())
    def play(data):
        talk = Conversation(renderer, [asked(data.draw(texts))])
        dialogue = renderer.dialogue()
        row = dialogue.start(observed(*talk.messages))
        assert row == tokenizer.encode(talk.shown, add_special_tokens=False)
        for _ in range(3):
            said = data.draw(turns(renderer))
            message = dialogue.add_policy_turn(tuple(said))
            body = said[:-1] if said and said[-1] in special else said
            assert (message.role, message.tool_calls) == ("assistant", ())
            assert message.text == tokenizer.decode(body, skip_special_tokens=True)
            user = asked(data.draw(texts))
            try:
                delta = talk.go_on(message, said, body, user)
            except InvalidStep:
                with pytest.raises(TurnRefused, match="rejects the policy's completion"):
                    dialogue.add_observation(observed(user))
                return
            extension = dialogue.add_observation(observed(user))
            assert extension.fork is (delta is None)
            if delta is None:
                row = extension.token_ids
                assert row == tokenizer.encode(talk.shown, add_special_tokens=False)
            else:
                assert extension.token_ids == talk.encoded(delta, said[-1] if said else row[-1])
                assert talk.spelled(extension.token_ids) == delta
                row = [*row, *said, *extension.token_ids]
        assert len(dialogue.messages) == 7

    play()


@pytest.mark.parametrize(("name", "family"), [*(("tekken", family) for family in STABLE), ("sentencepiece", "own")])
def test_a_conversation_of_text_grows_into_the_ids_of_the_whole(chat, name, family):
    """Nothing forks, and where the policy writes words as the tokenizer would, the row is what encoding the whole
    conversation gives: glue, end of turn and all."""
    renderer = chat(name, family)
    tokenizer = renderer.tokenizer
    end = renderer.stop_token_ids[-1]

    @quick
    @given(st.lists(plain, min_size=5, max_size=5))
    def play(said):
        talk = Conversation(renderer, [asked(said[0])])
        dialogue = renderer.dialogue()
        row = dialogue.start(observed(*talk.messages))
        for answer, question in zip(said[1::2], said[2::2], strict=True):
            lead = " " if (name, family) == ("sentencepiece", "own") else ""  # which that template writes
            ids = talk.encoded(lead + answer, row[-1])
            assert dialogue.add_policy_turn([*ids, end]).text == answer
            extension = dialogue.add_observation(observed(asked(question)))
            assert not extension.fork
            row = [*row, *ids, end, *extension.token_ids]
            talk.messages += [{"role": "assistant", "content": answer}, asked(question)]
        assert row == tokenizer.encode(talk.whole(), add_special_tokens=False)

    play()


@pytest.mark.parametrize("family", STABLE)
def test_a_cut_turn_gets_the_glue(chat, family):
    """A turn that ran out of tokens does not end itself; the reply does it, and the row is the same."""
    renderer = chat("tekken", family)
    rows = []
    for cut in (True, False):
        dialogue = renderer.dialogue()
        row = dialogue.start(observed(asked("12 + 34?")))
        ids = renderer.encode("hello there")
        ended = ids if cut else [*ids, renderer.stop_token_ids[-1]]
        dialogue.add_policy_turn(ended)
        extension = dialogue.add_observation(observed(asked("And twice that?")))
        assert not extension.fork
        rows.append([*row, *ended, *extension.token_ids])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", ["tekken", "sentencepiece", "starter"])
def test_half_a_character_stays_what_it_is(chat, name):
    """Its text is U+FFFD, which the template is told; the tokens are the policy's, and nothing forks."""
    renderer = chat(name, "chatml")
    tokenizer = renderer.tokenizer
    half = renderer.encode_after(tokenizer.eos_token_id, "𓀀")[:1]
    for ids in (half, half * 3, [*half, renderer.stop_token_ids[-1]]):
        dialogue = renderer.dialogue()
        dialogue.start(observed(asked("Smile!")))
        assert set(dialogue.add_policy_turn(ids).text) == {"\ufffd"}
        extension = dialogue.add_observation(observed(asked("Thanks.")))
        assert not extension.fork
        assert "\ufffd" not in tokenizer.decode(extension.token_ids)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "deepseekv3", "nemotron_3_nano", "glm4moe"])
def test_thoughts_that_the_template_drops_begin_a_new_row(chat, family):
    renderer = chat("tekken", family)
    tokenizer = renderer.tokenizer
    dialogue = renderer.dialogue()
    prompt = tokenizer.decode(dialogue.start(observed(asked("12 + 34?"))))
    opened = "" if prompt.endswith("<think>\n") else "<think>\n"
    said = renderer.encode(f"{opened}Hm, forty-six.\n</think>\n\nIt is 46.") + list(renderer.stop_token_ids[-1:])
    assert dialogue.add_policy_turn(said).text.endswith("It is 46.")
    extension = dialogue.add_observation(observed(asked("Sure?")))
    assert extension.fork
    text = tokenizer.decode(extension.token_ids)
    assert "Hm, forty" not in text
    assert text.index("12 + 34?") < text.index("It is 46.") < text.index("Sure?")
    # The new row goes on as any other.
    assert dialogue.add_policy_turn(said)
    assert [message.role for message in dialogue.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(("family", "forks"), [("llama3", True), ("gemma", True), ("chatml", False), ("phi3", False)])
def test_spaces_that_the_template_trims_begin_a_new_row(chat, family, forks):
    renderer = chat("tekken", family)
    dialogue = renderer.dialogue()
    dialogue.start(observed(asked("12 + 34?")))
    dialogue.add_policy_turn([*renderer.encode(" 46 \n"), renderer.stop_token_ids[-1]])
    assert dialogue.add_observation(observed(asked("Sure?"))).fork is forks


def test_a_stop_token_that_is_no_end_of_turn_begins_a_new_row(chat):
    """The engine stops at the tokenizer's end token, too; the template would never show that in a conversation."""
    renderer = chat("tekken", "qwen2_5")
    eos, end = renderer.stop_token_ids
    for token, forks in ((end, False), (eos, True)):
        dialogue = renderer.dialogue()
        dialogue.start(observed(asked("12 + 34?")))
        assert dialogue.add_policy_turn([*renderer.encode("46"), token]).text == "46"
        extension = dialogue.add_observation(observed(asked("Sure?")))
        assert extension.fork is forks
        assert eos not in extension.token_ids


ENDS = {
    "chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>",
    "deepseekv3": "<｜end▁of▁sentence｜>", "cohere2": "<|END_RESPONSE|>", "own": "</s>",
}  # fmt: skip


@pytest.mark.parametrize(("family", "end"), ENDS.items())
def test_a_turn_ends_where_the_template_ends_it(chat, family, end):
    renderer = chat("tekken", family)
    tokens = renderer.tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids))
    assert tokens == (["</s>", end] if end != "</s>" else ["</s>"])


def test_a_turn_ends_with_the_tokenizers_token_where_the_template_writes_another_before_it(chat):
    renderer = chat("sentencepiece", "cohere2", "<|END_OF_TURN_TOKEN|>")
    assert renderer.stop_token_ids == (renderer.tokenizer.eos_token_id,)
    assert renderer.template.end_of_turn == "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"


@pytest.mark.parametrize("eos", ["<|end|>", None])
def test_tokens_that_swallow_the_space_after_them_do_so_after_a_turn(chat, eos):
    """As Phi-3's do: the line break that its template writes after a turn is no token."""
    tokenizer = copy.deepcopy(chat("starter", "phi3", eos).tokenizer)
    for token in ("<|end|>", "<|user|>", "<|assistant|>"):
        tokenizer.add_tokens([AddedToken(token, rstrip=True, special=True)], special_tokens=True)
    renderer = ChatRenderer(tokenizer)
    dialogue = renderer.dialogue()
    row = dialogue.start(observed(asked("12 + 34?")))
    row += dialogue.add_demonstration("46")
    row += dialogue.add_observation(observed(asked("Sure?"))).token_ids
    talk = [asked("12 + 34?"), {"role": "assistant", "content": "46"}, asked("Sure?")]
    whole = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert "<|end|>\n<|user|>\nSure" in whole
    assert row == tokenizer.encode(whole, add_special_tokens=False)
    assert renderer.encode("\n")[0] not in row


def test_tools_that_come_later_are_shown_in_a_new_row(chat):
    renderer = chat("tekken", "qwen2_5")
    dialogue = renderer.dialogue()
    dialogue.start(observed(asked("12 + 34?")))
    dialogue.add_policy_turn([*renderer.encode("46"), renderer.stop_token_ids[-1]])
    extension = dialogue.add_observation(observed(asked("Sure?"), tools=(ToolSpec("calculate", "Calculates.", {}),)))
    assert extension.fork
    assert '"calculate"' in renderer.tokenizer.decode(extension.token_ids)


def test_a_conversation_that_the_template_refuses_is_one_line(chat):
    dialogue = chat("tekken", "gemma").dialogue()
    with pytest.raises(InvalidStep, match=r"rejects .* \(System role not supported; its roles: system\): "):
        dialogue.start(observed({"role": "system", "content": "Be brief."}))
    with pytest.raises(InvalidStep, match="neither messages nor text"):
        dialogue.start(Observation())
    with pytest.raises(InvalidStep, match="not valid Unicode"):
        dialogue.start(observed(asked("half: \ud83d")))


@pytest.mark.parametrize("family", ["llava_next", "smolvlm"])
def test_a_template_that_wants_content_in_parts_gets_it(chat, family):
    renderer = chat("tekken", family)
    dialogue = renderer.dialogue()
    text = renderer.tokenizer.decode(dialogue.start(observed(asked("12 + 34?"))))
    assert text.count("12 + 34?") == 1
    dialogue.add_policy_turn([*renderer.encode(" 46"), renderer.stop_token_ids[-1]])
    text = renderer.tokenizer.decode(dialogue.add_observation(observed(asked("Sure?"))).token_ids)
    assert text.count("Sure?") == 1


def test_one_observation_is_rendered_once_for_a_group(chat, monkeypatch):
    renderer = chat("starter", "own")
    first = renderer.prompt(observed(asked("once upon a time")))
    monkeypatch.setattr(renderer, "encode", None)
    again = renderer.prompt(observed(asked("once upon a time")))
    assert again == first
    again.clear()  # each episode has a list of its own
    assert renderer.prompt(observed(asked("once upon a time"))) == first
