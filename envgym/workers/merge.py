"""Merging an adapter into its base (`envgym model merge`), by peft, for any folder in peft's format."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envgym import hub
from envgym.disk import work_folder
from envgym.errors import ConfigError, needs, reported_as
from envgym.models import check_no_file, is_path
from envgym.models.rounding import ENOUGH, WeightChange
from envgym.models.vision import policy_class, save_tokenizer
from envgym.models.weights_file import save_model

from .lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ORIGIN

CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
"""transformers' classes by peft's names of their tasks: policies, reward models, critics."""


def merge_adapter(adapter: str, target: str, *, base: str | None = None, note: Callable[[str], None]) -> Path:
    """Write the model folder `target`: the adapter's base with the adapter added to its weights, and its tokenizer.

    `base` is a folder or hub id; by default the one that the adapter names. Weights keep the base's number format, if
    it keeps what the adapter changes; else they are written in float32, with a note.
    An adapter that was trained on 4-bit weights is merged into the weights as rounded to 4 bits, in the format they
    were computed with, which gives the trained policy. `note` is called with notes for the user. Raises `ConfigError`.
    """
    folder, path = Path(adapter).expanduser(), Path(target).expanduser()
    config = _read_config(folder)
    if path.exists():
        raise ConfigError(f"{target} exists: give the merged model another name")
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"the adapter {adapter} does not name its base: give it with --base")
    base = _find_base(base, adapter, note)
    # The folder is made first, so that no large base is loaded in vain.
    with reported_as(ConfigError, f"{target} cannot be written"), work_folder(path) as temporary:
        save_model(_merge(folder, config, base, note), temporary)
        if not _save_tokenizer((str(folder), base), temporary):
            note(f"{base} has no tokenizer, and so {target} has none")
        os.replace(temporary, path)
    return path


def _read_config(folder: Path) -> dict[str, Any]:
    """The adapter's config. Raises `ConfigError` unless the folder holds a LoRA adapter in peft's form."""
    if not folder.is_dir():
        raise ConfigError(f"there is no adapter folder {folder}")
    if not (folder / ADAPTER_CONFIG).is_file():
        inner = folder / "adapter"
        hint = f". Did you mean {inner}?" if (inner / ADAPTER_CONFIG).is_file() else ""
        raise ConfigError(f"{folder} is no adapter folder in peft's form: it has no {ADAPTER_CONFIG}{hint}")
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ConfigError(f"{folder / ADAPTER_CONFIG} is not the config of an adapter") from None
    if kind != "LORA":
        raise ConfigError(f"{folder} holds an adapter of kind {kind}, and only LORA can be merged")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"the adapter folder {folder} has no {ADAPTER_WEIGHTS}")
    return config


def _find_base(base: str, adapter: str, note: Callable[[str], None]) -> str:
    """The name or folder of the base, as libraries load it. Raises `ConfigError` if there is none."""
    path = Path(base).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"the base {base} is no model folder: it has no config.json")
        return base
    check_no_file(base)
    if is_path(base):
        raise ConfigError(f"the base of {adapter} is not at {base}: give its path with --base")
    note(f"looking for {base} on the Hugging Face hub, for up to {hub.SECONDS:g} s")
    return hub.find_on_hub(base)


def _merge(folder: Path, config: Mapping[str, Any], base: str, note: Callable[[str], None]) -> Any:
    """The base model with the adapter merged into its weights, in float32 where its own number format would keep too
    little of the change. Raises `ConfigError` if they do not fit together."""
    with needs("torch", "train", "merging an adapter"):
        import torch
        import transformers
        from safetensors import SafetensorError, safe_open
    from .adapter import import_peft

    peft = import_peft()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = folder / ADAPTER_WEIGHTS
    with reported_as(ConfigError, f"{path} cannot be read", cause=SafetensorError), safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no mapping
    model, missing = _load_base(base, config, shapes)
    origin = folder / ORIGIN
    if origin.is_file():
        model = _round_to_4_bits(model, base, json.loads(origin.read_text(encoding="utf-8")))
    heads = {name.partition(".")[0] for name in missing} - set(config.get("modules_to_save") or ())
    if heads:
        raise ConfigError(f"neither the base {base} nor the adapter has weights for {sorted(heads)[0]}")
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    change = WeightChange(model.dtype)
    mismatch = ConfigError(f"the adapter {folder} is of another model than {base}: give its own with --base")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            with_adapter = peft.PeftModel.from_pretrained(model.float(), str(folder))
            expected = set(peft.get_peft_model_state_dict(with_adapter, save_embedding_layers=False))
            if expected - shapes.keys() or any(".lora_" in name for name in shapes.keys() - expected):
                raise mismatch
            merged = with_adapter.merge_and_unload(safe_merge=True)
    except (RuntimeError, KeyError):
        raise mismatch from None
    except ValueError as error:
        raise ConfigError(f"the adapter {folder} cannot be merged into {base}: {_shorten(error)}") from None
    for name, parameter in merged.named_parameters():
        if name in weights:
            change.add(weights[name], parameter)
    if change.share >= ENOUGH:
        return merged.to(change.dtype)
    note(f"the merged model is in float32, since {change.in_words}")
    return merged


def _load_base(base: str, config: Mapping[str, Any], shapes: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """The base, loaded as the class that the adapter was trained on, and the names of weights that it lacks."""
    import transformers

    try:
        base_config = transformers.AutoConfig.from_pretrained(base)
        task = config.get("task_type") or _task_of(base_config)
        if task not in CLASSES:
            raise ConfigError(f"adapters for {task} cannot be merged, only those for {', '.join(CLASSES)}")
        heads = config.get("modules_to_save") or ()
        labels = [shapes[name][0] for head in heads if (name := f"base_model.model.{head}.weight") in shapes]
        if labels and task != "CAUSAL_LM":
            base_config.num_labels = labels[0]
        factory = policy_class(base_config) if task == "CAUSAL_LM" else getattr(transformers, CLASSES[task])
        model, loading = factory.from_pretrained(base, config=base_config, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"the base {base} does not load: {_shorten(error)}") from None
    return model, set(loading["missing_keys"])


def _task_of(config: Any) -> str:
    """The task of a base, for an adapter that does not name one."""
    name = (getattr(config, "architectures", None) or [""])[0]
    endings = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
    return next((task for ending, task in endings.items() if name.endswith(ending)), "CAUSAL_LM")


def _round_to_4_bits(model: Any, base: str, origin: Mapping[str, str]) -> Any:
    """The model with its weights rounded to 4 bits and back, as it computes when quantized."""
    import torch

    from .adapter import quantization
    from .export import full_tensor

    dtype = getattr(torch, origin["dtype"])
    quantized = type(model).from_pretrained(
        base, config=model.config, dtype=dtype, quantization_config=quantization(dtype)
    )
    model = model.to(dtype)
    for name, parameter in quantized.named_parameters():
        if hasattr(parameter, "quant_state"):
            model.get_parameter(name).data = full_tensor(parameter).to("cpu", dtype)
    return model


def _save_tokenizer(sources: tuple[str, ...], folder: Path) -> bool:
    """Save the first tokenizer in `sources`, the last of which is a model, to `folder`; False if there is none."""
    import transformers

    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir() and not any(next(path.glob(name), None) for name in ("tokenizer*", "vocab*", "*.model")):
            continue  # transformers would create an empty one
        try:
            save_tokenizer(transformers.AutoTokenizer.from_pretrained(source), folder, sources[-1])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return True
    return False


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
