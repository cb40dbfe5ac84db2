"""The images of rows as tensors for a vision-language model's forward pass."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from envgym.errors import ConfigError, RunError
from envgym.images import ImageFolder
from envgym.models.vision import placeholder_ids, takes_images
from envgym.types import ImageSpan, Row

from .attention import VARLEN, takes_ends
from .config import ImageConfig

CACHED_BYTES = 2**29
"""Maximum bytes of the processed images in a worker's memory: members of a group and epochs share them."""
BLANK = "blank_ids"
"""The name of the tokens of a blank image, which are an additional row, among the tensors of images."""
TOKEN_TYPES = {"mm_token_type_ids", "token_type_ids"}
"""Arguments of models that tell placeholders from text."""
OF_TEXT = {"input_ids", "attention_mask", *TOKEN_TYPES}
"""Outputs of processors that a row determines, not an image."""


@dataclass(frozen=True, slots=True)
class Processed:
    """An image as the model takes it: its placeholder tokens, and the tensors by their names in the model's call."""

    token_ids: list[int]
    tensors: dict[str, torch.Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ImageTensors:
    """Makes the tensors of images from the files of a run, with the processor of a model's folder.

    `model`: the Hugging Face model. Raises `EnvgymError` if its processor cannot be loaded here.
    """

    def __init__(self, model: nn.Module, source: str, config: ImageConfig, device: torch.device) -> None:
        from envgym.render.images import load_processor

        self._processor = load_processor(source)
        self._folder, self._size = ImageFolder(Path(config.folder)), config.size
        self._device, self._dtype = device, model.dtype
        backbone = model.base_model
        self._arguments = inspect.signature(backbone.forward).parameters
        self._positions = getattr(backbone, "get_rope_index", None)
        self._placeholders = placeholder_ids(model.config)
        if model.config.vision_config._attn_implementation == VARLEN:  # its kernel is causal
            model.config.vision_config._attn_implementation = "sdpa"
        if 0 in self._placeholders:  # rows are padded with 0
            raise ConfigError(f"{source}: token 0 stands for an image, which envgym does not support")
        self._cache: OrderedDict[str, Processed] = OrderedDict()
        self._cached_bytes = 0

    def tensors(self, samples: Sequence[Row], *, packed: bool, blank: bool) -> dict[str, torch.Tensor]:
        """Arguments of the model's call for the images of a micro-batch's rows, in order, which are padded to the
        longest or `packed` end to end. Without any image it is empty or, if `blank`, that of a blank image, whose
        tokens are in `BLANK`: a row to be computed after all others. With it all ranks run the vision tower.

        Raises `DataError` for an image whose file is missing or another one, and `RunError` if its placeholders are not
        those of the row.
        """
        rows = [sample.token_ids.tolist() for sample in samples]
        images = [self._of_row(tokens, sample.images) for tokens, sample in zip(rows, samples, strict=True)]
        tensors: dict[str, torch.Tensor] = {}
        if not any(images):
            if not blank:
                return {}
            rows.append(self._blank.token_ids)
            images.append([self._blank])
            tensors[BLANK] = torch.tensor(self._blank.token_ids)
        tensors |= collate([image.tensors for line in images for image in line])
        types: list[torch.Tensor] = []
        if names := self._arguments.keys() & TOKEN_TYPES:
            types = [torch.tensor(line) for line in self._processor.create_mm_token_type_ids(rows)]
            joined = torch.cat(types)[None] if packed else nn.utils.rnn.pad_sequence(types, batch_first=True)
            tensors |= dict.fromkeys(names, joined)
        if packed and self._positions is not None:
            tensors["position_ids"] = torch.cat(list(map(self._row_positions, rows, types, images)), 2)
        return {
            name: tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }

    def _row_positions(self, token_ids: list[int], types: torch.Tensor, images: Sequence[Processed]) -> torch.Tensor:
        """[4, 1, T] the positions of a row in its text, in time, and in an image's height and width."""
        grids = {"image_grid_thw": torch.cat([image.tensors["image_grid_thw"] for image in images])} if images else {}
        assert self._positions is not None
        places, _ = self._positions(torch.tensor([token_ids]), types[None], **grids)
        return torch.cat([torch.arange(len(token_ids)).view(1, 1, -1), places])

    def _of_row(self, token_ids: list[int], spans: Sequence[ImageSpan]) -> list[Processed]:
        """The images of a row, whose placeholders are compared with the row's."""
        images = [self._processed(span.sha256) for span in spans]
        for span, image in zip(spans, images, strict=True):
            if token_ids[span.start : span.end] != image.token_ids:
                raise RunError(
                    f"image {span.sha256} has {len(image.token_ids)} placeholders in this model, which are not the "
                    f"{span.length} tokens at {span.start} of a row: it was rendered by another model's processor"
                )
        lines = (token_ids, *(image.token_ids for image in images))
        n_placeholders, *n_of_images = [sum(token in self._placeholders for token in line) for line in lines]
        if n_placeholders != sum(n_of_images):
            raise RunError(f"a row has {n_placeholders} placeholders, {sum(n_of_images)} of which belong to its images")
        return images

    def _processed(self, name: str) -> Processed:
        """The image `name`, from memory or from its file."""
        from envgym.render.images import open_rgb

        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        image = self._cache[name] = self._process(open_rgb(self._folder.read(name)))
        self._cached_bytes += image.n_bytes
        while len(self._cache) > 1 and self._cached_bytes > CACHED_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1].n_bytes
        return image

    @cached_property
    def _blank(self) -> Processed:
        """A grey image, which is small for every processor."""
        from PIL import Image

        return self._process(Image.new("RGB", (64, 64), "grey"))

    def _process(self, image: Any) -> Processed:
        """Call the processor, on the CPU."""
        from envgym.render.images import process

        run, outputs = process(self._processor, image, self._size, return_tensors="pt")
        tensors = {name: outputs[name] for name in self._arguments if name in outputs and name not in OF_TEXT}
        return Processed(self._processor.tokenizer(run.strip("\n"), add_special_tokens=False)["input_ids"], tensors)


