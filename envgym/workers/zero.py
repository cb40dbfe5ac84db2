"""The interface to DeepSpeed: its JSON, process group and engine, the differences between ZeRO stages, and AutoTP.

Written for DeepSpeed 0.19, which is imported inside functions because it reads DS_ACCELERATOR on import. AutoTP splits
every large matrix over ranks that have the same rows, when the engine is made, by transformers' plan for the
architecture; embeddings and output layer are not split. Here are the check for models that it can split, and numbers
that need all parts of a parameter.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from envgym.errors import ConfigError, RunError, missing_package
from envgym.settings import deep_merge

from . import checkpoint

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig

    from .config import WorkersConfig


MEETING_SECONDS = 300
"""Maximum time that ranks wait for each other at the start."""
COLLECTIVE_SECONDS = 3600
"""Maximum time of a later collective: rank 0 may be reading a large checkpoint from slow storage. If a rank dies, the
controller ends the waiting ranks immediately."""


def config(
    settings: WorkersConfig, learner: LearnerConfig | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """DeepSpeed's JSON for these settings, with the user's own merged over it. No learner: the model is not trained."""
    stage = settings.effective_zero_stage(str(dtype).removeprefix("torch."), trained=learner is not None)
    # A GPU copies from pinned memory at full speed; without a GPU pinning has no use.
    on_cpu = {"device": "cpu", "pin_memory": device.type == "cuda"}
    zero: dict[str, Any] = {"stage": stage}
    if settings.offload_parameters:
        zero["offload_param"] = on_cpu
    json: dict[str, Any] = {
        # The controller sets the number of micro-batches per step, so these two only have to agree.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},  # with dynamic loss scaling, unless `loss_scale` is set
    }
    if settings.tensor_parallel > 1:
        json["tensor_parallel"] = {"autotp_size": settings.tensor_parallel, "vocab_parallel_lm_head": False}
    if learner is None:
        return deep_merge(json, settings.deepspeed)
    if dtype != torch.float32:
        json["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = on_cpu
    if settings.compile:
        json["compile"] = {"deepcompile": True}
    json["gradient_clipping"] = learner.max_grad_norm
    if learner.optimizer == "muon":  # made by `muon_optimizer`, since DeepSpeed would take a scalar head for a matrix
        json["gradient_clipping"] = 0.0  # updates are orthogonalised, so their norm is fixed
        json["zero_force_ds_cpu_optimizer"] = False
        if stage == 3:
            zero["reduce_scatter"] = False  # required by DeepSpeed
    elif "optimizer" not in settings.deepspeed:  # another optimizer's parameters do not mix with AdamW's
        json["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": learner.lr,
                "betas": list(learner.betas),
                "eps": learner.eps,
                "weight_decay": learner.weight_decay,
                # DeepSpeed's own Adam must be compiled first, but for offloaded parameters it is several times faster.
                "torch_adam": (in_torch := not (settings.offload_optimizer and device.type == "cuda")),
                # One kernel for all parameters, without a temporary of their size.
                **({"fused": True} if in_torch and device.type == "cuda" else {}),
            },
        }
    return deep_merge(json, settings.deepspeed)


def free_address() -> str:
    """A free `host:port` of this machine, at which ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{os.environ.get('ENVGYM_NODE_ADDRESS', '127.0.0.1')}:{probe.getsockname()[1]}"


def join_process_group(address: str | None, rank: int, world_size: int, device: torch.device) -> None:
    """Meet the other ranks at `host:port`; a single rank needs no address. Raises `RunError` if this process is already
    in a group of another size."""
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
            store.set_timeout(waiting)  # NCCL's ranks exchange addresses through it at their first collective
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=waiting)
    if dist.get_world_size() != world_size:  # another library in this process made a group
        raise RunError(
            f"this process is already in a group of {dist.get_world_size()} ranks, and {world_size} are needed"
        )
    _library().init_distributed(verbose=False)


def wait_for_ranks(device: torch.device) -> None:
    """Wait until all ranks have read the model. DeepSpeed's own groups time out after 10 minutes with NCCL."""
    if torch.distributed.get_world_size() > 1:
        count = torch.zeros((), device=device)
        torch.distributed.all_reduce(count)
        count.item()  # blocks; the all_reduce alone only enqueues on a GPU


