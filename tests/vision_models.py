"""Small vision-language models with random weights, and their real processors, made without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
TOKENS = {
    "qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "idefics3": IDEFICS, "smolvlm": IDEFICS,
    "gemma3": [*GEMMA.values(), *("\n" * n for n in range(1, 5))], "internvl": list(INTERN.values()),
    "llava": ["<image>"], "pixtral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
}  # fmt: skip
"""The tokens of each kind's images."""
MARKERS = {**dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QWEN[2]), "internvl": INTERN["context_image_token"]}
MARKERS |= dict.fromkeys(("idefics3", "smolvlm"), "<image>")
"""What a template writes for an image, where it is not the first of the tokens."""
KINDS = tuple(TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS_ONLY = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}MARKER"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolVLM's and Idefics3's: a content that is a text is left out, without an error."""

TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def vision_config(kind: str, tokenizer: Any = None) -> Any:
    """The config of a model of one of the `KINDS`; without a tokenizer its image tokens have any ids."""
    return _config(kind, lambda text: 5 if tokenizer is None else int(tokenizer.convert_tokens_to_ids(text)))


def make_vision_model(kind: str, folder: Path, corpus: list[str], *, seed: int = 0) -> Path:
    """Write a model of one of the `KINDS`, its tokenizer with merges learned on `corpus`, and its processor."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText

    tokenizer = _tokenizer(kind, corpus)
    processor = _processor(kind, tokenizer)
    processor.save_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(vision_config(kind, tokenizer))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 2
    with torch.no_grad():
        for parameter in model.parameters():  # Gemma's projector is zero in a new model
            if parameter.dim() >= 2 and not parameter.any():
                parameter.normal_(std=0.2)
    model.to(torch.float32).save_pretrained(folder)
    if kind in ("llava", "gemma3"):  # a new model's names are not those of the hub, which alone vLLM knows
        weights = load_file(folder / "model.safetensors")
        names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights}
        save_file({names[n]: t for n, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer(kind: str, corpus: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", *TOKENS[kind]]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus, trainer)
    template = LISTS_ONLY if kind in ("idefics3", "smolvlm") else CHAT_TEMPLATE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=template.replace("MARKER", MARKERS.get(kind, TOKENS[kind][0])),
        extra_special_tokens=INTERN if kind == "internvl" else GEMMA if kind == "gemma3" else None,
    )  # fmt: skip


def _config(kind: str, token: Callable[[str], int]) -> Any:
    from transformers import AutoConfig

    qwen_names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    qwen_ids = dict(zip(qwen_names, map(token, QWEN), strict=True)) if "qwen" in kind else {}
    tower = {"depth": 2, "num_heads": 2, "patch_size": 14, "initializer_range": 0.2}
    text, vision = dict(TEXT), dict(VISION)
    match kind:
        case "qwen2_vl":
            vision = {**tower, "embed_dim": 64, "hidden_size": 64}
            extra = {**qwen_ids, "tie_word_embeddings": True}
            text |= {"rope_parameters": ROPE, "tie_word_embeddings": True}
        case "qwen2_5_vl":
            vision = {
                **tower, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64, "window_size": 56,
                "fullatt_block_indexes": [1],
            }  # fmt: skip
            extra = qwen_ids
            text |= {"rope_parameters": ROPE}
        case "qwen3_vl":
            vision = {
                **tower, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64, "patch_size": 16,
                "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
            }  # fmt: skip
            extra = {**qwen_ids, "tie_word_embeddings": True}
            text |= {"head_dim": 32, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
        case "idefics3" | "smolvlm":
            vision |= {"image_size": 56, "patch_size": 14}
            extra = {"image_token_id": token("<image>"), "scale_factor": 2, "pad_token_id": 2}
            text |= {"model_type": "llama"}
        case "gemma3":
            vision |= {"image_size": 56, "patch_size": 14, "model_type": "siglip_vision_model"}
            vision.pop("initializer_range")
            boi, eoi, image = map(token, GEMMA.values())
            extra = {
                "boi_token_index": boi, "eoi_token_index": eoi, "image_token_index": image, "mm_tokens_per_image": 4,
            }  # fmt: skip
            text |= {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64, "model_type": "gemma3_text"}
        case "internvl":
            vision |= {"image_size": [56, 56], "patch_size": [14, 14], "model_type": "internvl_vision"}
            extra = {
                "image_token_id": token(INTERN["context_image_token"]), "image_seq_length": 4,
                "downsample_ratio": 0.5, "tie_word_embeddings": False,
            }  # fmt: skip
            text |= {"model_type": "qwen2"}
        case "llava":
            vision |= {"image_size": 56, "patch_size": 14, "model_type": "clip_vision_model", "projection_dim": 64}
            extra = {"image_token_index": token("<image>"), "image_seq_length": 16}
            text |= {"model_type": "qwen2"}
        case "pixtral":
            vision |= {"image_size": 56, "patch_size": 14, "model_type": "pixtral"}
            vision["head_dim"] = 32
            extra = {
                "image_token_index": token("[IMG]"), "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            }  # fmt: skip
            text |= {"model_type": "mistral", "head_dim": 32, "sliding_window": None}
    model_type = "llava" if kind == "pixtral" else kind
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **extra)


def _processor(kind: str, tokenizer: Any) -> Any:
    import transformers as t

    template = tokenizer.chat_template
    match kind:
        case "qwen2_vl" | "qwen2_5_vl":
            small = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
            family = t.Qwen2VLProcessor if kind == "qwen2_vl" else t.Qwen2_5_VLProcessor
            images = t.Qwen2VLImageProcessor(**small)
            return family(images, tokenizer, t.Qwen2VLVideoProcessor(**small), chat_template=template)
        case "qwen3_vl":
            images = t.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64)
            return t.Qwen3VLProcessor(images, tokenizer, t.Qwen3VLVideoProcessor(), chat_template=template)
        case "idefics3":
            size = {"longest_edge": 56}
            images = t.Idefics3ImageProcessor(size=size, max_image_size=size)
            return t.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
        case "smolvlm":
            size = {"longest_edge": 56}
            images = t.SmolVLMImageProcessor(size=size, max_image_size=size)
            video = t.SmolVLMVideoProcessor(size=size, max_image_size=size)
            return t.SmolVLMProcessor(images, tokenizer, video, image_seq_len=4, chat_template=template)
        case "gemma3":
            images = t.Gemma3ImageProcessor(size={"height": 56, "width": 56})
            return t.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
        case "internvl":
            images = t.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=False)
            video = t.InternVLVideoProcessor(size={"height": 56, "width": 56})
            return t.InternVLProcessor(images, tokenizer, video, image_seq_length=4, chat_template=template)
        case "llava":
            images = t.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
            return t.LlavaProcessor(
                images, tokenizer, patch_size=14, vision_feature_select_strategy="default", chat_template=template,
                num_additional_image_tokens=1,
            )  # fmt: skip
    images = t.PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    return t.PixtralProcessor(images, tokenizer, patch_size=14, chat_template=template)
