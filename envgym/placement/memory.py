"""Memory that the parts of a stage need, estimated from the model's sizes before anything is loaded.

Permanent tensors (weights, gradients, AdamW's moments) are counted, and divided by ZeRO as in S. Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3. Temporary ones (activations,
communication buffers) follow a formula fitted to measurements on a CPU, in float32 (`benchmarks/memory_plan.py` of
commit `d1a86251`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from envgym import hub
from envgym.config.recipes import makes_model, recipe_model_folder
from envgym.config.schema import STAGE, StageConfig
from envgym.disk import regular_file
from envgym.errors import ConfigError, reported_as
from envgym.learner import LearnerConfig
from envgym.limits import limits
from envgym.models import is_path
from envgym.models.sizes import count_parameters
from envgym.models.vision import TOWERS, policy_class
from envgym.run_folder import policy_of_run
from envgym.services.declarations import RewardModel
from envgym.workers.config import GPU_SHARE, MAX_LOGITS, WorkersConfig, number_format

from .plan import ENGINE, Plan, name_of_service

GIB = 2**30
BUFFER_NUMBERS = 5e8
"""Maximum numbers in DeepSpeed's buckets."""
BUFFERS = {0: 1.0, 1: 1.7, 2: 1.7, 3: 4.5}
"""Communication buffers by ZeRO stage, in copies of the trained weights (of a bucket, if it is smaller)."""
DEEPSPEED = 40 * 2**20
"""Bytes that DeepSpeed itself takes."""
GATHER_OVERHEAD = 1.2
"""Factor on the activations in ZeRO stage 3, for gathered parameters that are held at the same time."""
LIBRARIES = {"rank": 0.6 * GIB, "engine": 1.0 * GIB}
"""Host memory of a process before it loads a model."""
CPU_CACHE = 2 * GIB
"""Default size of vLLM's cache on a CPU."""
STEP_TOKENS, STEP_REQUESTS = 16_384, 1024
"""The most of each in one step of vLLM on a large GPU, by its defaults."""
SAVED_VECTORS = {4: 9, 2: 23}
"""Vectors of the model's width that a layer saves, by bytes of a number: more in 16 bits, since norms compute in
float32. Those were fitted to the peaks of `benchmarks/gpu_first.py` on an H100."""
GPU_MICRO_BATCHES = (16_384, 8_192)
"""Tokens per micro-batch that `auto` tries on GPUs. On an H100 a model of 0.5 billion parameters learned 1.8 times as
fast with 16,384 as with 4,096, and no faster with 32,768 (`benchmarks/gpu_first.py`)."""
BUILDING = 30.0, 4 * GIB
"""The most seconds and bytes that a model without its weights takes; a config may ask for a billion layers."""
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
OTHER_SIZES = ("head_dim", "num_key_value_heads", "intermediate_size")
"""Names of sizes in a model's config: those that every config has, and others."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, from its config. `vision`: the parameters that texts do not reach, of a vision tower."""

    parameters: int
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    key_value_width: int
    vision: int = 0

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSizes | None:
        """The sizes of the model in a folder; None without a config, and for a mixture that transformers does not know.
        Parameters are counted in the weight files; without them, in the model that transformers builds from the config;
        if transformers does not know it, as those of a dense model of gated layers (Llama, Qwen). Raises `ConfigError`
        for a config or weight files that are none."""
        if not (file := folder / "config.json").exists():
            return None
        with reported_as(ConfigError, f"{folder} holds no model whose sizes can be read", cause=Exception):
            return cls._from_config(folder, json.loads(regular_file(file).read_text(encoding="utf-8")))

    @classmethod
    def _from_config(cls, folder: Path, config: dict[str, Any]) -> ModelSizes | None:
        is_known = "model_type" in config
        has_tower = config.get("vision_config") is not None
        config = config.get("text_config", config)
        if has_tower and not all(map(config.get, SIZES)):  # its text config may leave out what is the default
            with contextlib.suppress(Exception):  # whatever a config that is none leads to
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(folder).get_text_config().to_dict() | config
        for name in (*SIZES, *filter(config.get, OTHER_SIZES)):
            if type(size := config.get(name)) is not int or not 0 < size < 2**32:
                raise ValueError(f"{name} is {size!r:.60}, and not a positive whole number")
        width, layers, vocabulary, heads = (config[name] for name in SIZES)
        head = config.get("head_dim") or width // heads
        kv = head * config.get("num_key_value_heads", heads)
        inner = config.get("intermediate_size") or 4 * width
        if per_token := config.get("num_experts_per_tok"):
            inner = per_token * (config.get("moe_intermediate_size") or inner)
        parameters = count_parameters(folder) or (_count_in_config(folder) if is_known else 0)
        if not (parameters or per_token):
            layer = width * (2 * head * heads + 2 * kv) + 3 * width * inner + 2 * width
            tables = 1 if config.get("tie_word_embeddings") else 2
            parameters = layers * layer + tables * vocabulary * width + width
        vision = count_parameters(folder, TOWERS) if has_tower else 0
        return cls(parameters, width, layers, inner, vocabulary, kv, vision) if parameters else None


