"""The network a worker holds: a Hugging Face model that answers with a number or two per token.

Log-probabilities and entropies are computed inside `forward`, in chunks of tokens, so that the logits of a whole
batch [tokens, vocabulary] never exist and DeepSpeed sees an ordinary call of an ordinary module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from envgym.errors import EnvgymError

from .adapter import quantization, tame_quantized
from .sequence_parallel import Slices

LOGITS_PER_CHUNK = 2**25
"""Logits that exist at once: 128 MiB in float32 (and as much again for their softmax)."""


class TokenScorer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Log-probabilities and entropies (`lm` head) or values (`scalar` head) of padded rows.

    `same_chunks`: ranks must call the head equally often (ZeRO-3 gathers its weight at each call).
    `entropy`: entropies are part of the graph; else they are only said.
    `slices`: the ranks that share the tokens of each row; all of them answer for all tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Literal["lm", "scalar"],
        *,
        same_chunks: bool = False,
        entropy: bool = False,
        slices: Slices | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.same_chunks = same_chunks
        self.entropy = entropy
        self.slices = slices or Slices()

    def forward(
        self, token_ids: torch.Tensor, wanted: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return float32 [B, T] each: log-probabilities and entropies, or values alone.

        token_ids [B, T], padded on the right: attention is causal, so no real token ever sees padding and no mask
        is needed. `wanted` [B, T] bool: tokens that are asked about; for the others, and t = 0, both numbers
        are 0. `temperatures` [B, T] divide the logits that predict each token. With a scalar head all values come
        and both are ignored.
        """
        length = token_ids.shape[1]
        if self.head == "scalar":
            values: torch.Tensor = self.slices.answer(self.model, token_ids).logits
            return (self.slices.join(values.squeeze(-1).float(), length),)
        hidden = self.slices.answer(self.model.base_model, token_ids).last_hidden_state
        # the state at t - 1 predicts token t
        targets, asked, scales = (self.slices.own(whole, ahead=1) for whole in (token_ids, wanted, temperatures))
        numbers = self._in_chunks(hidden[asked], targets[asked], scales[asked])
        zeros = torch.zeros(asked.shape, device=hidden.device)
        said = self.slices.join(torch.stack([zeros.masked_scatter(asked, number) for number in numbers], 2), length)
        return tuple(nn.functional.pad(said[:, :-1], (0, 0, 1, 0)).unbind(2))

    def _in_chunks(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden size], [N], [N] -> [N] twice; a chunk's logits are computed again in the backward pass."""
        vocabulary = self.model.config.get_text_config().vocab_size
        n_chunks = -(-len(targets) * vocabulary // LOGITS_PER_CHUNK) or 1
        if self.same_chunks:
            most = torch.tensor(n_chunks, device=hidden.device)
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
            n_chunks = int(most)
        if n_chunks == 1:
            return self._logprobs(hidden, targets, temperatures)
        size = -(-len(targets) // n_chunks)
        pieces = [slice(index * size, (index + 1) * size) for index in range(n_chunks)]
        chunks = [
            checkpoint(self._logprobs, hidden[p], targets[p], temperatures[p], use_reentrant=False) for p in pieces
        ]
        logprobs, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return logprobs, entropies

    def _logprobs(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _rescaled(self.model.get_output_embeddings()(hidden), self.model.config)
        logits = logits.float() / temperatures[:, None]
        total = logits.logsumexp(1)
        logprobs = logits.gather(1, targets[:, None]).squeeze(1) - total
        with torch.set_grad_enabled(self.entropy and torch.is_grad_enabled()):
            entropies = total - (logits.softmax(1) * logits).sum(1)
        return logprobs, entropies


def _rescaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """What some architectures do to their logits after the head, by the names Hugging Face configs give it."""
    config = config.get_text_config()
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


def load_model(
    name: str, head: Literal["lm", "scalar"], dtype: torch.dtype, *, empty: bool = False, quantize: str = "none"
) -> nn.Module:
    """Load a Hugging Face model from a folder or a hub id.

    A scalar head missing from the checkpoint is drawn from the global generator. `empty`: parameters hold whatever
    memory they fall on, which costs none until it is written to. `quantize` `4bit`: linear layers but the head are kept
    in 4 bits. Raises `EnvgymError` in one line.
    """
    import transformers
    from transformers.initialization import no_init_weights

    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path)
        if not (path / "config.json").is_file():
            raise EnvgymError(f"model folder {name} has no config.json: it is not a Hugging Face model folder")
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise EnvgymError(f"model folder {name} does not exist")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        factory = transformers.AutoModelForCausalLM
        if head == "scalar":
            factory = transformers.AutoModelForTokenClassification
            config.num_labels = 1
            config.classifier_dropout = 0.0  # without it Hugging Face drops a tenth of what the head sees
        options = {"config": config, "dtype": dtype, "attn_implementation": "sdpa"}
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
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if path.is_dir():
            raise EnvgymError(f"model {name} does not load: {reason}") from error
        raise EnvgymError(
            f"model {name} is no folder here and could not be fetched from the hub: "
            f"pass the path of a local folder ({reason})"
        ) from error
    return model
