"""Every setting by its key, and which of them an unknown key was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

OTHER_NAMES = {
    "learner.lr": ("learning_rate", "actor_lr", "actor_learning_rate", "step_size"),
    "learner.kl.coef": ("beta", "kl_coef", "kl_coeff", "kl_beta", "kl_loss_coef", "init_kl_coef", "kl_penalty"),
    "learner.clip_low": ("epsilon", "eps_clip", "clip_eps", "clip_epsilon", "clip_range", "clip_ratio", "cliprange"),
    "learner.clip_high": ("epsilon_high", "eps_clip_high", "clip_ratio_high"),
    "learner.max_grad_norm": ("grad_clip", "clip_grad", "gradient_clipping"),
    "learner.minibatches": ("batch_size", "train_batch_size", "mini_batch_size", "gradient_accumulation_steps"),
    "learner.epochs": ("num_train_epochs", "num_iterations", "num_epochs", "max_epochs"),
    "learner.entropy_coef": ("entropy_coeff", "entropy_bonus"),
    "learner.gae_lambda": ("lam", "lambda", "lambd"),
    "learner.ema_decay": ("ema",),
    "learner.lr_schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler"),
    "learner.warmup_steps": ("warmup", "num_warmup_steps"),
    "rollout.tasks": ("batch_size", "train_batch_size", "rollout_batch_size", "num_prompts", "prompts"),
    "rollout.group_size": (
        "n", "num_generations", "num_samples", "n_samples", "n_samples_per_prompt", "samples_per_prompt",
    ),
    "rollout.max_tokens": (
        "max_new_tokens", "max_completion_length", "max_response_length", "response_length", "generate_max_len",
    ),
    "rollout.concurrency": ("max_concurrency", "num_workers"),
    "engine.max_model_len": ("max_length", "max_seq_len", "max_seq_length", "context_length"),
    "engine.args": ("gpu_memory_utilization", "tensor_parallel_size", "enforce_eager", "max_num_seqs"),
    "engine.kind": ("backend", "use_vllm"),
    "workers.ranks": ("gpus", "num_gpus", "n_gpus", "n_gpus_per_node", "world_size", "num_processes"),
    "workers.tokens_per_microbatch": (
        "micro_batch_size", "per_device_train_batch_size", "micro_train_batch_size", "max_tokens_per_gpu",
    ),
    "workers.tensor_parallel": ("tensor_parallel_size", "tp"),
    "workers.dtype": ("bf16", "fp16", "precision", "torch_dtype"),
    "workers.attention": ("attn_implementation", "flash_attn"),
    "lora.rank": ("r", "lora_r", "lora_rank"),
    "lora.alpha": ("lora_alpha",),
    "lora.quantize": ("load_in_4bit", "load_in_4_bit", "qlora"),
    "data.path": ("dataset", "dataset_path", "data_path", "prompt_data", "train_file", "train_files"),
    "data.prompt": ("input_key", "prompt_key"),
    "data.answer": ("label_key", "answer_key"),
    "steps": ("max_steps", "num_steps", "total_steps", "iterations", "total_training_steps"),
    "runs_dir": ("output_dir", "save_path", "ckpt_path", "out"),
    "checkpoint.every": ("save_steps", "save_freq", "save_every", "save_interval"),
    "eval.every": ("eval_steps", "eval_freq", "test_freq", "eval_every", "eval_interval"),
    "report_to": ("wandb", "use_wandb", "logger", "tensorboard", "swanlab", "use_tensorboard"),
    "project": ("wandb_project", "project_name"),
    "name": ("run_name", "experiment_name"),
}  # fmt: skip
"""What other programs call a setting."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted key, the model that has it, and what pydantic knows of it."""

    key: str
    owner: type[BaseModel]
    field: FieldInfo


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """The settings of a model and of the models within it, in order. What a mapping holds has a name in capitals."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, named = _model_within(field.annotation)
        if inner is None:
            yield Setting(key, model, field)
        else:
            yield from settings_of(inner, f"{key}.NAME." if named else f"{key}.")


def _model_within(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, if it does, and whether it holds several by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (None if annotation.model_config.get("extra") == "allow" else annotation), False
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is dict:
        return _model_within(parts[1])[0], True
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 1:
        return _model_within(parts[0])
    return None, False


def meant(key: str, known: Sequence[str]) -> list[str]:
    """Those of the `known` keys that an unknown one was probably meant to be: other programs' names for them, then
    those that end alike, then those that nearly do."""
    last = key.rpartition(".")[2].replace("-", "_").lower()
    others = [name for name, other in OTHER_NAMES.items() if last in other and name in known]
    ends: dict[str, list[str]] = {}
    for name in known:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    return list(dict.fromkeys(others + ends.get(last, [])))[:3]


def nearly(key: str, known: Sequence[str]) -> list[str]:
    """Those of the `known` keys whose last part is nearly that of an unknown one."""
    last = key.rpartition(".")[2]
    near = get_close_matches(last, {name.rpartition(".")[2] for name in known}, n=1, cutoff=0.7)
    return [name for name in known if near and name.rpartition(".")[2] == near[0]][:3]


def question(names: Sequence[str]) -> str:
    """` Did you mean …?`, or nothing."""
    *before, last = [repr(name) for name in names] or [""]
    return f" Did you mean {', '.join(before)}{' or ' if before else ''}{last}?" if last else ""


def keys_of(*models: tuple[str, type[BaseModel]]) -> list[str]:
    """The keys of several models, each behind its prefix, but for those of things that have names of their own."""
    keys = (setting.key for prefix, model in models for setting in settings_of(model, prefix))
    return [key for key in keys if ".NAME." not in key and not key.startswith("env.data.")]  # which is written data.…
