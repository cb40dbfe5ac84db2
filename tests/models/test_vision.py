"""Vision-language models as files: they are loaded and saved as what they are, with their processors, and sized."""

import json
import re
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.engines import vllm
from envgym.engines.spec import EngineSpec, end_tokens
from envgym.engines.transformers import TransformersEngine
from envgym.errors import ConfigError, MissingDependency
from envgym.models.vision import policy_class, save_tokenizer, vision_pattern
from envgym.placement.memory import MemoryNeeds, ModelSizes
from envgym.placement.plan import Node, plan_of
from envgym.render import RenderConfig, load_renderer, load_tokenizer
from envgym.types import Message, Observation
from envgym.workers.export import flops_per_token
from tests.vision_models import KINDS

TEXT_MODELS = ("idefics3", "gemma3", "internvl", "llava", "pixtral")
"""The kinds whose language model is one that transformers also has alone."""


def pixels(folder):
    """What a folder's processor makes of a prompt with an image."""
    processor = AutoProcessor.from_pretrained(folder)
    marker = getattr(processor, "boi_token", None) or processor.image_token
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8))
    return processor(text=[f"see {marker} there"], images=[[image]], return_tensors="pt")


def check_folder(folder, kind, model):
    """A folder loads as the class of `model`, a folder too, with its weights' names and its processor."""
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(loaded) is type(AutoModelForImageTextToText.from_pretrained(model))
    assert load_file(folder / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    assert type(AutoProcessor.from_pretrained(folder)) is type(AutoProcessor.from_pretrained(model))
    now, before = pixels(folder), pixels(model)
    assert now.keys() == before.keys()
    assert "pixel_values" in now
    assert all(torch.equal(torch.as_tensor(now[name]), torch.as_tensor(before[name])) for name in now), kind


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_model_and_processor(vision_model, tmp_path, kind, capsys):
    model = vision_model(kind)
    assert main(["model", "export", str(model), str(tmp_path / "out")]) == 0
    check_folder(tmp_path / "out", kind, model)


def test_the_older_files_of_processors_are_kept_too(vision_model, tmp_path):
    """Checkpoints of earlier years have a file for each part, and the template in another."""
    model = tmp_path / "model"
    shutil.copytree(vision_model("llava"), model)
    processor = AutoProcessor.from_pretrained(model)
    (model / "processor_config.json").unlink()
    processor.image_processor.save_pretrained(model)
    saved = json.loads((model / "preprocessor_config.json").read_text())
    parts = {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default"}
    (model / "preprocessor_config.json").write_text(json.dumps(saved | {"processor_class": "LlavaProcessor"}))
    (model / "processor_config.json").write_text(json.dumps(parts | {"num_additional_image_tokens": 1}))
    (model / "chat_template.jinja").rename(model / "template")
    (model / "chat_template.json").write_text(json.dumps({"chat_template": (model / "template").read_text()}))
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.chat_template == (model / "template").read_text()
    (tmp_path / "out").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, tmp_path / "out")
    save_tokenizer(tokenizer, tmp_path / "out")
    check_folder(tmp_path / "out", "llava", model)
    assert AutoProcessor.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def test_a_language_model_has_no_processor(tiny_model, tmp_path):
    (tmp_path / "processor_config.json").write_text("{}")
    shutil.copy(tiny_model / "config.json", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    (tmp_path / "out").mkdir()
    shutil.copy(tiny_model / "config.json", tmp_path / "out")
    save_tokenizer(tokenizer, tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out/processor_config.json").exists()
    assert policy_class(AutoConfig.from_pretrained(tiny_model)) is AutoModelForCausalLM


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_has_the_text(vision_model, kind):
    """Templates that take parts alone leave a plain text out, without an error."""
    renderer = load_renderer(str(vision_model(kind)), RenderConfig())
    assert "what is 12 + 34?" in renderer.text(renderer.prompt(Observation([Message.user("what is 12 + 34?")])))


# -- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_pay_for_the_tower(vision_model, kind):
    model = AutoModelForImageTextToText.from_pretrained(vision_model(kind))
    tower = [p for p in model.base_model.parameters() if id(p) not in set(map(id, model.get_decoder().parameters()))]
    names = vision_pattern(model)
    matched = [p for name, p in model.named_parameters() if re.fullmatch(names, name)]
    assert set(map(id, matched)) == set(map(id, tower)) != set()
    sizes = ModelSizes.from_folder(vision_model(kind))
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.vision == sum(p.numel() for p in tower)
    assert sizes.layers == 2
    if kind in TEXT_MODELS:
        with torch.device("meta"):
            alone = AutoModelForCausalLM.from_config(model.config.get_text_config())
        assert flops_per_token(model)[0] == flops_per_token(alone)[0]


def test_what_is_not_told_apart_is_trained(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.vision_config = {}
    for each in (model, model.base_model):
        assert not re.fullmatch(vision_pattern(each), "model.layers.0")
        assert not re.fullmatch(vision_pattern(each), "model.embed_tokens.weight")


def test_sizes_that_a_text_config_leaves_out_are_the_defaults(vision_model, tmp_path):
    """As in Gemma 3's checkpoints."""
    config = json.loads((vision_model("gemma3") / "config.json").read_text())
    for name in ("num_attention_heads", "vocab_size", "head_dim"):
        del config["text_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(vision_model("gemma3") / "model.safetensors", tmp_path)
    sizes = ModelSizes.from_folder(tmp_path)
    assert (sizes.hidden, sizes.vocabulary, sizes.key_value_width) == (64, 262_208, 256)


def test_a_vision_tower_takes_memory_for_training_where_images_may_come(vision_model):
    def bytes_of_actor(**engine):
        [stage] = resolve(
            {
                "env": "math_verify",
                "model": str(vision_model("llava")),
                "learner": {"kl": {"coef": 0}},
                "engine": engine,
            }
        ).stages
        plan = plan_of(stage, {}, [Node("here", 0, None, 500 * 2**30)])
        return MemoryNeeds(stage, plan, {}, {}).part_memory("actor").parts

    sizes = ModelSizes.from_folder(vision_model("llava"))
    assert sizes.vision > 0
    assert bytes_of_actor()["gradients"] == 4 * sizes.parameters
    texts_alone = bytes_of_actor(args={"language_model_only": True})
    assert texts_alone["gradients"] == pytest.approx(4 * (sizes.parameters - sizes.vision))


def test_the_end_of_a_turn_may_be_in_the_text_config_alone(vision_model, tmp_path):
    config = AutoConfig.from_pretrained(vision_model("qwen2_vl"))
    assert end_tokens(config, str(vision_model("qwen2_vl"))) == (0,)
    config.eos_token_id, config.text_config.eos_token_id = None, [7, 4]
    assert end_tokens(config, str(tmp_path)) == (4, 7)
    assert end_tokens(config, str(vision_model("qwen2_vl"))) == (0,)  # the generation config's


# -- what is refused --------------------------------------------------------------------------------------


def test_without_torchvision_one_line_says_what_to_install(vision_model, tiny_model, monkeypatch):
    find = find_spec
    monkeypatch.setattr("envgym.render.images.find_spec", lambda name: None if name == "torchvision" else find(name))
    with pytest.raises(MissingDependency, match=r"torchvision: .* \(pip install --no-deps torchvision\)$") as error:
        vllm._arguments(EngineSpec(str(vision_model("llava"))), cpu=True)
    assert "\n" not in str(error.value)
    assert "language_model_only" not in vllm._arguments(EngineSpec(str(tiny_model)), cpu=True)


def test_vllm_takes_images_unless_it_is_told_to_load_the_language_model_alone(vision_model):
    folder, size = str(vision_model("llava")), {"shortest_edge": 28}
    arguments = vllm._arguments(EngineSpec(folder, max_model_len=64, image_size=size), cpu=True)
    assert (arguments["language_model_only"], arguments["max_model_len"]) == (False, 64)
    assert arguments["mm_processor_kwargs"] == {"size": size}
    alone = EngineSpec(folder, engine_args={"language_model_only": True})
    assert vllm._arguments(alone, cpu=True)["language_model_only"]


def test_the_fallback_engine_refuses_them(vision_model, capsys):
    folder = str(vision_model("qwen3_vl"))
    with pytest.raises(ConfigError, match=f"^{folder} is a vision-language model, which engine.kind=vllm alone sampl"):
        TransformersEngine(EngineSpec(folder))
    assert capsys.readouterr().err == ""
