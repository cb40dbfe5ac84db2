"""Memory that the parts of a stage need, estimated from the model's sizes before anything is loaded.

What stays is counted: weights, gradients and AdamW's moments, and what ZeRO divides of them, as in S. Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3. What comes and goes
(activations, buffers of communication) was fitted to measurements on a CPU, in float32 (`benchmarks/memory_plan.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from envgym.config.recipes import makes_model, recipe_model_folder
from envgym.config.schema import STAGE, RoleConfig, StageConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.learner import LearnerConfig
from envgym.models import is_path
from envgym.processes.runtime import Slot
from envgym.run_folder import policy_of_run
from envgym.workers.config import WorkersConfig, number_format

from .placement import ENGINE, Plan, name_of_service

GIB = 2**30
BUFFER_NUMBERS = 5e8
"""Numbers in DeepSpeed's buckets at most."""
BUFFERS = {0: 1.0, 1: 1.7, 2: 1.7, 3: 4.5}
"""Copies of the weights' numbers, or of a bucket's where they are more, that communication needs, by ZeRO stage."""
DEEPSPEED = 40 * 2**20
"""Bytes of its own."""
KEPT_LONGER = 1.2
"""Share of activations in ZeRO stage 3, whose gathered parameters are held beside them."""
EPISODE_BYTES = 3_400
"""Host memory of an episode of one turn and one token, the least that one takes, as `tests/agents/test_multi_turn.py`
measures it. Each further token takes 15 to 35 bytes, and learning from the episode 2,000 and more."""
LIBRARIES = {"rank": 0.6 * GIB, "engine": 1.0 * GIB}
"""Host memory of a process before it has a model: a rank's, and an engine's."""
CPU_CACHE = 2 * GIB
"""vLLM's cache on a CPU, unless it is told otherwise."""
MAX_LOGITS = 2**25
"""Of the output layer; see `envgym.workers.head`."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, by the names of its config."""

    parameters: int
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    key_value_width: int

    @classmethod
    def of(cls, folder: Path) -> ModelSizes | None:
        """Those of a model folder; None where it holds no config, or none that can be counted. Without weights
        parameters are those of the model that transformers would make; one that it does not know is counted as a dense
        model of gated layers (Llama, Qwen)."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        counted = _numbers_of_files(folder)
        if not counted and "model_type" in config:
            counted = _numbers_of_config(folder)
        config = config.get("text_config", config)
        hidden, layers, vocabulary = (config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        kv = head * config.get("num_key_value_heads", heads)
        inner = config.get("intermediate_size") or 4 * hidden
        if per_token := config.get("num_experts_per_tok"):
            inner = per_token * (config.get("moe_intermediate_size") or inner)
        elif not counted:
            layer = hidden * (2 * head * heads + 2 * kv) + 3 * hidden * inner + 2 * hidden
            tables = 1 if config.get("tie_word_embeddings") else 2
            counted = layers * layer + tables * vocabulary * hidden + hidden
        return cls(counted, hidden, layers, inner, vocabulary, kv) if counted else None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they are for, at the worst moment; `host`: of those, what is in the machine's memory though the
    part computes on a GPU."""

    parts: Mapping[str, float]
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def rank_memory(
    sizes: ModelSizes,
    settings: WorkersConfig,
    learner: LearnerConfig | None,
    *,
    on_gpu: bool,
    trained_share: float = 1.0,
) -> Memory:
    """A rank of a role. No learner: it only scores. `trained_share`: of the parameters, the share that learns (with an
    adapter, little)."""
    dtype = number_format(settings.dtype, on_cpu=not on_gpu)
    width = 4 if dtype == "float32" else 2
    numbers = sizes.parameters / settings.tensor_parallel
    ranks = max(1, settings.ranks // settings.tensor_parallel)
    stage = settings.runs_as(dtype, trained=learner is not None)
    parts = {"weights": numbers * width / (ranks if stage == 3 else 1)}
    host = 0.0
    if learner is not None:
        learns = numbers * trained_share
        parts["gradients"] = 4 * learns / (ranks if stage >= 2 else 1)
        moments = 4 * learns * (2 if stage == 0 else 3) / (ranks if stage >= 1 else 1)  # and float32 weights
        if settings.offload_optimizer and on_gpu:
            host += moments
        else:
            parts["optimizer"] = moments
        parts["buffers"] = BUFFERS[stage] * 4 * min(learns, BUFFER_NUMBERS) + DEEPSPEED
    kept = KEPT_LONGER if learner is not None and stage == 3 else 1.0
    parts["activations"] = kept * _activations(sizes, settings, width, learns=learner is not None)
    if settings.offload_parameters and on_gpu:
        host += parts.pop("weights")
    return Memory(parts, host)


def _activations(sizes: ModelSizes, settings: WorkersConfig, width: int, *, learns: bool) -> float:
    """Of a micro-batch: what every layer keeps for the backward pass (9 vectors of the model's width and 4 of its inner
    one; with checkpointing the layer's input, and one layer's at a time), and the logits that exist at once."""
    tokens = settings.tokens_per_microbatch
    layer = 9 * sizes.hidden + 4 * sizes.intermediate
    kept = layer if not learns else sizes.layers * layer
    if learns and settings.gradient_checkpointing:
        kept = sizes.layers * sizes.hidden + layer
    logits = 3.5 * min(tokens * sizes.vocabulary, MAX_LOGITS)
    return width * tokens * (kept + 6 * sizes.hidden) / settings.tensor_parallel + 4 * logits


def engine_memory(sizes: ModelSizes, stage: StageConfig, plan: Plan, gpu_bytes: int | None) -> Memory:
    """An engine, or each GPU of one: weights, and a cache for keys and values. On a GPU it takes its share whole."""
    in_16_bits = stage.engine.dtype in ("bfloat16", "float16") or gpu_bytes is not None
    weights = sizes.parameters * (2 if in_16_bits else 4) / stage.engine.tensor_parallel
    if gpu_bytes is None:
        cache = float(stage.engine.args.get("kv_cache_memory_bytes", CPU_CACHE))
    else:
        share = float(stage.engine.args.get("gpu_memory_utilization", plan.engine_share()))
        cache = max(0.0, share * gpu_bytes - weights)
    return Memory({"weights": weights, "cache": cache})


@dataclass(frozen=True, slots=True)
class Total:
    """Memory that a GPU, or a machine, would need at the worst moment; `there` is None where its size is not known."""

    where: str
    needed: float
    there: float | None
    parts: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.there is None or self.needed <= self.there

    def of_how_much(self) -> str:
        return "" if self.there is None else f"of {self.there / GIB:.2f} GiB"

    def problem(self) -> str:
        names = " and ".join(self.parts)
        return (
            f"{self.where} would need {self.needed / GIB:.2f} GiB for {names}, and has {(self.there or 0) / GIB:.2f}: "
            "raise workers.zero_stage or workers.ranks, lower workers.tokens_per_microbatch, or offload"
        )


class MemoryNeeds:
    """The memory of a stage's parts where a plan has them. `models`: of reward models, by their workers' names.
    `stages`: the run's, any of which may be what a model comes from."""

    def __init__(
        self, stage: StageConfig, plan: Plan, models: Mapping[str, str], stages: Mapping[str, StageConfig]
    ) -> None:
        self._stages = stages
        self._stage = stage
        self._plan = plan
        learner_class, self._learner = stage.learner_config()
        self._roles = learner_class(self._learner).roles
        self._models = {name_of_service(worker, list(models)): model for worker, model in models.items()}

    def of(self, part: str) -> Memory | None:
        """Memory of each process of a part; None where its model is not here to be looked at."""
        stage, role = self._stage, self._roles.get(part)
        own = stage.roles.get(part, RoleConfig()).model if role is not None else self._models.get(part)
        name = own or stage.model
        while name.startswith(STAGE):
            name = self._stages[name.removeprefix(STAGE)].model
        if (sizes := ModelSizes.of(model_folder(name))) is None:
            return None
        slot = self._slots(part)[0]
        on_gpu = bool(slot.gpus)
        if part == ENGINE:
            return engine_memory(sizes, stage, self._plan, self._plan.nodes[slot.node].gpu_bytes if on_gpu else None)
        if role is None:  # a reward model
            return Memory({"weights": sizes.parameters * (2.0 if on_gpu else 4.0)})
        lora = stage.lora_of(part, role)
        share = 1.0 if not lora.rank else min(1.0, _adapter_numbers(sizes, lora.rank) / sizes.parameters)
        learner = self._learner if role.trained else None
        return rank_memory(sizes, stage.workers_of(part), learner, on_gpu=on_gpu, trained_share=share)

    def totals(self) -> list[Total]:
        """Every GPU and machine that is used. Parts that take turns with the engine are not there at the same time."""
        found = []
        for number, node in enumerate(self._plan.nodes):
            here = [(part, slot) for part in self._plan.parts for slot in self._slots(part.name) if slot.node == number]
            for gpu in sorted({gpu for _, slot in here for gpu in slot.gpus}):
                on_it = [part.name for part, slot in here if gpu in slot.gpus]
                needed = self._together(on_it)
                found.append(Total(f"{node.name}, GPU {gpu}", needed, node.gpu_bytes, tuple(dict.fromkeys(on_it))))
            on_host = [part.name for part, slot in here]
            if on_host:
                needed = sum(self._on_host(part.name, bool(slot.gpus)) for part, slot in here)
                found.append(Total(node.name, needed, node.host_bytes, tuple(dict.fromkeys(on_host))))
        return found

    def _slots(self, part: str) -> list[Slot]:
        return [self._plan.slots[worker] for one in self._plan.parts if one.name == part for worker in one.workers]

    def _together(self, parts: Sequence[str]) -> float:
        sizes = {part: memory.total * parts.count(part) for part in parts if (memory := self.of(part)) is not None}
        in_turns = sum(sizes.pop(part.name, 0.0) for part in self._plan.parts if part.in_turns)
        return max(in_turns, sizes.pop(ENGINE, 0.0)) + sum(sizes.values())

    def _on_host(self, part: str, on_gpu: bool) -> float:
        memory = self.of(part)
        own = LIBRARIES["engine" if part == ENGINE else "rank"]
        if memory is None:
            return own
        return own + (memory.host if on_gpu else memory.total)


def check_episodes(stage: StageConfig, spec: EnvSpec) -> None:
    """Refuse a stage that would hold more episodes at once than `check_episode_memory` lets it, in a step or an evaluation. What
    a filter drops is held too until its step is written: as many rounds as there may be."""
    config, samples = stage.rollout, stage.agent_config()[0].uses_policy
    of_each = config.group_size if samples else spec.recordings_per_task
    rounds = config.filter.max_rounds if samples and config.filter.is_on else 1
    names = f"rollout.tasks_per_step, rollout.group_size{', rollout.filter.max_rounds' if rounds > 1 else ''}"
    check_episode_memory(f"a step ({names})", config.tasks_per_step * (rounds + config.max_staleness), of_each)
    if stage.eval.every:
        size, of_each = spec.tasks("test").size, stage.eval.samples if samples else spec.recordings_per_task
        count = stage.eval.tasks if size is None else min(stage.eval.tasks, size)
        check_episode_memory("an evaluation (eval.tasks, eval.samples)", count, of_each)


def check_episode_memory(what: str, tasks: int, of_each: int) -> None:
    """Refuse to hold `of_each` episodes of `tasks` tasks where even the smallest would take more than half of the free
    memory; `what` they are for. Raises `ConfigError`.

    Tokens are not counted: answers are mostly far shorter than `rollout.max_tokens`, and by that limit recipes would be
    refused that run. So memory may run out with long answers all the same.
    """
    free, needed = free_memory(), tasks * of_each * EPISODE_BYTES
    if 2 * needed > free:
        raise ConfigError(
            f"{what} of {tasks:,} tasks, {of_each:,} episodes of each, would take {needed / GIB:,.1f} GiB of memory or "
            f"more, {EPISODE_BYTES:,} bytes an episode: it may take half of the {free / GIB:.1f} GiB that are free, "
            f"{free // 2 // EPISODE_BYTES:,} episodes"
        )


def free_memory() -> int:
    """Bytes of this machine's memory that a process could have; all of its memory, where that is not to be read."""
    whole, info = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), Path("/proc/meminfo")
    lines = info.read_text(encoding="ascii").splitlines() if info.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), whole)


def model_folder(name: str) -> Path:
    """Folder of a model's config: its own, what a recipe made, or what the hub's cache holds."""
    if makes_model(name):
        return recipe_model_folder(name)
    path = Path(name)
    if path.is_dir() or is_path(name):
        return policy_of_run(path) if (path / "config.yaml").exists() else path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return path
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no such name can be there
        return path
    return Path(found).parent if isinstance(found, str) else path


def _adapter_numbers(sizes: ModelSizes, rank: int) -> float:
    """Parameters of an adapter on every linear layer of a dense model."""
    attention = 4 * sizes.hidden + 2 * (sizes.hidden + sizes.key_value_width)
    return sizes.layers * rank * (attention + 3 * (sizes.hidden + sizes.intermediate))


@cache
def _numbers_of_config(folder: Path) -> int:
    """Parameters of the model that transformers would make by a folder's config, without memory for them; 0 where it
    knows none. Takes seconds: torch is loaded for it."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except Exception:  # of code for many models, some of which want numbers while they are made
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _numbers_of_files(folder: Path) -> int:
    """Parameters in a folder's safetensors files; 0 where there are none."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            numbers = 1
            for size in tensor.get("shape", ()):
                numbers *= size
            count += numbers if name != "__metadata__" else 0
    return count
