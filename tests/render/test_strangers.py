"""Chat templates and tokenizers of strangers: rendered, and decoded, in bounded time and memory."""

import copy
import json
import resource
import shutil
from base64 import b64encode

import pytest

from envgym.errors import ConfigError, InvalidStep
from envgym.models.fresh import FreshModelConfig, make_fresh_model
from envgym.render import ChatRenderer, RenderConfig, load_tokenizer
from envgym.render import chat as template_module
from envgym.render import config as config_module
from envgym.render.renderer import check_tokenizer
from envgym.types import Message, Observation

from .conftest import CHATML

# -- templates --------------------------------------------------------------------------------------------

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'x' * 99999 }}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a large constant": "{{ 'x' * 10**11 }}",
    "a large text": "{{ messages[0].content * 10**11 }}",
    "a text that grows": "{% set n = namespace(t='xx') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "constant numbers": "{{ 9 ** (10**9) }}",
    "a large number": "{{ (messages|length + 8) ** (10**9) }}",
    "spaces": "{{ 'x'|center(10**11) }}",
}
QUESTION = Observation(messages=[Message("user", "12 + 34?")])


@pytest.fixture(scope="session")
def tokenizer(vocabulary):
    return vocabulary("starter")


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_takes_any_time_or_memory_is_not_used(tokenizer, name, monkeypatch):
    monkeypatch.setattr(template_module, "RENDERING", (0.5, 2**28))
    before = resource.getrlimit(resource.RLIMIT_AS)
    endless = copy.copy(tokenizer)
    endless.chat_template = CHATML + ENDLESS[name]
    with pytest.raises(ConfigError, match=r"cannot be used: it took (longer than 0.5 s|more than 256 MiB)$"):
        ChatRenderer(endless)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("name", ENDLESS)
def test_only_the_conversation_for_which_it_does_fails(tokenizer, name, monkeypatch):
    monkeypatch.setattr(template_module, "RENDERING", (0.5, 2**28))
    some = copy.copy(tokenizer)
    some.chat_template = f"{CHATML}{{% if 'loop' in messages[0].content %}}{ENDLESS[name]}{{% endif %}}"
    renderer = ChatRenderer(some)
    with pytest.raises(InvalidStep, match=r"rejects the conversation \(it took (longer than 0.5 s|more than 256 MiB);"):
        renderer.prompt(Observation(messages=[Message("user", "loop")]))
    assert renderer.prompt(QUESTION)


@pytest.mark.parametrize("value", ["'x' * 10**11", "9 ** (10**9)"])
def test_a_template_with_values_is_compiled_within_limits_too(tokenizer, monkeypatch, value):
    """Jinja computes constants then, and drops their errors."""
    monkeypatch.setattr(config_module, "RENDERING", (0.5, 2**28))
    changed = copy.copy(tokenizer)
    RenderConfig(template=f"{{{{ x }}}}{{{{ {value} }}}}", template_kwargs={"x": 1}).set_template(changed)
    assert changed.chat_template.endswith(f"{{{{ {value} }}}}")


def test_a_long_conversation_is_no_overrun(tokenizer):
    renderer = ChatRenderer(copy.copy(tokenizer))
    renderer.tokenizer.chat_template = CHATML
    messages = [Message("user", "x" * 1000)] * 2000
    assert len(renderer.opening(Observation(messages=messages))[0]) > 2_000_000


# -- tokenizers -------------------------------------------------------------------------------------------


def replacing(pattern, content):
    return {
        "type": "Replace",
        "pattern": pattern if isinstance(pattern, dict) else {"String": pattern},
        "content": content,
    }


def sequence(section, *items):
    names = {"normalizer": "normalizers", "decoder": "decoders", "pre_tokenizer": "pretokenizers"}
    return {"type": "Sequence", names[section]: list(items)}


def charsmap(*texts):
    """A table of the kind `Precompiled` with an empty index."""
    return b64encode(bytes(4) + b"".join(text.encode() + b"\0" for text in texts)).decode()


