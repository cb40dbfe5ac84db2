"""The network of a worker: a Hugging Face model whose outputs are one or two numbers per token.

Log-probabilities and entropies are computed inside `forward` (see `head`), so that the logits of a whole batch
[tokens, vocabulary] never exist and DeepSpeed sees an ordinary call of an ordinary module.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from envgym.errors import ConfigError, EnvgymError
from envgym.models import capped_attention, is_path
from envgym.models.vision import policy_class

from .adapter import quantization, tame_quantized
from .attention import VARLEN, not_covered, runs_here, takes_ends
from .export import n_experts
from .head import LogprobHead, Rescaling, configure_scalar_head, scalar_head
from .images import BLANK, run_beside_blank_row
from .micro_batches import RowBucket, SharedPrefixes
from .packing import packed_inputs
from .sequence_parallel import Slices


class TokenNetwork(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Log-probabilities and entropies (`lm` head) or values (`scalar` head) of rows.

    `entropy`: entropies are part of the graph; otherwise they are only logged.
    `balance`: in training mode the model, a mixture of experts, also returns the load imbalance of its experts.
    `slices`: where ranks share the tokens of each row; all of them return outputs of all tokens.
    `packed` may be set where `packs` allows it: rows go through the model end to end instead of padded.
    `top_k`: an `lm` head returns the k most likely tokens instead.

    Raises `EnvgymError` for a model that does not support this.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Literal["lm", "scalar"],
        *,
        entropy: bool = False,
        balance: bool = False,
        slices: Slices | None = None,
        top_k: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.entropy = entropy
        self.balance = balance
        self.slices = slices
        self.packed = False
        self.top_k = top_k
        if head == "lm":
            output = model.get_output_embeddings()
            if not isinstance(output, nn.Linear):
                raise EnvgymError(
                    f"the output layer of {model.config.model_type} is not linear: log-probabilities need a linear one"
                )
            LogprobHead.convert(output, Rescaling.from_config(model.config))

    def forward(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        mask: torch.Tensor,
        temperatures: torch.Tensor,
        extra_ids: torch.Tensor | None = None,
        prefixes: SharedPrefixes | None = None,
        images: dict[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, float32:

        logprobs    [B, T]; 0 for tokens outside `mask`, and at t = 0
        entropy     [B, T] of the same tokens, in training mode
        extra_logprobs [B, T, K] log-probabilities of the tokens `extra_ids` [B, T, K] in place of token t
        top_tokens  [B, T, k, 2] with `top_k`, instead of all these: the most likely tokens' log-probabilities and ids
        values      [B, T] of all tokens, with a scalar head; 0 for padding, if packed
        balance     a scalar, in training mode where experts are balanced

        token_ids [B, T] are rows of `lengths` [B], padded on the right: attention is causal, so no token ever sees
        padding and no attention mask is needed. mask [B, T] bool: the others have hidden states only.
        temperatures [B, T] divide the logits that predict each token. `prefixes`: the rows' layout, if what they share
        is computed once. `images`: the tensors of the rows' images (`ImageTensors`).
        """
        length = token_ids.shape[1]
        valid = torch.arange(length, device=token_ids.device) < lengths[:, None]
        states, router_logits = self._run_backbone(token_ids, lengths, prefixes, images or {})
        outputs = {}
        if self.balance and self.training:
            weights = prefixes.counts(valid)[None] if prefixes else None if self.packed else valid
            outputs["balance"] = balance_loss(self.model, router_logits, weights)
        if self.head == "scalar":
            return outputs | {"values": self._values(states, valid, prefixes)}
        # the state at t - 1 predicts token t
        targets, mask, scales = map(self._ahead, (token_ids, mask, temperatures))
        if prefixes is not None:
            states = gather(states[0], prefixes.index[mask])
        else:
            states = states[0, mask[valid]] if self.packed else states[mask]
        if self.top_k:
            return outputs | {"top_tokens": self._at_tokens(self._top_tokens(states, scales[mask]), mask, length)}
        targets = targets[mask][:, None]
        if extra_ids is not None:
            targets = torch.cat([targets, self._ahead(extra_ids)[mask]], 1)
        numbers = self._at_tokens(self._logprobs(states, targets, scales[mask]), mask, length)
        outputs["logprobs"] = numbers[..., 0]
        if extra_ids is not None:
            outputs["extra_logprobs"] = numbers[..., 1 : targets.shape[1]]
        return outputs | ({"entropy": numbers[..., -1]} if self.training else {})

    def _values(self, states: torch.Tensor, valid: torch.Tensor, prefixes: SharedPrefixes | None) -> torch.Tensor:
        """[B, T] the scalar head's values."""
        values = scalar_head(self.model)(states).squeeze(-1).float()
        if prefixes is not None:
            return values[0, prefixes.index].where(valid, 0.0)
        if self.packed:
            values = values.new_zeros(valid.shape).masked_scatter(valid, values)
        return values if self.slices is None else self.slices.join(values, valid.shape[1])

    def _top_tokens(self, states: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[N, k, 2] log-probabilities and ids of the most likely tokens after `states` [N, hidden size]."""
        head = self.model.get_output_embeddings()
        return torch.stack(head(states, None, temperatures, False, False, self.top_k), 2).float()

    def _logprobs(self, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[N, K] log-probabilities of `targets` [N, K] after `states` [N, hidden size]; in training mode one more
        column has the entropies."""
        head = self.model.get_output_embeddings()
        logprobs, *entropies = head(states, targets, temperatures, self.training, self.entropy)
        return torch.cat([logprobs, *(column[:, None] for column in entropies)], 1)

    def _at_tokens(self, numbers: torch.Tensor, mask: torch.Tensor, length: int) -> torch.Tensor:
        """[B, T, …] the numbers [N, …] of the states in `mask` [B, t], each moved to the next token; 0 elsewhere."""
        spread = numbers.new_zeros(*mask.shape, *numbers.shape[1:])
        spread = spread.masked_scatter(mask.view(*mask.shape, *[1] * (numbers.dim() - 1)), numbers)
        joined = spread if self.slices is None else self.slices.join(spread, length)
        return nn.functional.pad(joined[:, :-1], (0, 0) * (numbers.dim() - 1) + (1, 0))

    def _ahead(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, t, …] of `tensor` [B, T, …] what stands one token further right, at the tokens that the states predict; 0
        after the last."""
        if self.slices is not None:
            return self.slices.local(tensor, ahead=1)
        return nn.functional.pad(tensor[:, 1:], (0, 0) * (tensor.dim() - 2) + (0, 1))

    def _run_backbone(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        prefixes: SharedPrefixes | None,
        images: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Outputs of the model without its head: hidden states [B, T, hidden size] of this rank's slices; if packed
        [1, tokens, hidden size], with shared prefixes [1, N, hidden size]; and the router logits of balanced experts
        [tokens, experts], per layer."""
        options = images | ({"output_router_logits": True} if self.balance and self.training else {})
        backbone = self.model.base_model
        if prefixes is not None:
            with attention_over(prefixes):
                base = backbone(**prefixes.inputs(), use_cache=False, **options)
        elif self.slices is not None:
            base = self.slices.outputs(backbone, token_ids, **options)
        elif BLANK in images:
            return run_beside_blank_row(self._run_rows, token_ids, lengths, options, packed=self.packed)
        else:
            base = self._run_rows(token_ids, lengths, options)
        return base.last_hidden_state, getattr(base, "router_logits", ())

    def _run_rows(self, token_ids: torch.Tensor, lengths: torch.Tensor, options: dict[str, Any]) -> Any:
        rows = packed_inputs(token_ids, lengths, self.model.config) if self.packed else {"input_ids": token_ids}
        return self.model.base_model(**rows | options, use_cache=False)


def be_deterministic() -> None:
    """Let torch compute the same bits from the same numbers, where deterministic kernels exist."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers
    torch.use_deterministic_algorithms(True, warn_only=True)
    # On, every step would fill DeepSpeed's reduce buckets of 2 GB, which small models hardly use: seconds.
    torch.utils.deterministic.fill_uninitialized_memory = False


def add_noise(model: nn.Module, alpha: float, *, rows_are_shared: bool = False) -> None:
    """Add noise to the token embeddings of `model` (from Hugging Face) in training mode. Raises `ConfigError` where
    ranks split token sequences (`rows_are_shared`): each would draw different noise.

    Source: N. Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (2023), algorithm 1: uniform
    between -m and m, m = alpha / sqrt(T d) for rows of T tokens and d numbers each. Packed rows count as one.
    """
    if rows_are_shared:
        raise ConfigError("learner.neftune_alpha does not work with ranks that share sequences: set only one of them")

    def add_uniform_noise(embeddings: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not embeddings.training:
            return output
        bound = alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-bound, bound)

    model.get_input_embeddings().register_forward_hook(add_uniform_noise)


def load_model(
    name: str,
    head: Literal["lm", "scalar"],
    dtype: torch.dtype,
    *,
    attention: str | None = "auto",
    uninitialized: bool = False,
    quantize: str = "none",
) -> nn.Module:
    """Load a Hugging Face model from a folder or a hub id.

    `attention` as in `WorkersConfig`; None: transformers' default, for padded rows with masks. A scalar head missing
    from the checkpoint is drawn from the global generator.
    `uninitialized`: parameters are allocated but not filled, so their memory costs nothing until it is written to.
    `quantize` `4bit`: linear layers except the head are stored in 4 bits. Raises a one-line `EnvgymError`.
    """
    import transformers
    from transformers.initialization import no_init_weights

    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path)
        if not (path / "config.json").is_file():
            raise EnvgymError(f"model folder {name} has no config.json: it is not a Hugging Face model folder")
    elif is_path(name):
        raise EnvgymError(f"model folder {name} does not exist")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        factory = configure_scalar_head(config) if head == "scalar" else policy_class(config)
        # cuDNN compiles a plan for each new shape, which `sdpa` would wait for.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if attention == "auto":  # without either, transformers itself takes sdpa for the models that know it
            attention = flash_attention(config, factory, dtype) or capped_attention(config)
        elif attention == VARLEN and (feature := not_covered(config, factory._model_mapping.get(type(config), None))):
            raise ConfigError(f"workers.attention={VARLEN} does not support {config.model_type}: {feature}")
        options = {"config": config, "dtype": dtype, "attn_implementation": attention}
        model: nn.Module
        if uninitialized:
            with no_init_weights():
                model = factory.from_config(**options)
            model.tie_weights()
            model.eval()  # as `from_pretrained` leaves it
        elif quantize == "4bit":
            model = factory.from_pretrained(name, quantization_config=quantization(dtype), **options)
            tame_quantized(model)
        else:
            model = factory.from_pretrained(name, **options)
    except ImportError as error:  # the kernels that `attention` names
        raise EnvgymError(f"workers.attention={attention}: {' '.join(str(error).split())[:300]}") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if path.is_dir():
            raise EnvgymError(f"model {name} does not load: {reason}") from error
        raise EnvgymError(
            f"model {name} is not a local folder and could not be fetched from the hub: "
            f"pass the path of a local folder ({reason})"
        ) from error
    return model


def flash_attention(config: Any, factory: Any, dtype: torch.dtype) -> str | None:
    """The installed kernel for rows of different lengths that supports this number format and this model, or None: a
    package's, else torch's own."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    model_class = factory._model_mapping.get(type(config), None)
    if dtype in (torch.bfloat16, torch.float16) and getattr(model_class, "_supports_flash_attn", False):
        is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
        if is_flash_attn_3_available() and (is_hopper or not is_flash_attn_2_available()):
            return "flash_attention_3"
        if is_flash_attn_2_available():
            return "flash_attention_2"
    return VARLEN if runs_here(dtype) and not not_covered(config, model_class) else None


# ---------------------------------------------------------------------------------------------------------
# Rows that begin alike, whose common tokens are computed once

Attention = Callable[..., tuple[torch.Tensor, Any]]

_active: SharedPrefixes | None = None
"""The layout of the forward pass that is running, for which a `PathMask` is made."""
_installed: dict[str, bool] = {}
"""Kinds of attention that understand a `PathMask`, by transformers' names, and whether each takes the ends of rows."""


@contextmanager
def attention_over(prefixes: SharedPrefixes) -> Iterator[None]:
    """Let models with `install_path_masks` attend within `prefixes`, whose flat sequence they get as one row."""
    global _active
    _active = prefixes
    try:
        yield
    finally:
        _active = None


class PathMask:
    """The tokens that each token of a layout sees, in the place of a model's attention mask.

    Rows that share prefixes need the model's own attention function, called with a row's new tokens as queries and the
    row's whole path as keys. A model of transformers makes its attention mask by one registered function and hands it,
    layer by layer, to another. Here the first returns a `PathMask`, which the second understands. So no model is
    patched, and what a model does to its mask in between (checkpointing, a choice per layer) stays as it is.

    sees  (batch, head, query, key) -> True where a query sees a key: transformers' rule, for positions in a row
    kind  the implementation of attention, by transformers' name
    dtype that of the hidden states
    """

    def __init__(
        self, prefixes: SharedPrefixes, sees: Callable[..., torch.Tensor], kind: str, dtype: torch.dtype
    ) -> None:
        self.buckets = prefixes.buckets
        self.by_ends = _installed[kind]
        if self.by_ends:
            self.path, self.ends = _path_and_ends(prefixes.buckets)
        else:
            self.masks = [_mask(bucket, sees, kind, dtype) for bucket in prefixes.buckets]

    def attend(
        self, attention: Attention, module: nn.Module, states: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The output [1, N, heads, width] of `attention` for queries, keys and values [1, heads, N, width]."""
        query, key, value = (_Gather(state) for state in states)
        if self.by_ends:
            rows = (states[0], key(self.path), value(self.path))
            return attention(module, *rows, None, *args, **kwargs | self.ends)[0]
        outputs = []
        for bucket, mask in zip(self.buckets, self.masks, strict=True):
            rows = (query(bucket.queries), key(bucket.path), value(bucket.path))
            output = attention(module, *rows, mask, *args, **kwargs)[0]
            outputs.append(output.flatten(0, 1) if bucket.is_full else output[bucket.new])
        return torch.cat(outputs)[None]


def _mask(bucket: RowBucket, sees: Callable[..., torch.Tensor], kind: str, dtype: torch.dtype) -> torch.Tensor | None:
    """[n, 1, Q, K] bool, or numbers to add for `eager`; None where `sdpa` needs none: for whole rows, each token of
    which sees all before. Arguments as in `PathMask`."""
    queries, keys = bucket.depths[:, :, None], torch.arange(bucket.path.shape[1], device=bucket.path.device)
    zero = queries.new_zeros(())
    mask = sees(zero, zero, queries, keys).expand(-1, -1, len(keys))
    if kind == "sdpa" and not bucket.depths[:, 0].any() and torch.equal(mask, keys <= queries):
        return None
    if kind == "eager":
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask[:, None]


def _path_and_ends(buckets: Sequence[RowBucket]) -> tuple[torch.Tensor, dict[str, Any]]:
    """For kernels that take the ends of rows: the paths of all rows end to end, [1, tokens], and the ends. With fewer
    queries than keys, the last query sees the last key. Tested with a stand-in for the kernel."""
    lengths = [bucket.depths.amax(1) + 1 for bucket in buckets]
    paths = [
        bucket.path[torch.arange(bucket.path.shape[1], device=bucket.path.device) < length[:, None]]
        for bucket, length in zip(buckets, lengths, strict=True)
    ]
    n_new, n_keys = torch.cat([bucket.new.sum(1) for bucket in buckets]), torch.cat(lengths)
    ends = {
        "cu_seq_lens_q": nn.functional.pad(n_new.cumsum(0, dtype=torch.int32), (1, 0)),
        "cu_seq_lens_k": nn.functional.pad(n_keys.cumsum(0, dtype=torch.int32), (1, 0)),
        "max_length_q": int(n_new.max()),
        "max_length_k": int(n_keys.max()),
    }
    return torch.cat(paths)[None], ends


class _Gather:
    """Rows of the states [1, heads, N, width] of a flat sequence: [n, heads, M, width] for positions [n, M]."""

    def __init__(self, states: torch.Tensor) -> None:
        _, self.heads, _, self.width = states.shape
        self.flat = states[0].transpose(0, 1).flatten(1)

    def __call__(self, index: torch.Tensor) -> torch.Tensor:
        return gather(self.flat, index).unflatten(-1, (self.heads, self.width)).transpose(1, 2)


def gather(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`flat[index]`. The gradient of an embedding is the fastest sum over repeated positions that torch has."""
    return nn.functional.embedding(index, flat)


def install_path_masks(model: nn.Module) -> None:
    """Let attention of `model`'s kind understand `PathMask`, for the whole process; other calls are as before."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = model.config._attn_implementation
    if kind in _installed:
        return
    _installed[kind] = takes_ends(kind)
    mask, registered = ALL_MASK_ATTENTION_FUNCTIONS[kind], ALL_ATTENTION_FUNCTIONS.get(kind, None)

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        attention = registered or sys.modules[type(module).__module__].eager_attention_forward
        if isinstance(attention_mask, PathMask):
            return attention_mask.attend(attention, module, (query, key, value), *args, **kwargs), None
        outputs: tuple[torch.Tensor, Any] = attention(module, query, key, value, attention_mask, *args, **kwargs)
        return outputs

    def create_mask(*, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> Any:
        if _active is not None:
            return PathMask(_active, mask_function, kind, kwargs["dtype"])
        return mask(mask_function=mask_function, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(kind, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(kind, create_mask)


# ---------------------------------------------------------------------------------------------------------
# Mixtures of experts: the load-balancing loss


def has_experts(model: nn.Module) -> bool:
    """True if `model` (from Hugging Face) has experts whose router logits can be read."""
    recordable = getattr(model.base_model, "_can_record_outputs", None) or {}
    return "router_logits" in recordable and hasattr(_modeling_code(model), "load_balancing_loss_func")


def check_experts(model: nn.Module) -> None:
    """Raise `ConfigError` for a model without experts, or with experts that cannot be balanced."""
    if not has_experts(model):
        experts = "none that transformers can balance" if n_experts(model.config.get_text_config()) else "none"
        raise ConfigError(
            f"learner.moe_aux_coef keeps the experts of a model equally busy; {model.config.model_type} has {experts}: "
            "set it to 0"
        )


def balance_loss(
    model: nn.Module, router_logits: tuple[torch.Tensor, ...], weights: torch.Tensor | None
) -> torch.Tensor:
    """E * sum over experts of f_e P_e, a scalar: f_e is the share of tokens that go to expert e, P_e the mean
    probability that its router gives it; 1 per expert a token goes to where all are equally busy.

    Source: W. Fedus et al., "Switch Transformer" (2021), eq. 4 to 6, as transformers has it for the architecture (all
    layers in one mean). router_logits: [tokens, E] per layer; `weights` [B, T]: how often each token counts, None:
    once.
    """
    config = model.config.get_text_config()
    loss: torch.Tensor = _modeling_code(model).load_balancing_loss_func(
        router_logits, n_experts(config), config.num_experts_per_tok, weights
    )
    return loss


def _modeling_code(model: nn.Module) -> Any:
    """The module of transformers that implements the architecture."""
    return sys.modules[type(model).__module__]
