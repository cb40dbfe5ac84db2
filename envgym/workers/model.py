"""The worker of a model: it loads the model and computes log-probabilities or values. Its base classes train with
DeepSpeed (`learning`), save and restore the state (`state`) and export the weights (`export`).

One process is one rank. The ranks of a role form a process group; the controller is outside of it and calls the same
method on every rank. All of this runs in the worker, so torch may be imported at the top; DeepSpeed is imported once
the process's environment names the accelerator and the rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401  # imported early: loading may have to wait for others
from torch import nn

from envgym.errors import ConfigError
from envgym.learner import Learner, pad
from envgym.models.vision import takes_images
from envgym.processes.gpus import check_visible_gpu, peak_flops
from envgym.types import Row

from . import checkpoint, zero
from .adapter import Adapter
from .config import WorkerSpec
from .export import flops_per_token
from .images import attend_within_images
from .learning import ModelLearning
from .micro_batches import RankInfo, choose_layout, micro_batches, network_inputs
from .network import TokenNetwork, add_noise, be_deterministic, check_experts, has_experts, load_model
from .optimizer import MovingAverage, freeze, mark_for_muon, mark_vision, muon_optimizer
from .sequence_parallel import Slices
from .trials import obstacle_to_sharing, try_fused_head, try_fused_layers, try_kernel, use_packing

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray


class ModelWorker(ModelLearning):
    """One rank of one model.

        worker = ModelWorker(WorkerSpec("actor", "path/or/hub-id", RoleSpec(trained=True), learner={"name": "grpo"}))
        worker.load()
        metrics = worker.accumulate(microbatches, normalizers)   # one optimizer step's gradient
        worker.step(lr=1e-6)

    A model that is not trained only runs forward passes, and needs no learner. With several ranks, `load` takes the
    result of rank 0's `address`, and all calls are collective.
    """

    def __init__(self, spec: WorkerSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        self.settings = spec.settings
        self._budget = spec.settings.budget
        self.trained = spec.role_spec.trained
        self.adapter: Adapter | None = None
        """Trained instead of the weights, with `lora.rank`."""
        self.network: Any = None
        self.engine: Any = None
        """DeepSpeed's engine around `network`, or `network` itself if it is neither trained nor partitioned."""
        self.learner = _make_learner(spec.learner) if spec.learner and self.trained else None
        self.average: MovingAverage | None = None
        self._writer = checkpoint.Writer()
        if torch.cuda.is_available():
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        check_visible_gpu(self.device.type)
        if "OMP_NUM_THREADS" not in os.environ:  # two ranks with all cores each are many times slower
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.settings.ranks))
        if spec.deterministic:
            be_deterministic()

    # -- life ---------------------------------------------------------------------------------------------

    def address(self) -> str:
        """A free `host:port` on this rank's machine, at which the ranks can meet."""
        return zero.free_address()

    def load(self, address: str | None = None) -> RankInfo:
        """Load the model and, if it is trained or partitioned, join the other ranks. Returns `info()`.

        The order matters: generators are seeded before a missing head is initialized, so that it is the same on all
        ranks; ranks join before they load, since some receive their parameters from others; adapters are added before
        layers are frozen; FLOPs are counted before the model is partitioned.

        Raises `EnvgymError` if the model does not load.
        """
        self._seed_generators()
        learner_config = self.learner.config if self.learner else None
        self.settings.check(self.spec.role, learner_config)
        config = zero.config(self.settings, learner_config, self.dtype, self.device)
        partitioned = self.settings.partitions(trained=self.trained)
        joins = self.trained or partitioned or self.settings.ranks_per_row > 1
        if joins:
            zero.join_process_group(address, self.rank, self.settings.ranks, self.device)
            zero.check_device(self.settings, self.dtype, self.device)
        model = self._load_weights(partitioned=partitioned)
        if self.spec.images is not None:
            attend_within_images(model)
        if joins:
            zero.wait_for_ranks(self.device)
        slices = self._split_attention(model)
        self._prepare_for_training(model)
        self._flops = flops_per_token(model)
        self._wrap(model, slices, config, partitioned=partitioned or self.settings.tensor_parallel > 1)
        return self.info()

    def _load_weights(self, *, partitioned: bool) -> nn.Module:
        """The model of the folder. If parameters are partitioned, only rank 0 reads them and sends the other parts,
        except with AutoTP, which takes each rank's part from that rank's copy."""
        uninitialized = partitioned and self.rank > 0 and self.settings.tensor_parallel == 1
        name, head, attention = self.spec.model, self.spec.role_spec.head, self.settings.attention
        return load_model(
            name, head, self.dtype, attention=attention, uninitialized=uninitialized, quantize=self.spec.lora.quantize
        )

    def _split_attention(self, model: nn.Module) -> Slices | None:
        """Let each of the ranks that split token sequences attend with a share of the heads. None: no ranks do."""
        size = self.settings.tensor_parallel
        if self.settings.ranks_per_row > 1 and takes_images(model.config):
            raise ConfigError(
                f"{self.spec.model} is a vision-language model, whose rows ranks cannot share: set "
                "workers.sequence_parallel=1 and workers.tensor_parallel=1"
            )
        if size > 1:
            zero.check_split(model, size)
        if self.settings.sequence_parallel == 1:
            return None
        slices = Slices.create(self.settings.sequence_parallel, stride=size)
        slices.install(model, model.config.get_text_config().num_attention_heads // size)
        return slices

    def _prepare_for_training(self, model: nn.Module) -> None:
        """Add the adapter, checkpoint activations, freeze layers and add NEFTune's noise, as the settings say."""
        if self.spec.lora.rank:
            self.adapter = Adapter(model, self.spec.lora, base=self.spec.model, head=self.spec.role_spec.head)
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.learner is not None:
            main_role = next(name for name, spec in self.learner.roles.items() if spec.trained)
            mark_vision(model, frozen=self.spec.images is None)
            # One list of names serves all trained models: a critic may lack the policy's head.
            freeze(model, self.learner.config.freeze, strict=self.spec.role == main_role)
            if (alpha := self.learner.config.neftune_alpha) and self.spec.role == main_role:
                add_noise(model, alpha, rows_are_shared=self.settings.ranks_per_row > 1)

    def _wrap(self, model: nn.Module, slices: Slices | None, config: Mapping[str, Any], *, partitioned: bool) -> None:
        """Wrap the model in its `TokenNetwork` (`network`), and that in DeepSpeed's engine if it is trained or
        partitioned (`engine`); start the moving average."""
        role = self.spec.role_spec
        self.network = TokenNetwork(
            model,
            role.head,
            entropy=role.entropy,
            balance=self._balances_experts(model),
            slices=slices,
            top_k=role.top_k,
        )
        if self.settings.tensor_parallel > 1:
            zero.prepare_split(self.network, model)
        if self.trained or partitioned:
            self.engine = zero.engine(self.network, config, self.device, self._optimizer(), self._writer)
        else:
            self.engine = self.network.to(self.device).requires_grad_(False)
        if self.learner is not None and self.spec.role == "actor" and (decay := self.learner.config.ema_decay):
            self.average = MovingAverage(dict(model.named_parameters()), decay, self._average_device)
        self._notes = []
        if self.settings.kernels == "auto" and not self.settings.compile:
            self._notes.append(try_fused_layers(self.network, self.engine, self.device))
            self._notes.append(try_fused_head(self.network, self.device))
        if self.settings.sequence_parallel == 1:
            self._notes.append(try_kernel(self.network, self.engine, self.device))
            use_packing(self.network, self.engine, self.settings.packing, self.device)
        self._not_shared = self._obstacle_to_sharing()

    def _obstacle_to_sharing(self) -> str:
        """The reason why prefixes that rows share are not computed once, or an empty string."""
        if not self.settings.share_prefixes:
            return "workers.share_prefixes=false"
        if self.settings.ranks_per_row > 1 or self.settings.compile:
            return "ranks split them" if self.settings.ranks_per_row > 1 else "workers.compile is true"
        return obstacle_to_sharing(self.network, self.engine, self.device, trained=self.trained)

    def info(self) -> RankInfo:
        """Facts of this rank."""
        parameters = list(self.network.parameters())
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        on_gpu = self.device.type == "cuda"
        return RankInfo(
            n_parameters=sum(zero.n_numbers(p) for p in parameters),
            n_trained=sum(zero.n_numbers(p) for p in parameters if p.requires_grad),
            adapter=self.adapter is not None,
            device=str(self.device),
            dtype=dtype,
            vocabulary=self.network.model.config.get_text_config().vocab_size,
            attention=self.network.model.config._attn_implementation,
            packed=self.network.packed,
            not_shared=self._not_shared,
            notes=tuple(filter(None, self._notes)),
            flops_per_token=self._flops,
            peak_flops=peak_flops(torch.cuda.get_device_name(self.device), dtype) if on_gpu else None,
        )

    def close(self) -> None:
        """Free the model. The process group is not ended with it: other models of the process may use it."""
        if hasattr(self.engine, "destroy"):
            self.engine.destroy()
        self.engine = self.network = None
        vars(self).pop("images", None)

    def offload(self, keep_weights: bool) -> None:
        """Free the device's memory, except for the weights if `keep_weights`. Call `onload` before computing again."""
        if self.average is not None:
            self.average.move(torch.device("cpu"))
        zero.offload(self.engine, self.device, keep_weights=keep_weights)

    def onload(self) -> None:
        """Undo `offload`."""
        zero.onload(self.engine, self.device)
        if self.average is not None:
            self.average.move(self._average_device)

    @property
    def _average_device(self) -> torch.device:
        return torch.device("cpu") if self.settings.offload_optimizer else self.device

    # -- forward passes -----------------------------------------------------------------------------------

    def forward_base(self, samples: Sequence[Row], *, with_images: bool = False) -> list[FloatArray]:
        """`forward` without the adapter: as before training."""
        assert self.adapter is not None
        with self.adapter.disable():
            return self.forward(samples, with_images=with_images)

    def forward(self, samples: Sequence[Row], *, with_images: bool = False) -> list[FloatArray]:
        """One float32 array [T] per sample, in order. `arrays` are not read. `with_images`: any sample, of any rank,
        has an image.

        `lm` head: log p(token t | tokens before t), in nats, at the token's temperature, of tokens that have a weight
        or were sampled; 0 for others, whose logits are not computed, and at t = 0. With `top_k`, [T, k, 2]: (log-
        probability, id) of the most likely tokens at t. `scalar` head: values of all tokens.
        """
        self.engine.eval()
        units = [sample.copy_with(arrays={}, microbatch_key=index) for index, sample in enumerate(samples)]
        shares_prefixes = not with_images and not self._not_shared
        layout = choose_layout(units, shares_prefixes=shares_prefixes, packed=self.network.packed)
        [batches] = micro_batches(units, self._budget, 1, layout=layout)
        # If parameters are partitioned, all ranks must bring in the same ones.
        blank = with_images and self.settings.partitions(trained=self.trained)
        outputs: list[FloatArray] = [np.empty(0, np.float32)] * len(samples)
        with torch.no_grad():
            for batch in self._pad_to_other_ranks(batches):
                packed = layout == "packed"
                images = self.images.tensors(batch, packed=packed, blank=blank) if with_images else None
                inputs = network_inputs(batch, [pad(batch, self.device)], self.device, layout, images=images)
                [lines] = self.engine(*inputs).values()
                for sample, line in zip(batch, lines.cpu().numpy(), strict=True):
                    outputs[sample.microbatch_key] = line[: len(sample.token_ids)].copy()
        return outputs

    def _pad_to_other_ranks(self, batches: list[list[Row]]) -> list[list[Row]]:
        """Repeat the last micro-batch: with partitioned parameters all ranks must make the same number of calls."""
        if self.settings.ranks == 1 or not self.settings.partitions(trained=self.trained):
            return batches
        count = torch.tensor(len(batches), device=self.device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
        return batches + [batches[-1]] * (int(count) - len(batches))

    # -- what `load` needs ----------------------------------------------------------------------------------

    def _balances_experts(self, model: torch.nn.Module) -> bool:
        """True if the load-balancing loss applies. A model with a scalar head may be dense. Raises `ConfigError` for
        another model without experts, and with sequence parallelism."""
        if self.learner is None or not self.learner.config.moe_aux_coef:
            return False
        if self.settings.sequence_parallel > 1:
            raise ConfigError(
                "learner.moe_aux_coef does not work with workers.sequence_parallel above 1: set only one of them"
            )
        if self.spec.role_spec.head == "scalar" and not has_experts(model):
            return False
        check_experts(model)
        return True

    def _optimizer(self) -> Callable[[Sequence[torch.nn.Parameter]], Any] | None:
        """A factory of the optimizer, if DeepSpeed's JSON does not name it."""
        if self.learner is None or self.learner.config.optimizer != "muon":
            return None
        mark_for_muon(self.network.model)
        return muon_optimizer(self.learner.config, self.device, offloaded=self.settings.offload_optimizer)


def _make_learner(settings: Mapping[str, Any]) -> Learner:
    from envgym.registry import load_component

    kind: Any = load_component("learner", settings["name"])
    learner: Learner = kind(kind.Config.model_validate(settings))
    return learner
