"""A worker's optimizer steps: loss and gradient per micro-batch, their metrics, DeepSpeed's step, and a check of its
weights."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from envgym.errors import ConfigError, RunError
from envgym.learner import MetricSums, Outputs, RowBatch, pad
from envgym.types import Row

from . import zero
from .images import ImageTensors, check_takes_images
from .micro_batches import Layout, add_metrics, cost, is_padding, network_inputs
from .state import ModelState

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray


CHECKED_PARAMETERS = 8
"""Parameters that are checked after a step."""
SAMPLED_WEIGHTS = 16
"""Weights of a parameter that are looked at."""


def check_weights(name: str, parameter: nn.Parameter) -> None:
    """Raise `RunError` if sampled weights of a parameter are not those of the optimizer, rounded to their format: then
    the optimizer updates numbers that neither the model nor the engine reads, and nothing is learned."""
    part, start = zero.optimizer_part(parameter)
    if part is None or not len(part):
        return
    weights = parameter.ds_tensor.data if hasattr(parameter, "ds_id") else parameter.data.reshape(-1)[start:]
    indices = torch.arange(SAMPLED_WEIGHTS, device=part.device) * (len(part) - 1) // (SAMPLED_WEIGHTS - 1)
    expected = part.detach()[indices].to(weights.device, weights.dtype)
    if not torch.equal(weights.reshape(-1)[indices.to(weights.device)], expected):
        raise RunError(
            f"after an optimizer step the weights of {name} are not those of the optimizer, so that nothing is "
            "learned: this is a bug of envgym or of this version of DeepSpeed; try another workers.zero_stage"
        )


class ModelLearning(ModelState):
    """Training of a `ModelWorker`. All calls are collective."""

    _outputs: list[FloatArray]
    _row_layout: Layout
    _with_images: bool

    def accumulate(
        self,
        microbatches: Sequence[list[Row]],
        normalizers: Mapping[str, float],
        layout: Layout = "padded",
        *,
        with_images: bool = False,
    ) -> MetricSums:
        """Forward and backward over all of this rank's micro-batches of one optimizer step. `with_images`: any row of
        the step, on any rank, has an image.

        `normalizers` are the whole step's, so that the gradient does not depend on the split into micro-batches. The
        load-balancing loss of experts does: it is averaged over micro-batches, weighted by their tokens.
        """
        self.engine.train()
        self._outputs = []
        self._row_layout = layout
        self._with_images = with_images
        shares = self._shares_of_tokens(microbatches) if self.network.balance else [0.0] * len(microbatches)
        # DeepSpeed averages gradients over the ranks with the same weights, but losses here are shares of a sum.
        copies = self.settings.ranks // self.settings.tensor_parallel
        total: MetricSums = {}
        for index, batch in enumerate(microbatches):
            self.engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
            loss, metrics, output, pushes = self._loss(batch, normalizers, shares[index])
            self.engine.backward(loss * copies, scale_wrt_gas=False)
            if output.grad is not None:
                scale = np.float32(copies * (zero.loss_scale(self.engine) or 1.0))
                pushes[:] = -output.grad.float().cpu().numpy() / scale
            add_metrics(total, metrics)
        return total | {"memory/max": (peak_memory(self.device), 1.0)}

    def accumulated_outputs(self) -> list[FloatArray]:
        """[3, T] float32 per sample of the last `accumulate`, in its order: the log-probabilities or values of its
        forward pass, the entropies of their distributions (0 for values), and minus the gradient of the step's loss by
        each log-probability or value."""
        return [lines.copy() for lines in self._outputs]

    def step(self, lr: float) -> dict[str, float]:
        """Take the optimizer step with the accumulated gradient, and update the moving average of the weights. Raises
        `RunError` for a gradient that is not finite.

        Returns `grad_norm`, the gradient's global norm before clipping (not with Muon, where DeepSpeed only has the
        norm of orthogonalised updates); in float16 also `loss_scale` and `overflow`: 1 if it overflowed, then the step
        was skipped and there is no norm.
        """
        assert self.learner is not None
        zero.set_learning_rate(self.engine, lr)
        scale = zero.loss_scale(self.engine)
        norm = zero.take_step(self.engine, with_images=self._with_images)
        metrics = {} if scale is None else {"loss_scale": scale, "overflow": float(norm is None)}
        if norm is None:
            return metrics
        if not math.isfinite(norm):
            raise RunError(f"the gradient of {self.spec.role} is not finite: lower learner.lr, or look at the rewards")
        for name, parameter in islice(self._trained, CHECKED_PARAMETERS):
            check_weights(name, parameter)
        if self.average is not None:
            self.average.update()
        return metrics if self.learner.config.optimizer == "muon" else {"grad_norm": norm, **metrics}

    @cached_property
    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters in turn, without an end, of which the next few are checked after each step.

        A step may go nowhere without any sign of it: gradients, norms and log-probabilities look as usual while the
        optimizer updates numbers that nobody reads. So a few trained parameters, others each time, are compared with
        the optimizer's. Of an adapter, its own matrices are looked at; frozen weights, in 4 bits or not, never. Tied
        weights are one parameter. A moving average follows the optimizer's weights, and is not compared.
        """
        return cycle([item for item in self.network.named_parameters() if item[1].requires_grad])

    def _loss(
        self, samples: Sequence[Row], normalizers: Mapping[str, float], share_of_tokens: float
    ) -> tuple[torch.Tensor, MetricSums, torch.Tensor, FloatArray]:
        """A micro-batch's share of the step's loss, over all its objectives; its metrics; the log-probabilities or
        values [B, T], whose gradient is retained; and the place [B, T] in `_outputs` for what that gradient says.
        Raises `RunError` if the loss is not finite. One forward pass has all samples, sorted by objective: `order` are
        their indexes."""
        assert self.learner is not None
        parts: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            parts.setdefault(sample.objective, []).append(index)
        order = [index for part in parts.values() for index in part]
        length = max([len(sample.token_ids) for sample in samples])
        batches = [pad([samples[index] for index in part], self.device, length) for part in parts.values()]
        inputs = self._inputs([samples[index] for index in order], batches)
        outputs: dict[str, torch.Tensor] = self.engine(*inputs)
        balance = outputs.pop("balance", None)
        # Puts every parameter into the graph, since all ranks must reduce the same ones.
        loss = 0.0 * next(iter(outputs.values())).sum()
        metrics: MetricSums = {}
        if (prefixes := inputs[-2]) is not None:
            n_tokens = cost(samples, layout="packed")
            metrics["tokens/shared_share"] = (float(n_tokens - len(prefixes)), float(n_tokens))
        output = outputs["logprobs" if self.network.head == "lm" else "values"]
        if output.requires_grad:
            output.retain_grad()
        zeros = torch.zeros_like(output)
        lines = torch.stack([output, outputs.get("entropy", zeros), zeros]).detach().float().cpu().numpy()
        places = zip(np.argsort(order), samples, strict=True)
        self._outputs += [lines[:, place, : len(sample.token_ids)] for place, sample in places]
        if balance is not None:
            loss = loss + self.learner.config.moe_aux_coef * share_of_tokens * balance
            metrics["moe/aux_loss"] = (share_of_tokens * float(balance.detach()), share_of_tokens)
        if is_padding(samples):
            return loss, metrics, output, lines[2]
        split = zip(*(numbers.split([*map(len, parts.values())]) for numbers in outputs.values()), strict=True)
        for batch, numbers in zip(batches, split, strict=True):
            batch_outputs = Outputs(**dict(zip(outputs, numbers, strict=True)))
            result = self.learner.loss(self.spec.role, batch_outputs, batch, normalizers)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
                raise self.learner.wrong_return(self.learner.loss, f"{result!r:.60}, which must be (loss, metrics)")
            share, logged = result
            loss = loss + share
            add_metrics(metrics, logged)
        if not loss.isfinite():
            has_feedback = any(((batch.loss_weights > 0) & batch.old_logprobs.isnan()).any() for batch in batches)
            cause = "; tokens that were not sampled are in it: feedback, say" if has_feedback else ""
            raise RunError(f"the loss of {self.spec.role} is not finite{cause}")
        if self.network.head == "lm":
            current = torch.tensor([samples[index].is_on_policy for index in order], device=self.device)
            old = torch.cat([batch.old_logprobs for batch in batches])
            add_metrics(metrics, mismatch(outputs["logprobs"].detach(), old, current))
        return loss, metrics, output, lines[2]

    def _inputs(self, samples: Sequence[Row], batches: Sequence[RowBatch]) -> tuple[Any, ...]:
        """The network's arguments for a micro-batch. `batches` are its samples, in order, padded to one length."""
        name = self.spec.role_spec.extra_token_ids
        extra_ids = torch.cat([batch.arrays[name] for batch in batches]).long() if name else None
        packed = self._row_layout == "packed"
        images = self.images.tensors(samples, packed=packed, blank=True) if self._with_images else None
        return network_inputs(samples, batches, self.device, self._row_layout, extra_ids, images)

    @cached_property
    def images(self) -> ImageTensors:
        """The tensors of rows' images: their processor is loaded with the first. Raises `ConfigError` for a model that
        takes none."""
        role, model = self.spec.role, self.network.model
        if self.spec.images is None:
            raise ConfigError(f"a row has an image, and the {role} was started for texts alone")
        check_takes_images(model.config, role, self.network.head)
        return ImageTensors(model, self.spec.model, self.spec.images, self.device)

    def _shares_of_tokens(self, microbatches: Sequence[list[Row]]) -> list[float]:
        """Each micro-batch's share of the step's tokens, over all ranks; 0 for padding micro-batches."""
        tokens = [0.0 if is_padding(batch) else float(cost(batch, layout="packed")) for batch in microbatches]
        total = torch.tensor(sum(tokens), device=self.device)
        torch.distributed.all_reduce(total)
        return [count / max(1.0, float(total) / self.settings.ranks_per_row) for count in tokens]


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process, in GiB: allocated by torch on its GPU, or resident without a GPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def mismatch(logprobs: torch.Tensor, old_logprobs: torch.Tensor, current: torch.Tensor) -> MetricSums:
    """Mismatch between the trainer's and the sampler's log-probabilities under the same weights.

    logprobs, old_logprobs [B, T] nats (old ones NaN where nothing was sampled), current [B] bool: rows that these
    weights sampled. `k3` is Schulman's estimate of KL(sampler || trainer), r - 1 - log r with r = trainer / sampler.
    Empty if there are no such tokens.
    """
    compared = old_logprobs.isfinite() & current[:, None]
    compared[:, 0] = False
    difference = (logprobs - old_logprobs)[compared].double()
    if not len(difference):
        return {}
    count = float(len(difference))
    return {
        "mismatch/mean_abs": (float(difference.abs().sum()), count),
        "mismatch/max": (float(difference.abs().max()), 1.0),
        "mismatch/k3": (float((difference.exp() - 1 - difference).sum()), count),
    }
