"""Sequence parallelism: the ranks of a group hold one slice each of the same rows, so a row may be as long as all of
them together can hold.

Everything in a transformer but attention looks at one token at a time, so a slice is all that a rank needs of it. For
attention the slices are exchanged for heads and back, the way DeepSpeed-Ulysses does it (Jacobs et al. 2023,
arXiv:2309.14509): within attention a rank has the whole sequence of its share of the heads, and the model's own
attention function runs there as it does on one rank, with the model's own mask.

The gradients that the ranks are left with add up to the gradient. To DeepSpeed they are therefore data-parallel ranks
like any others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from envgym.errors import ConfigError

PER_HEAD = ("s_aux", "position_bias")
"""Arguments of transformers' attention, beside the states, that have a part for each head."""


class Slices:
    """One group of ranks that shares the tokens of its rows: rank r has those from r * t up to (r + 1) * t, where t is
    T / size, rounded up. Without a group there is one slice, and it is everything."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self.group = group
        self.size: int = torch.distributed.get_world_size(group) if group else 1
        self.rank: int = torch.distributed.get_rank(group) if group else 0
        self._attentions = 0

    def own(self, whole: torch.Tensor, *, ahead: int = 0, beyond: float = 0) -> torch.Tensor:
        """This rank's [B, t, …] of `whole` [B, T, …], read `ahead` tokens further right; past the end comes `beyond`.

        One ahead is what a state predicts, also where the next token is in the next slice.
        """
        length = -(-whole.shape[1] // self.size)
        start = self.rank * length + ahead
        part = whole[:, start : start + length]
        return nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, length - part.shape[1]), value=beyond)

    def join(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """The slices [B, t, …] of all ranks as one [B, length, …], on every rank.

        In the backward pass each rank answers for its own slice: all of them compute the same loss from the whole.
        """
        if self.group is None:
            return part
        joined: torch.Tensor = _Join.apply(part, self.group)
        return joined[:, :length]

    def answer(self, model: nn.Module, token_ids: torch.Tensor, **options: Any) -> Any:
        """Outputs of `model` (from Hugging Face) for this rank's slice of `token_ids` [B, T].

        Raises `ConfigError` for a model with anything but one attention in each layer that `install` could reach: what
        mixes tokens in another way would see a slice for a sequence.
        """
        ids = self.own(token_ids)
        if self.group is None:
            return model(input_ids=ids, use_cache=False, **options)
        positions = self.rank * ids.shape[1] + torch.arange(ids.shape[1], device=ids.device)
        before = self._attentions
        answer = model(input_ids=ids, position_ids=positions[None], use_cache=False, **options)
        found, n_layers = self._attentions - before, model.config.get_text_config().num_hidden_layers
        if found != n_layers:
            raise ConfigError(
                f"workers.sequence_parallel needs one ordinary attention in each layer, and {model.config.model_type} "
                f"has {found} in {n_layers} layers"
            )
        return answer

    @classmethod
    def of(cls, size: int, stride: int) -> Slices:
        """The slices of this process, where `size` ranks share each row. They lie `stride` ranks apart: those between
        them have the same slice. Ranks must call together."""
        if size == 1:
            return cls()
        block = size * stride
        groups = [
            list(range(start + offset, start + block, stride))
            for start in range(0, torch.distributed.get_world_size(), block)
            for offset in range(stride)
        ]
        return cls(torch.distributed.new_subgroups_by_enumeration(groups)[0])

    def install(self, model: nn.Module, n_heads: int) -> None:
        """Let `model` attend over all slices. `n_heads`: how many query heads of a layer this rank has.

        The implementation it is configured for (`sdpa`, …) is wrapped for the whole process, which holds one model:
        under another name transformers would no longer know it for what it is. Raises `ConfigError` for a model
        whose rows cannot be cut.
        """
        if self.group is None:
            return
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        kind = model.config._attn_implementation
        if obstacle := self._obstacle(model, n_heads, kind in ALL_ATTENTION_FUNCTIONS):
            raise ConfigError(
                f"workers.sequence_parallel={self.size} does not work with {model.config.model_type}: {obstacle}"
            )
        attend, mask = ALL_ATTENTION_FUNCTIONS[kind], ALL_MASK_ATTENTION_FUNCTIONS[kind]

        def attend_to_all(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            self._attentions += 1
            if apart := [name for name in PER_HEAD if kwargs.get(name) is not None]:
                raise ConfigError(f"workers.sequence_parallel cannot share out what each head has of {apart[0]}")
            copies = self.size // math.gcd(self.size, key.shape[1])
            if copies > 1:  # so that key and value heads can be shared out evenly, too
                key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
            query, key, value = (self._exchanged(states) for states in (query, key, value))
            module.num_key_value_groups = query.shape[1] // key.shape[1]
            kwargs["position_ids"] = torch.arange(query.shape[2], device=query.device)[None]
            output, _ = attend(module, query, key, value, *args, **kwargs)
            return self._exchanged(output), None

        def mask_of_all(*, q_length: int, kv_length: int, **kwargs: Any) -> Any:
            return mask(q_length=q_length * self.size, kv_length=kv_length * self.size, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register(kind, attend_to_all)
        ALL_MASK_ATTENTION_FUNCTIONS.register(kind, mask_of_all)

    def _obstacle(self, model: nn.Module, n_heads: int, reachable: bool) -> str:
        """The reason why rows cannot be cut for this model, or nothing."""
        if n_heads % self.size:
            return f"it does not divide the {n_heads} attention heads"
        if not reachable or getattr(model, "_is_stateful", False):
            return "it does not look at other tokens by transformers' attention alone"
        stretched = {"dynamic", "longrope"} & _rope_types(model)
        if stretched:  # a rank would take the end of its slice for the end of the row
            return f"its {stretched.pop()} rope depends on the length of the whole row"
        return ""

    def _exchanged(self, states: torch.Tensor) -> torch.Tensor:
        """[B, n, m, D] -> [B, n / size, size * m, D]: a share of the n of all ranks for their m.

        Of n heads and m tokens it makes the whole sequence of a share of the heads; what attention gives for that, n
        tokens and m heads, goes back the same way.
        """
        batch, n, m, width = states.shape
        pieces = states.reshape(batch, self.size, n // self.size, m, width).transpose(0, 1)
        received = _Exchange.apply(pieces, self.group)
        return received.permute(1, 2, 0, 3, 4).reshape(batch, n // self.size, self.size * m, width)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """[size, …] -> [size, …]: piece r goes to rank r, and what comes from there takes its place. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, pieces: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        pieces = pieces.contiguous()
        received = torch.empty_like(pieces)
        torch.distributed.all_to_all_single(received, pieces, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None


class _Join(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """[B, t, …] of each rank -> [B, size * t, …] on all of them; backward keeps the own slice."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.length = part.shape[1]
        ctx.start = torch.distributed.get_rank(group) * ctx.length
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, part, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.narrow(1, ctx.start, ctx.length), None


def _rope_types(model: nn.Module) -> set[str]:
    """The model's kinds of rotation by position, from Hugging Face's rotary modules, some of which have one for each
    kind of layer."""
    found: set[str] = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())
        found.update([kinds] if isinstance(kinds, str) else kinds.values() if isinstance(kinds, dict) else ())
    return found
