"""The worker that holds a model: it loads it, scores samples and, by its bases, learns from them on DeepSpeed
(`learning`), keeps its state in files (`state`) and hands its weights out (`export`).

One process is one rank. The ranks of a role form a process group of their own; the controller is no part of it
and calls the same method on every rank. Everything here runs in the worker, so torch may be imported at the top;
DeepSpeed is imported once the process's environment names the accelerator and the rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401  # here, not when a model is loaded, which may have to wait for others
from torch import nn

from envgym.errors import ConfigError
from envgym.learner import Learner, TrainSample

from . import checkpoint, tensor_parallel, zero
from .adapter import Adapter
from .learning import ModelLearning
from .metrics import peak_flops
from .micro_batches import micro_batches, network_inputs, pad
from .network import TokenScorer, add_noise, be_deterministic, check_experts, has_experts, load_model, use_packing
from .optimizer import MovingAverage, freeze, mark_for_muon, muon_optimizer
from .parameters import flops_per_token, n_numbers
from .sequence_parallel import Slices
from .spec import RankInfo, WorkerSpec

if TYPE_CHECKING:
    from envgym.learner import FloatArray


class ModelWorker(ModelLearning):
    """One rank of one model.

        worker = ModelWorker(WorkerSpec("actor", "path/or/hub-id", RoleSpec(trained=True), learner={"name": "grpo"}))
        worker.load()
        metrics = worker.accumulate(microbatches, denominators)   # one optimizer step's gradient
        worker.step(lr=1e-6)

    A model that is not trained only scores, and needs no learner. With several ranks, `load` is given what rank 0's
    `address` returned, and every call must be made on all ranks at once.
    """

    def __init__(self, spec: WorkerSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        self.settings = spec.settings
        self.trained = spec.role_spec.trained
        self.adapter: Adapter | None = None
        """Learns in place of the weights, with `lora.rank`."""
        self.network: Any = None
        self.engine: Any = None
        """DeepSpeed's engine around `network`, or `network` itself where DeepSpeed has nothing to do."""
        self.learner = _make_learner(spec.learner) if spec.learner and self.trained else None
        self.average: MovingAverage | None = None
        self._writer = checkpoint.Writer()
        if torch.cuda.is_available():
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:  # two ranks with all cores each are many times slower
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.settings.ranks))
        if spec.deterministic:
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

    def load(self, address: str | None = None) -> RankInfo:
        """Load the model and, where it is trained or partitioned, meet the other ranks. Returns `info()`.

        The order matters: generators are seeded before a head is drawn that the checkpoint lacks, so that all ranks
        draw the same; ranks meet before they load, since some take their parameters from others; adapters are there
        before layers are frozen; operations are counted while the model is whole, before it is spread over the ranks.

        Raises `EnvgymError` where the model does not load.
        """
        self._seed_generators()
        learner_config = self.learner.config if self.learner else None
        self.settings.check(self.spec.role, learner_config)
        config = zero.config(self.settings, learner_config, self.dtype, self.device)
        partitioned = self.settings.partitions(trained=self.trained)
        meets = self.trained or partitioned or self.settings.ranks_per_row > 1
        if meets:
            zero.join(address, self.rank, self.settings.ranks, self.device)
            zero.check(self.settings, self.dtype, self.device)
        model = self._load_weights(partitioned=partitioned)
        if meets:
            zero.wait(self.device)
        slices = self._cut_attention(model)
        self._prepare_for_learning(model)
        self._flops = flops_per_token(model)
        self._wrap(model, slices, config, spread=partitioned or self.settings.tensor_parallel > 1)
        return self.info()

    def _load_weights(self, *, partitioned: bool) -> nn.Module:
        """The model as its folder has it. Partitioned parameters come from rank 0, which alone has to hold all of them
        for a while. (Not with AutoTP: it cuts a rank's part out of what that rank has.)"""
        empty = partitioned and self.rank > 0 and self.settings.tensor_parallel == 1
        name, head, attention = self.spec.model, self.spec.role_spec.head, self.settings.attention
        return load_model(name, head, self.dtype, attention=attention, empty=empty, quantize=self.spec.lora.quantize)

    def _cut_attention(self, model: nn.Module) -> Slices:
        """Let the ranks that share rows each attend with a share of the heads."""
        size = self.settings.tensor_parallel
        if size > 1:
            tensor_parallel.check(model, size)
        slices = Slices.of(self.settings.sequence_parallel, stride=size)
        slices.install(model, model.config.get_text_config().num_attention_heads // size)
        return slices

    def _prepare_for_learning(self, model: nn.Module) -> None:
        """Add the adapter, checkpoint activations, freeze layers and add NEFTune's noise, as the settings say."""
        if self.spec.lora.rank:
            self.adapter = Adapter(model, self.spec.lora, base=self.spec.model, head=self.spec.role_spec.head)
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.learner is not None:
            first = next(name for name, spec in self.learner.roles.items() if spec.trained)
            # One list of names serves all trained models: a critic may lack the policy's head.
            freeze(model, self.learner.config.freeze, strict=self.spec.role == first)
            if (alpha := self.learner.config.neftune_alpha) and self.spec.role == first:
                add_noise(model, alpha, shared=self.settings.ranks_per_row > 1)

    def _wrap(self, model: nn.Module, slices: Slices, config: Mapping[str, Any], *, spread: bool) -> None:
        """Put the model behind what computes its outputs, and that behind DeepSpeed where it is trained or spread."""
        role = self.spec.role_spec
        self.network = TokenScorer(
            model, role.head, entropy=role.entropy, balance=self._balances(model), slices=slices, top_k=role.top_k
        )
        if self.settings.tensor_parallel > 1:
            tensor_parallel.prepare(self.network, model)
        if self.trained or spread:
            self.engine = zero.engine(self.network, config, self.device, self._optimizer(), self._writer)
        else:
            self.engine = self.network.to(self.device).requires_grad_(False)
        if self.learner is not None and self.spec.role == "actor" and (decay := self.learner.config.ema_decay):
            self.average = MovingAverage(dict(model.named_parameters()), decay, self._averages_on)
        if self.settings.sequence_parallel == 1:
            use_packing(self.network, self.engine, self.settings.packing, self.device)

    def info(self) -> RankInfo:
        """Facts of this rank."""
        parameters = list(self.network.parameters())
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        on_gpu = self.device.type == "cuda"
        return RankInfo(
            n_parameters=sum(n_numbers(p) for p in parameters),
            n_trained=sum(n_numbers(p) for p in parameters if p.requires_grad),
            adapter=self.adapter is not None,
            device=str(self.device),
            dtype=dtype,
            vocabulary=self.network.model.config.get_text_config().vocab_size,
            attention=self.network.model.config._attn_implementation,
            packed=self.network.packed,
            flops_per_token=self._flops,
            peak_flops=peak_flops(torch.cuda.get_device_name(self.device), dtype) if on_gpu else None,
        )

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

    # -- scoring ------------------------------------------------------------------------------------------

    def forward_base(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """`forward` of the model without its adapter: as it was before it learned."""
        assert self.adapter is not None
        with self.adapter.off():
            scores: list[FloatArray] = self.forward(samples)
        return scores

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def forward(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """One float32 array [T] a sample, in order. `arrays` are not read.

        `lm` head: log p(token t | those before), in nats, at the token's temperature, of tokens that have a weight or
        were sampled; 0 for the others, of which no logits are computed, and at t = 0. With `top_k`, [T, k, 2]: the
        tokens likeliest in the place of t, as log-probability and id each. `scalar`: values, of all tokens.
        """
        self.engine.eval()
        numbered = [replace(sample, arrays={}, batch_unit=index) for index, sample in enumerate(samples)]
        [batches] = micro_batches(numbered, self.settings.budget, 1, packed=self.network.packed)
        scores: list[FloatArray] = [np.empty(0, np.float32)] * len(samples)
        for batch in self._as_many_as_other_ranks(batches):
            [lines] = self.engine(*network_inputs(batch, [pad(batch, self.device)], self.device)).values()
            for sample, line in zip(batch, lines.cpu().numpy(), strict=True):
                scores[sample.batch_unit] = line[: len(sample)].copy()
        return scores

    def _as_many_as_other_ranks(self, batches: list[list[TrainSample]]) -> list[list[TrainSample]]:
        """With partitioned parameters every rank must make the same number of calls: repeat the last one."""
        if self.settings.ranks == 1 or not self.settings.partitions(trained=self.trained):
            return batches
        most = torch.tensor(len(batches), device=self.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return batches + [batches[-1]] * (int(most) - len(batches))

    # -- what `load` needs ----------------------------------------------------------------------------------

    def _balances(self, model: torch.nn.Module) -> bool:
        """The model's experts are kept equally busy. A critic may be dense beside a mixture of experts."""
        if self.learner is None or not self.learner.config.moe_aux_coef:
            return False
        if self.settings.sequence_parallel > 1:
            raise ConfigError("learner.moe_aux_coef and workers.sequence_parallel above 1: leave one of them out")
        if self.spec.role_spec.head == "scalar" and not has_experts(model):
            return False
        check_experts(model)
        return True

    def _optimizer(self) -> Callable[[Sequence[torch.nn.Parameter]], Any] | None:
        """A function that makes the optimizer, where DeepSpeed's JSON does not name it."""
        if self.learner is None or self.learner.config.optimizer != "muon":
            return None
        mark_for_muon(self.network.model)
        return muon_optimizer(self.learner.config, self.device, offloaded=self.settings.offload_optimizer)


def _make_learner(settings: Mapping[str, Any]) -> Learner:
    from envgym.registry import load_component

    kind: Any = load_component("learner", settings["name"])
    learner: Learner = kind(kind.Config.model_validate(settings))
    return learner
