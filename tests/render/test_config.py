"""Settings of rendering: a template of one's own, its variables, and thoughts of earlier turns that stay."""

import copy

import pytest

from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.config.schema import StageConfig
from envgym.errors import ConfigError
from envgym.render import ChatRenderer, RenderConfig, load_renderer, load_tokenizer
from envgym.types import Message, Observation, ToolSpec

from .conftest import CHATML, template

THINKING = ["qwen3", "qwen3_6", "deepseekv3", "deepseek_r1_distill", "glm4moe", "nemotron_3_nano"]
"""Templates that drop the thoughts of earlier turns."""


def asked(text):
    return Observation(messages=[Message("user", text)])


def rows_of(renderer, turns):
    """The token sequences of a conversation whose answers have thoughts."""
    dialogue = renderer.dialogue()
    rows = [dialogue.start(asked("12 + 34?"))]
    for turn in range(turns):
        thought = "" if renderer.decode_after(rows[-1]).rstrip().endswith("<think>") else "<think>\n"
        answer = f"{thought}Hm, {turn}.\n</think>\n\nIt is {turn}."
        sampled = renderer.encode_after(rows[-1][-1], answer) + list(renderer.stop_token_ids[-1:])
        rows[-1] += sampled
        dialogue.add_policy_turn(sampled)
        if turn < turns - 1:
            extension = dialogue.add_observation(asked(f"Wrong, {turn}."))
            rows.append(extension.token_ids) if extension.fork else rows[-1].extend(extension.token_ids)
    return rows


@pytest.mark.parametrize("family", THINKING)
def test_an_episode_whose_thoughts_are_kept_is_one_sequence(chat, family):
    dropping = chat("starter", family)
    keeping = ChatRenderer(dropping.tokenizer, keep_thoughts=True)
    assert len(rows_of(dropping, 5)) == 5
    [row] = rows_of(keeping, 5)
    text = keeping.decode_after(row)
    assert text.count("Hm,") == 5
    assert len(row) < sum(map(len, rows_of(dropping, 5)))


def test_qwen3_with_thoughts_as_text(chat):
    """By hand: every turn stands as it was sampled, and what is between two turns is the template's own."""
    renderer = ChatRenderer(chat("starter", "qwen3", "<|im_end|>").tokenizer, keep_thoughts=True)
    [row] = rows_of(renderer, 3)
    turns = [f"<think>\nHm, {n}.\n</think>\n\nIt is {n}.<|im_end|>" for n in range(3)]
    expected = "<|im_start|>user\n12 + 34?<|im_end|>\n<|im_start|>assistant\n" + turns[0]
    for n in (1, 2):
        expected += f"\n<|im_start|>user\nWrong, {n - 1}.<|im_end|>\n<|im_start|>assistant\n{turns[n]}"
    assert renderer.decode_after(row) == expected


def test_a_truncated_turn_gets_the_templates_end(chat):
    renderer = ChatRenderer(chat("starter", "qwen3", "<|im_end|>").tokenizer, keep_thoughts=True)
    dialogue = renderer.dialogue()
    prompt = dialogue.start(asked("12 + 34?"))
    dialogue.add_policy_turn(renderer.encode_after(prompt[-1], "<think>\nHm.\n</think>\n\nIt"))
    extension = dialogue.add_observation(asked("Well?"))
    assert not extension.fork
    expected = "<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode_after(extension.token_ids) == expected


def qwen3_tokenizer(chat):
    return copy.deepcopy(chat("starter", "qwen3", "<|im_end|>").tokenizer)


