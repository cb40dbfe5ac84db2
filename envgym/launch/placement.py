"""Placement of a stage's processes on machines and their GPUs: decided before anything starts, and started
there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from envgym.config.schema import PlacementConfig, RoleConfig, StageConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError, did_you_mean
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime, Runtime, Slot, WorkerHandle
from envgym.services.start import local_models
from envgym.workers.ray import RayRuntime

ENGINE, REWARD = "engine", "reward"

ENGINE_SHARES = {"alone": 0.9, "in turns": 0.85, "at once": 0.5}
"""The share of a GPU's memory that engines on it take: in turns with others, whose libraries hold on to some of it, or
at once with them. vLLM's own is 0.92."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: its GPUs, the memory of each in bytes (None: not known), and its own."""

    name: str
    gpus: int = 0
    gpu_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StagePart:
    """Processes that do one thing: the ranks of a role, the engines, a reward model. `gpus`: of each process.
    `in_turns`: it takes turns with the engine."""

    name: str
    workers: tuple[str, ...]
    gpus: float = 1.0
    nodes: int | None = None
    in_turns: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The place of each worker, by its name."""

    nodes: tuple[Node, ...]
    parts: tuple[StagePart, ...]
    slots: Mapping[str, Slot] = field(default_factory=dict)

    @property
    def uses_gpus(self) -> bool:
        return any(slot.gpus for slot in self.slots.values())

    def bundles(self) -> list[int]:
        """GPUs to hold on each of the machines that are used, in their order."""
        used = {slot.node for slot in self.slots.values()}
        return [
            max((gpu + 1 for slot in self.slots.values() if slot.node == node for gpu in slot.gpus), default=0)
            for node in range(max(used, default=0) + 1)
        ]

    def gpus_of(self, name: str) -> list[tuple[int, int]]:
        """(machine, GPU) of each process of a part, in their order."""
        workers = [worker for part in self.parts if part.name == name for worker in part.workers]
        return [(self.slots[worker].node, gpu) for worker in workers for gpu in self.slots[worker].gpus]

    def engine_share(self) -> float:
        """The share of each of its GPUs' memory that an engine takes, for weights and cache."""
        own = self.gpus_of(ENGINE)
        others = [part for part in self.parts if part.name != ENGINE]
        beside = [part.in_turns for part in others if not set(own).isdisjoint(self.gpus_of(part.name))]
        kind = "alone" if not beside else "in turns" if all(beside) else "at once"
        return ENGINE_SHARES[kind] / max(map(own.count, own), default=1)


def plan_of(stage: StageConfig, services: Sequence[str], nodes: Sequence[Node], *, trains: bool = True) -> Plan:
    """The plan of a stage on these machines. `services`: the names of its environment's local workers. Without `trains`
    it only plays.

    Raises `ConfigError` that says what does not fit.
    """
    parts = parts_of(stage, services, trains=trains)
    known = [part.name for part in parts]
    sets = stage.colocate if isinstance(stage.colocate, list) else []
    for name in (*stage.placement, *(name for one in sets for name in one)):
        if name not in known and trains:
            key = "placement" if name in stage.placement else "colocate"
            raise ConfigError(f"{key}: this stage has no part {name!r}.{did_you_mean(name, known)}")
    if twice := [name for name in known if sum(name in one for one in sets) > 1]:
        raise ConfigError(f"colocate: {twice[0]} is in two sets, and can share the GPUs of one")
    if stage.colocate == "auto":
        try:
            plan = place_parts(parts, nodes, [])
        except ConfigError:
            plan = place_parts(parts, nodes, [known])
    else:
        plan = place_parts(parts, nodes, [known] if stage.colocate == "all" else sets)
    _check_transfer(stage.sync.transfer, plan)
    return plan


def _check_transfer(transfer: str, plan: Plan) -> None:
    """Refuse a way for weights between GPUs that these GPUs have not."""
    engines, ranks = plan.gpus_of(ENGINE), plan.gpus_of("actor")
    if not engines or not ranks:
        return
    if transfer == "nccl" and ranks[0] in engines:
        raise ConfigError(
            "sync.transfer=nccl: the engine and the actor share a GPU, which NCCL refuses: take cuda_ipc, or give the "
            "engine GPUs of its own (colocate=none)"
        )
    if transfer == "cuda_ipc" and not set(engines) <= set(ranks):
        raise ConfigError(
            "sync.transfer=cuda_ipc: the engine has a GPU without a rank of the actor, whose weights it cannot see: "
            "take nccl, or let them share GPUs (colocate=all)"
        )


