"""What fits a model's context: the same rule and the same words for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from envgym.errors import PromptTooLong

from .base import Request


def max_new_tokens(request: Request, max_model_len: int) -> int:
    """How many tokens to sample at most: those asked for, cut to what fits after the prompt.

    Raises `PromptTooLong` where not one fits.
    """
    prompt = len(request.token_ids)
    if prompt >= max_model_len:
        raise PromptTooLong(
            f"a prompt of {prompt} tokens leaves no room to answer in a context of {max_model_len}: "
            "raise max_model_len or shorten the prompt"
        )
    return min(request.sampling.max_tokens, max_model_len - prompt)


def check_fits(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raise `PromptTooLong` where a sequence to score is longer than the context."""
    if len(token_ids) > max_model_len:
        raise PromptTooLong(
            f"{len(token_ids)} tokens cannot be scored in a context of {max_model_len}: raise max_model_len"
        )
