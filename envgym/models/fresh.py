"""A new, untrained model folder: a small Qwen3 architecture, for pictures with LLaVA's vision tower, and a byte-level
tokenizer with learned merges.

For machines without access to a model hub, and for tests. The tokenizer can encode any text (all 256 bytes are in
its alphabet); digits are never merged, as in the large models' tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from envgym.env import EnvSpec
from envgym.errors import needs
from envgym.hashing import derived_seed
from envgym.settings import Settings
from envgym.types import Action, Message, observed_messages

from .weights_file import save_model, write_weights

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
PADDING = "<|endoftext|>"
IMAGE = "<image>"
ROPE_THETA = 100.0
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").rstrip()


class FreshVisionConfig(Settings):
    """The size of a new model's vision tower. An image is resized to a square of patches, each of which is a token."""

    image_size: int = Field(56, ge=8)
    """Pixels per side of the square."""
    patch_size: int = Field(14, ge=4)
    """Pixels per side of a patch."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(256, ge=8)
    """Width of the feed-forward layers."""
    layers: int = Field(2, ge=2)
    """Transformer blocks; the last but one has the features that the model reads."""
    heads: int = Field(4, ge=1)
    """Attention heads."""


class FreshModelConfig(Settings):
    """The size of a new model."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(256, ge=8)
    """Width of the feed-forward layers."""
    layers: int = Field(2, ge=1)
    """Transformer blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads, each hidden_size / heads wide."""
    vocab_size: int = Field(512, ge=300)
    """Tokens in the vocabulary, the 256 bytes and the special tokens included."""
    max_model_len: int = Field(512, ge=16)
    """Longest sequence, in tokens."""
    vision: FreshVisionConfig | None = None
    """A vision tower; unset: the model reads text alone."""


def make_fresh_model(folder: Path, config: FreshModelConfig, corpus: Iterable[str], seed: int) -> None:
    """Write a randomly initialised causal model and a tokenizer whose merges are trained on `corpus`.

    The folder loads with `AutoModelForCausalLM` and `AutoTokenizer`; with a vision tower, with
    `AutoModelForImageTextToText` and `AutoProcessor`. The same seed gives the same weights.
    """
    with needs("torch", "train", "making a model"):
        import torch
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar

    tokenizer = Tokenizer(models.BPE())
    # A word includes the space before it; each digit is one token, so that numbers have one spelling.
    words = pre_tokenizers.Split(Regex(r"\d| ?\p{L}+| ?[^\s\p{L}\d]+|\s+"), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    special = [PADDING, START_OF_TURN, END_OF_TURN, *([IMAGE] if config.vision else [])]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=PADDING, chat_template=CHAT_TEMPLATE
    )

    torch.manual_seed(seed)
    text = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        # Both halve the steps that a small model needs: initial weights scaled by its width, and rotations that
        # distinguish positions a few tokens apart rather than thousands.
        initializer_range=0.7 / config.hidden_size**0.5,
        rope_theta=ROPE_THETA,
        max_position_embeddings=config.max_model_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model: PreTrainedModel
    if config.vision is None:
        model = Qwen3ForCausalLM(text)
    else:
        model = _with_vision(text, config.vision, fast.convert_tokens_to_ids(IMAGE))
        _processor(fast, config.vision).save_pretrained(folder)
    model.generation_config.eos_token_id = fast.eos_token_id
    model.generation_config.pad_token_id = fast.pad_token_id
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    save_model(model, folder)
    if config.vision is None:
        fast.save_pretrained(folder)
    else:
        _name_as_in_hub(folder / "model.safetensors")


def _with_vision(text: Any, vision: FreshVisionConfig, image_token: int) -> Any:
    """A new LLaVA with the language model `text`."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    tower = CLIPVisionConfig(
        **vision.model_dump(exclude={"layers", "heads"}), projection_dim=vision.hidden_size,
        num_hidden_layers=vision.layers, num_attention_heads=vision.heads,
    )  # fmt: skip
    patches = (vision.image_size // vision.patch_size) ** 2
    config = LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=image_token, image_seq_length=patches,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def _processor(tokenizer: Any, vision: FreshVisionConfig) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    side = vision.image_size
    images = CLIPImageProcessor(size={"height": side, "width": side}, do_center_crop=False)
    return LlavaProcessor(
        images, tokenizer, patch_size=vision.patch_size, vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template, num_additional_image_tokens=1,
    )  # fmt: skip


def _name_as_in_hub(file: Path) -> None:
    """Rename the weights of a new LLaVA's tower as in the hub's checkpoints, whose names alone vLLM knows."""
    from safetensors.torch import load_file

    mode, old, new = file.stat().st_mode, "vision_tower.", "vision_tower.vision_model."
    write_weights(file, {name.replace(old, new): tensor for name, tensor in load_file(file).items()})
    file.chmod(mode)


async def sample_texts(spec: EnvSpec, n_tasks: int) -> list[str]:
    """Texts of an environment: observations, demonstrations and tools of its first training tasks, with the roles of
    chat templates."""
    texts = []
    tasks = spec.tasks("train")
    for index in range(n_tasks if tasks.size is None else min(n_tasks, tasks.size)):
        task = await tasks.get(index)
        async with spec.spec_for(task).make() as env:
            observation, _ = await env.reset(seed=index, options={"task": task})
            turns = spec.spec_for(task).demonstrations(task, derived_seed(0, index))
            messages = [*observed_messages(observation)]
            tools = json.dumps([tool.as_dict() for tool in observation.tools]) if observation.tools else ""
            for number, turn in enumerate(turns, start=1):
                messages.append(turn if isinstance(turn, Message) else Message("assistant", turn))
                if number < len(turns):
                    observation, *_ = await env.step(Action(messages[-1].text, (), messages[-1].tool_calls))
                    messages += observed_messages(observation)
        texts += [f"{message.role}\n{message.text}" for message in (*messages, Message("system", tools))]
        texts += [json.dumps(message.as_dict()["tool_calls"]) for message in messages if message.tool_calls]
    return texts
