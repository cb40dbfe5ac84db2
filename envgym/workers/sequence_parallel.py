"""Sequence parallelism: the ranks of a group hold one slice each of the same rows, so the longest row is limited by
the memory of all of them.

Every layer of a transformer except attention processes tokens separately, so a rank needs only its slice. Around
attention, slices are exchanged for heads and back, as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509):
within attention a rank has the whole sequence for its share of the heads, and the model's own attention function runs
there with the model's own mask, as on one rank.

The ranks' gradients add up to the full gradient, so DeepSpeed treats them as ordinary data-parallel ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from envgym.errors import ConfigError

PER_HEAD = ("s_aux", "position_bias")
"""Arguments of transformers' attention, besides the states, with one part per head."""


class Slices:
    """One group of ranks that share the tokens of their rows: rank r has tokens r * t to (r + 1) * t, where t is
    T / size, rounded up."""

    def __init__(self, group: torch.distributed.ProcessGroup, size: int, rank: int) -> None:
        self.group = group
        self.size = size
        self.rank = rank
        self._attentions = 0

    def local(self, tensor: torch.Tensor, *, ahead: int = 0) -> torch.Tensor:
        """This rank's slice [B, t, …] of `tensor` [B, T, …], taken `ahead` tokens further right and padded with 0.

        With `ahead` = 1 it holds the tokens that the states predict, including the first of the next slice.
        """
        length = -(-tensor.shape[1] // self.size)
        start = self.rank * length + ahead
        part = tensor[:, start : start + length]
        return nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, length - part.shape[1]))

    def join(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """The slices [B, t, …] of all ranks as one [B, length, …], on every rank.

        Gradients reach this rank's slice alone: all ranks compute the same loss.
        """
        values = part.detach().contiguous()
        parts = [torch.empty_like(values) for _ in range(self.size)]
        torch.distributed.all_gather(parts, values, group=self.group)
        parts[self.rank] = part
        return torch.cat(parts, 1)[:, :length]

    def outputs(self, model: nn.Module, token_ids: torch.Tensor, **options: Any) -> Any:
        """Outputs of `model` (from Hugging Face) for this rank's slice of `token_ids` [B, T].

        Raises `ConfigError` unless each layer calls exactly one attention that `install` has wrapped: any other layer
        that mixes tokens would take a slice for the whole sequence.
        """
        ids = self.local(token_ids)
        positions = self.rank * ids.shape[1] + torch.arange(ids.shape[1], device=ids.device)
        previous = self._attentions
        outputs = model(input_ids=ids, position_ids=positions[None], use_cache=False, **options)
        n_attentions, n_layers = self._attentions - previous, model.config.get_text_config().num_hidden_layers
        if n_attentions != n_layers:
            raise ConfigError(
                f"workers.sequence_parallel needs one ordinary attention in each layer, and {model.config.model_type} "
                f"has {n_attentions} in {n_layers} layers"
            )
        return outputs

    @classmethod
    def create(cls, size: int, stride: int) -> Slices:
        """The slices of this process, where `size` ranks share each row. The ranks of a group are `stride` apart; the
        ranks in between have the same slice. A collective call."""
        block = size * stride
        groups = [
            list(range(start + offset, start + block, stride))
            for start in range(0, torch.distributed.get_world_size(), block)
            for offset in range(stride)
        ]
        group = torch.distributed.new_subgroups_by_enumeration(groups)[0]
        return cls(group, size, torch.distributed.get_rank(group))

    def install(self, model: nn.Module, n_heads: int) -> None:
        """Let `model` attend over all slices. `n_heads`: this rank's number of query heads per layer.

        The implementation it is configured for (`sdpa`, …) is wrapped for the whole process, which holds one model:
        under another name transformers would not recognize it. Raises `ConfigError` for a model whose rows cannot be
        split.
        """
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
            if per_head := [name for name in PER_HEAD if kwargs.get(name) is not None]:
                raise ConfigError(f"workers.sequence_parallel does not support {per_head[0]}, which is set per head")
            copies = self.size // math.gcd(self.size, key.shape[1])
            if copies > 1:  # key and value heads must divide evenly, too
                key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
            query, key, value = (self._exchange(states) for states in (query, key, value))
            module.num_key_value_groups = query.shape[1] // key.shape[1]
            kwargs["position_ids"] = torch.arange(query.shape[2], device=query.device)[None]
            output, _ = attend(module, query, key, value, *args, **kwargs)
            return self._exchange(output), None

        def create_full_mask(*, q_length: int, kv_length: int, **kwargs: Any) -> Any:
            return mask(q_length=q_length * self.size, kv_length=kv_length * self.size, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register(kind, attend_to_all)
        ALL_MASK_ATTENTION_FUNCTIONS.register(kind, create_full_mask)

    def _obstacle(self, model: nn.Module, n_heads: int, reachable: bool) -> str:
        """The reason why this model's rows cannot be split, or an empty string."""
        if n_heads % self.size:
            return f"it does not divide the {n_heads} attention heads"
        if not reachable or getattr(model, "_is_stateful", False):
            return "it mixes tokens by other means than transformers' attention"
        stretched = {"dynamic", "longrope"} & _rope_types(model)
        if stretched:  # a rank would compute it from the length of its slice
            return f"its {stretched.pop()} rope depends on the length of the whole sequence"
        return ""

    def _exchange(self, states: torch.Tensor) -> torch.Tensor:
        """[B, n, m, D] -> [B, n / size, size * m, D]: gather m over the ranks and scatter n.

        Before attention n are heads and m tokens: a rank gets the whole sequence for its share of the heads. After
        attention n are tokens and m heads, and the same exchange restores the slices.
        """
        batch, n, m, width = states.shape
        pieces = states.reshape(batch, self.size, n // self.size, m, width).transpose(0, 1)
        received = all_to_all_single_autograd(pieces.contiguous(), None, None, self.group)
        return received.permute(1, 2, 0, 3, 4).reshape(batch, n // self.size, self.size * m, width)


def _rope_types(model: nn.Module) -> set[str]:
    """The model's kinds of rotary embedding, from Hugging Face's rotary modules, some of which have one per kind of
    layer."""
    types: set[str] = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())
        types.update([kinds] if isinstance(kinds, str) else kinds.values() if isinstance(kinds, dict) else ())
    return types
