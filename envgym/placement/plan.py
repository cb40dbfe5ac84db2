"""Placement of a stage's processes on nodes and GPUs: a plan made before anything starts, and a runtime that follows
it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from envgym.config.schema import PlacementConfig, StageConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError, did_you_mean
from envgym.processes.gpus import least_gpu_bytes, visible_gpus
from envgym.processes.local import LocalRuntime
from envgym.processes.ray import RayRuntime
from envgym.processes.runtime import InlineRuntime, Runtime, Slot, WorkerHandle
from envgym.services.start import local_models

ENGINE, REWARD = "engine", "reward"
SHARD = "rollout-{}"
"""The name of a process that rolls out."""

ENGINE_SHARES = {"separate": 0.9, "in turns": 0.85, "shared": 0.5}
"""The share of a GPU's memory that engines take: on separate GPUs, in turns with other parts (whose libraries keep some
memory), or at the same time as they. vLLM's default is 0.92."""

SECONDS_PER_TURN, SECONDS_PER_TOKEN, SECONDS_PER_REPEATED_TOKEN = 4.6e-4, 1.3e-7, 1.1e-8
"""Time of one process for an episode: for each turn, for each token, and for each token in each turn, since every turn
renders the whole conversation. Fitted to the column `whole` of `benchmarks/controller.py`."""
BUSY = 0.5
"""Share of its time up to which a process of rollouts may be busy: beyond it, engines wait for it."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its GPUs, the memory of each in bytes (None: unknown), and its host memory in bytes (None: unknown)."""

    name: str
    gpus: int = 0
    gpu_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StagePart:
    """Processes with one purpose: the ranks of a role, the engines, a reward model. `gpus`: per process. `in_turns`: it
    shares GPUs with the engine in turns."""

    name: str
    workers: tuple[str, ...]
    gpus: float = 1.0
    nodes: int | None = None
    in_turns: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The slot of each worker, by its name."""

    nodes: tuple[Node, ...]
    parts: tuple[StagePart, ...]
    slots: Mapping[str, Slot] = field(default_factory=dict)
    shards: Mapping[str, Slot] = field(default_factory=dict)
    """The nodes of the processes that roll out, by their names: those of the engines, in turn. They see no GPUs there,
    but on this machine what the controller sees, since environments may use a GPU."""

    @property
    def uses_gpus(self) -> bool:
        return any(slot.gpus for slot in self.slots.values())

    def bundles(self) -> list[int]:
        """Number of GPUs to reserve on each node, up to the last node in use."""
        slots = self.slots.values()
        return [
            max((gpu + 1 for slot in slots if slot.node == node for gpu in slot.gpus), default=0)
            for node in range(max((slot.node for slot in slots), default=0) + 1)
        ]

    def slots_of(self, name: str) -> list[Slot]:
        """The slots of a part's processes, in their order."""
        return [self.slots[worker] for part in self.parts if part.name == name for worker in part.workers]

    def gpus_of(self, name: str) -> list[tuple[int, int]]:
        """(node, GPU) of each process of a part, in their order."""
        return [(slot.node, gpu) for slot in self.slots_of(name) for gpu in slot.gpus]

    def engine_share(self) -> float:
        """The share of a GPU's memory that each engine on it takes, for weights and cache."""
        gpus = self.gpus_of(ENGINE)
        neighbors = [p for p in self.parts if p.name != ENGINE and not set(gpus).isdisjoint(self.gpus_of(p.name))]
        kind = "separate" if not neighbors else "in turns" if all(part.in_turns for part in neighbors) else "shared"
        return ENGINE_SHARES[kind] / max(map(gpus.count, gpus), default=1)


def plan_of(stage: StageConfig, services: Mapping[str, int], nodes: Sequence[Node], *, trains: bool = True) -> Plan:
    """The plan of a stage on these nodes. `services`: the ranks of its environment's reward models, by the names of
    their workers. `trains`: False for a stage that only samples. Raises `ConfigError` for the first part that does not
    fit."""
    parts = parts_of(stage, services, trains=trains)
    names = [part.name for part in parts]
    sets = stage.colocate if isinstance(stage.colocate, list) else []
    for name in (*stage.placement, *(name for members in sets for name in members)):
        if name not in names and trains:
            key = "placement" if name in stage.placement else "colocate"
            raise ConfigError(f"{key}: this stage has no part {name!r}.{did_you_mean(name, names)}")
    if repeated := [name for name in names if sum(name in members for members in sets) > 1]:
        raise ConfigError(f"colocate: {repeated[0]} is in two sets, and can share the GPUs of one")
    if stage.colocate == "auto":
        try:
            plan = place_parts(parts, nodes, [])
        except ConfigError:
            plan = place_parts(parts, nodes, [names])
    else:
        plan = place_parts(parts, nodes, [names] if stage.colocate == "all" else sets)
    _check_transfer(stage.sync.transfer, plan)
    engine_nodes = [slot.node for slot in plan.slots_of(ENGINE)] or [0]
    processes = range(stage.rollout.processes)
    shards = {SHARD.format(number): Slot(engine_nodes[number % len(engine_nodes)]) for number in processes}
    return replace(plan, shards=shards)