def parts_of(stage: StageConfig, services: Sequence[str], *, trains: bool = True) -> list[StagePart]:
    """The parts of a stage that run as processes of their own."""

    def part(name: str, workers: Sequence[str], gpus: float = 1.0, *, in_turns: bool = False) -> StagePart:
        own = stage.placement.get(name, PlacementConfig())
        if own.nodes is not None and len(workers) % own.nodes:
            raise ConfigError(
                f"placement.{name}.nodes={own.nodes} does not divide its {len(workers)} process"
                f"{'es' * (len(workers) > 1)}"
            )
        return StagePart(name, tuple(workers), gpus if gpus > 1 else own.gpus, own.nodes, in_turns)

    parts = []
    if stage.agent_config()[0].uses_policy and stage.engine.kind != "openai":
        count = stage.engine.count
        names = [ENGINE] if count == 1 else [f"{ENGINE}-{number}" for number in range(count)]
        parts.append(part(ENGINE, names, stage.engine.tensor_parallel))
    if trains and stage.kind == "train":
        learner_class, learner_config = stage.learner_config()
        roles = learner_class(learner_config).roles
        for role in roles:
            if not stage.is_base(role, roles) and stage.roles.get(role, RoleConfig()).base_url is None:
                ranks = [f"{role}-{rank}" for rank in range(stage.workers_of(role).ranks)]
                parts.append(part(role, ranks, in_turns=stage.takes_turns(role)))
    return parts + [part(name_of_service(worker, services), [worker]) for worker in services]


def name_of_service(worker: str, services: Sequence[str]) -> str:
    """The part that a reward model is: `reward` where it is the only one, else by its own name."""
    return REWARD if len(services) == 1 else worker.removeprefix("service-")


