"""The heads of a model: the output layer, asked for the log-probabilities of given tokens instead of for logits, and
the scalar head of critics and reward models, which gives a number a token.

The logits of all tokens [N, vocabulary] never exist: they are made for a slice of the vocabulary at a time, and made
again for the backward pass, whose formulas are written out here. Slices of the vocabulary serve better than slices of
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

LOGITS_AT_ONCE = 2**25
"""Logits that exist at once: 128 MiB in float32, and as much again for what is computed from them."""
NARROWEST = 1024
"""Tokens of the vocabulary a slice has at least: with very many rows, narrower matrices would waste the processor."""


@dataclass(frozen=True, slots=True)
class Rescaling:
    """Change of the logits after the output layer, by architecture: `cap * tanh(scale * logits / cap)`, or without
    a cap `scale * logits`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Rescaling:
        """By the names that Hugging Face configs give it."""
        config = config.get_text_config()
        scale = 1.0
        if getattr(config, "logit_scale", None):  # Cohere
            scale *= config.logit_scale
        if getattr(config, "logits_scaling", None):  # Granite
            scale /= config.logits_scaling
        return cls(scale, getattr(config, "final_logit_softcapping", None) or None)  # Gemma

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


class ScoringHead(nn.Linear):  # type: ignore[misc]  # torch is untyped here
    """A linear output layer that gives log-probabilities of tokens. It is called as a module, once a micro-batch, so
    that DeepSpeed finds its weight in use where it expects to."""

    rescaling: Rescaling

    @classmethod
    def of(cls, head: nn.Linear, rescaling: Rescaling) -> ScoringHead:
        """Turn `head` itself into one: parameters, hooks and its place in the model stay."""
        head.__class__ = cls
        assert isinstance(head, cls)
        head.rescaling = rescaling
        return head

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None,
        temperatures: torch.Tensor,
        entropy: bool,
        graph: bool,
        likeliest: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """The log-probabilities of `targets`, in nats, and if `entropy` [N] entropies of what they were drawn from.

        hidden [N, hidden size] in the weight's dtype, targets [N] or [N, K] int64, temperatures [N] that divide logits.
        Logits are computed in the weight's dtype; from there on float32 counts (float64 for a weight in float64).
        Entropies are part of the graph only if `graph`. With `likeliest` = k: see there.
        """
        if likeliest:
            return self.likeliest(hidden, temperatures, likeliest)
        assert targets is not None, "there are tokens to score, or the likeliest are asked for"
        logprobs, *entropies = _Score.apply(
            hidden,
            self.weight,
            self.bias,
            targets if targets.dim() == 2 else targets[:, None],
            temperatures,
            self.rescaling,
            entropy,
            graph,
            torch.is_grad_enabled(),
        )
        return logprobs.view_as(targets), *entropies

    def likeliest(self, hidden: torch.Tensor, temperatures: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, k] each: log-probabilities of the likeliest tokens, in nats, the likeliest first, and their ids.

        Without a graph; arguments as in `forward`.
        """
        temperatures = temperatures.to(torch.promote_types(self.weight.dtype, torch.float32))
        divide = bool((temperatures != 1).any())
        none = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        vocabulary = _Vocabulary(hidden, self.weight, self.bias, none, temperatures, self.rescaling, divide)
        total = torch.full_like(temperatures, -math.inf)
        top, ids = temperatures.new_empty(len(hidden), 0), none[:, :0]
        for part in vocabulary.slices:
            logits = vocabulary.logits(part)
            total = torch.logaddexp(total, logits.logsumexp(1))
            candidates = torch.cat([ids, torch.arange(part.start, part.stop, device=ids.device).expand_as(logits)], 1)
            top, order = torch.cat([top, logits], 1).topk(min(k, candidates.shape[1]), 1)
            ids = candidates.gather(1, order)
        return top - total[:, None], ids


class _Score(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """With z the logits, L = log sum exp z and H the entropy, for a token y: log p = z_y - L and H = L - sum p z, so
    d log p / dz = 1_y - p and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        rescaling: Rescaling,
        entropy: bool,
        graph: bool,
        learns: bool,
    ) -> tuple[torch.Tensor, ...]:
        temperatures = temperatures.to(torch.promote_types(weight.dtype, torch.float32))
        divide = bool((temperatures != 1).any())
        vocabulary = _Vocabulary(hidden, weight, bias, targets, temperatures, rescaling, divide)
        taken = torch.zeros_like(targets, dtype=temperatures.dtype)
        total = torch.full_like(temperatures, -math.inf)  # log sum exp of the slices so far
        mean = torch.zeros_like(temperatures)  # sum p z, likewise
        keep = learns and len(vocabulary.slices) == 1  # then nothing is computed twice
        for part in vocabulary.slices:
            logits = vocabulary.logits(part)
            taken += vocabulary.at_targets(logits, part)
            largest = logits.amax(1)
            powers = (logits - largest[:, None] if keep or entropy else logits.sub_(largest[:, None])).exp_()
            own_sum = powers.sum(1)
            own_total = largest + own_sum.log()
            new_total = torch.logaddexp(total, own_total)
            if entropy:
                own_mean = powers.mul_(logits).sum(1) / own_sum
                mean = mean * (total - new_total).exp() + own_mean * (own_total - new_total).exp()
            total = new_total
        ctx.vocabulary, ctx.total, ctx.graph = vocabulary, total, entropy and graph
        ctx.logits = logits if keep else None
        logprobs = taken - total[:, None]
        if not entropy:
            return (logprobs,)
        entropies = total - mean
        if graph:
            ctx.entropies = entropies.clone()  # not the output itself, which would hold on to its own graph
        else:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_logprobs: torch.Tensor, d_entropies: torch.Tensor | None = None) -> tuple[Any, ...]:
        vocabulary, weight = ctx.vocabulary, ctx.vocabulary.weight
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # The factor between a logit and z, once for each row instead of for each logit.
        temperatures, scale = vocabulary.temperatures, vocabulary.rescaling.scale
        d_targets = d_logprobs / temperatures[:, None] * scale
        d_rows = d_targets.sum(1)
        d_entropies = d_entropies / temperatures * scale if ctx.graph and d_entropies is not None else None
        d_hidden = torch.zeros_like(vocabulary.hidden, dtype=d_targets.dtype) if wants_hidden else None
        d_weight = torch.empty_like(weight) if wants_weight else None
        d_bias = torch.empty_like(vocabulary.bias) if wants_bias and vocabulary.bias is not None else None
        for part in vocabulary.slices:
            gradient = _logits_gradient(ctx, part, d_targets, d_rows, d_entropies)
            if d_bias is not None:
                d_bias[part] = gradient.sum(0)
            d_logits = gradient.to(weight.dtype)
            if d_hidden is not None:
                if weight.dtype == d_hidden.dtype:
                    d_hidden.addmm_(d_logits, weight[part])
                else:
                    d_hidden += d_logits @ weight[part]
            if d_weight is not None:
                torch.mm(d_logits.t(), vocabulary.hidden, out=d_weight[part])
            del gradient, d_logits  # or there would be those of two slices at once
        return None if d_hidden is None else d_hidden.to(vocabulary.hidden.dtype), d_weight, d_bias, *[None] * 6


