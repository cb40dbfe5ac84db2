"""All contact with DeepSpeed: its JSON, its process group, its engine, and what differs between ZeRO stages.

Written for DeepSpeed 0.19. It is imported inside functions: it reads DS_ACCELERATOR when imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from envgym.errors import RunError

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig

    from .config import WorkersConfig

MEETING_SECONDS = 300
"""How long ranks wait for each other at the start."""


def config(
    settings: WorkersConfig, learner: LearnerConfig | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """DeepSpeed's JSON for these settings, with the user's own merged over it. No learner: the model only scores."""
    trained = learner is not None
    in_16_bits = dtype != torch.float32
    stage = 3 if settings.partitions(trained=trained) else settings.zero_stage
    # Pinned memory is what a GPU copies from at full speed; without one it would only be locked in.
    on_cpu = {"device": "cpu", "pin_memory": device.type == "cuda"}
    zero: dict[str, Any] = {"stage": stage}
    if settings.offload_parameters:
        zero["offload_param"] = on_cpu
    ours: dict[str, Any] = {
        # The controller decides how many micro-batches a step has, so these two only have to agree.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},  # with dynamic loss scaling, unless `loss_scale` says otherwise
    }
    if learner is None:
        return _merged(ours, settings.deepspeed)
    if in_16_bits:
        # Micro-batches must add up in float32: in bfloat16 the gradient of 256 of them was measured 2% off. DeepSpeed
        # does so from stage 1 on; its stage 0 also counts a step of Adam that was never taken.
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
        zero["stage"] = max(1, stage)
    if settings.offload_optimizer:
        zero["offload_optimizer"] = on_cpu
    if settings.compile:
        ours["compile"] = {"deepcompile": True}
    ours["gradient_clipping"] = learner.max_grad_norm
    if learner.optimizer == "muon":  # made by `muon.optimizer`, since DeepSpeed would take a scalar head for a matrix
        ours["gradient_clipping"] = 0.0  # it would clip what is orthogonalised already, at a length of its own
        ours["zero_force_ds_cpu_optimizer"] = False
        if stage == 3:
            zero["reduce_scatter"] = False  # DeepSpeed wants it so
    elif "optimizer" not in settings.deepspeed:  # another optimizer's parameters do not mix with AdamW's
        ours["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": learner.lr,
                "betas": list(learner.betas),
                "weight_decay": learner.weight_decay,
                # DeepSpeed's own Adam is a kernel that has to be compiled: worth it for what a GPU's machine computes
                # on its CPU, several times faster than torch's.
                "torch_adam": not (settings.offload_optimizer and device.type == "cuda"),
            },
        }
    return _merged(ours, settings.deepspeed)


def join(address: str | None, rank: int, world_size: int, device: torch.device) -> None:
    """Meet the other ranks at `host:port`; a single rank needs no address."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(device.index or 0)}
    dist = torch.distributed
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            if address is None:
                raise ValueError(f"{world_size} ranks need the address of rank 0")
            host, _, port = address.rpartition(":")
            os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=MEETING_SECONDS)
            )
    if dist.get_world_size() != world_size:  # another library in this process made a group of its own
        raise RunError(
            f"this process is in a group of {dist.get_world_size()} ranks already, and {world_size} are asked"
        )
    _library().init_distributed(verbose=False)


def engine(network: torch.nn.Module, json: Mapping[str, Any]) -> Any:
    """DeepSpeed's engine around the network, with an optimizer where the JSON names one."""
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    parameters = trainable if "optimizer" in json else None
    wrapped, *_ = _library().initialize(model=network, model_parameters=parameters, config=dict(json))
    return wrapped


def take_step(engine: Any) -> float:
    """Clip, step and clear the gradients. Returns the global gradient norm before clipping."""
    norm = None
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # not one of DeepSpeed's, which keep the norm
        norm = torch.nn.utils.get_total_norm(p.grad for p in engine.module.parameters() if p.grad is not None)
    engine.step()
    return float(engine.get_global_grad_norm() if norm is None else norm)


def gathered(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Within it the parameter is whole on every rank. Ranks must enter it together."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    context: AbstractContextManager[Any] = _library().zero.GatheredParameters([parameter])
    return context


def _library() -> Any:
    import deepspeed

    # Its shared-memory kernel serves inference only; looking for it would compile C++ at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`theirs` over `ours`, key by key in nested mappings."""
    out = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            value = _merged(out[key], value)
        out[key] = value
    return out