def check_takes_images(config: Any, role: str, head: str) -> None:
    """Raise `ConfigError` if a role's model with this Hugging Face config cannot take rows with images."""
    if head == "scalar":
        raise ConfigError(
            f"a row has an image, and the {role} cannot see it: critics and reward models take texts alone; choose a "
            "learner without a critic"
        )
    if not takes_images(config):
        raise ConfigError(
            f"a row has an image, and the {role} ({config.model_type}) takes texts alone: name a vision-language model"
        )


def attend_within_images(model: nn.Module) -> None:
    """Let a Hugging Face model attend both ways within an image where it is defined so: by a kernel with masks."""
    takes_types = "token_type_ids" in inspect.signature(model.base_model.forward).parameters
    if takes_types and takes_images(model.config) and takes_ends(model.config._attn_implementation):
        model.config._attn_implementation = "sdpa"


def collate(images: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of images one after the other, which is the first dimension; all others are padded with zeros to the
    largest image's."""
    tensors = {}
    for name in images[0]:
        parts = [image[name] for image in images]
        sizes = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
        missing = [
            [n for size, length in zip(sizes, part.shape[1:], strict=True) for n in (size - length, 0)]
            for part in parts
        ]
        tensors[name] = torch.cat([nn.functional.pad(part, n[::-1]) for part, n in zip(parts, missing, strict=True)])
    return tensors


def run_beside_blank_row(
    run: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], Any],
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    options: dict[str, Any],
    *,
    packed: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The hidden states and router logits of rows `token_ids` [B, T] of `lengths` [B], which the model computes
    together with the row `BLANK` [N] of `options`, its other arguments. That row stays in the graph, with gradients of
    0: ranks must reduce the same ones, the vision tower's too."""
    options = dict(options)
    blank_ids = options.pop(BLANK)
    (n_rows, length), n_blank = token_ids.shape, len(blank_ids)
    rows = nn.utils.rnn.pad_sequence([*token_ids, blank_ids], batch_first=True)
    base = run(rows, nn.functional.pad(lengths, (0, 1), value=n_blank), options)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :-n_blank] if packed else tensor[:n_rows, :length]

    states = base.last_hidden_state
    logits = (layer.view(*states.shape[:2], -1) for layer in getattr(base, "router_logits", None) or ())
    return cut(states), tuple(cut(layer).flatten(0, 1) for layer in logits)
