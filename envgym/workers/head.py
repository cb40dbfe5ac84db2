"""The heads of a model: the output layer, which returns log-probabilities of given tokens instead of logits, and
the scalar head of critics and reward models, which returns one number per token.

The logits of all tokens [N, vocabulary] never exist: they are computed for one slice of the vocabulary at a time, and
again in the backward pass, whose formulas are written out here. Slices of the vocabulary serve better than slices of
the tokens: each holds whole rows of the weight, whose gradient is then written once, in its own precision, instead of
being added up over slices. The idea of never keeping the logits is that of E. Wijmans et al., "Cut Your Losses in
Large-Vocabulary Language Models" (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from envgym.errors import ConfigError
from envgym.models.vision import takes_images

from .config import GPU_SHARE, MAX_LOGITS

MIN_SLICE = 1024
"""Minimum tokens of the vocabulary per slice: with very many rows, narrower matrices would waste the processor."""
MULTIPLE = 256
"""Slices hold multiples of so many tokens: a GPU's fast kernels take no matrix whose rows begin at odd places."""


@dataclass(frozen=True, slots=True)
class Rescaling:
    """Change of the logits after the output layer, by architecture: `cap * tanh(scale * logits / cap)`, or without
    a cap `scale * logits`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> Rescaling:
        """The rescaling that a Hugging Face config describes."""
        config = config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        return cls(scale, getattr(config, "final_logit_softcapping", None) or None)  # Gemma

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


class LogprobHead(nn.Linear):  # type: ignore[misc]  # torch is untyped here
    """A linear output layer that returns log-probabilities of tokens. It is called as a module, once per micro-batch,
    because DeepSpeed tracks the use of weights by calls of modules."""

    rescaling: Rescaling
    fused = False
    """Use the kernels of `head_kernel`, which need a GPU and a weight in at most 32 bits."""

    @classmethod
    def convert(cls, head: nn.Linear, rescaling: Rescaling) -> LogprobHead:
        """Change the class of `head` in place: its parameters, hooks and position in the model stay."""
        head.__class__ = cls
        assert isinstance(head, cls)
        head.rescaling = rescaling
        return head

    def forward(
        self,
        states: torch.Tensor,
        targets: torch.Tensor | None,
        temperatures: torch.Tensor,
        entropy: bool,
        graph: bool,
        top_k: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """The log-probabilities of `targets`, in nats, and if `entropy` the [N] entropies of the distributions.

        states [N, hidden size] in the weight's dtype, targets [N] or [N, K] int64, temperatures [N] that divide logits.
        Logits are computed in the weight's dtype, everything after them in float32 (float64 for a weight in float64).
        Entropies are part of the graph only if `graph`. With `top_k` the result is that of `top_tokens`.
        """
        if top_k:
            return self.top_tokens(states, temperatures, top_k)
        assert targets is not None, "targets are needed without top_k"
        parameters = self.weight, self.bias
        return score(
            states, *parameters, targets, temperatures, self.rescaling, entropy=entropy, graph=graph, fused=self.fused
        )

    def top_tokens(self, states: torch.Tensor, temperatures: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, k] each: log-probabilities of the k most likely tokens, in nats, in falling order, and their ids.

        Builds no graph; arguments as in `forward`.
        """
        temperatures = temperatures.to(torch.promote_types(self.weight.dtype, torch.float32))
        divide = bool((temperatures != 1).any())
        no_targets = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)
        vocabulary = _Vocabulary(states, self.weight, self.bias, no_targets, temperatures, self.rescaling, divide)
        total = torch.full_like(temperatures, -math.inf)
        top, ids = temperatures.new_empty(len(states), 0), no_targets[:, :0]
        for part in vocabulary.slices:
            logits = vocabulary.logits(part)
            total = torch.logaddexp(total, logits.logsumexp(1))
            candidates = torch.cat([ids, torch.arange(part.start, part.stop, device=ids.device).expand_as(logits)], 1)
            top, order = torch.cat([top, logits], 1).topk(min(k, candidates.shape[1]), 1)
            ids = candidates.gather(1, order)
        return top - total[:, None], ids


def score(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    rescaling: Rescaling,
    *,
    entropy: bool,
    graph: bool,
    fused: bool,
) -> tuple[torch.Tensor, ...]:
    """`LogprobHead.forward` for a weight [vocabulary, hidden size] and a bias. `fused`: by `head_kernel`."""
    columns = targets if targets.dim() == 2 else targets[:, None]
    logprobs, *entropies = _Logprobs.apply(
        states, weight, bias, columns, temperatures, rescaling, entropy, graph, torch.is_grad_enabled(), fused
    )
    return logprobs.view_as(targets), *entropies