PERMANENT = ("weights", "gradients", "optimizer")
"""Parts of a rank's memory that wait in the host's while the engine has the GPU."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes of a process by purpose. `host`: the bytes in addition that a process on a GPU offloads to host
    memory."""

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
    gpu_bytes: int | None = None,
    trained_share: float = 1.0,
) -> Memory:
    """The memory of a role's rank. `learner`: None for a role that is not trained. `trained_share`: the trained share
    of the parameters (small with an adapter)."""
    dtype = number_format(settings.dtype, on_cpu=not on_gpu)
    width = 4 if dtype == "float32" else 2
    numbers = sizes.parameters / settings.tensor_parallel
    ranks = max(1, settings.ranks // settings.tensor_parallel)
    stage = settings.effective_zero_stage(dtype, trained=learner is not None)
    parts = {"weights": numbers * width / (ranks if stage == 3 else 1)}
    host = 0.0
    if learner is not None:
        trained = numbers * min(trained_share, 1 - sizes.vision / sizes.parameters)
        parts["gradients"] = 4 * trained / (ranks if stage >= 2 else 1)
        moments = 4 * trained * (2 if stage == 0 else 3) / (ranks if stage >= 1 else 1)  # and float32 weights
        if settings.offload_optimizer and on_gpu:
            host += moments
        else:
            parts["optimizer"] = moments
        parts["buffers"] = BUFFERS[stage] * 4 * min(trained, BUFFER_NUMBERS) + DEEPSPEED
    factor = GATHER_OVERHEAD if learner is not None and stage == 3 else 1.0
    activations = _activation_bytes(sizes, settings, width, gpu_bytes or 0, trains=learner is not None)
    parts["activations"] = factor * activations
    if settings.offload_parameters and on_gpu:
        host += parts.pop("weights")
    return Memory(parts, host)


def _activation_bytes(sizes: ModelSizes, settings: WorkersConfig, width: int, gpu_bytes: int, *, trains: bool) -> float:
    """Activation bytes of one micro-batch: per-layer buffers saved for backward (vectors of the model's width and 4
    of the inner width; with checkpointing each layer's input, and the buffers of one layer), plus live logits."""
    tokens = settings.tokens_per_rank
    layer = SAVED_VECTORS[width] * sizes.hidden + 4 * sizes.intermediate
    saved = layer if not trains else sizes.layers * layer
    if trains and settings.gradient_checkpointing:
        saved = sizes.layers * sizes.hidden + layer
    logits = min(14 * tokens * sizes.vocabulary, max(14 * MAX_LOGITS, gpu_bytes / GPU_SHARE))
    return width * tokens * (saved + 6 * sizes.hidden) / settings.tensor_parallel + logits


def engine_memory(sizes: ModelSizes, stage: StageConfig, plan: Plan, gpu_bytes: int | None) -> Memory:
    """The memory of an engine, or of each GPU of one: weights, without a vision tower for texts alone, and a cache for
    keys and values. On a GPU the cache fills the engine's share."""
    in_16_bits = number_format(stage.engine.dtype, on_cpu=gpu_bytes is None) != "float32"
    weights = (sizes.parameters - sizes.vision) * (2 if in_16_bits else 4) / stage.engine.tensor_parallel
    if gpu_bytes is None:
        cache = float(stage.engine.args.get("kv_cache_memory_bytes", CPU_CACHE))
    else:
        share = float(stage.engine.args.get("gpu_memory_utilization", plan.engine_share()))
        cache = max(0.0, share * gpu_bytes - weights)
    return Memory({"weights": weights, "cache": cache})


def _sampling_bytes(sizes: ModelSizes) -> float:
    """Bytes that vLLM takes on a GPU beside weights and cache: the activations of its longest step, the logits of all
    requests in float32, a copy and their order, and its graphs."""
    activations = 2 * STEP_TOKENS * (6 * sizes.hidden + 3 * sizes.intermediate)
    return activations + 12 * STEP_REQUESTS * sizes.vocabulary + 2 * GIB


@dataclass(frozen=True, slots=True)
class Total:
    """Peak bytes that a GPU or a node would need; `available` is None if its size is unknown."""

    device: str
    required: float
    available: float | None
    parts: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.available is None or self.required <= self.available

    def format_available(self) -> str:
        return "" if self.available is None else f"of {self.available / GIB:.2f} GiB"

    def problem(self) -> str:
        required, available = self.required / GIB, (self.available or 0) / GIB
        return (
            f"{self.device} would need {required:.2f} GiB for {' and '.join(self.parts)}, and has {available:.2f}: "
            "raise workers.zero_stage or workers.ranks, lower workers.tokens_per_microbatch, or offload"
        )


class MemoryNeeds:
    """The memory of a stage's parts as a plan places them. `models`: the reward models by their workers' names.
    `stages`: the run's stages, for models that are earlier stages' results."""

    def __init__(
        self, stage: StageConfig, plan: Plan, models: Mapping[str, RewardModel], stages: Mapping[str, StageConfig]
    ) -> None:
        self._stages = stages
        self._stage = stage
        self._plan = plan
        learner_class, learner_config = stage.learner_config()
        self._roles = learner_class(learner_config).roles
        self._models = {name_of_service(worker, list(models)): model for worker, model in models.items()}

    def part_memory(self, part: str) -> Memory | None:
        """The memory of each process of a part; None if its model is not on this machine."""
        stage, role = self._stage, self._roles.get(part)
        service = self._models.get(part)
        if (sizes := self._sizes(part)) is None:
            return None
        slot = self._plan.slots_of(part)[0]
        on_gpu = bool(slot.gpus)
        gpu_bytes = self._plan.nodes[slot.node].gpu_bytes if on_gpu else None
        if part == ENGINE:
            return engine_memory(sizes, stage, self._plan, gpu_bytes)
        if role is None:  # a reward model
            ranks = 1 if service is None else service.ranks
            return Memory({"weights": sizes.parameters * (2.0 if on_gpu else 4.0) / ranks})
        lora = stage.lora_of(part, role)
        share = 1.0 if not lora.rank else min(1.0, _adapter_parameters(sizes, lora.rank) / sizes.parameters)
        learner = stage.learner_config_of(part) if role.trained else None
        settings = stage.workers_of(part)
        return rank_memory(sizes, settings, learner, on_gpu=on_gpu, gpu_bytes=gpu_bytes, trained_share=share)

    def _sizes(self, part: str) -> ModelSizes | None:
        """The sizes of a part's model; None if it is not on this machine."""
        service = self._models.get(part)
        name = self._stage.role(part).model if service is None else service.model
        name = name or self._stage.model
        while name.startswith(STAGE):
            name = self._stages[name.removeprefix(STAGE)].model
        sizes = ModelSizes.from_folder(model_folder(name))
        return replace(sizes, vision=0) if sizes is not None and self._stage.takes_images else sizes

    def totals(self) -> list[Total]:
        """The total of every GPU and node in use. Parts that share GPUs in turns with the engine do not add to it."""
        totals = []
        for number, node in enumerate(self._plan.nodes):
            slots = [(part.name, slot) for part in self._plan.parts for slot in self._plan.slots_of(part.name)]
            processes = [(name, slot) for name, slot in slots if slot.node == number]
            for gpu in sorted({gpu for _, slot in processes for gpu in slot.gpus}):
                names = [name for name, slot in processes if gpu in slot.gpus]
                gpu_bytes = self._gpu_bytes(names)
                totals.append(Total(f"{node.name}, GPU {gpu}", gpu_bytes, node.gpu_bytes, tuple(dict.fromkeys(names))))
            if processes:
                host_bytes = sum(self._host_bytes(name, bool(slot.gpus)) for name, slot in processes)
                names = list(dict.fromkeys(name for name, _ in processes))
                totals.append(Total(node.name, host_bytes, node.host_bytes, tuple(names)))
        return totals

    def engine_cache(self) -> int | None:
        """The size of the engine's cache, in bytes, with which roles on its GPUs can load while it starts. None if no
        roles are there, or if they must wait: they take turns, a size is unknown, or the GPU may be too small for both.

        Without a given size vLLM takes the memory that it finds free, which a role that loads meanwhile changes.
        """
        gpus = {f"{self._plan.nodes[node].name}, GPU {gpu}" for node, gpu in self._plan.gpus_of(ENGINE)}
        if not gpus:  # then no model's size need be read
            return None
        on_gpus = [total for total in self.totals() if total.device in gpus]
        parts = {part: self.part_memory(part) for total in on_gpus for part in total.parts}
        if set(parts) <= {ENGINE} or None in parts.values() or any(part.in_turns for part in self._plan.parts):
            return None
        if any(total.available is None or total.required > 0.95 * total.available for total in on_gpus):
            return None
        engine, sizes = parts[ENGINE], self._sizes(ENGINE)
        assert engine is not None
        assert sizes is not None
        cache = int(engine.parts["cache"] - _sampling_bytes(sizes))
        return cache if cache > GIB else None

    def _gpu_bytes(self, parts: Sequence[str]) -> float:
        """Bytes of a GPU with these parts, each as often as it has processes there."""
        memories = {part: self.part_memory(part) for part in parts}
        sizes = {part: memory.total * parts.count(part) for part, memory in memories.items() if memory is not None}
        in_turns = sum(sizes.pop(part.name, 0.0) for part in self._plan.parts if part.in_turns)
        return max(in_turns, sizes.pop(ENGINE, 0.0)) + sum(sizes.values())

    def _host_bytes(self, part: str, on_gpu: bool) -> float:
        """Host memory of a process of a part."""
        memory = self.part_memory(part)
        libraries = LIBRARIES["engine" if part == ENGINE else "rank"]
        if memory is None:
            return libraries
        if not on_gpu:
            return libraries + memory.total
        takes_turns = part != ENGINE and any(p.in_turns for p in self._plan.parts if p.name == part)
        on_host = sum(memory.parts.get(name, 0.0) for name in PERMANENT) if takes_turns else 0.0
        return libraries + memory.host + on_host


def with_micro_batches(
    stage: StageConfig, plan: Plan, models: Mapping[str, RewardModel], stages: Mapping[str, StageConfig]
) -> StageConfig:
    """The stage with larger micro-batches, if `workers.tokens_per_microbatch` is `auto` and its GPUs have memory for
    them. Nothing changes where the size of a GPU or of a model is unknown. Arguments as of `MemoryNeeds`."""
    if stage.workers.tokens_per_microbatch != "auto":
        return stage
    gpus_are_known = all(plan.nodes[slot.node].gpu_bytes for slot in plan.slots.values() if slot.gpus)
    for tokens in GPU_MICRO_BATCHES if plan.uses_gpus and gpus_are_known else ():
        workers = stage.workers.model_copy(update={"tokens_per_microbatch": tokens})
        candidate = stage.model_copy(update={"workers": workers})
        needs = MemoryNeeds(candidate, plan, models, stages)
        models_are_known = all(needs.part_memory(part.name) is not None for part in plan.parts)
        if models_are_known and all(total.fits for total in needs.totals()):
            return candidate
    return stage


def model_folder(name: str) -> Path:
    """The folder of a model's config: a local one, a recipe's, or one in the hub's cache."""
    if makes_model(name):
        return recipe_model_folder(name)
    path = Path(name)
    return policy_of_run(path) if path.is_dir() or is_path(name) else hub.fetched_model(name) or path


def _adapter_parameters(sizes: ModelSizes, rank: int) -> float:
    """Number of parameters of an adapter on every linear layer of a dense model."""
    attention = 4 * sizes.hidden + 2 * (sizes.hidden + sizes.key_value_width)
    return sizes.layers * rank * (attention + 3 * (sizes.hidden + sizes.intermediate))


@cache
def _count_in_config(folder: Path) -> int:
    """Number of parameters of the model that transformers builds from a folder's config, on the meta device; 0 if
    transformers cannot build it. Takes seconds, since it imports torch."""
    try:
        import torch
        from transformers import AutoConfig

        with torch.device("meta"), limits(*BUILDING):
            config = AutoConfig.from_pretrained(folder)
            model = policy_class(config).from_config(config)
    except Exception:  # some models compute with their weights while they are built
        return 0
    return sum(parameter.numel() for parameter in model.parameters())
