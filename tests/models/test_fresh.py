"""New models, with and without a vision tower: how others load them."""

import stat

import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from envgym.models.fresh import FreshModelConfig, make_fresh_model

CORPUS = ["Which colour? One of: red, green, blue.", "user", "assistant"] * 3


def test_a_new_model_is_the_same_for_a_seed(tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_fresh_model(tmp_path / folder, FreshModelConfig(vocab_size=300), CORPUS, seed)
    first, same, different = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == same != different
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) <= model.config.vocab_size == 300


def test_a_new_model_that_sees_reads_the_picture(tmp_path):
    config = FreshModelConfig(vision={"image_size": 28, "patch_size": 7, "hidden_size": 32, "heads": 2})
    make_fresh_model(tmp_path, config, CORPUS, 0)
    processor = AutoProcessor.from_pretrained(tmp_path)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n<image>Which colour?<|im_end|>\n<|im_start|>assistant\n"
    logits = []
    for colour in ("red", "blue"):
        inputs = processor(text=[text], images=[[Image.new("RGB", (64, 48), colour)]], return_tensors="pt")
        assert (inputs["input_ids"] == model.config.image_token_id).sum() == 16  # a token per patch
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.2


def test_its_weights_have_the_names_of_the_hubs_checkpoints(tmp_path):
    make_fresh_model(tmp_path, FreshModelConfig(vision={}), CORPUS, 0)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    tower = {name for name in names if "vision_tower" in name}
    assert tower
    assert all(name.startswith("vision_tower.vision_model.") for name in tower)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("model.safetensors", "config.json")]
    assert modes[0] == modes[1]


def test_text_is_rendered_the_same_with_and_without_a_tower(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": []}]
    texts = []
    for name, vision in (("text", None), ("sees", {})):
        make_fresh_model(tmp_path / name, FreshModelConfig(vision=vision), CORPUS, 0)
        texts.append(AutoTokenizer.from_pretrained(tmp_path / name).apply_chat_template(messages, tokenize=False))
    assert texts == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"] * 2