def place_parts(parts: Sequence[StagePart], nodes: Sequence[Node], colocated: Sequence[Sequence[str]]) -> Plan:
    """Give every process its machine and GPUs. Parts of a `colocated` set share theirs. A part stays on one machine
    where it can, unless it is to be on several. Without GPUs parts that say nothing are on the first machine."""
    together = [_Pool(tuple(part for part in parts if part.name in names)) for names in colocated]
    alone = [_Pool((part,)) for part in parts if not any(part.name in names for names in colocated)]
    # First those that must be spread, then those that need most.
    pools = sorted((pool for pool in (*together, *alone) if pool.parts), key=lambda pool: (-pool.machines, -pool.gpus))
    free = [list(range(node.gpus)) for node in nodes]
    slots: dict[str, Slot] = {}
    for pool in pools:
        gpus = _take(pool, nodes, free) if any(node.gpus for node in nodes) else []
        for part in pool.parts:
            if not gpus and (part.nodes or 1) > len(nodes):
                raise ConfigError(f"{part.name} wants {part.nodes} machines, and there are {len(nodes)}")
            slots |= zip(part.workers, _slots(part, gpus, min(1.0, part.gpus) / len(pool.parts)), strict=True)
    return Plan(tuple(nodes), tuple(parts), slots)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Parts that share their GPUs."""

    parts: tuple[StagePart, ...]

    @property
    def gpus(self) -> int:
        return max(ceil(len(part.workers) * part.gpus) for part in self.parts)

    @property
    def machines(self) -> int:
        """Number of machines that it is spread over evenly; 1: as few as it fits on."""
        return max(part.nodes or 1 for part in self.parts)


def _slots(part: StagePart, gpus: Sequence[tuple[int, int]], share: float) -> Iterator[Slot]:
    """The place of each process of a part: by its GPUs, out of (machine, GPU) of its pool; else on the machines in
    turn that the part is to be on."""
    per_machine = len(part.workers) // (part.nodes or 1)
    for number in range(len(part.workers)):
        first = int(number * part.gpus)
        taken = gpus[first : first + ceil(part.gpus)]
        yield Slot(taken[0][0] if taken else number // per_machine, tuple(gpu for _, gpu in taken), share)


def _take(pool: _Pool, nodes: Sequence[Node], free: list[list[int]]) -> list[tuple[int, int]]:
    """Take the GPUs of a pool out of those that are free: (machine, GPU), those of one machine together.

    They are on the machines that have least free beside them. A pool that may be on any, and fits on none, takes what
    whole processes can use of the machines that have most free.
    """
    if not pool.gpus:
        return []
    each = ceil(pool.gpus / pool.machines)
    roomy = sorted((node for node in range(len(nodes)) if len(free[node]) >= each), key=lambda node: len(free[node]))
    left = pool.gpus
    counts: dict[int, int] = {}
    if len(roomy) >= pool.machines:
        left, counts = 0, dict.fromkeys(sorted(roomy[: pool.machines]), each)
    elif pool.machines == 1:
        of_process = max(ceil(part.gpus) for part in pool.parts)
        for node in sorted(range(len(nodes)), key=lambda node: -len(free[node])):
            counts[node] = min(left, len(free[node]) // of_process * of_process)
            left -= counts[node]
    if left:
        raise _does_not_fit(pool, nodes, free)
    return [(node, free[node].pop(0)) for node, count in counts.items() for _ in range(count)]


def _does_not_fit(pool: _Pool, nodes: Sequence[Node], free: Sequence[Sequence[int]]) -> ConfigError:
    names, wanted, spread = " and ".join(part.name for part in pool.parts), pool.gpus, pool.machines
    where = f" on {spread} machines, {ceil(wanted / spread)} each" if spread > 1 else ""
    there = ", ".join(f"{len(left)} of {node.gpus} on {node.name}" for node, left in zip(nodes, free, strict=True))
    return ConfigError(
        f"{names} need{'s' * (len(pool.parts) == 1)} {wanted} GPU{'s' * (wanted > 1)}{where}; free are {there}: lower "
        "workers.ranks or engine.count, let processes share one (placement.PART.gpus=0.5), or take colocate=all"
    )


# ---------------------------------------------------------------------------------------------------------
# The machines there are, and starting workers where the plan has them


def nodes_of(runtime: Runtime | None = None, *, free: bool = False) -> list[Node]:
    """The machines of a run: this one, or those of the Ray cluster that `runtime` is connected to; with `free`, without
    the GPUs that others hold."""
    if isinstance(runtime, RayRuntime):
        return [Node(name, gpus, None, memory) for name, gpus, memory in runtime.nodes(only_free=free)]
    node = this_machine()
    return [replace(node, gpus=min(1, node.gpus)) if isinstance(runtime, InlineRuntime) else node]


def this_machine() -> Node:
    """This machine, with those of its GPUs that `CUDA_VISIBLE_DEVICES` leaves."""
    gpus = visible_gpus()
    memory = _gpu_bytes() if gpus else None
    return Node("this machine", len(gpus), memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def visible_gpus() -> list[str]:
    """The GPUs of this machine that a process may use, by the names that `CUDA_VISIBLE_DEVICES` gives them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name not in ("", "-1")]
    return [str(number) for number in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))]


def _gpu_bytes() -> int | None:
    """Memory of the smallest GPU, by `nvidia-smi`; None where there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=False).stdout.split()
    sizes = [int(size) for size in answer if size.isdecimal()]
    return min(sizes) * 2**20 if sizes else None


class PlacedRuntime:
    """A runtime that starts workers where a plan has them."""

    def __init__(self, runtime: Runtime, plan: Plan) -> None:
        self.plan = plan
        self._runtime = runtime
        self._bundles = plan.bundles()

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> WorkerHandle:
        slot = self.plan.slots.get(name)
        if isinstance(self._runtime, RayRuntime):
            if slot is not None:
                await self._runtime.reserve(self._bundles)
            return await self._runtime.start(target, kwargs, name=name, environ=environ, slot=slot)
        own = dict(environ or {})
        if slot is not None and isinstance(self._runtime, LocalRuntime) and (visible := visible_gpus()):
            own["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] for gpu in slot.gpus)
        return await self._runtime.start(target, kwargs, name=name, environ=own)

    async def close(self) -> None:
        await self._runtime.close()


def placed_runtime(
    stage: StageConfig, specs: Sequence[EnvSpec], runtime: Runtime, *, trains: bool = True
) -> PlacedRuntime:
    """The runtime of a stage that plays these environments, planned.

    Raises `ConfigError` where something does not fit, before anything starts.
    """
    services = list(dict.fromkeys(name for spec in specs for name in local_models(spec)))
    try:
        plan = plan_of(stage, services, nodes_of(runtime, free=True), trains=trains)
    except ConfigError:  # perhaps others will give back what they hold: that is waited for
        plan = plan_of(stage, services, nodes_of(runtime), trains=trains)
    return PlacedRuntime(runtime, plan)