class _Logprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """With z the logits, L = log sum exp z and H the entropy, for a token y: log p = z_y - L and H = L - sum p z, so
    d log p / dz = 1_y - p and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        rescaling: Rescaling,
        entropy: bool,
        graph: bool,
        needs_grad: bool,
        fused: bool,
    ) -> tuple[torch.Tensor, ...]:
        """[N, K] log-probabilities and, if `entropy`, [N] entropies: log sum exp over slices of the vocabulary, one
        after the other. `graph`: entropies get gradients too."""
        temperatures = temperatures.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
        divide = not fused and bool((temperatures != 1).any())
        vocabulary = _Vocabulary(states, weight, bias, targets.contiguous(), temperatures, rescaling, divide, fused)
        stored = needs_grad and len(vocabulary.slices) == 1  # then nothing is computed twice
        sums = _kernels().FusedSums(vocabulary, entropy) if fused else _Sums(vocabulary, entropy, stored)
        for part in vocabulary.slices:
            logits = vocabulary.logits(part)
            sums.add(logits, part)
        ctx.vocabulary, ctx.total, ctx.graph = vocabulary, sums.total, entropy and graph
        ctx.logits = logits if stored else None
        logprobs = sums.target_logits - ctx.total[:, None]
        if not entropy:
            return (logprobs,)
        entropies = sums.entropies
        if graph:
            ctx.entropies = entropies.clone()  # the output itself would keep its own graph alive
        else:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropies: torch.Tensor | None = None) -> tuple[Any, ...]:
        """The gradients of states, weight and bias. Logits of several slices are computed a second time."""
        vocabulary, weight = ctx.vocabulary, ctx.vocabulary.weight
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # d z / d logit = scale / temperature, applied per row instead of per logit.
        temperatures, scale = vocabulary.temperatures, vocabulary.rescaling.scale
        grad_targets = grad_logprobs / temperatures[:, None] * scale
        grad_targets, grad_rows = grad_targets.contiguous(), grad_targets.sum(1)
        grad_entropies = (
            (grad_entropies / temperatures * scale).contiguous() if ctx.graph and grad_entropies is not None else None
        )
        grad_states = torch.zeros_like(vocabulary.states, dtype=grad_targets.dtype) if needs_states else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(vocabulary.bias) if needs_bias and vocabulary.bias is not None else None
        for part in vocabulary.slices:
            gradient = _logits_gradient(ctx, part, grad_targets, grad_rows, grad_entropies)
            if grad_bias is not None:
                grad_bias[part] = gradient.sum(0)
            grad_logits = gradient.to(weight.dtype)
            if grad_states is not None:
                if weight.dtype == grad_states.dtype:
                    grad_states.addmm_(grad_logits, weight[part])
                else:
                    grad_states += grad_logits @ weight[part]
            if grad_weight is not None:
                torch.mm(grad_logits.t(), vocabulary.states, out=grad_weight[part])
            del gradient, grad_logits  # before the next slice allocates its own
        if grad_states is not None:
            grad_states = grad_states.to(vocabulary.states.dtype)
        return grad_states, grad_weight, grad_bias, *[None] * 7


class _Sums:
    """Sums of a pass over the logits of all slices, per row.

    target_logits [N, K]; total [N], log sum exp of the slices so far; mean [N], sum p z, likewise.
    """

    def __init__(self, vocabulary: _Vocabulary, entropy: bool, stored: bool) -> None:
        self._vocabulary, self._entropy, self._stored = vocabulary, entropy, stored
        self.target_logits = torch.zeros_like(vocabulary.targets, dtype=vocabulary.temperatures.dtype)
        self.total = torch.full_like(vocabulary.temperatures, -math.inf)
        self.mean = torch.zeros_like(vocabulary.temperatures)

    @property
    def entropies(self) -> torch.Tensor:
        """[N] in nats."""
        return self.total - self.mean

    def add(self, logits: torch.Tensor, part: slice) -> None:
        """Add a slice's logits [N, width], in whose memory it computes unless they are needed again."""
        self.target_logits += self._vocabulary.at_targets(logits, part)
        max_logits = logits.amax(1)
        needs_logits = self._stored or self._entropy
        powers = (logits - max_logits[:, None] if needs_logits else logits.sub_(max_logits[:, None])).exp_()
        slice_sum = powers.sum(1)
        slice_total = max_logits + slice_sum.log()
        new_total = torch.logaddexp(self.total, slice_total)
        if self._entropy:
            slice_mean = powers.mul_(logits).sum(1) / slice_sum
            self.mean = self.mean * (self.total - new_total).exp() + slice_mean * (slice_total - new_total).exp()
        self.total = new_total


