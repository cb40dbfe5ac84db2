"""LoRA inside a worker: an adapter on a frozen model, which learns alone, is switched off, taken out and merged.

All contact with peft and bitsandbytes. Both are imported where they are used: they are optional.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from envgym.errors import ConfigError, missing_package, needs
from envgym.models.weights_file import write_weights

from .lora import ADAPTER_WEIGHTS, ORIGIN, LoraConfig
from .parameters import whole

NAME = "default"
"""The adapter's name for peft, in the names of modules and parameters."""
PREFIX = "base_model.model."
"""Beginning of every name in peft's files."""

Read = Callable[[str, torch.nn.Parameter], torch.Tensor]
"""(name in the model, parameter) -> the parameter's numbers, whole. Ranks must call it together."""


class Adapter:
    """The adapter that `Adapter(model, settings, …)` puts on a Hugging Face model, which is frozen but for it.

    A scalar head is new or not the base's business: it learns in full, beside the adapter (`modules_to_save`).
    Raises `EnvgymError` where peft is not installed or no layer has a name that ends as `targets` say.
    """

    def __init__(self, model: Any, settings: LoraConfig, *, base: str, head: Literal["lm", "scalar"]) -> None:
        peft = library()
        heads = _modules_beside_the_base(model) if head == "scalar" else []
        self.model = model
        self._quantize = settings.quantize
        self._config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=settings.targets,
            exclude_modules=heads or None,
            modules_to_save=heads or None,
            task_type="CAUSAL_LM" if head == "lm" else "SEQ_CLS",
            base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
            inference_mode=False,
        )
        embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
        try:
            peft.inject_adapter_in_model(self._config, model, NAME)
        except ValueError as error:
            raise ConfigError(f"lora.targets={settings.targets}: {' '.join(str(error).split())[:300]}") from None
        self._layers = {
            name: part for name, part in model.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)
        }
        if any(layer.base_layer in embeddings for layer in self._layers.values() if layer.base_layer is not None):
            raise ConfigError(
                "lora.targets: the embedding and the head cannot have an adapter, only linear layers within"
            )

        model.register_state_dict_post_hook(_leave_the_base_out)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model is its base, bit for bit. What is trainable stays so, and parameters are used in the
        same order: partitioned ones are gathered in the order they were first used in."""
        for layer in self._layers.values():
            layer.set_scale(NAME, 0.0)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.set_scale(NAME, 1.0)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapter, whole, under the names of peft's files. Ranks must call it together."""
        for name, parameter in self.model.named_parameters():
            if _is_of_adapter(name):
                yield PREFIX + _plain(name), whole(parameter)

    def write(self, folder: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a folder in peft's form with what `tensors` gave."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._config.save_pretrained(str(path))
        write_weights(path / ADAPTER_WEIGHTS, tensors)
        if self._quantize != "none":
            dtype = str(self.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
            (path / ORIGIN).write_text(
                json.dumps({"quantize": self._quantize, "dtype": dtype}) + "\n", encoding="utf-8"
            )

    def parameters(self, read: Read, *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, as `read` gives them, under the names they had without an adapter: with the adapter
        added to them (`merged`), or as they were."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name or ".original_module." in name:
                continue
            owner, _, leaf = name.rpartition(".")
            layer = owner.removesuffix(".base_layer")
            tensor = read(name, parameter)
            if merged and leaf == "weight" and layer in self._layers:
                tensor = (tensor.float() + self._delta(layer, read).to(tensor.device)).to(tensor.dtype)
            yield _plain(name), tensor

    def _delta(self, layer: str, read: Read) -> torch.Tensor:
        """The adapter's addition to a layer's weight, float32."""
        part = self._layers[layer]
        a = read(f"{layer}.lora_A.{NAME}.weight", part.lora_A[NAME].weight)
        b = read(f"{layer}.lora_B.{NAME}.weight", part.lora_B[NAME].weight)
        delta = b.float() @ a.float() * part.scaling[NAME]
        return delta.T if part.fan_in_fan_out else delta


def library() -> Any:
    """peft, without what it prints of the libraries that it looks for. Raises `MissingDependency`."""
    logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)  # of a kernel it cannot download
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed tells of looking for a GPU
    with needs("peft", "lora", "an adapter"):
        import peft
    return peft


def quantization(dtype: torch.dtype) -> Any:
    """The argument of `from_pretrained` for a model in 4 bits that computes in `dtype`.

    Raises `EnvgymError` where the library is missing or has no build for this machine.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise missing_package(error.name or "bitsandbytes", "qlora", "lora.quantize=4bit") from None
    except Exception as error:  # its native library fails in many ways
        raise ConfigError(f"lora.quantize=4bit: bitsandbytes does not work here: {error}") from None
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def tame_quantized(model: Any) -> None:
    """Let a model in 4 bits compute the same in every pass, and be saved as the ordinary model that it then is.

    On a CPU with bfloat16 instructions bitsandbytes repacks weights in the first pass without gradients, and from
    then on computes in bfloat16 whatever was asked for: what is scored would not be what is learned from.
    """
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    del model.config.quantization_config
    model.hf_quantizer = None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name or f".modules_to_save.{NAME}." in name


def _leave_the_base_out(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A checkpoint need not hold what the run finds where it began. (DeepSpeed leaves frozen parameters out itself, but
    neither a tied head nor what belongs to weights in 4 bits.)"""
    for name in [name for name in state if name.startswith(prefix) and not _is_of_adapter(name)]:
        del state[name]


def _plain(name: str) -> str:
    """A parameter's name without what peft put in it."""
    for part in (f".modules_to_save.{NAME}.", f".{NAME}.", ".base_layer."):
        name = name.replace(part, ".")
    return name


def _modules_beside_the_base(model: Any) -> list[str]:
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    return sorted(names - {model.base_model_prefix})