def _check_transfer(transfer: str, plan: Plan) -> None:
    """Raise `ConfigError` if the planned GPUs do not support the transfer of weights."""
    engines, ranks = plan.gpus_of(ENGINE), plan.gpus_of("actor")
    if not engines or not ranks:
        return
    if transfer == "nccl" and ranks[0] in engines:
        raise ConfigError(
            "sync.transfer=nccl: the engine and the actor share a GPU, which NCCL does not support: use cuda_ipc, or "
            "give the engine separate GPUs (colocate=none)"
        )
    if transfer == "cuda_ipc" and not set(engines) <= set(ranks):
        raise ConfigError(
            "sync.transfer=cuda_ipc: the engine has a GPU without a rank of the actor, whose weights it cannot reach: "
            "use nccl, or let them share GPUs (colocate=all)"
        )


def parts_of(stage: StageConfig, services: Mapping[str, int], *, trains: bool = True) -> list[StagePart]:
    """The parts of one training stage, each of which runs in processes of its own."""

    def part(name: str, workers: Sequence[str], gpus: float = 1.0, *, in_turns: bool = False) -> StagePart:
        config = stage.placement.get(name, PlacementConfig())
        if config.nodes is not None and len(workers) % config.nodes:
            raise ConfigError(
                f"placement.{name}.nodes={config.nodes} does not divide its {len(workers)} process"
                f"{'es' * (len(workers) > 1)}"
            )
        return StagePart(name, tuple(workers), gpus if gpus > 1 else config.gpus, config.nodes, in_turns)

    parts = []
    if stage.agent_config()[0].uses_policy and stage.engine.kind != "openai":
        count = stage.engine.count
        names = [ENGINE] if count == 1 else [f"{ENGINE}-{number}" for number in range(count)]
        parts.append(part(ENGINE, names, stage.engine.tensor_parallel))
    if trains and stage.kind == "train":
        learner_class, learner_config = stage.learner_config()
        roles = learner_class(learner_config).roles
        for role in roles:
            if not stage.is_base(role, roles) and stage.role(role).base_url is None:
                ranks = [f"{role}-{rank}" for rank in range(stage.workers_of(role).ranks)]
                parts.append(part(role, ranks, in_turns=stage.takes_turns(role)))
    for worker, n_ranks in services.items():
        workers = [worker] if n_ranks == 1 else [f"{worker}-{rank}" for rank in range(n_ranks)]
        parts.append(part(name_of_service(worker, list(services)), workers))
    return parts


def name_of_service(worker: str, services: Sequence[str]) -> str:
    """The part's name for a reward model's worker: `reward` if it is the only one, else its own name."""
    return REWARD if len(services) == 1 else worker.removeprefix("service-")


def place_parts(parts: Sequence[StagePart], nodes: Sequence[Node], colocated: Sequence[Sequence[str]]) -> Plan:
    """Assign a node and GPUs to every process. Parts of a `colocated` set share GPUs. A part is placed on one node if
    it fits there, unless its `nodes` are set. Without GPUs, parts are by default on the first node."""
    shared = [_Pool(tuple(part for part in parts if part.name in names)) for names in colocated]
    separate = [_Pool((part,)) for part in parts if not any(part.name in names for names in colocated)]
    # The most constrained pools first: several nodes, then most GPUs.
    pools = sorted((pool for pool in (*shared, *separate) if pool.parts), key=lambda pool: (-pool.nodes, -pool.gpus))
    free_gpus = [list(range(node.gpus)) for node in nodes]
    slots: dict[str, Slot] = {}
    for pool in pools:
        gpus = _take_gpus(pool, nodes, free_gpus) if any(node.gpus for node in nodes) else []
        for part in pool.parts:
            if not gpus and (part.nodes or 1) > len(nodes):
                raise ConfigError(f"{part.name} needs {part.nodes} nodes, and there are {len(nodes)}")
            slots |= zip(part.workers, _slots(part, gpus, min(1.0, part.gpus) / len(pool.parts)), strict=True)
    return Plan(tuple(nodes), tuple(parts), slots)