def _logits_gradient(
    ctx: Any, part: slice, grad_targets: torch.Tensor, grad_rows: torch.Tensor, grad_entropies: torch.Tensor | None
) -> torch.Tensor:
    """[N, width] the gradient of a slice's logits, from the gradients of the targets' log-probabilities [N, K], whose
    sum over K is `grad_rows` [N], and of the entropies [N]. It is computed in the memory of the logits."""
    vocabulary, cap = ctx.vocabulary, ctx.vocabulary.rescaling.cap
    z = ctx.logits if ctx.logits is not None else vocabulary.logits(part)
    ctx.logits = None  # overwritten here
    if vocabulary.fused:
        entropies = ctx.entropies if grad_entropies is not None else None
        return _kernels().write_gradient(
            z, vocabulary, part, ctx.total, entropies, grad_targets, grad_rows, grad_entropies
        )
    slope = None if cap is None else 1 - (z * (vocabulary.temperatures / cap)[:, None]).square()
    log_p = z.sub_(ctx.total[:, None])
    if grad_entropies is None:
        gradient = log_p.exp_().mul_(-grad_rows[:, None])
    else:
        factor = (log_p + ctx.entropies[:, None]).mul_(-grad_entropies[:, None]).sub_(grad_rows[:, None])
        gradient = log_p.exp_().mul_(factor)
    vocabulary.add_at_targets(gradient, part, grad_targets)  # 1_y
    return gradient if slope is None else gradient.mul_(slope)


def _kernels() -> Any:
    """The module of the fused form, which needs Triton."""
    from . import head_kernel

    return head_kernel


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The output layer in slices of the vocabulary, and the positions of `targets` in them."""

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    temperatures: torch.Tensor
    rescaling: Rescaling
    divide: bool
    """True if some temperature is not 1."""
    fused: bool = False

    @property
    def _max_logits(self) -> int:
        """The maximum number of logits in memory, with what is computed from them: nothing, if fused."""
        if self.weight.device.type != "cuda":
            return MAX_LOGITS
        size: int = self.weight.element_size() + (0 if self.fused else 2 * self.temperatures.element_size())
        memory = torch.cuda.get_device_properties(self.weight.device).total_memory
        return int(memory) // GPU_SHARE // size

    @property
    def slices(self) -> list[slice]:
        size, rows = len(self.weight), max(1, len(self.targets))
        width = max(MIN_SLICE, self._max_logits // rows // MULTIPLE * MULTIPLE)
        return [slice(start, min(start + width, size)) for start in range(0, size, width)]

    def logits(self, part: slice) -> torch.Tensor:
        """[N, width] a new tensor of logits, rescaled and divided by the temperatures unless a kernel does both."""
        bias = None if self.bias is None else self.bias[part]
        logits = nn.functional.linear(self.states, self.weight[part], bias)
        if self.fused:
            return logits
        logits = self.rescaling(logits.to(self.temperatures.dtype))
        return logits.div_(self.temperatures[:, None]) if self.divide else logits

    def at_targets(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """[N, K] the targets' logits, 0 for targets in other slices."""
        columns, in_slice = self._columns(part)
        return logits.gather(1, columns).where(in_slice, 0.0)

    def add_at_targets(self, gradient: torch.Tensor, part: slice, values: torch.Tensor) -> None:
        """Add `values` [N, K] in the columns of the targets."""
        columns, in_slice = self._columns(part)
        gradient.scatter_add_(1, columns, values.where(in_slice, 0.0))

    def _columns(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.targets - part.start
        in_slice = (columns >= 0) & (columns < part.stop - part.start)
        return columns.where(in_slice, 0), in_slice


# ---------------------------------------------------------------------------------------------------------
# The scalar head


def configure_scalar_head(config: Any) -> Any:
    """Configure a scalar head in `config` (from Hugging Face), in place. Returns the class that loads the model; it
    draws a head missing from the checkpoint from the global generator. Raises `ConfigError` without such a class."""
    import transformers

    factory = transformers.AutoModelForSequenceClassification
    if takes_images(config) and type(config) not in factory._model_mapping:
        raise ConfigError(
            f"transformers has no critic or reward model of the vision-language model {config.model_type}: name a "
            "language model for this role (roles.ROLE.model), or choose a learner without one"
        )
    config.num_labels = 1
    config.reward_at = "end_of_turn"  # training sequences end there, so the reward must be read there
    config.classifier_dropout = 0.0  # Hugging Face's default drops a tenth of the head's inputs
    return factory


def scalar_head(model: nn.Module) -> nn.Module:
    """The scalar head of a model (from Hugging Face), under either of its names."""
    head: nn.Module = model.score if hasattr(model, "score") else model.classifier
    return head