def _logits_gradient(
    ctx: Any, part: slice, d_targets: torch.Tensor, d_rows: torch.Tensor, d_entropies: torch.Tensor | None
) -> torch.Tensor:
    """[N, width] the gradient of a slice's logits, for that of the targets' log-probabilities [N, K], which add up to
    `d_rows` [N], and that of the entropies [N]. It is computed in the memory of the logits."""
    vocabulary, cap = ctx.vocabulary, ctx.vocabulary.rescaling.cap
    z = ctx.logits if ctx.logits is not None else vocabulary.logits(part)
    ctx.logits = None  # overwritten here
    slope = None if cap is None else 1 - (z * (vocabulary.temperatures / cap)[:, None]).square()
    log_p = z.sub_(ctx.total[:, None])
    if d_entropies is None:
        gradient = log_p.exp_().mul_(-d_rows[:, None])
    else:
        factor = (log_p + ctx.entropies[:, None]).mul_(-d_entropies[:, None]).sub_(d_rows[:, None])
        gradient = log_p.exp_().mul_(factor)
    vocabulary.add_at_targets(gradient, part, d_targets)  # 1_y
    return gradient if slope is None else gradient.mul_(slope)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The output layer as slices of the vocabulary, and how `targets` lie in them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    temperatures: torch.Tensor
    rescaling: Rescaling
    divide: bool
    """Some temperature is not 1."""

    @property
    def slices(self) -> list[slice]:
        size, rows = len(self.weight), max(1, len(self.targets))
        width = max(NARROWEST, LOGITS_AT_ONCE // rows)
        return [slice(start, min(start + width, size)) for start in range(0, size, width)]

    def logits(self, part: slice) -> torch.Tensor:
        """[N, width], a tensor of its own: rescaled and divided by the temperatures."""
        bias = None if self.bias is None else self.bias[part]
        logits = nn.functional.linear(self.hidden, self.weight[part], bias)
        logits = self.rescaling(logits.to(self.temperatures.dtype))
        return logits.div_(self.temperatures[:, None]) if self.divide else logits

    def at_targets(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """[N, K] the targets' logits, 0 for those in other slices."""
        columns, inside = self._columns(part)
        return logits.gather(1, columns).where(inside, 0.0)

    def add_at_targets(self, gradient: torch.Tensor, part: slice, values: torch.Tensor) -> None:
        """Add `values` [N, K] where the targets are."""
        columns, inside = self._columns(part)
        gradient.scatter_add_(1, columns, values.where(inside, 0.0))

    def _columns(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.targets - part.start
        inside = (columns >= 0) & (columns < part.stop - part.start)
        return columns.where(inside, 0), inside


# ---------------------------------------------------------------------------------------------------------
# The scalar head


def with_scalar_head(config: Any) -> Any:
    """Have `config` (from Hugging Face) describe a model with a scalar head; returns the class that loads it. A head
    missing from the checkpoint is drawn from the global generator."""
    import transformers

    config.num_labels = 1
    config.reward_at = "end_of_turn"  # rows end there, and so what is trained on them is to be read there
    config.classifier_dropout = 0.0  # without it Hugging Face drops a tenth of what the head sees
    return transformers.AutoModelForSequenceClassification


def scalar_head(model: nn.Module) -> nn.Module:
    """The scalar head of a model (from Hugging Face), by either of its names."""
    head: nn.Module = model.score if hasattr(model, "score") else model.classifier
    return head
