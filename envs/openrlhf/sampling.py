"""vLLM's words for sampling, as agent files know them: parameters and outputs. Ours are frozen, these are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envgym.errors import InvalidStep

HONOURED = ("max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed")
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_tokens": (0, 1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ([], ()),
    "bad_words": ([], ()),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_decoding": (),
}
"""Parameters that cannot be honoured, and the values (besides None) at which there is nothing to honour."""


@dataclass
class SamplingParams:
    """An episode's own copy of the parameters of its next turn. The file may change or replace it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: int = 1
    min_tokens: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = False

    @classmethod
    def of(cls, ours: Mapping[str, Any]) -> SamplingParams:
        """The run's parameters, in an object that is the caller's own."""
        known = {name: ours[name] for name in HONOURED if name in ours}
        return cls(**known | {"stop_token_ids": list(ours.get("stop_token_ids", ()))})


def overrides(params: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
    """What `params` (an object or a mapping) changes of the run's parameters.

    Raises `InvalidStep` for a parameter that cannot be honoured: ignoring it would be worse.
    """
    values = params if isinstance(params, Mapping) else {name: getattr(params, name, None) for name in _NAMES}
    for name, idle in WITHOUT_EFFECT.items():
        value = values.get(name)
        if value is not None and value not in idle:
            raise InvalidStep(
                f"the agent set the sampling parameter {name}={value!r:.60}, which has no effect here: "
                f"there are {', '.join(HONOURED)}"
            )
    changed: dict[str, Any] = {}
    for name in HONOURED:
        value = values.get(name)
        if value is None:
            continue
        if name == "top_k":
            value = max(0, value)  # vLLM's -1 is all of them, too
        elif name == "stop_token_ids":
            value = tuple(dict.fromkeys((*ours.get(name, ()), *value)))  # the end of a turn still ends it
        if value != ours.get(name):
            changed[name] = value
    return changed


_NAMES = (*HONOURED, *WITHOUT_EFFECT)


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """What was sampled. `finish_reason` is `stop` or `length`."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    index: int = 0
    stop_reason: Any = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_id: str = ""
    finished: bool = True
    prompt: str | None = field(default=None)
