"""Images in prompts, with the real processors of nine families of small vision-language models."""

from itertools import pairwise

import numpy as np
import pytest
import transformers
from PIL import Image

import tests.vision_models as vision_models
from envgym.errors import InvalidStep, MissingDependency
from envgym.render import RenderConfig, images, load_renderer, load_tokenizer, make_renderer
from envgym.types import Message, Observation, ToolSpec
from tests.vision_models import KINDS, make_vision_model

CORPUS = ["What colour is it?\n\nAnd now?\n", "Look:\n\n\nred, green or blue.\n\n", "User: a\n\nb\n\n\nc"] * 3
SIZES = [(56, 56), (40, 100), (200, 64), (31, 47), (56, 56), (90, 90)]
BEGIN = ToolSpec("look", "Look around.", {"type": "object", "properties": {}})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes the model of a kind, once."""
    folders = {}

    def make(kind):
        if kind not in folders:
            folders[kind] = make_vision_model(kind, tmp_path_factory.mktemp(kind), CORPUS)
        return folders[kind]

    return make


def picture(number):
    width, height = SIZES[number]
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def observed(*parts):
    return Observation(messages=(Message("user", parts),))


def conversation(first, *last):
    """Three observations, each with its parts; numbers stand for pictures."""
    return [[picture(p) if isinstance(p, int) else p for p in parts] for parts in (first, *last)]


CONVERSATIONS = {
    "mixed": conversation(["Look:\n\n\n", 0, "\n\n", 1, "\n"], [2, "And now?"], ["\n", 3, 4, 5]),
    "adjacent": conversation([0, 1, 2], [3, 4], ["\n\n\n", 5]),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_turns_have_the_token_ids_of_the_models_processor(folder_of, kind, name):
    folder, turns = folder_of(kind), CONVERSATIONS[name]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    dialogue = load_renderer(str(folder), RenderConfig()).dialogue()
    row, placed, chat = [], [], []
    answer = dialogue.renderer.encode("red<|im_end|>")
    for number, parts in enumerate(turns):
        extension = dialogue.begin(observed(*parts)) if number == 0 else dialogue.add_observation(observed(*parts))
        assert extension.fork == (number == 0)
        placed += [image.shifted(len(row)) for image in extension.images]
        row += extension.token_ids
        forms = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts
        ]  # fmt: skip
        chat.append({"role": "user", "content": forms})
        if number < 2:
            dialogue.add_policy_turn(answer)
            row += answer
            chat.append({"role": "assistant", "content": [{"type": "text", "text": "red"}]})
    pictures = [part for parts in turns for part in parts if not isinstance(part, str)]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    ids = processor(text=[text], images=[pictures], add_special_tokens=False)["input_ids"][0]
    assert row == list(ids)
    tokens = [row[image.start : image.end] for image in placed]
    mark = images.mark_of(processor)
    for part, span in zip(pictures, tokens, strict=True):
        alone = processor(text=[mark], images=[[part]], add_special_tokens=False)["input_ids"][0]
        assert span.count(processor.image_token_id) == list(alone).count(processor.image_token_id) > 0
        assert "\n" not in dialogue.renderer.tokenizer.decode([span[0], span[-1]])
    assert [image.image.width for image in placed] == [part.width for part in pictures]
    assert all(a.end <= b.start for a, b in pairwise(placed))
    assert sum(span.count(processor.image_token_id) for span in tokens) == row.count(processor.image_token_id)


def test_a_conversation_that_the_template_changes_begins_anew_with_all_its_images(folder_of):
    """As one that drops earlier thoughts."""
    tokenizer = load_tokenizer(str(folder_of("qwen2_vl")))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.content }}", "{{ message.content.split('</think>')[-1] }}"
    )
    dialogue = make_renderer("chat", tokenizer).dialogue()
    dialogue.begin(observed("Look:", picture(0)))
    dialogue.add_policy_turn(dialogue.renderer.encode("<think>hm</think>red<|im_end|>"))
    extension = dialogue.add_observation(observed(picture(2), "And now?"))
    assert extension.fork
    assert [image.image.width for image in extension.images] == [56, 200]
    for image in extension.images:
        assert set(extension.token_ids[image.start : image.end]) == {tokenizer.convert_tokens_to_ids("<|image_pad|>")}


def test_the_image_size_is_the_processors_argument(folder_of):
    folder, big = str(folder_of("qwen3_vl")), picture(5)
    config = RenderConfig(image_size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32})
    normal = load_renderer(folder, RenderConfig()).dialogue().begin(observed(big)).images[0].length
    assert (normal, load_renderer(folder, config).dialogue().begin(observed(big)).images[0].length) == (4, 1)


@pytest.mark.parametrize("kind", ["smolvlm", "llava"])
def test_tools_described_in_text_and_their_results_keep_the_images_beside_them(folder_of, kind):
    """These templates show neither tools nor their results: one takes lists of parts alone."""
    tokenizer = load_tokenizer(str(folder_of(kind)))
    loop = "{% for message in messages"
    tokenizer.chat_template = tokenizer.chat_template.replace(loop, f"{loop} if message.role != 'tool'")
    dialogue = make_renderer("chat", tokenizer).dialogue()
    first = dialogue.begin(Observation(messages=(Message.user(picture(0), "Look."),), tools=(BEGIN,)))
    assert "Look around." in dialogue.renderer.tokenizer.decode(first.token_ids)
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    turn = dialogue.add_policy_turn(dialogue.renderer.encode(call))
    results = tuple(
        Message("tool", ["Seen: ", picture(n)], tool_call_id=turn.tool_calls[0].id, name="look") for n in (1, 2)
    )
    last = dialogue.add_observation(Observation(messages=results))
    assert [image.image.width for image in (*first.images, *last.images)] == [56, 40, 200]
    text = dialogue.renderer.tokenizer.decode(last.token_ids)
    assert text.count("<tool_response>") == text.count("</tool_response>") == 2
    assert text.index("</tool_response>") > text.index("<image>") > text.index("Seen: ")


def test_a_mark_that_others_spell_out_is_text(folder_of):
    dialogue = load_renderer(str(folder_of("qwen2_vl")), RenderConfig()).dialogue()
    mark = dialogue.renderer.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    text = Message("user", ["This <|image_pad|> is none:", picture(0)], from_others=True)
    first = dialogue.begin(Observation(messages=(text,)))
    assert first.token_ids.count(mark) == first.images[0].length
    with pytest.raises(InvalidStep, match=r"writes 2 marks '<\|image_pad\|>' of images for 1: put images into"):
        dialogue.renderer.dialogue().begin(observed("This <|image_pad|> is one:", picture(0)))


def test_an_image_where_a_template_leaves_it_out_is_one_line(folder_of):
    dialogue = load_renderer(str(folder_of("qwen2_vl")), RenderConfig()).dialogue()
    tokenizer = dialogue.renderer.tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(InvalidStep, match=r"writes 0 marks '<\|image_pad\|>' of images for 1: put images into"):
        make_renderer("chat", tokenizer).dialogue().begin(observed(picture(0)))


@pytest.mark.parametrize("kind", ["text", "raw"])
def test_plain_text_takes_no_images(folder_of, kind):
    renderer = make_renderer(kind, load_tokenizer(str(folder_of("llava"))))
    with pytest.raises(InvalidStep, match=r"plain text \(render=text or raw\) takes text alone: leave images out"):
        renderer.dialogue().begin(observed(picture(0)))
    dialogue = renderer.dialogue()
    dialogue.begin(observed("Look:"))
    dialogue.add_policy_turn(renderer.encode("red"))
    with pytest.raises(InvalidStep, match="takes text alone"):
        dialogue.add_observation(observed(picture(0)))


def test_models_and_images_that_cannot_be_used_are_one_line(folder_of, tiny_model, monkeypatch):
    with pytest.raises(InvalidStep, match=f"a message has an image, and {tiny_model} takes text alone"):
        load_renderer(str(tiny_model), RenderConfig()).dialogue().begin(observed(picture(0)))
    renderer = load_renderer(str(folder_of("qwen2_vl")), RenderConfig())
    with pytest.raises(InvalidStep, match="takes no image of 1000 x 2 pixels: absolute aspect ratio must be smaller"):
        renderer.dialogue().begin(observed(Image.new("RGB", (1000, 2))))
    with pytest.raises(InvalidStep, match="starts its dialogue with `start`, and not `begin`, takes text"):
        renderer.dialogue().start(observed(picture(0)))
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="a vision-language model needs torchvision: install the build that be"):
        load_renderer(str(folder_of("qwen2_vl")), RenderConfig()).dialogue().begin(observed(picture(0)))


def test_a_package_of_one_family_is_named(folder_of, monkeypatch):
    folder = str(folder_of("smolvlm"))
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    with pytest.raises(MissingDependency, match=r"the images of .* need another package: Package `num2words` is requi"):
        images.load_processor(folder)


def test_another_backends_pixels_are_refused(folder_of, monkeypatch):
    """Pillow resizes to pixels that differ by a level."""
    folder = str(folder_of("llava"))
    load = transformers.AutoProcessor.from_pretrained
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name, backend: load(name, backend="pil"))
    with pytest.raises(InvalidStep, match="are processed by CLIPImageProcessorPil, which does not use torchvision"):
        images.load_processor(folder)


def test_kinds_are_those_of_the_design():
    assert len(KINDS) == len(set(KINDS)) == len(vision_models.TOKENS) == 9
