"""The network a worker holds: a Hugging Face model that answers with a number or two per token.

Log-probabilities and entropies are computed inside `forward` (see `head`), so that the logits of a whole batch
[tokens, vocabulary] never exist and DeepSpeed sees an ordinary call of an ordinary module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from envgym.errors import EnvgymError
from envgym.models import is_path

from .adapter import quantization, tame_quantized
from .experts import balance_loss
from .head import Rescaling, ScoringHead
from .packing import packed_inputs
from .sequence_parallel import Slices


class TokenScorer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Log-probabilities and entropies (`lm` head) or values (`scalar` head) of rows.

    `entropy`: entropies are part of the graph; else they are only said.
    `balance`: in training the model, a mixture of experts, also says how unequally busy its experts are.
    `slices`: the ranks that share the tokens of each row; all of them answer for all tokens.
    `packed` may be set where `packing.packs`: rows go through the model end to end instead of padded.

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
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.entropy = entropy
        self.balance = balance
        self.slices = slices or Slices()
        self.packed = False
        if head == "lm":
            output = model.get_output_embeddings()
            if not isinstance(output, nn.Linear):
                raise EnvgymError(
                    f"the output layer of {model.config.model_type} is no linear one: it cannot be scored"
                )
            ScoringHead.of(output, Rescaling.of(model.config))

    def forward(
        self, token_ids: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor, temperatures: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return float32 [B, T] each: `logprobs` and, in training mode, `entropy`; or `values`. Where experts are
        balanced, training mode adds the scalar `balance`.

        token_ids [B, T] are rows of `lengths` [B], padded on the right: attention is causal, so no real token ever
        sees padding and no mask is needed. `wanted` [B, T] bool: tokens that are asked about; for the others, and
        t = 0, both numbers are 0, and nothing is computed of them beyond hidden states. `temperatures` [B, T] divide
        the logits that predict each token. With a scalar head all values come (0 for padding, if packed) and both are
        ignored.
        """
        length = token_ids.shape[1]
        real = torch.arange(length, device=token_ids.device) < lengths[:, None]
        answer = self._answer(token_ids, lengths, real)
        hidden, said = answer.last_hidden_state, {}
        if self.balance and self.training:
            said["balance"] = balance_loss(self.model, answer.router_logits, None if self.packed else real)
        if self.head == "scalar":
            values = self._scalar_head()(hidden).squeeze(-1).float()
            if self.packed:
                values = values.new_zeros(real.shape).masked_scatter(real, values)
            return said | {"values": self.slices.join(values, length)}
        # the state at t - 1 predicts token t
        targets, asked, scales = (self.slices.own(whole, ahead=1) for whole in (token_ids, wanted, temperatures))
        states = hidden[0, asked[real]] if self.packed else hidden[asked]
        numbers = self.model.get_output_embeddings()(states, targets[asked], scales[asked], self.training, self.entropy)
        spread = [number.new_zeros(asked.shape).masked_scatter(asked, number) for number in numbers]
        both = self.slices.join(torch.stack(spread, 2), length)
        return said | dict(
            zip(("logprobs", "entropy"), nn.functional.pad(both[:, :-1], (0, 0, 1, 0)).unbind(2), strict=False)
        )

    def _answer(self, token_ids: torch.Tensor, lengths: torch.Tensor, real: torch.Tensor) -> Any:
        """What the model without its head says: hidden states [B, T, hidden size], of this rank's slices; if packed
        [1, tokens, hidden size]."""
        options = {"output_router_logits": True} if self.balance and self.training else {}
        backbone = self.model.base_model
        if self.packed:
            return backbone(**packed_inputs(token_ids, lengths, real), use_cache=False, **options)
        return self.slices.answer(backbone, token_ids, **options)

    def _scalar_head(self) -> nn.Module:
        head: nn.Module = self.model.score if hasattr(self.model, "score") else self.model.classifier
        return head


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
        factory = transformers.AutoModelForCausalLM
        if head == "scalar":
            factory = transformers.AutoModelForTokenClassification
            config.num_labels = 1
            config.reward_at = "end_of_turn"  # rows end there, and so what is trained on them is to be read there
            config.classifier_dropout = 0.0  # without it Hugging Face drops a tenth of what the head sees
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
