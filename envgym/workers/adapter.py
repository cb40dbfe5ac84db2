"""LoRA inside a worker: an adapter on a frozen model, which is trained, disabled, exported and merged.

The interface to peft and bitsandbytes, which are optional and therefore imported where they are used.
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
from envgym.models.rounding import WeightChange
from envgym.models.vision import takes_images, vision_pattern
from envgym.models.weights_file import write_weights

from .export import full_tensor
from .lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ORIGIN, LoraConfig

NAME = "default"
"""The adapter's name for peft, in the names of modules and parameters."""
PREFIX = "base_model.model."
"""Prefix of every name in peft's files."""

ReadTensor = Callable[[str, torch.nn.Parameter], torch.Tensor]
"""(name in the model, parameter) -> the full tensor. A collective call."""


class Adapter:
    """The adapter that `Adapter(model, settings, …)` adds to a Hugging Face model, whose own weights are frozen.

    A scalar head is trained in full, in addition to the adapter (`modules_to_save`). Raises `EnvgymError` if peft is
    not installed or no layer's name ends with one of `targets`.
    """

    def __init__(self, model: Any, settings: LoraConfig, *, base: str, head: Literal["lm", "scalar"]) -> None:
        peft = import_peft()
        heads = _head_names(model) if head == "scalar" else []
        self.model = model
        self._quantize = settings.quantize
        self._config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=settings.targets,
            exclude_modules="|".join([vision_pattern(model), *heads]) if takes_images(model.config) else heads or None,
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
                "lora.targets: the embedding and the head cannot have an adapter, only the linear layers between them"
            )

        if any(isinstance(layer, peft.tuners.lora.ParamWrapper) for layer in self._layers.values()):
            raise ConfigError(
                f"lora.targets={settings.targets}: the experts and routers of this model cannot have an adapter, only "
                "its linear layers: set lora.targets=[q_proj, k_proj, v_proj, o_proj]"
            )
        model.register_state_dict_post_hook(_drop_base_state)

    @contextmanager
    def disable(self) -> Iterator[None]:
        """A context in which the model computes like its base, bit for bit. Parameters stay trainable and are used in
        the same order, because ZeRO 3 gathers them in the order of their first use."""
        for layer in self._layers.values():
            layer.set_scale(NAME, 0.0)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.set_scale(NAME, 1.0)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors of the adapter, under the names of peft's files. A collective call."""
        for name, parameter in self.model.named_parameters():
            if _is_adapter_parameter(name):
                yield PREFIX + _strip_peft(name), full_tensor(parameter)

    def write(self, folder: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a folder in peft's format with `tensors`, the result of the method `tensors`."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._config.save_pretrained(str(path))
        write_weights(path / ADAPTER_WEIGHTS, tensors)
        (path / ADAPTER_WEIGHTS).chmod((path / ADAPTER_CONFIG).stat().st_mode)  # safetensors' is for its owner alone
        if self._quantize != "none":
            dtype = str(self.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
            (path / ORIGIN).write_text(
                json.dumps({"quantize": self._quantize, "dtype": dtype}) + "\n", encoding="utf-8"
            )

    def merged_change(self) -> WeightChange:
        """The change of the weights when the adapter is added to them, in their number format. A collective call."""
        change = WeightChange(self.model.get_input_embeddings().weight.dtype)
        for layer, part in self._layers.items():
            tensor = full_tensor(part.get_base_layer().weight).float()
            change.add(tensor, tensor + self._delta(layer, lambda _, p: full_tensor(p)).to(tensor.device))
        return change

    def parameters(self, read: ReadTensor, *, merged: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, read by `read`, under their names without an adapter. `merged`: with the adapter
        added to them, in this number format; None: without it, in their own."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name or ".original_module." in name:
                continue
            owner, _, leaf = name.rpartition(".")
            layer = owner.removesuffix(".base_layer")
            tensor = read(name, parameter)
            if merged is not None and leaf == "weight" and layer in self._layers:
                tensor = tensor.float() + self._delta(layer, read).to(tensor.device)
            yield _strip_peft(name), tensor if merged is None else tensor.to(merged)

    def _delta(self, layer: str, read: ReadTensor) -> torch.Tensor:
        """The adapter's addition to a layer's weight, float32."""
        part = self._layers[layer]
        a = read(f"{layer}.lora_A.{NAME}.weight", part.lora_A[NAME].weight)
        b = read(f"{layer}.lora_B.{NAME}.weight", part.lora_B[NAME].weight)
        delta = b.float() @ a.float() * part.scaling[NAME]
        return delta.T if part.fan_in_fan_out else delta


def import_peft() -> Any:
    """Import peft, without the logs of libraries that it probes. Raises `MissingDependency`."""
    logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)  # about a kernel it cannot download
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed logs that it found no GPU
    with needs("peft", "lora", "an adapter"):
        import peft
    return peft


def quantization(dtype: torch.dtype) -> Any:
    """The argument of `from_pretrained` for a model in 4 bits that computes in `dtype`.

    Raises `EnvgymError` if bitsandbytes is missing or has no build for this machine.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise missing_package(error.name or "bitsandbytes", "qlora", "lora.quantize=4bit") from None
    except Exception as error:  # its native library fails in many ways
        raise ConfigError(f"lora.quantize=4bit: bitsandbytes does not work here: {error}") from None
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def tame_quantized(model: Any) -> None:
    """Make a 4-bit model compute the same in every pass, and remove the quantization from what is saved with it.

    On a CPU with bfloat16 instructions bitsandbytes repacks weights in the first pass without gradients, and from
    then on computes in bfloat16 whatever the dtype: log-prob passes would differ from training.
    """
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    del model.config.quantization_config
    model.hf_quantizer = None


def _is_adapter_parameter(name: str) -> bool:
    return ".lora_" in name or f".modules_to_save.{NAME}." in name


def _drop_base_state(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Drop the base from a checkpoint, since a resumed run loads it from its model folder. (DeepSpeed omits frozen
    parameters itself, but neither a tied head nor the state of 4-bit weights.)"""
    for name in [name for name in state if name.startswith(prefix) and not _is_adapter_parameter(name)]:
        del state[name]


def _strip_peft(name: str) -> str:
    """A parameter's name without the parts that peft inserted."""
    for part in (f".modules_to_save.{NAME}.", f".{NAME}.", ".base_layer."):
        name = name.replace(part, ".")
    return name


def _head_names(model: Any) -> list[str]:
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    return sorted(names - {model.base_model_prefix})
