"""`envgym plan`: the placement of a run's processes and their memory, without starting anything."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import Parser, add_run_options, resolve_options

if TYPE_CHECKING:
    from envgym.config.schema import RunConfig
    from envgym.placement.plan import Node


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Print the node, GPUs and memory of every process of a run, from the model's sizes, and how many processes its
    rollouts need. Nothing is started. Without --gpus the plan is for the detected hardware: this machine, or the Ray
    cluster in RAY_ADDRESS.

    usage: [--env E] [--model M] [options] [key=value …]
    example: envgym plan --env math_verify --model path/to/model workers.ranks=4 workers.zero_stage=3 --gpus 8
    """
    parser = Parser("plan", main)
    add_run_options(parser)
    parser.add_argument("--gpus", type=int, metavar="N", help="plan for nodes with N GPUs each")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="memory of each GPU (default 80)")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="number of such nodes (default 1)")
    parser.add_argument("--turns", type=int, metavar="N", help="turns of an episode (default: agent.max_turns, or 1)")
    parser.add_argument(
        "--engine-rate", type=int, default=3000, metavar="N", help="tokens/s of an engine (default 3000)"
    )
    options, words = parser.parse_with_words(arguments)
    for name in ("gpus", "machines", "turns", "engine-rate"):
        if (value := getattr(options, name.replace("-", "_"))) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    config = resolve_options(options, words, invocation)

    from envgym.placement.memory import GIB
    from envgym.placement.plan import Node

    if options.gpus is None:
        nodes = _detected_nodes(config)
    else:
        bytes_each = int(options.gpu_memory * GIB)
        nodes = [Node(f"machine {number}", options.gpus, bytes_each) for number in range(options.machines)]
    problems = [
        problem for number in range(len(config.stages)) for problem in _print_stage(config, number, nodes, options)
    ]
    if problems:
        suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + suffix)
    return 0


def _detected_nodes(config: RunConfig) -> list[Node]:
    """This machine, or the nodes of the Ray cluster."""
    from envgym.placement.plan import nodes_of
    from envgym.processes.ray import RayRuntime

    if config.runtime != "ray" or "RAY_ADDRESS" not in os.environ:
        return nodes_of()
    import asyncio

    runtime = RayRuntime(".")
    try:
        return nodes_of(runtime)
    finally:
        asyncio.run(runtime.close())


def _print_stage(config: RunConfig, number: int, nodes: Sequence[Node], options: Namespace) -> list[str]:
    """Print a stage's plan; return the problems of parts that do not fit."""
    from envgym.monitoring.report import aligned
    from envgym.placement.memory import GIB, MemoryNeeds, with_micro_batches
    from envgym.placement.plan import ENGINE, plan_of
    from envgym.services.start import local_models

    stage = config.stages[number]
    models = local_models(stage.make_spec())
    plan = plan_of(stage, {name: model.ranks for name, model in models.items()}, nodes)
    stage = with_micro_batches(stage, plan, models, config.stages_by_name)
    needs = MemoryNeeds(stage, plan, models, config.stages_by_name)
    if len(config.stages) > 1:
        print(f"{'' if number == 0 else chr(10)}stage {number + 1}, {config.stage_names[number]}")
    rows = [("part", "processes", "where", "GPUs", "GiB each", "of which")]
    for part in plan.parts:
        slots = [plan.slots[worker] for worker in part.workers]
        names = ", ".join(dict.fromkeys(nodes[slot.node].name for slot in slots))
        gpus = " ".join(",".join(map(str, slot.gpus)) for slot in slots) if plan.uses_gpus else "-"
        memory = needs.part_memory(part.name)
        size, kinds = "?", "the model's sizes are unknown until it is downloaded"
        if memory is not None:
            size = f"{memory.total / GIB:.2f}"
            kinds = ", ".join(f"{kind} {n_bytes / GIB:.2f}" for kind, n_bytes in memory.parts.items())
        rows.append((part.name, str(len(slots)), names, gpus or "-", size, kinds))
    print(aligned(rows))
    print()
    totals = needs.totals()
    print(aligned([(total.device, f"{total.required / GIB:.2f} GiB", total.format_available()) for total in totals]))
    n, workers = stage.rollout.group_size, stage.workers
    print(f"\nmicro-batches of {workers.tokens_per_rank:,} tokens")
    if stage.agent.name != "replay" and n > 1 and workers.share_prefixes and workers.ranks_per_row == 1:
        print(f"workers compute the P tokens of a prompt once for its {n} episodes of A tokens: P + {n} A")
    if engines := sum(len(part.workers) for part in plan.parts if part.name == ENGINE):
        turns = options.turns or getattr(stage.agent_config()[1], "max_turns", None) or 1
        print(_rollout_processes(turns, max(1, stage.rollout.max_tokens // 2), engines * options.engine_rate))
    return [total.problem() for total in totals if not total.fits]


def _rollout_processes(turns: int, tokens: int, rate: int) -> str:
    """A line about the processes that rollouts need: `rate` sampled tokens per second, `tokens` in each turn."""
    from envgym.placement.plan import BUSY, busy_processes

    busy = busy_processes(turns, tokens, rate)
    n = 0 if busy <= BUSY else math.ceil(busy / BUSY)
    length = f"{turns} turn{'s' * (turns > 1)} of {tokens:,} tokens"
    return f"rollouts of {rate:,} tokens/s, in {length}, keep {busy:.2f} processes busy: rollout.processes={n}"
