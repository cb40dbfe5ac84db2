"""Stop texts: an observation may ask for the policy's turn to end with the first token that holds a text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from envgym.errors import InvalidStep
from envgym.types import Observation

from .renderer import Renderer


def sampling_of(observation: Observation, renderer: Renderer) -> Mapping[str, Any] | None:
    """The sampling parameters that an observation sets, its `stop` as the tokens that hold that text.

    Raises `InvalidStep` where no token holds it.
    """
    wanted = observation.sampling
    if not wanted or "stop" not in wanted:
        return wanted
    stop = (*renderer.stop_token_ids, *tokens_with(wanted["stop"], renderer))
    return {name: value for name, value in wanted.items() if name != "stop"} | {"stop_token_ids": stop}


@lru_cache(maxsize=64)  # every token of the vocabulary is looked at
def tokens_with(text: str, renderer: Renderer) -> tuple[int, ...]:
    """Ids of the tokens whose own text holds `text`. Raises `InvalidStep` where there is none."""
    ids = tuple(token for token in range(len(renderer.tokenizer)) if text in renderer.text([token]))
    if not ids:
        raise InvalidStep(f"no token of the policy's tokenizer holds {text!r}, so that no turn can stop there")
    return ids
