"""A checkpoint of other ranks, or another ZeRO stage: its parts put together parameter by parameter, and given to the
ranks there are.

DeepSpeed writes what each rank holds. Files are mapped into memory, so that no rank has more of them at a time than
one parameter. Written for the files of DeepSpeed 0.19. The sharing of moments over ranks is that of S. Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
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
"""AdamW's, of which the gradient's mean comes first."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter as a checkpoint has it: float32 weights and moments, flat, and the optimizer's count of steps."""

    weights: torch.Tensor
    moments: Mapping[str, torch.Tensor]
    step: float


def check(folder: str, state: Mapping[str, Any], settings: WorkersConfig, learner: LearnerConfig) -> None:
    """Raise `RunError` where the state of a rank of other ranks cannot be dealt out anew."""
    problem = None
    if max(state["tensor_parallel"], settings.tensor_parallel) > 1:
        problem = f"a model is cut: set workers.tensor_parallel={state['tensor_parallel']}"
    elif learner.optimizer != "adamw":
        problem = f"learner.optimizer={learner.optimizer}"
    elif learner.ema_decay:
        problem = "learner.ema_decay is set"
    if problem:
        raise RunError(
            f"the state in {folder} is of {state['world_size']} ranks and ZeRO stage {state['zero_stage']}, and "
            f"cannot be spread anew where {problem}: resume with those"
        )


def load(engine: Any, folder: Path) -> None:
    """Let DeepSpeed's engine go on from what DeepSpeed wrote for other ranks."""
    trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    give(engine, parameters(folder, trained))


def parameters(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Trained]]:
    """The trained parameters of a checkpoint, one by one; `names`: those of the model, in order."""
    read = partial(zero.read, mapped=True)
    shards = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank)
    if not shards:
        yield from _of_one_file(read(str(folder / "mp_rank_00_model_states.pt")), names)
        return
    states = [read(str(shard))["optimizer_state_dict"] for shard in shards]
    if "fp32_flat_groups" in states[0]:
        groups = read(str(sorted(folder.glob("*zero_pp_rank_*_model_states.pt"), key=_rank)[0]))["param_shapes"]
        yield from _of_stage_3(states, groups)
    else:
        yield from _of_stages_1_and_2(states)


def _rank(shard: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)", shard.name)
    assert found is not None
    return int(found[1])


def _of_one_file(state: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Trained]]:
    """Stage 0: every rank has all of it, and one has written it."""
    moments = state["optimizer"]["state"]
    order = [number for group in state["optimizer"]["param_groups"] for number in group["params"]]
    for name, number in zip(names, order, strict=True):
        own = moments[number]
        flat = {kind: own[kind].flatten() for kind in MOMENTS}
        yield name, Trained(state["module"][name].float().flatten(), flat, float(own["step"]))


def _of_stages_1_and_2(states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Trained]]:
    """Ranks have neighbouring slices of all parameters, end to end."""
    for group in range(len(states[0]["single_partition_of_fp32_groups"])):
        names = dict.fromkeys(name for state in states for name in state["param_slice_mappings"][group])
        inner = [state["base_optimizer_state"]["state"][group] for state in states]
        for name in names:
            pieces: dict[str, list[torch.Tensor]] = {kind: [] for kind in ("weights", *MOMENTS)}
            for state, moments in zip(states, inner, strict=True):
                if (place := state["param_slice_mappings"][group].get(name)) is None:
                    continue
                flat = {"weights": state["single_partition_of_fp32_groups"][group], **moments}
                for kind, own in pieces.items():
                    own.append(flat[kind].flatten()[place.start : place.start + place.numel])
            whole = {kind: torch.cat(own) for kind, own in pieces.items()}
            yield name, Trained(whole.pop("weights"), whole, float(inner[0]["step"]))


def _of_stage_3(
    states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Sequence[int]]]
) -> Iterator[tuple[str, Trained]]:
    """Ranks have equal shares of each parameter, the last one's filled up."""
    for group, shapes in enumerate(groups):
        start = 0
        inner = [state["optimizer_state_dict"]["state"][group] for state in states]
        for name, shape in shapes.items():
            share = -(-prod(shape) // len(states))
            whole = {
                kind: torch.cat([flat.flatten()[start : start + share] for flat in flats])[: prod(shape)]
                for kind, flats in {
                    "weights": [state["fp32_flat_groups"][group] for state in states],
                    **{kind: [moments[kind] for moments in inner] for kind in MOMENTS},
                }.items()
            }
            yield name, Trained(whole.pop("weights"), whole, float(inner[0]["step"]))
            start += share


@torch.no_grad()  # type: ignore[untyped-decorator]
def give(engine: Any, trained: Iterator[tuple[str, Trained]]) -> None:
    """Let DeepSpeed's engine go on with these parameters. Raises `RunError` where they are not all of its own."""
    named = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    stepped = _stepped(engine.optimizer)
    for flat in stepped:
        inner.state[flat] = {"step": torch.tensor(0.0), **{kind: torch.zeros_like(flat) for kind in MOMENTS}}
    for name, own in trained:
        if (parameter := named.pop(name, None)) is None:
            raise RunError(f"the checkpoint has a parameter {name} that the model has not, or does not train")
        _give_weights(parameter, own.weights)
        part, start = zero.own_part(parameter)
        if part is None or not len(part):
            continue
        part.copy_(own.weights[start : start + len(part)])
        flat, at = next(
            (flat, (part.data_ptr() - flat.data_ptr()) // flat.element_size())
            for flat in stepped
            if flat.data_ptr() <= part.data_ptr() < flat.data_ptr() + flat.nbytes
        )
        for kind in MOMENTS:
            moment = own.moments[kind][start : start + len(part)]
            inner.state[flat][kind].view(-1)[at : at + len(part)].copy_(moment)
        inner.state[flat]["step"].fill_(own.step)
    if named:
        raise RunError(f"the checkpoint lacks the parameter {next(iter(named))}")


def _stepped(optimizer: Any) -> list[torch.Tensor]:
    """Tensors of the optimizer within DeepSpeed's on this rank: flat slices of many parameters, or parameters."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _give_weights(parameter: torch.nn.Parameter, weights: torch.Tensor) -> None:
    """Set what the model computes with, in its own number format."""
    from deepspeed.runtime.zero import GatheredParameters

    partitioned = hasattr(parameter, "ds_id")
    with GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
        parameter.data.copy_(weights.view(parameter.shape))
