"""All contact with DeepSpeed: its JSON, its process group, its engine, and what differs between ZeRO stages.

Written for DeepSpeed 0.19. It is imported inside functions: it reads DS_ACCELERATOR when imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from envgym.errors import ConfigError, RunError, missing_package
from envgym.settings import lay

from . import checkpoint, tensor_parallel

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig

    from .config import WorkersConfig

MEETING_SECONDS = 300
"""Limit of the ranks' wait for each other at the start."""
COLLECTIVE_SECONDS = 3600
"""Limit of their waits from then on: rank 0 may read a large checkpoint from slow storage meanwhile. Who
waits for a rank that is gone is ended by the controller, at once."""


def config(
    settings: WorkersConfig, learner: LearnerConfig | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """DeepSpeed's JSON for these settings, with the user's own merged over it. No learner: the model only scores."""
    stage = settings.runs_as(str(dtype).removeprefix("torch."), trained=learner is not None)
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
    if settings.tensor_parallel > 1:
        ours["tensor_parallel"] = tensor_parallel.json(settings.tensor_parallel)
    if learner is None:
        return lay(ours, settings.deepspeed)
    if dtype != torch.float32:
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = on_cpu
    if settings.compile:
        ours["compile"] = {"deepcompile": True}
    ours["gradient_clipping"] = learner.max_grad_norm
    if learner.optimizer == "muon":  # made by `muon_optimizer`, since DeepSpeed would take a scalar head for a matrix
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
    return lay(ours, settings.deepspeed)


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
            store = dist.TCPStore(host, int(port), world_size, rank == 0, timedelta(seconds=MEETING_SECONDS))
            waiting = timedelta(seconds=COLLECTIVE_SECONDS)
            store.set_timeout(waiting)  # NCCL's ranks first speak to each other, by way of it, when one has to wait
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=waiting)
    if dist.get_world_size() != world_size:  # another library in this process made a group of its own
        raise RunError(
            f"this process is in a group of {dist.get_world_size()} ranks already, and {world_size} are asked"
        )
    _library().init_distributed(verbose=False)


def wait(device: torch.device) -> None:
    """Wait for ranks that still read the model. DeepSpeed's own groups wait no longer than 10 minutes, with NCCL."""
    if torch.distributed.get_world_size() > 1:
        ready = torch.zeros((), device=device)
        torch.distributed.all_reduce(ready)
        ready.item()  # a GPU's queue is filled at once


