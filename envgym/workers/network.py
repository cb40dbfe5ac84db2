"""The network a worker holds: a Hugging Face model that answers with a number or two per token.

Log-probabilities and entropies are computed inside `forward` (see `head`), so that the logits of a whole batch
[tokens, vocabulary] never exist and DeepSpeed sees an ordinary call of an ordinary module.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from envgym.errors import ConfigError, EnvgymError
from envgym.models import is_path

from .adapter import quantization, tame_quantized
from .head import Rescaling, ScoringHead, scalar_head, with_scalar_head
from .parameters import n_experts
from .sequence_parallel import Slices


class TokenScorer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Log-probabilities and entropies (`lm` head) or values (`scalar` head) of rows.

    `entropy`: entropies are part of the graph; else they are there to be logged.
    `balance`: in training the model, a mixture of experts, also gives how unequally busy its experts are.
    `slices`: the ranks that share the tokens of each row; all of them answer for all tokens.
    `packed` may be set where `packs` allows it: rows go through the model end to end instead of padded.
    `top_k`: an `lm` head answers with the k likeliest tokens instead.

    Raises `EnvgymError` for a model that cannot do what is asked of it.
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
        self.slices = slices or Slices()
        self.packed = False
        self.top_k = top_k
        if head == "lm":
            output = model.get_output_embeddings()
            if not isinstance(output, nn.Linear):
                raise EnvgymError(
                    f"the output layer of {model.config.model_type} is no linear one: it cannot be scored"
                )
            ScoringHead.of(output, Rescaling.of(model.config))

    def forward(
        self,
        token_ids: torch.Tensor,
        lengths: torch.Tensor,
        wanted: torch.Tensor,
        temperatures: torch.Tensor,
        others: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, float32:

        logprobs   [B, T]; in training mode with `entropy` [B, T]; 0 for tokens that are not `wanted`, and at t = 0
        others     [B, T, K] beside them, the log-probabilities of the tokens that `others` [B, T, K] has in place of t
        likeliest  [B, T, k, 2] instead of them with `top_k`: the likeliest tokens' log-probabilities, and their ids
        values     [B, T] with a scalar head, of all tokens; 0 for padding, if packed
        balance    a scalar more in training mode, where experts are balanced

        token_ids [B, T] are rows of `lengths` [B], padded on the right: attention is causal, so no real token ever
        sees padding and no mask is needed. wanted [B, T] bool; of the other tokens nothing is computed beyond hidden
        states. temperatures [B, T] divide the logits that predict each token.
        """
        length = token_ids.shape[1]
        real = torch.arange(length, device=token_ids.device) < lengths[:, None]
        answer = self._answer(token_ids, lengths, real)
        hidden, outputs = answer.last_hidden_state, {}
        if self.balance and self.training:
            outputs["balance"] = balance_loss(self.model, answer.router_logits, None if self.packed else real)
        if self.head == "scalar":
            return outputs | {"values": self._values(hidden, real)}
        # the state at t - 1 predicts token t
        targets, asked, scales = (self.slices.own(whole, ahead=1) for whole in (token_ids, wanted, temperatures))
        states = hidden[0, asked[real]] if self.packed else hidden[asked]
        if self.top_k:
            return outputs | {"likeliest": self._at_tokens(self._likeliest(states, scales[asked]), asked, length)}
        targets = targets[asked][:, None]
        if others is not None:
            targets = torch.cat([targets, self.slices.own(others, ahead=1)[asked]], 1)
        numbers = self._at_tokens(self._logprobs(states, targets, scales[asked]), asked, length)
        outputs["logprobs"] = numbers[..., 0]
        if others is not None:
            outputs["others"] = numbers[..., 1 : targets.shape[1]]
        return outputs | ({"entropy": numbers[..., -1]} if self.training else {})

    def _values(self, hidden: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """[B, T] the scalar head's values."""
        values = scalar_head(self.model)(hidden).squeeze(-1).float()
        if self.packed:
            values = values.new_zeros(real.shape).masked_scatter(real, values)
        return self.slices.join(values, real.shape[1])

    def _likeliest(self, states: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[N, k, 2] log-probabilities and ids of the tokens likeliest after `states` [N, hidden size]."""
        head = self.model.get_output_embeddings()
        return torch.stack(head(states, None, temperatures, False, False, self.top_k), 2).float()

    def _logprobs(self, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """[N, K] log-probabilities of `targets` [N, K] after `states` [N, hidden size]; in training mode with one more
        column: the entropies."""
        head = self.model.get_output_embeddings()
        logprobs, *entropies = head(states, targets, temperatures, self.training, self.entropy)
        return torch.cat([logprobs, *(column[:, None] for column in entropies)], 1)

    def _at_tokens(self, numbers: torch.Tensor, asked: torch.Tensor, length: int) -> torch.Tensor:
        """[B, T, …] the numbers [N, …] of the states that `asked` [B, t] picks, each at the token after it; else 0."""
        spread = numbers.new_zeros(*asked.shape, *numbers.shape[1:])
        spread = spread.masked_scatter(asked.view(*asked.shape, *[1] * (numbers.dim() - 1)), numbers)
        whole = self.slices.join(spread, length)
        return nn.functional.pad(whole[:, :-1], (0, 0) * (numbers.dim() - 1) + (1, 0))

    def _answer(self, token_ids: torch.Tensor, lengths: torch.Tensor, real: torch.Tensor) -> Any:
        """Outputs of the model without its head: hidden states [B, T, hidden size], of this rank's slices; if packed
        [1, tokens, hidden size]."""
        options = {"output_router_logits": True} if self.balance and self.training else {}
        backbone = self.model.base_model
        if self.packed:
            return backbone(**packed_inputs(token_ids, lengths, real), use_cache=False, **options)
        return self.slices.answer(backbone, token_ids, **options)


def be_deterministic() -> None:
    """Compute the same bits again from the same numbers, as far as there are kernels that do."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # read by transformers
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Off, or every step fills DeepSpeed's reduce buckets of 2 GB, which small models hardly touch: seconds.
    torch.utils.deterministic.fill_uninitialized_memory = False


def add_noise(model: nn.Module, alpha: float, *, shared: bool = False) -> None:
    """Have `model` (from Hugging Face) see its token embeddings with noise while it learns. Raises `ConfigError` where
    ranks share rows (`shared`): each would draw noise of its own.

    Source: N. Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (2023), algorithm 1: uniform
    between -m and m, m = alpha / sqrt(T d) for rows of T tokens and d numbers each. Rows that are packed count as one.
    """
    if shared:
        raise ConfigError("learner.neftune_alpha and ranks that share rows: leave one of them out")

    def noisy(embeddings: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not embeddings.training:
            return output
        most = alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-most, most)

    model.get_input_embeddings().register_forward_hook(noisy)


def load_model(
    name: str,
    head: Literal["lm", "scalar"],
    dtype: torch.dtype,
    *,
    attention: str = "auto",
    empty: bool = False,
    quantize: str = "none",
) -> nn.Module:
    """Load a Hugging Face model from a folder or a hub id.

    `attention` as in `WorkersConfig`. A scalar head missing from the checkpoint is drawn from the global generator.
    `empty`: parameters hold whatever memory they fall on, which costs none until it is written to. `quantize` `4bit`:
    linear layers but the head are kept in 4 bits. Raises `EnvgymError` in one line.
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
        factory = with_scalar_head(config) if head == "scalar" else transformers.AutoModelForCausalLM
        # Without flash kernels transformers itself takes sdpa for the models that know it.
        kind = flash_attention(config, factory, dtype) if attention == "auto" else attention
        options = {"config": config, "dtype": dtype, "attn_implementation": kind}
        model: nn.Module
        if empty:
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
            f"model {name} is no folder here and could not be fetched from the hub: "
            f"pass the path of a local folder ({reason})"
        ) from error
    return model


def flash_attention(config: Any, factory: Any, dtype: torch.dtype) -> str | None:
    """The flash kernel that is installed here, knows this number format and serves this model; None: there is none."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    model_class = factory._model_mapping.get(type(config), None)
    if dtype not in (torch.bfloat16, torch.float16) or not getattr(model_class, "_supports_flash_attn", False):
        return None
    if is_flash_attn_2_available():
        return "flash_attention_2"
    return "flash_attention_3" if is_flash_attn_3_available() else None


# ---------------------------------------------------------------------------------------------------------
# Rows end to end in one sequence, instead of padded to the longest


def packed_inputs(token_ids: torch.Tensor, lengths: torch.Tensor, real: torch.Tensor) -> dict[str, Any]:
    """Arguments of transformers' models for rows of `lengths` [B] out of `token_ids` [B, T], of which `real` [B, T] are
    tokens and not padding: one sequence of all tokens, with positions that begin again at each row.

    From those `sdpa`, `eager` and `flex_attention` make the mask that keeps rows apart (`masking_utils`), if they get
    no mask and no cache; flash kernels take the rows' ends.
    """
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    ends = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    return {
        "input_ids": token_ids[real][None],
        "position_ids": positions[real][None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packs(setting: bool | Literal["auto"], model: nn.Module) -> bool:
    """Rows go packed through `model` (from Hugging Face): if set so, or by itself with flash kernels.

    Raises `ConfigError` where packing is asked for and the model would take its rows for one.
    """
    if setting is False:
        return False
    obstacle = _packing_obstacle(model)
    if setting == "auto":
        return not obstacle and "flash" in model.config._attn_implementation  # as transformers tells them
    if obstacle:
        raise ConfigError(f"workers.packing=true does not work with {model.config.model_type}: {obstacle}")
    return True


def use_packing(network: TokenScorer, engine: Any, setting: bool | Literal["auto"], device: torch.device) -> None:
    """Set `network.packed` where `packs` allows it and rows do not see each other: what the model's code and kernels
    make of rows is tried out, on the same rows packed and padded. `engine` is DeepSpeed's around the network, or it.

    Raises `ConfigError` where packing is asked for and the rows see each other.
    """
    if not packs(setting, network.model):
        return
    lengths = torch.tensor([9, 6], device=device)
    steps = torch.arange(1, 10, device=device).expand(2, 9)
    real = steps <= lengths[:, None]
    token_ids = (steps * lengths[:, None] % network.model.get_input_embeddings().num_embeddings).where(real, 0)
    asked = real & (steps > 1)

    def outputs(packed: bool) -> torch.Tensor:
        network.packed = packed
        [numbers] = engine(token_ids, lengths, asked, torch.ones(2, 9, device=device)).values()
        return numbers[asked]

    engine.eval()
    with torch.no_grad():
        padded, packed = outputs(False), outputs(True)
    tolerance = 1e-4 if next(network.parameters()).dtype == torch.float32 else 2e-2
    network.packed = bool((packed - padded).abs().mean() < tolerance * padded.abs().mean())
    if setting is True and not network.packed:
        kind = network.model.config._attn_implementation
        raise ConfigError(
            f"workers.packing=true does not work with {network.model.config.model_type} and {kind}: rows see each other"
        )


def _packing_obstacle(model: nn.Module) -> str:
    """The reason why rows of this model cannot be packed, or nothing."""
    backbone = model.base_model
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others or getattr(model, "_is_stateful", False):
        return f"its layers of {others[0] if others else 'state'} would carry one row over into the next"
    # What goes by transformers' own attention interface keeps rows apart; others do as they please.
    if not model._supports_flash_attn or "position_ids" not in inspect.signature(backbone.forward).parameters:
        return "its attention takes no ends of rows"
    return ""


# ---------------------------------------------------------------------------------------------------------
# Mixtures of experts: the loss that keeps their experts equally busy


def has_experts(model: nn.Module) -> bool:
    """`model` (from Hugging Face) has experts whose routers can be read."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    return "router_logits" in recorded and hasattr(_code(model), "load_balancing_loss_func")


def check_experts(model: nn.Module) -> None:
    """Raise `ConfigError` for a model whose experts cannot be balanced, or that has none."""
    if not has_experts(model):
        what = "none that transformers can balance" if n_experts(model.config.get_text_config()) else "none"
        raise ConfigError(
            f"learner.moe_aux_coef keeps the experts of a model equally busy; {model.config.model_type} has {what}: "
            "set it to 0"
        )


def balance_loss(model: nn.Module, router_logits: tuple[torch.Tensor, ...], real: torch.Tensor | None) -> torch.Tensor:
    """E * sum over experts of f_e P_e, a scalar: f_e is the share of tokens that go to expert e, P_e the mean
    probability that its router gives it; 1 per expert a token goes to where all are equally busy.

    Source: W. Fedus et al., "Switch Transformer" (2021), eq. 4 to 6, as transformers has it for the architecture (all
    layers in one mean). router_logits: [tokens, E] a layer; `real`: the tokens that count, None: all.
    """
    config = model.config.get_text_config()
    loss: torch.Tensor = _code(model).load_balancing_loss_func(
        router_logits, n_experts(config), config.num_experts_per_tok, real
    )
    return loss


def _code(model: nn.Module) -> Any:
    """The module of transformers that the architecture is written in."""
    return sys.modules[type(model).__module__]
