"""Loading a checkpoint of another number of ranks or another ZeRO stage: its parts are joined parameter by parameter,
and split over the present ranks.

DeepSpeed writes the parts of each rank. Files are mapped into memory, so a rank loads only one parameter at a time.
Written for the files of DeepSpeed 0.19. The sharing of moments over ranks is that of S. Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from envgym.errors import RunError

from . import zero

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig

    from .config import WorkersConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments: the mean of the gradient, and of its square."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """A parameter in a checkpoint: float32 weights and moments, flat, and the optimizer's number of steps."""

    weights: torch.Tensor
    moments: Mapping[str, torch.Tensor]
    step: float


def check(folder: str, state: Mapping[str, Any], settings: WorkersConfig, learner: LearnerConfig) -> None:
    """Raise `RunError` if `state`, of a rank of another layout, cannot be resharded."""
    problem = None
    if max(state["tensor_parallel"], settings.tensor_parallel) > 1:
        problem = f"a model is split: set workers.tensor_parallel={state['tensor_parallel']}"
    elif learner.optimizer != "adamw":
        problem = f"learner.optimizer={learner.optimizer}"
    elif learner.ema_decay:
        problem = "learner.ema_decay is set"
    if problem:
        raise RunError(
            f"the state in {folder} is of {state['world_size']} ranks and ZeRO stage {state['zero_stage']}, and "
            f"cannot be split differently where {problem}: resume with those"
        )


def load(engine: Any, folder: Path) -> None:
    """Restore DeepSpeed's engine from a DeepSpeed checkpoint of another layout."""
    trained = [item for item in engine.module.named_parameters() if item[1].requires_grad]
    trained.sort(key=lambda item: hasattr(item[1], "of_vision"))  # the order of the optimizer's groups
    restore_parameters(engine, parameters(folder, [name for name, _ in trained]))


def parameters(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, ParameterState]]:
    """The trained parameters of a checkpoint, one by one. `names`: the model's, in the optimizer's order."""
    read = partial(zero.read, mapped=True)
    shards = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank)
    if not shards:
        yield from _read_stage_0(read(str(folder / "mp_rank_00_model_states.pt")), names)
        return
    states = [read(str(shard))["optimizer_state_dict"] for shard in shards]
    if "fp32_flat_groups" in states[0]:
        groups = read(str(sorted(folder.glob("*zero_pp_rank_*_model_states.pt"), key=_rank)[0]))["param_shapes"]
        yield from _read_stage_3(states, groups)
    else:
        yield from _read_stages_1_and_2(states)


def _rank(shard: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)", shard.name)
    assert match is not None
    return int(match[1])


def _read_stage_0(state: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, ParameterState]]:
    """The parameters of a checkpoint of ZeRO stage 0, where rank 0 has written all of them. `names` are in the
    optimizer's order. Moments are in float32 already, weights may not be."""
    moments = state["optimizer"]["state"]
    order = [index for group in state["optimizer"]["param_groups"] for index in group["params"]]
    for name, index in zip(names, order, strict=True):
        entry = moments[index]
        flat = {kind: entry[kind].flatten() for kind in MOMENTS}
        yield name, ParameterState(state["module"][name].float().flatten(), flat, float(entry["step"]))


def _read_stages_1_and_2(states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ParameterState]]:
    """Stages 1 and 2: ranks have consecutive slices of all parameters, concatenated."""
    for group in range(len(states[0]["single_partition_of_fp32_groups"])):
        names = dict.fromkeys(name for state in states for name in state["param_slice_mappings"][group])
        inner = [state["base_optimizer_state"]["state"][group] for state in states]
        for name in names:
            pieces: dict[str, list[torch.Tensor]] = {kind: [] for kind in ("weights", *MOMENTS)}
            for state, moments in zip(states, inner, strict=True):
                if (address := state["param_slice_mappings"][group].get(name)) is None:
                    continue
                flat = {"weights": state["single_partition_of_fp32_groups"][group], **moments}
                for kind, parts in pieces.items():
                    parts.append(flat[kind].flatten()[address.start : address.start + address.numel])
            joined = {kind: torch.cat(parts) for kind, parts in pieces.items()}
            yield name, ParameterState(joined.pop("weights"), joined, float(inner[0]["step"]))


def _read_stage_3(
    states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Sequence[int]]]
) -> Iterator[tuple[str, ParameterState]]:
    """Stage 3: ranks have equal shares of each parameter, the last share padded."""
    for group, shapes in enumerate(groups):
        start = 0
        inner = [state["optimizer_state_dict"]["state"][group] for state in states]
        for name, shape in shapes.items():
            share = -(-prod(shape) // len(states))
            joined = {
                kind: torch.cat([flat.flatten()[start : start + share] for flat in flats])[: prod(shape)]
                for kind, flats in {
                    "weights": [state["fp32_flat_groups"][group] for state in states],
                    **{kind: [moments[kind] for moments in inner] for kind in MOMENTS},
                }.items()
            }
            yield name, ParameterState(joined.pop("weights"), joined, float(inner[0]["step"]))
            start += share


@torch.no_grad()  # type: ignore[untyped-decorator]
def restore_parameters(engine: Any, trained: Iterator[tuple[str, ParameterState]]) -> None:
    """Restore these parameters in DeepSpeed's engine. Raises `RunError` unless they are exactly the trained ones."""
    from deepspeed.runtime.zero import GatheredParameters

    remaining = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = _optimizer_tensors(engine.optimizer)
    # A fused optimizer reads its step counters on the weights' device; the others count on the host.
    fused = any(group.get("fused") for group in inner.param_groups)
    for flat in tensors:
        step = torch.zeros((), device=flat.device if fused else "cpu")
        inner.state[flat] = {"step": step, **{kind: torch.zeros_like(flat) for kind in MOMENTS}}
    for name, saved in trained:
        if (parameter := remaining.pop(name, None)) is None:
            raise RunError(f"the checkpoint has a parameter {name} that the model lacks or does not train")
        # The model's own copy, in its number format.
        with GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
            parameter.data.copy_(saved.weights.view(parameter.shape))
        part, start = zero.optimizer_part(parameter)
        if part is None or not len(part):
            continue
        part.copy_(saved.weights[start : start + len(part)])
        flat, offset = next(
            (flat, (part.data_ptr() - flat.data_ptr()) // flat.element_size())
            for flat in tensors
            if flat.data_ptr() <= part.data_ptr() < flat.data_ptr() + flat.nbytes
        )
        for kind in MOMENTS:
            moment = saved.moments[kind][start : start + len(part)]
            inner.state[flat][kind].view(-1)[offset : offset + len(part)].copy_(moment)
        inner.state[flat]["step"].fill_(saved.step)
    if remaining:
        raise RunError(f"the checkpoint lacks the parameter {next(iter(remaining))}")


def _optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """This rank's tensors in the optimizer that DeepSpeed wraps: flat slices of many parameters, or parameters."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