def check_device(settings: WorkersConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` for settings that this device does not support."""
    _library()
    from deepspeed.accelerator import get_accelerator

    if dtype == torch.float16 and not get_accelerator().is_fp16_supported():
        kind = "CPU" if device.type == "cpu" else "GPU"
        raise ConfigError(f"workers.dtype=float16 does not work on this {kind}: use bfloat16 or float32")
    if settings.compile and device.type != "cuda":
        raise ConfigError("workers.compile (DeepCompile) needs a GPU, and there is none: set it to false")


def engine(
    network: nn.Module,
    json: Mapping[str, Any],
    device: torch.device,
    optimizer: Callable[[Sequence[nn.Parameter]], Any] | None = None,
    writer: checkpoint.Writer | None = None,
) -> Any:
    """DeepSpeed's engine around the network, with an optimizer if the JSON names one or `optimizer` makes one. `writer`
    writes its checkpoints."""
    library = _library()
    if json["zero_optimization"]["stage"] == 3 and "tensor_parallel" not in json:
        # Parameter by parameter, from rank 0: `initialize` would first move the full model to each GPU.
        library.zero.Init(module=network, config_dict_or_path=dict(json))
        for buffer in network.buffers():  # checkpoints may hold some, and only rank 0 has read them
            buffer.data = buffer.data.to(device)
            torch.distributed.broadcast(buffer.data, 0)
    if json["zero_optimization"]["stage"]:
        muon_library(device)  # ZeRO imports it anyway, without the setting for CPUs
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    parameters: Any = None
    if optimizer or "optimizer" in json:
        parameters = trainable if optimizer else with_vision_apart([{"params": trainable}])
    wrapper, *_ = library.initialize(model=network, model_parameters=parameters, optimizer=optimizer, config=dict(json))
    if json.get("compile", {}).get("deepcompile"):
        wrapper.compile()
    if hasattr(wrapper.optimizer, "_add_to_grad_partition_buffer"):  # ZeRO 1 and 2
        wrapper.optimizer._add_to_grad_partition_buffer = _add_gradient
    if (checkpoints := wrapper.checkpoint_engine) is not None:  # a model without an optimizer has none
        checkpoints.load = read  # DeepSpeed's own would run code from the file
        if writer is not None:
            checkpoints.save = lambda state_dict, path: writer.write(path, state_dict)
    return wrapper


def _add_gradient(total: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """Add a micro-batch's gradient to this rank's sum, if it has one, in the sum's number format. DeepSpeed's own would
    first write a converted copy of the gradient."""
    if total is not None:
        total.add_(gradient)


def set_learning_rate(engine: Any, lr: float) -> None:
    """Set the learning rate of the next step, in each group of parameters times its `lr_scale` if set."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def set_optimizer_settings(engine: Any, learner: LearnerConfig) -> None:
    """Set the weight decay and the averages' decay of AdamW's and Muon's groups of parameters."""
    adam = {"betas": tuple(learner.betas), "eps": learner.eps}
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = learner.weight_decay
        if not group.get("use_muon"):
            group |= adam
            continue
        group["momentum"] = learner.muon_momentum
        if learner.muon_lr is not None:
            group["lr_scale"] = learner.muon_lr / learner.lr


def with_vision_apart(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of an optimizer's parameters, each split into those marked `of_vision` and all others."""
    parts = []
    for group in groups:
        for mark in (False, True):
            if parameters := [p for p in group["params"] if hasattr(p, "of_vision") is mark]:
                parts.append({**group, "params": parameters, "of_vision": mark})
    return parts


def take_step(engine: Any, *, with_images: bool) -> float | None:
    """Clip, step and clear the gradients. Returns the global gradient norm before clipping. Without images the gradient
    of a vision tower is 0, and its weights do not decay: nothing would restore them.

    None where float16 overflowed: then the step is skipped and the loss scale halved. Raises `RunError` at the
    smallest loss scale.
    """
    norm = None
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # DeepSpeed's own optimizers store the norm
        norm = gradient_norm(engine.module.parameters())
    groups = [group for group in engine.optimizer.param_groups if group.get("of_vision") and not with_images]
    decays = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 0.0
    try:
        engine.step()
    except Exception as error:
        if "loss scale already at minimum" in str(error):
            raise RunError("float16 overflows at the smallest loss scale too: set workers.dtype=bfloat16") from None
        raise
    finally:
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
    if engine.fp16_enabled() and engine.optimizer.overflow:
        return None
    return float(engine.get_global_grad_norm() if norm is None else norm)


def loss_scale(engine: Any) -> float | None:
    """The factor of float16's losses; None for other formats."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None


def optimizer_part(parameter: nn.Parameter) -> tuple[torch.Tensor | None, int]:
    """The float32 weights of a parameter that this rank's optimizer updates, flat, and their offset in the parameter.

    None if it updates none of them. The tensor is a view, valid until the next step.
    """
    if hasattr(parameter, "ds_id"):  # ZeRO 3: the last rank's share may extend past the parameter's end
        from deepspeed.utils import safe_get_local_fp32_param

        share = safe_get_local_fp32_param(parameter)
        start = torch.distributed.get_rank(parameter.ds_process_group) * share.numel()
        return share[: max(0, parameter.ds_numel - start)], start
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2
        fragment = parameter._hp_mapping
        return (None, 0) if fragment is None else (fragment.hp_fragment, fragment.lp_fragment_address.start)
    return parameter.data.reshape(-1), 0


def gather_full(parameter: nn.Parameter, part: torch.Tensor | None, start: int, device: torch.device) -> torch.Tensor:
    """The full tensor on `device`, in the parameter's shape, float32, from the ranks' parts, which are laid out like
    their `optimizer_part`. A collective call."""
    partitioned = hasattr(parameter, "ds_id")
    if not partitioned and not hasattr(parameter, "_hp_mapping"):
        assert part is not None
        return part.to(device).view(parameter.shape)
    shape = parameter.ds_shape if partitioned else parameter.shape
    tensor = torch.zeros(shape.numel(), dtype=torch.float32, device=device)
    if part is not None:
        tensor[start : start + len(part)] = part
    torch.distributed.all_reduce(tensor, group=parameter.ds_process_group if partitioned else parameter._dp_group)
    return tensor.view(shape)


def gathered_parameter(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """A context in which the full parameter is on every rank. All ranks must enter it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    context: AbstractContextManager[Any] = _library().zero.GatheredParameters([parameter])
    return context


def offload(engine: Any, device: torch.device, *, keep_weights: bool) -> None:
    """Move a model's optimizer state, gradients and, unless `keep_weights`, weights from the device to the host."""
    _move_optimizer(engine, torch.device("cpu"))
    if _has_flat_copies(engine):
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        stay = {State.optim_states} | ({State.lp_params} if keep_weights else set())
        kinds = [kind for kind in State if kind not in stay]
        # Stage 3 demands DeepSpeed's fused Adam, although no moments are moved here, and looks for frozen parameters in
        # the buffer of the trained ones.
        trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        with (
            patch("deepspeed.ops.adam.fused_adam.FusedAdam", type(engine.optimizer.optimizer)),
            patch.object(engine.module, "parameters", lambda: trained),
        ):
            engine.offload_states(include=kinds, pin_memory=device.type == "cuda")
    if not keep_weights:
        _move_weights(engine, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()


def onload(engine: Any, device: torch.device) -> None:
    """Undo `offload`."""
    _move_optimizer(engine, device)
    if _has_flat_copies(engine):
        engine.reload_states()
    _move_weights(engine, device)


def _has_flat_copies(engine: Any) -> bool:
    """True if DeepSpeed's ZeRO holds weights and gradients in buffers that only DeepSpeed can move."""
    return hasattr(getattr(engine, "optimizer", None), "offload_states")


def _move_weights(engine: Any, device: torch.device) -> None:
    """Move the weights outside of ZeRO's flat buffers: frozen ones, or all of them, partitioned or not."""
    module = getattr(engine, "module", engine)
    in_buffers = _has_flat_copies(engine)
    partitioned = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if not in_buffers and not partitioned:
        module.to(device)
    elif not partitioned or engine.zero_offload_param() is None:
        for parameter in module.parameters():
            if not (in_buffers and parameter.requires_grad):
                tensor = getattr(parameter, "ds_tensor", parameter)
                tensor.data = tensor.data.to(device)


def _move_optimizer(engine: Any, device: torch.device) -> None:
    """Move the moments, unless they are on the host permanently. (DeepSpeed's own function makes a second copy of them,
    which goes into checkpoints, and in stage 3 demands its fused Adam.)"""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None or engine.zero_use_cpu_optimizer():
        return
    for state in getattr(getattr(optimizer, "optimizer", optimizer), "state", {}).values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.to(device)


def muon_library(device: torch.device) -> Any:
    """DeepSpeed's module of Muon, which its ZeRO optimizers import too."""
    # It compiles the iteration for each shape of a matrix, which takes seconds and saves nothing on a CPU.
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"} if device.type == "cpu" else {}):
        from deepspeed.runtime.zero.muon import muon_optimizer
    return muon_optimizer


def read(path: str, map_location: Any = None, *, mapped: bool = False) -> Any:
    """The contents of a checkpoint file of DeepSpeed: tensors, plain values, and a few of its classes."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    return checkpoint.read(path, map_location, classes=classes, mapped=mapped)


def _library() -> Any:
    """DeepSpeed, without its notes in the log. Raises `MissingDependency`."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise missing_package(error.name or "deepspeed", "train", "a trained model") from None
    # Its shared-memory kernel serves inference only; the check for it would compile C++ at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


# ---------------------------------------------------------------------------------------------------------
# Tensor parallelism


def check_split(model: nn.Module, size: int) -> None:
    """Raise `ConfigError` for a model (from Hugging Face) that cannot be split into `size` parts."""
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    config = model.config.get_text_config()
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - SUPPORTED_STYLES)
    heads = {"attention heads": "num_attention_heads", "key and value heads": "num_key_value_heads"}
    counts = {kind: getattr(config, name, size) for kind, name in heads.items()}
    obstacle = ""
    if not plan:
        obstacle = "transformers has no plan for it"
    elif unknown:
        obstacle = f"DeepSpeed cannot split layers the way transformers plans it ({', '.join(unknown)})"
    elif undivided := [f"{count} {kind}" for kind, count in counts.items() if count % size]:
        obstacle = f"it does not divide the {undivided[0]}"
    if obstacle:
        raise ConfigError(f"workers.tensor_parallel={size} does not work with {model.config.model_type}: {obstacle}")


def prepare_split(network: nn.Module, model: nn.Module) -> None:
    """Set what AutoTP reads on `network` and `model` (from Hugging Face): the config, and marks of frozen weights."""
    network.config = model.config
    for parameter in model.parameters():
        if not parameter.requires_grad:  # AutoTP would reduce its gradient, and it has none
            parameter._ds_grad_allreduce_registered = True


def n_numbers(parameter: nn.Parameter) -> int:
    """Number of numbers in a parameter, all ranks' parts included, also if it is stored in 4 bits."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        return math.prod(state.shape)
    if _split_dim(parameter) is None:
        return int(getattr(parameter, "ds_numel", parameter.numel()))  # ds_numel: of a parameter partitioned by ZeRO 3
    return int(torch.Size(_layout(parameter)["original_shape"]).numel())


def gather_parts(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The full tensor, from each rank's `part` [shape of the parameter on this rank]. A collective call."""
    dim = _split_dim(parameter)
    if dim is None:
        return part
    sizes, group = _layout(parameter)["partition_sizes"], _group()
    parts = [part.new_empty([*part.shape[:dim], max(sizes), *part.shape[dim + 1 :]]) for _ in sizes]
    padded = torch.zeros_like(parts[0])  # parts may differ in size, and all-gather needs equal sizes
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The norm of the whole model's gradient, a scalar, from the `.grad` of each rank's parts."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    grads_of_parts = [parameter.grad for parameter in trained if _split_dim(parameter) is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if _split_dim(parameter) is None])
    if not grads_of_parts:
        return norm
    square = torch.nn.utils.get_total_norm(grads_of_parts).square()
    torch.distributed.all_reduce(square, group=_group())
    return (norm.square() + square).sqrt()


def _split_dim(parameter: nn.Parameter) -> int | None:
    """The dimension along which AutoTP has split a parameter; None: every rank has all of it."""
    dim: int | None = _layout(parameter).get("partition_dim")
    return dim


def _layout(parameter: nn.Parameter) -> dict[str, Any]:
    """The layout that AutoTP stores on a parameter, for its own checkpoints."""
    layout: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return layout


def _group() -> Any:
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()
