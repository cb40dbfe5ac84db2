"""The worker that holds a model: it scores rows, learns from them on DeepSpeed, and hands its weights out.

One process is one rank. The ranks of a role form a process group of their own; the controller is no part of it
and calls the same method on every rank. Everything here runs in the worker, so torch may be imported at the top;
DeepSpeed is imported once the process's environment names the accelerator and the rank.
"""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401  # here, not when a model is loaded, which may have to wait for others

from envgym.errors import ConfigError, RunError
from envgym.learner import Learner, Metrics, Outputs, RowBatch, TrainSample
from envgym.models.lora import LoraConfig

from . import checkpoint, reshard, tensor_parallel, zero
from .adapter import Adapter
from .config import WorkersConfig
from .export import WeightExport
from .layout import cost, is_silent, micro_batches, network_inputs, pad
from .metrics import add, mismatch, peak_flops, peak_memory
from .network import TokenScorer, add_noise, be_deterministic, check_experts, has_experts, load_model, use_packing
from .optimizer import MovingAverage, freeze, mark_for_muon, muon_optimizer
from .parameters import averaged_parameters, flops_per_token, n_numbers
from .sequence_parallel import Slices

if TYPE_CHECKING:
    from envgym.learner import FloatArray


class ModelWorker(WeightExport):
    """One rank of one model.

        worker = ModelWorker(role="actor", model="path/or/hub-id", learner="grpo", learner_config={...})
        worker.load()
        metrics = worker.accumulate(microbatches, denominators)   # one optimizer step's gradient
        worker.step(lr=1e-6)

    A model that is not `trained` only scores, and needs no learner. With several ranks, `load` is given what
    rank 0's `address` returned, and every call must be made on all ranks at once.
    """

    def __init__(
        self,
        *,
        role: str,
        model: str,
        learner: str | None = None,
        learner_config: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        trained: bool = True,
        head: Literal["lm", "scalar"] = "lm",
        top_k: int = 0,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.role = role
        self.model_name = model
        self.trained = trained
        self.head = head
        self.top_k = top_k
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.settings = WorkersConfig.model_validate(settings or {})
        self.lora = LoraConfig.model_validate(lora or {})
        self.adapter: Adapter | None = None
        """Learns in place of the weights, with `lora.rank`."""
        self.network: Any = None
        self.engine: Any = None
        """DeepSpeed's engine around `network`, or `network` itself where DeepSpeed has nothing to do."""
        self.learner = _make_learner(learner, learner_config or {}) if learner and trained else None
        self._compared = ""
        """`RoleSpec.compared` of its role."""
        self.average: MovingAverage | None = None
        self._writer = checkpoint.Writer()
        if torch.cuda.is_available():
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:  # two ranks with all cores each are many times slower
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
        if deterministic:
            be_deterministic()

    # -- life ---------------------------------------------------------------------------------------------

    def device_type(self) -> str:
        """The kind of device the model will be on: `cpu`, `cuda`, …"""
        return str(self.device.type)

    def address(self) -> str:
        """`host:port` at which the ranks can meet, on this rank's machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{os.environ.get('ENVGYM_NODE_ADDRESS', '127.0.0.1')}:{probe.getsockname()[1]}"

    def load(self, address: str | None = None) -> dict[str, Any]:
        """Load the model and, where it is trained or partitioned, meet the other ranks. Returns `info()`.

        Raises `EnvgymError` where the model does not load.
        """
        self._seed_generators()  # a head that the checkpoint lacks is drawn alike on every rank
        learner_config = self.learner.config if self.learner else None
        self.settings.check(self.role, learner_config)
        partitioned = self.settings.partitions(trained=self.trained)
        dtype = _dtype(self.settings.dtype, self.device)
        config = zero.config(self.settings, learner_config, dtype, self.device)
        tensor_parallel_size, shared = self.settings.tensor_parallel, self.settings.ranks_per_row > 1
        joined = self.trained or partitioned or shared
        if joined:
            zero.join(address, self.rank, self.world_size, self.device)
            zero.check(self.settings, dtype, self.device)
        # Partitioned parameters come from rank 0, which alone has to hold all of them for a while. (Not with AutoTP: it
        # cuts a rank's part out of what that rank has.)
        empty = partitioned and self.rank > 0 and tensor_parallel_size == 1
        attention = self.settings.attention
        model = load_model(
            self.model_name, self.head, dtype, attention=attention, empty=empty, quantize=self.lora.quantize
        )
        if joined:
            zero.wait(self.device)
        if tensor_parallel_size > 1:
            tensor_parallel.check(model, tensor_parallel_size)
        slices = Slices.of(self.settings.sequence_parallel, stride=tensor_parallel_size)
        slices.install(model, model.config.get_text_config().num_attention_heads // tensor_parallel_size)
        if self.lora.rank:
            self.adapter = Adapter(model, self.lora, base=self.model_name, head=self.head)
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.learner is not None:
            roles = self.learner.roles
            first = next(name for name, spec in roles.items() if spec.trained)
            # One list of names serves all trained models: a critic may lack the policy's head.
            freeze(model, self.learner.config.freeze, strict=self.role == first)
            if (alpha := self.learner.config.neftune_alpha) and self.role == first:
                add_noise(model, alpha, shared=shared)
        self._flops = flops_per_token(model)  # of all of it, before it is spread over ranks
        role = self.learner.roles.get(self.role) if self.learner else None
        self._compared = role.compared if role else ""
        self.network = TokenScorer(
            model,
            self.head,
            entropy=role is not None and role.entropy,
            balance=self._balances(model),
            slices=slices,
            top_k=self.top_k,
        )
        if tensor_parallel_size > 1:
            tensor_parallel.prepare(self.network, model)
        if self.trained or partitioned or tensor_parallel_size > 1:
            self.engine = zero.engine(self.network, config, self.device, self._optimizer(), self._writer)
        else:
            self.engine = self.network.to(self.device).requires_grad_(False)
        if learner_config and learner_config.ema_decay and self.role == "actor":
            self.average = MovingAverage(dict(model.named_parameters()), learner_config.ema_decay, self._averages_on)
        if self.settings.sequence_parallel == 1:
            use_packing(self.network, self.engine, self.settings.packing, self.device)
        return self.info()

    def info(self) -> dict[str, Any]:
        """Facts of this rank: parameters (of the whole model; those that learn), adapter, device, ids in the
        vocabulary, ZeRO stage, rank, attention, packing.

        `flops_per_token` (a, b): learning from a token of a sequence of T takes the model a + b T FLOPs.
        `peak_flops`: what this rank's device can do in a second, None where that is not known (on a CPU).
        """
        peak = None
        dtype = str(next(self.network.parameters()).dtype).removeprefix("torch.")
        if self.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(self.device), dtype)
        return {
            "role": self.role,
            "n_parameters": sum(n_numbers(p) for p in self.network.parameters()),
            "n_trained": sum(n_numbers(p) for p in self.network.parameters() if p.requires_grad),
            "adapter": self.adapter is not None,
            "device": str(self.device),
            "dtype": dtype,
            "vocabulary": self.network.model.config.get_text_config().vocab_size,
            "zero_stage": self._spread["zero_stage"],
            "rank": self.rank,
            "attention": self.network.model.config._attn_implementation,
            "packed": self.network.packed,
            "flops_per_token": self._flops,
            "peak_flops": peak,
        }

    def close(self) -> None:
        """Let go of the model. The process group lives as long as the process: others may be in it."""
        if hasattr(self.engine, "destroy"):
            self.engine.destroy()
        self.engine = self.network = None

    def offload(self, keep_weights: bool) -> None:
        """Give the device's memory to others, but for the weights with `keep_weights`. Nothing is computed until
        `onload`."""
        if self.average is not None:
            self.average.move(torch.device("cpu"))
        zero.offload(self.engine, self.device, keep_weights=keep_weights)

    def onload(self) -> None:
        """Take the memory back."""
        zero.onload(self.engine, self.device)
        if self.average is not None:
            self.average.move(self._averages_on)

    @property
    def _averages_on(self) -> torch.device:
        return torch.device("cpu") if self.settings.offload_optimizer else self.device

    # -- scoring and learning -----------------------------------------------------------------------------

    def forward_base(self, rows: Sequence[TrainSample]) -> list[FloatArray]:
        """`forward` of the model without its adapter: as it was before it learned."""
        assert self.adapter is not None
        with self.adapter.off():
            scores: list[FloatArray] = self.forward(rows)
        return scores

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def forward(self, rows: Sequence[TrainSample]) -> list[FloatArray]:
        """One float32 array [T] a row, in order. `arrays` are not read.

        `lm` head: log p(token t | those before), in nats, at the token's temperature, of tokens that have a weight or
        were sampled; 0 for the others, of which no logits are computed, and at t = 0. With `top_k`, [T, k, 2]: the
        tokens likeliest in the place of t, as log-probability and id each. `scalar`: values, of all tokens.
        """
        self.engine.eval()
        numbered = [replace(row, arrays={}, batch_unit=index) for index, row in enumerate(rows)]
        [batches] = micro_batches(numbered, self.settings.budget, 1, packed=self.network.packed)
        scores: list[FloatArray] = [np.empty(0, np.float32)] * len(rows)
        name = "values" if self.head == "scalar" else "likeliest" if self.top_k else "logprobs"
        for batch in self._as_many_as_other_ranks(batches):
            numbers = self._forward(batch, [pad(batch, self.device)])[name]
            for row, line in zip(batch, numbers.cpu().numpy(), strict=True):
                scores[row.batch_unit] = line[: len(row.token_ids)].copy()
        return scores

    def accumulate(self, microbatches: Sequence[list[TrainSample]], denominators: Mapping[str, float]) -> Metrics:
        """Forward and backward over all of this rank's micro-batches of one optimizer step.

        `denominators` are the whole step's, so that the gradient does not depend on how it was cut. That of the loss
        which balances experts does: it is each micro-batch's own, by its share of the step's tokens.
        """
        self.engine.train()
        self._logprobs: list[FloatArray] = []
        shares = self._shares_of_tokens(microbatches) if self.network.balance else [0.0] * len(microbatches)
        total: Metrics = {}
        for index, batch in enumerate(microbatches):
            self.engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
            loss, metrics = self._loss(batch, denominators, shares[index])
            # DeepSpeed averages gradients over the ranks that have the same weights; the loss is a share of the sum.
            copies = self.world_size // self.settings.tensor_parallel
            self.engine.backward(loss * copies, scale_wrt_gas=False)
            add(total, metrics)
        return total | {"memory/max": (peak_memory(self.device), 1.0)}

    def learned_logprobs(self) -> list[FloatArray]:
        """[T] float32 a row of what was accumulated last, in its order: the log-probabilities that it was learned with,
        before the step. Empty without an `lm` head."""
        return self._logprobs

    def step(self, lr: float) -> dict[str, float]:
        """Take the optimizer step for what was accumulated.

        Returns `grad_norm`, the gradient's global norm before clipping (not with Muon, where DeepSpeed only knows that
        of its orthogonalised updates); in float16 also `loss_scale` and `overflow`: 1 where it overflowed, the step
        was not taken and there is no norm.
        """
        assert self.learner is not None
        zero.set_learning_rate(self.engine, lr)
        scale = zero.loss_scale(self.engine)
        norm = zero.take_step(self.engine)
        metrics = {} if scale is None else {"loss_scale": scale, "overflow": float(norm is None)}
        if norm is None:
            return metrics
        if not math.isfinite(norm):
            raise RunError(f"the gradient of {self.role} is not finite: lower learner.lr, or look at the rewards")
        if self.average is not None:
            self.average.update()
        return metrics if self.learner.config.optimizer == "muon" else {"grad_norm": norm, **metrics}

    def _loss(
        self, rows: list[TrainSample], denominators: Mapping[str, float], share_of_tokens: float
    ) -> tuple[torch.Tensor, Metrics]:
        """A micro-batch's share of the step's loss, over all its objectives."""
        assert self.learner is not None
        by_objective: dict[str, list[TrainSample]] = {}
        in_order = rows
        for row in rows:
            by_objective.setdefault(row.objective, []).append(row)
        rows = [row for part in by_objective.values() for row in part]
        length = max(len(row.token_ids) for row in rows)
        batches = [pad(part, self.device, length) for part in by_objective.values()]
        outputs = self._forward(rows, batches)
        balance = outputs.pop("balance", None)
        if self.head == "lm":
            lines = outputs["logprobs"].detach().float().cpu().numpy()
            of_row = {id(row): line[: len(row.token_ids)] for row, line in zip(rows, lines, strict=True)}
            self._logprobs += [of_row[id(row)] for row in in_order]
        # Every parameter is in the graph: ranks must reduce the same ones.
        loss = 0.0 * next(iter(outputs.values())).sum()
        metrics: Metrics = {}
        if balance is not None:
            loss = loss + self.learner.config.moe_aux_coef * share_of_tokens * balance
            metrics["moe/aux_loss"] = (share_of_tokens * float(balance.detach()), share_of_tokens)
        if is_silent(rows):
            return loss, metrics
        sizes = [len(batch.token_ids) for batch in batches]
        parts = zip(*(numbers.split(sizes) for numbers in outputs.values()), strict=True)
        for batch, numbers in zip(batches, parts, strict=True):
            own = Outputs(**dict(zip(outputs, numbers, strict=True)))
            share, logged = self.learner.loss(self.role, own, batch, denominators)
            loss = loss + share
            add(metrics, logged)
        if not loss.isfinite():
            raise RunError(f"the loss of {self.role} is not finite")
        if self.head == "lm":
            current = torch.tensor([row.current for row in rows], device=self.device)
            old = torch.cat([batch.old_logprobs for batch in batches])
            add(metrics, mismatch(outputs["logprobs"].detach(), old, current))
        return loss, metrics

    def _forward(self, rows: Sequence[TrainSample], batches: Sequence[RowBatch]) -> dict[str, torch.Tensor]:
        """The network's outputs of a micro-batch. `batches` are its rows, in order, padded to one length."""
        inputs = network_inputs(rows, batches, self.device)
        compared = self._compared if self.network.training else ""
        others = torch.cat([batch.arrays[compared] for batch in batches]).long() if compared else None
        outputs: dict[str, torch.Tensor] = self.engine(*inputs, others)
        return outputs

    def _shares_of_tokens(self, microbatches: Sequence[list[TrainSample]]) -> list[float]:
        """Each micro-batch's share of the step's tokens, over all ranks; those that only fill up have none."""
        tokens = [0.0 if is_silent(batch) else float(cost(batch, packed=True)) for batch in microbatches]
        total = torch.tensor(sum(tokens), device=self.device)
        torch.distributed.all_reduce(total)
        return [count / max(1.0, float(total) / self.settings.ranks_per_row) for count in tokens]

    def _balances(self, model: torch.nn.Module) -> bool:
        """The model's experts are kept equally busy. A critic may be dense beside a mixture of experts."""
        if self.learner is None or not self.learner.config.moe_aux_coef:
            return False
        if self.settings.sequence_parallel > 1:
            raise ConfigError("learner.moe_aux_coef and workers.sequence_parallel above 1: leave one of them out")
        if self.head == "scalar" and not has_experts(model):
            return False
        check_experts(model)
        return True

    def _as_many_as_other_ranks(self, batches: list[list[TrainSample]]) -> list[list[TrainSample]]:
        """With partitioned parameters every rank must make the same number of calls: repeat the last one."""
        if self.world_size == 1 or not self.settings.partitions(trained=self.trained):
            return batches
        most = torch.tensor(len(batches), device=self.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return batches + [batches[-1]] * (int(most) - len(batches))

    # -- weights and state --------------------------------------------------------------------------------

    def export_adapter(self, folder: str) -> None:
        """Write the adapter as a folder in peft's form (rank 0 does)."""
        assert self.adapter is not None
        tensors = dict(self.adapter.tensors())
        if self.rank == 0:
            self.adapter.write(folder, tensors)

    def save(self, folder: str, described: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face model folder (without the tokenizer), an adapter merged into it. Rank 0 writes.

        `described` are further entries of its config.
        """
        tensors = dict(self._parameters(merged=True))
        if self.rank == 0:
            self.network.model.config.update(dict(described or {}))
            self.network.model.save_pretrained(folder, state_dict=tensors)

    def save_average(self, folder: str) -> None:
        """Write the moving average of the weights (`learner.ema_decay`) as a Hugging Face model folder, in the model's
        own number format. Rank 0 writes."""
        assert self.average is not None
        named = averaged_parameters(self.network.model, self.adapter, self.average, self.device)
        tensors = {name: tensor.cpu() for name, tensor in named if self.rank == 0}
        if self.rank == 0:
            self.network.model.save_pretrained(folder, state_dict=tensors)

    def save_state(self, folder: str, *, waits: bool = True) -> None:
        """Write weights, optimizer and random states, exactly, as they are now. Every rank writes its own part. Without
        `waits` it is only begun, from copies, and written after `finish_save`."""
        self._writer.waits = waits
        frozen_too = self.adapter is None  # an adapter's base is where the run found it
        self.engine.save_checkpoint(
            folder, tag="deepspeed", save_latest=False, exclude_frozen_parameters=not frozen_too
        )
        state: dict[str, Any] = {**self._spread, "random": checkpoint.random_states()}
        if self.average is not None:
            state["average"] = self.average.state()
        self._writer.write(Path(folder, f"rank-{self.rank}.pt"), state)

    async def finish_save(self) -> None:
        """Return once the disk has what `save_state` began to write. Raises `RunError` where it has not."""
        await self._writer.finish()

    @property
    def _spread(self) -> dict[str, int]:
        """Settings that the files of a checkpoint depend on."""
        dtype = str(_dtype(self.settings.dtype, self.device)).removeprefix("torch.")
        return {
            "world_size": self.world_size,
            "zero_stage": self.settings.runs_as(dtype, trained=self.trained),
            "tensor_parallel": self.settings.tensor_parallel,
        }

    def load_state(self, folder: str) -> None:
        """Go on from `save_state`, bit for bit where it is of as many ranks and the same ZeRO stage. Raises `RunError`
        where it is not there, or cannot be spread over these ranks."""
        state = checkpoint.read_rank(folder, self.role, 0)
        if any(state.get(name, own) != own for name, own in self._spread.items()):
            self._load_of_others(folder, state)
            return
        state = checkpoint.read_rank(folder, self.role, self.rank)
        self.engine.load_checkpoint(folder, tag="deepspeed", load_module_strict=self.adapter is None)
        if self.average is not None:
            if "average" not in state:
                raise RunError(f"the state in {folder} has no moving average: set learner.ema_decay=0")
            self.average.load_state(state["average"])
        checkpoint.set_random_states(state["random"])

    def _load_of_others(self, folder: str, state: Mapping[str, Any]) -> None:
        """Go on from the state of another number of ranks or ZeRO stage: to the rounding, with random states anew."""
        assert self.learner is not None
        reshard.check(folder, state, self.settings, self.learner.config)
        reshard.load(self.engine, Path(folder, "deepspeed"))
        self._seed_generators()

    def _optimizer(self) -> Callable[[Sequence[torch.nn.Parameter]], Any] | None:
        """A function that makes the optimizer, where DeepSpeed's JSON does not name it."""
        if self.learner is None or self.learner.config.optimizer != "muon":
            return None
        mark_for_muon(self.network.model)
        return muon_optimizer(self.learner.config, self.device, offloaded=self.settings.offload_optimizer)

    def _seed_generators(self) -> None:
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)


def _make_learner(name: str, settings: Mapping[str, Any]) -> Learner:
    from envgym.registry import load_component

    kind: Any = load_component("learner", name)
    learner: Learner = kind(kind.Config.model_validate(settings))
    return learner


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
