"""Stop texts: an observation may request that the policy's turn ends with the first token that contains a text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from envgym.errors import InvalidStep
from envgym.types import Observation

from .renderer import Renderer


def sampling_of(observation: Observation, renderer: Renderer) -> Mapping[str, Any] | None:
    """The sampling parameters of an observation, with its `stop` converted to the tokens that contain that text.

    Raises `InvalidStep` if it is no text, or no token contains it.
    """
    parameters = observation.sampling
    if not parameters or "stop" not in parameters:
        return parameters
    if not isinstance(text := parameters["stop"], str) or not text:
        raise InvalidStep(f"the stop of an observation's sampling is a text, not {text!r:.60}")
    stop = (*renderer.stop_token_ids, *tokens_with(text, renderer))
    return {name: value for name, value in parameters.items() if name != "stop"} | {"stop_token_ids": stop}


@lru_cache(maxsize=4)  # a stranger's environment may change its `stop` at each step, and decoding takes seconds
def token_texts(renderer: Renderer) -> tuple[str, ...]:
    """The text of every token of the vocabulary."""
    return tuple(renderer.text([token]) for token in range(len(renderer.tokenizer)))


@lru_cache(maxsize=64)
def tokens_with(text: str, renderer: Renderer) -> tuple[int, ...]:
    """Ids of the tokens that contain `text`. Raises `InvalidStep` if there are none."""
    ids = tuple(token for token, token_text in enumerate(token_texts(renderer)) if text in token_text)
    if not ids:
        raise InvalidStep(f"no token of the policy's tokenizer contains {text!r}, so that no turn can stop there")
    return ids