def busy_processes(n_turns: int, turn_tokens: float, tokens_per_second: float) -> float:
    """The number of processes that engines keep fully busy with rollouts and the work on their episodes, if they sample
    `tokens_per_second` together, in episodes of `n_turns` turns of `turn_tokens` sampled and as many read tokens."""
    n_tokens = 2 * n_turns * turn_tokens
    seconds = n_turns * SECONDS_PER_TURN + n_tokens * (SECONDS_PER_TOKEN + n_turns * SECONDS_PER_REPEATED_TOKEN)
    return tokens_per_second * seconds / (n_turns * turn_tokens)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Parts that share their GPUs."""

    parts: tuple[StagePart, ...]

    @property
    def gpus(self) -> int:
        return max(ceil(len(part.workers) * part.gpus) for part in self.parts)

    @property
    def nodes(self) -> int:
        """Number of nodes that it is spread over evenly; 1: as few as possible."""
        return max(part.nodes or 1 for part in self.parts)


def _slots(part: StagePart, gpus: Sequence[tuple[int, int]], share: float) -> Iterator[Slot]:
    """The slot of each process of a part: on its GPUs, from the pool's (node, GPU) pairs; without GPUs, on the part's
    nodes in order."""
    per_node = len(part.workers) // (part.nodes or 1)
    for number in range(len(part.workers)):
        start = int(number * part.gpus)
        pairs = gpus[start : start + ceil(part.gpus)]
        yield Slot(pairs[0][0] if pairs else number // per_node, tuple(gpu for _, gpu in pairs), share)


def _take_gpus(pool: _Pool, nodes: Sequence[Node], free_gpus: list[list[int]]) -> list[tuple[int, int]]:
    """Remove the GPUs of a pool from the free ones and return them: (node, GPU), grouped by node.

    The fullest nodes with enough free GPUs are chosen. If a pool needs no particular number of nodes and fits on none,
    its processes are spread over the emptiest nodes.
    """
    if not pool.gpus:
        return []
    per_node = ceil(pool.gpus / pool.nodes)
    n_free = [len(gpus) for gpus in free_gpus]
    candidates = sorted((node for node in range(len(nodes)) if n_free[node] >= per_node), key=lambda node: n_free[node])
    remaining = pool.gpus
    counts: dict[int, int] = {}
    if len(candidates) >= pool.nodes:
        remaining, counts = 0, dict.fromkeys(sorted(candidates[: pool.nodes]), per_node)
    elif pool.nodes == 1:
        per_process = max(ceil(part.gpus) for part in pool.parts)
        for node in sorted(range(len(nodes)), key=lambda node: -n_free[node]):
            counts[node] = min(remaining, n_free[node] // per_process * per_process)
            remaining -= counts[node]
    if remaining:
        raise _does_not_fit(pool, nodes, n_free)
    return [(node, free_gpus[node].pop(0)) for node, count in counts.items() for _ in range(count)]


def _does_not_fit(pool: _Pool, nodes: Sequence[Node], n_free: Sequence[int]) -> ConfigError:
    names, gpus = " and ".join(part.name for part in pool.parts), pool.gpus
    spread = f" on {pool.nodes} nodes, {ceil(gpus / pool.nodes)} each" if pool.nodes > 1 else ""
    free_gpus = ", ".join(f"{count} of {node.gpus} on {node.name}" for node, count in zip(nodes, n_free, strict=True))
    return ConfigError(
        f"{names} need{'s' * (len(pool.parts) == 1)} {gpus} GPU{'s' * (gpus > 1)}{spread}; free are {free_gpus}: lower "
        "workers.ranks or engine.count, let processes share one (placement.PART.gpus=0.5), or set colocate=all"
    )


# ---------------------------------------------------------------------------------------------------------
# The available nodes, and the runtime that follows a plan


def nodes_of(runtime: Runtime | None = None, *, only_free: bool = False) -> list[Node]:
    """The nodes of a run: this machine, or the nodes of the Ray cluster that `runtime` is connected to. With
    `only_free`, without the GPUs that are in use."""
    if isinstance(runtime, RayRuntime):
        return [Node(*node) for node in runtime.nodes(only_free=only_free)]
    node = this_machine()
    return [replace(node, gpus=min(1, node.gpus)) if isinstance(runtime, InlineRuntime) else node]


def this_machine() -> Node:
    """This machine, with its visible GPUs."""
    gpus = visible_gpus()
    memory = least_gpu_bytes() if gpus else None
    return Node("this machine", len(gpus), memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class PlacedRuntime:
    """A runtime that starts workers in their planned slots."""

    def __init__(self, runtime: Runtime, plan: Plan) -> None:
        self.plan = plan
        self._runtime = runtime
        self._bundles = plan.bundles()

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> WorkerHandle[Any]:
        slot = self.plan.slots.get(name)
        if isinstance(self._runtime, RayRuntime):
            slot = slot or self.plan.shards.get(name)
            if slot is not None:
                await self._runtime.reserve(self._bundles)
            return await self._runtime.start(target, kwargs, name=name, environ=environ, slot=slot)
        variables = dict(environ or {})
        if slot is not None and isinstance(self._runtime, LocalRuntime) and (visible := visible_gpus()):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] for gpu in slot.gpus)
        return await self._runtime.start(target, kwargs, name=name, environ=variables)

    async def close(self) -> None:
        await self._runtime.close()


def placed_runtime(
    stage: StageConfig, specs: Sequence[EnvSpec], runtime: Runtime, *, trains: bool = True
) -> PlacedRuntime:
    """The runtime of a stage with these environments. Raises `ConfigError` if a part does not fit, before anything
    starts."""
    services = {name: model.ranks for spec in specs for name, model in local_models(spec).items()}
    try:
        plan = plan_of(stage, services, nodes_of(runtime, only_free=True), trains=trains)
    except ConfigError:  # use GPUs of other jobs: the runtime waits until they are free
        plan = plan_of(stage, services, nodes_of(runtime), trains=trains)
    return PlacedRuntime(runtime, plan)