DOUBLE = replacing("a", "aa")
GROWING = {
    "a decoder": ("decoder", sequence("decoder", *[DOUBLE] * 33)),
    "a normalizer": ("normalizer", sequence("normalizer", *[DOUBLE] * 33)),
    "nested": ("decoder", sequence("decoder", sequence("decoder", *[DOUBLE] * 9), sequence("decoder", *[DOUBLE] * 9))),
    "one step": ("decoder", replacing("a", "a" * 10_000)),
    "nothing replaced": ("decoder", sequence("decoder", *[replacing("", "b")] * 33)),
    "a regular expression": ("normalizer", sequence("normalizer", *[replacing({"Regex": "b*"}, "b")] * 33)),
    "without a type": ("decoder", sequence("decoder", *[{**DOUBLE, "type": "Replace"}] * 33)),
    "an empty suffix": ("decoder", sequence("decoder", *[{"type": "BPEDecoder", "suffix": ""}] * 33)),
    "an empty delimiter": ("decoder", sequence("decoder", *[
        {"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": True}] * 33)),
    "bytes": ("normalizer", sequence("normalizer", *[{"type": "ByteLevel"}] * 33)),
    "bytes of words": ("pre_tokenizer", sequence("pre_tokenizer", *[
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}] * 33)),
    "a table": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap("a" * 8000)}),
}  # fmt: skip
USUAL = {
    "llama": {
        "normalizer": sequence("normalizer", {"type": "Prepend", "prepend": "▁"}, replacing(" ", "▁")),
        "decoder": sequence("decoder", replacing("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                            {"type": "Strip", "content": " ", "start": 1, "stop": 0}),
    },
    "gpt2": {"decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    "sentencepiece": {
        "normalizer": sequence("normalizer", {
            "type": "Precompiled", "precompiled_charsmap": charsmap("a", "صلى الله عليه وسلم"),
        }, replacing({"Regex": " {2,}"}, "▁")),
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    },
    "bert": {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
    "white space as words": {"normalizer": sequence("normalizer", replacing("\n", "<n>"), replacing("\t", "<|tab|>"))},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_fresh_model(folder, FreshModelConfig(hidden_size=8, intermediate_size=8, layers=1, heads=1), ["a b"], 0)
    return folder


def with_parts(folder, parts):
    """Change parts of a tokenizer's file. It has a token of many letters, which its normalizer replaces."""
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text()) | parts
    described["added_tokens"].append({
        "id": 9999, "content": "a" * 8, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
        "special": False,
    })  # fmt: skip
    file.write_text(json.dumps(described))
    return file


@pytest.fixture
def folder(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_that_lengthens_texts_without_bounds_is_not_loaded(folder, name):
    """Nor what it is loaded with: its normalizer replaces the added tokens then."""
    section, part = GROWING[name]
    file = with_parts(folder, {section: part})
    assert len(json.dumps(part)) < 12_000
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json is not used: it may make texts more than 1000 times as long"
    ):
        load_tokenizer(str(folder))
    other = file.rename(file.with_name("tokenizer.4.0.0.json"))  # which its configuration may name instead
    with pytest.raises(ConfigError, match=other.name):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_decoder_with_a_regular_expression_is_not_loaded(folder, wrapped):
    step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    with_parts(folder, {"decoder": {"type": "Sequence", "decoders": [step]} if wrapped else step})
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not used: its decoder searches with a regular"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", USUAL)
def test_usual_tokenizers_are_loaded(folder, name):
    file = with_parts(folder, USUAL[name])
    check_tokenizer(file)


@pytest.mark.parametrize("content", ["[]", "{", "1", '{"normalizer": {"precompiled_charsmap": "A"}}', "[" * 100_000])
def test_a_file_that_is_none_is_one_line(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json describes no tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("name", GROWING)
def test_the_bound_holds_for_what_is_accepted(folder, name):
    """With as many steps as are accepted a text grows by a thousand at most, by the library's own measure."""
    from tokenizers import Tokenizer

    section, part = GROWING[name]
    if name in ("one step", "a table", "nested"):
        return
    key = next(key for key in part if key != "type")
    for count in range(1, len(part[key])):
        file = with_parts(folder, {section: {**part, key: part[key][:count]}})
        try:
            check_tokenizer(file)
        except ConfigError:
            break
    assert 1 < count < 12
    file = with_parts(folder, {section: {**part, key: part[key][: count - 1]}})
    tokenizer = Tokenizer.from_file(str(file))
    text = "ab c" * 10
    if section == "decoder":
        grown = tokenizer.decoder.decode([text[:20], text[20:]])
    elif section == "normalizer":
        grown = tokenizer.normalizer.normalize_str(text)
    else:
        grown = "".join(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    assert len(text) < len(grown) <= 1001 * len(text)