def check(settings: WorkersConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` for what this device cannot do."""
    _library()
    from deepspeed.accelerator import get_accelerator

    if dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(f"workers.dtype=float16 does not work on this {device.type.upper()}: use bfloat16 or float32")
    if settings.compile and device.type != "cuda":
        raise ConfigError("workers.compile (DeepCompile) needs a GPU, and there is none: leave it off")


def engine(
    network: torch.nn.Module,
    json: Mapping[str, Any],
    device: torch.device,
    optimizer: Callable[[Sequence[torch.nn.Parameter]], Any] | None = None,
    writer: checkpoint.Writer | None = None,
) -> Any:
    """DeepSpeed's engine around the network, with an optimizer where the JSON names one or `optimizer` makes one. Its
    checkpoints are written by `writer`."""
    library = _library()
    if json["zero_optimization"]["stage"] == 3 and "tensor_parallel" not in json:
        # Parameter by parameter, from rank 0's: `initialize` would first move all of the model to each GPU.
        library.zero.Init(module=network, config_dict_or_path=dict(json))
        for buffer in network.buffers():  # checkpoints may hold some, and only rank 0 has read it
            buffer.data = buffer.data.to(device)
            torch.distributed.broadcast(buffer.data, 0)
    if json["zero_optimization"]["stage"]:
        muon_library(device)  # ZeRO imports it in any case, and on a CPU not as it should be
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    parameters = trainable if optimizer or "optimizer" in json else None
    wrapped, *_ = library.initialize(model=network, model_parameters=parameters, optimizer=optimizer, config=dict(json))
    if json.get("compile", {}).get("deepcompile"):
        wrapped.compile()
    if (files := wrapped.checkpoint_engine) is not None:  # a model that only scores has none
        files.load = read  # its own would run whatever code the file holds
        if writer is not None:
            files.save = lambda state_dict, path: writer.write(path, state_dict)
    return wrapped


def set_learning_rate(engine: Any, lr: float) -> None:
    """Set the learning rate of the next step, in each group of parameters by its `lr_scale` where it has one."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def take_step(engine: Any) -> float | None:
    """Clip, step and clear the gradients. Returns the global gradient norm before clipping.

    None where float16 overflowed: then the step is not taken, and the next one is tried at half the loss scale.
    Raises `RunError` where that cannot get smaller.
    """
    norm = None
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # not one of DeepSpeed's, which keep the norm
        norm = tensor_parallel.gradient_norm(engine.module.parameters())
    try:
        engine.step()
    except Exception as error:
        if "loss scale already at minimum" in str(error):
            raise RunError("float16 overflows at the smallest loss scale too: set workers.dtype=bfloat16") from None
        raise
    if engine.fp16_enabled() and engine.optimizer.overflow:
        return None
    return float(engine.get_global_grad_norm() if norm is None else norm)


def loss_scale(engine: Any) -> float | None:
    """The factor of float16's losses; None for other formats."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None


def own_part(parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, int]:
    """The float32 weights of a parameter that this rank's optimizer steps, flat, and where in it they begin.

    None where it steps none of them. A view, good until the next step.
    """
    if hasattr(parameter, "ds_id"):  # ZeRO 3: the last rank's share may be longer than what is left for it
        from deepspeed.utils import safe_get_local_fp32_param

        share = safe_get_local_fp32_param(parameter)
        start = torch.distributed.get_rank(parameter.ds_process_group) * share.numel()
        return share[: max(0, parameter.ds_numel - start)], start
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2
        fragment = parameter._hp_mapping
        return (None, 0) if fragment is None else (fragment.hp_fragment, fragment.lp_fragment_address.start)
    return parameter.data.reshape(-1), 0


def joined(parameter: torch.nn.Parameter, part: torch.Tensor | None, start: int, device: torch.device) -> torch.Tensor:
    """Put together on `device` what ranks hold in place of their `own_part`, in the parameter's shape, float32. Ranks
    must call together."""
    partitioned = hasattr(parameter, "ds_id")
    if not partitioned and not hasattr(parameter, "_hp_mapping"):
        assert part is not None
        return part.to(device).view(parameter.shape)
    shape = parameter.ds_shape if partitioned else parameter.shape
    whole = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
    if part is not None:
        whole[start : start + len(part)] = part
    torch.distributed.all_reduce(whole, group=parameter.ds_process_group if partitioned else parameter._dp_group)
    return whole.view(shape)


def gathered(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Within it the parameter is whole on every rank. Ranks must enter it together."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    context: AbstractContextManager[Any] = _library().zero.GatheredParameters([parameter])
    return context


def offload(engine: Any, device: torch.device, *, keep_weights: bool) -> None:
    """Move what a model holds on the device to the host: optimizer, gradients and, unless they are kept, weights."""
    _move_optimizer(engine, torch.device("cpu"))
    if _has_flat_copies(engine):
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        stay = {State.optim_states} | ({State.lp_params} if keep_weights else set())
        kinds = [kind for kind in State if kind not in stay]
        # Stage 3 wants DeepSpeed's fused Adam, though the moments are not for it to move, and looks for frozen
        # parameters too in the buffer of those that learn.
        learning = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        with (
            patch("deepspeed.ops.adam.fused_adam.FusedAdam", type(engine.optimizer.optimizer)),
            patch.object(engine.module, "parameters", lambda: learning),
        ):
            engine.offload_states(include=kinds, pin_memory=device.type == "cuda")
    if not keep_weights:
        _move_weights(engine, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()


def onload(engine: Any, device: torch.device) -> None:
    """Move it back."""
    _move_optimizer(engine, device)
    if _has_flat_copies(engine):
        engine.reload_states()
    _move_weights(engine, device)


def _has_flat_copies(engine: Any) -> bool:
    """DeepSpeed's ZeRO holds weights and gradients in buffers that it alone can move."""
    return hasattr(getattr(engine, "optimizer", None), "offload_states")


def _move_weights(engine: Any, device: torch.device) -> None:
    """Move the weights that are in none of those buffers: frozen ones, or all of them, split over ranks or whole."""
    module = getattr(engine, "module", engine)
    in_buffers = _has_flat_copies(engine)
    partitioned = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if not in_buffers and not partitioned:
        module.to(device)
    elif not partitioned or engine.zero_offload_param() is None:
        for parameter in module.parameters():
            if not (in_buffers and parameter.requires_grad):
                own = getattr(parameter, "ds_tensor", parameter)
                own.data = own.data.to(device)


def _move_optimizer(engine: Any, device: torch.device) -> None:
    """Move the moments, unless they are on the host for good. (DeepSpeed's own way keeps a second copy of them, which
    goes into checkpoints, and in stage 3 wants its fused Adam.)"""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None or engine.zero_use_cpu_optimizer():
        return
    for state in getattr(getattr(optimizer, "optimizer", optimizer), "state", {}).values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.to(device)


def muon_library(device: torch.device) -> Any:
    """DeepSpeed's module of Muon, which its ZeRO optimizers import too."""
    # It compiles the iteration, for each shape of a matrix: seconds that are never won back on a CPU.
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"} if device.type == "cpu" else {}):
        from deepspeed.runtime.zero.muon import muon_optimizer
    return muon_optimizer


def read(path: str, map_location: Any = None, *, mapped: bool = False) -> Any:
    """A file that DeepSpeed wrote into a checkpoint: tensors, plain values, and a few classes of its own."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    own = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    return checkpoint.read(path, map_location, also=own, mapped=mapped)


def _library() -> Any:
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise missing_package(error.name or "deepspeed", "train", "a trained model") from None
    # Its shared-memory kernel serves inference only; looking for it would compile C++ at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