@pytest.mark.parametrize(("value", "ends"), [(False, "<think>\n\n</think>\n\n"), (True, "<|im_start|>assistant\n")])
def test_variables_of_a_template_are_set_and_saved_with_the_model(chat, tmp_path, value, ends):
    tokenizer = qwen3_tokenizer(chat)
    RenderConfig(template_kwargs={"enable_thinking": value}).set_template(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    for saved in (tokenizer, load_tokenizer(str(tmp_path))):
        renderer = ChatRenderer(saved)
        assert renderer.decode_after(renderer.prompt(asked("Well?"))).endswith(ends)
        messages = [{"role": "user", "content": "Well?"}]
        text = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        assert text.endswith("<|im_start|>assistant\n")  # the caller of a saved model may still choose


def test_values_over_earlier_values(chat):
    tokenizer = qwen3_tokenizer(chat)
    for value in (False, True, False):
        RenderConfig(template_kwargs={"enable_thinking": value}).set_template(tokenizer)
    renderer = ChatRenderer(tokenizer)
    assert renderer.decode_after(renderer.prompt(asked("Well?"))).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"template_kwargs": {"enable_thinkin": False}},
            "no variable 'enable_thinkin'. Did you mean 'enable_thinking'",
        ),
        ({"template": "none.jinja"}, "none.jinja cannot be read"),
        ({"template_kwargs": {"tools": []}}, "no variable 'tools'"),
    ],
)
def test_mistakes(chat, settings, says):
    with pytest.raises(ConfigError, match=says):
        RenderConfig(**settings).set_template(qwen3_tokenizer(chat))


def test_a_file_that_is_no_template(chat, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for message in messages %}")
    with pytest.raises(ConfigError, match=r"not valid Jinja \(line 1"):
        RenderConfig(template=str(tmp_path / "broken.jinja")).set_template(qwen3_tokenizer(chat))


def test_a_template_of_ones_own(tiny_model, tmp_path):
    (tmp_path / "mine.jinja").write_text(CHATML.replace("assistant\n", "{{ speaker }}\n"))
    settings = {"template": str(tmp_path / "mine.jinja"), "template_kwargs": {"speaker": "robot"}}
    renderer = load_renderer(str(tiny_model), RenderConfig(**settings))
    assert renderer.decode_after(renderer.prompt(asked("Well?"))).endswith("<|im_start|>robot\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"render": "text"}, {"kind": "text"}),
        ({"render": {"keep_thoughts": True}}, {"kind": "auto", "keep_thoughts": True}),
        ({"render": {"kind": "chat", "template_kwargs": {"enable_thinking": False}}}, {"kind": "chat"}),
    ],
)
def test_the_kind_alone_may_be_a_word(words, expected):
    config = resolve({"env": "math_verify", **words})
    saved = config.model_dump(mode="json")["stages"][0]["render"]
    assert expected.items() <= saved.items()
    assert StageConfig(**config.stages[0].model_dump()).render == config.stages[0].render


def test_a_kind_and_another_setting_on_the_command_line(capsys):
    words = ["render=text", "render.keep_thoughts=true"]
    for order in (words, words[::-1]):
        assert main(["config", "--env", "math_verify", *order]) == 0
        printed = capsys.readouterr().out
        assert "kind: text" in printed
        assert "keep_thoughts: true" in printed


def test_the_families_drop_thoughts():
    assert all("</think>" in template(family) for family in THINKING)


@pytest.mark.parametrize("value", ['é😀 "quoted" \n', [None, 1, {"a": None}], {"a": [True]}, 0.5, None])
def test_values_arrive_as_they_are(tiny_model, value):
    template = "\n{{ value | tojson }}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    tokenizer = load_tokenizer(str(tiny_model))
    RenderConfig(template=template, template_kwargs={"value": value}).set_template(tokenizer)
    plain = load_tokenizer(str(tiny_model))
    plain.chat_template = template
    messages = [{"role": "user", "content": "Well?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == plain.apply_chat_template(
        messages, tokenize=False, value=value
    )


def test_names_that_are_no_variables(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    for name in ("message", "raise_exception", "loop"):
        with pytest.raises(ConfigError, match="has no variable"):
            RenderConfig(template=CHATML, template_kwargs={name: 1}).set_template(tokenizer)


def test_a_turn_with_calls_forks_as_it_would_without_the_setting(chat):
    renderer = ChatRenderer(chat("starter", "qwen3", "<|im_end|>").tokenizer, keep_thoughts=True)
    for follows in ("tool", "user"):
        dialogue = renderer.dialogue()
        tool = ToolSpec("look", "Look.", {"type": "object", "properties": {}})
        prompt = dialogue.start(Observation(messages=[Message("user", "?")], tools=(tool,)))
        call = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
        message = dialogue.add_policy_turn(renderer.encode_after(prompt[-1], call))
        assert message.tool_calls
        extra = {"tool_call_id": message.tool_calls[0].id} if follows == "tool" else {}
        assert dialogue.add_observation(Observation(messages=[Message(follows, "seen", **extra)])).fork is (
            follows == "user"
        )
