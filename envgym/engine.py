"""The interface of engines: token ids and sampling parameters in; token ids, log-probabilities and versions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envgym.errors import ConfigError, PromptTooLong, did_you_mean
from envgym.models.weights_file import Bucket
from envgym.types import Message, StopReason, ToolSpec, VersionSpan


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling one turn. Frozen: no two episodes can share mutable parameters.

    With `top_p` below 1 the support is cut and importance ratios are biased, so the default is 1.
    `temperature` 0 is greedy. `seed` makes one request repeatable (deterministic mode).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def overridden(self, by: Mapping[str, Any] | None) -> SamplingParams:
        """These, with the fields that an environment sets for one turn. Raises `ConfigError` for one there is not."""
        for name in by or ():
            if name not in self.__dataclass_fields__:
                hint = did_you_mean(name, self.__dataclass_fields__)
                raise ConfigError(f"the environment set an unknown sampling parameter {name!r}.{hint}")
        return replace(self, **by) if by else self

    def within(self, max_model_len: int, prompt: int) -> SamplingParams:
        """These, with no more tokens than fit into a context of `max_model_len` after a prompt of `prompt` tokens.

        Raises `PromptTooLong` where not one fits.
        """
        if prompt >= max_model_len:
            raise PromptTooLong(
                f"a prompt of {prompt} tokens leaves no room to answer in a context of {max_model_len}: "
                "raise max_model_len or shorten the prompt"
            )
        return replace(self, max_tokens=min(self.max_tokens, max_model_len - prompt))


def check_fits(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raise `PromptTooLong` where a sequence to score is longer than the context."""
    if len(token_ids) > max_model_len:
        raise PromptTooLong(
            f"{len(token_ids)} tokens cannot be scored in a context of {max_model_len}: raise max_model_len"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to make after `token_ids` [T] (int32), which do not change while it is made. `id` is unique among
    those in flight. Prompt and `sampling.max_tokens` fit into the context: whoever asks has seen to it."""

    id: str
    token_ids: array[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """A sampled turn: `token_ids` [T] int32 (end-of-turn token included), `logprobs` [T] float32, in nats, of the
    distribution sampled from, why it ended, and which policy version sampled which tokens."""

    token_ids: array[int]
    logprobs: array[float]
    stop_reason: StopReason
    versions: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A started engine: kind (`vllm 0.32.0`), context length in tokens."""

    kind: str
    max_model_len: int


class Engine(Protocol):
    """A policy that can be sampled. Calls may overlap; results come as each request finishes."""

    async def info(self) -> EngineInfo: ...

    async def steps(self) -> int:
        """The number of steps taken so far. It grows while anything is sampled or scored, so that whoever waits can
        tell an engine that is slow from one that hangs."""

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Raises `InvalidOutcome` of kind `engine` where the request was given up before it was done:
        that is no answer cut short."""

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Return log p(token t | tokens before t) at temperature 1 for t = 1 .. T-1: T-1 numbers, in nats."""

    async def close(self) -> None: ...


class HostedEngine(Engine, Protocol):
    """An engine in the process that holds it, whose weights and memory are another's to change."""

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer for a transfer of vLLM's own; `info` is what its engine is to be told."""

    async def sees(self, path: str) -> bool:
        """True if a file that the trainer has made can be read here."""

    async def begin_weights(self) -> None:
        """Stop sampling, keeping requests in flight where they are, to replace the weights."""

    async def load_bucket(self, bucket: Bucket | Mapping[str, Any]) -> None:
        """Load some of the weights, in the order of buckets' numbers; a mapping is what a transfer of vLLM's own is
        told. Raises `WorkerError` for a bucket that is not what was written, or comes out of turn."""

    async def end_weights(self, n_buckets: int, version: int) -> None:
        """Go on with the new weights, and stamp what is sampled from now on with `version`. Requests in flight go on,
        and their later tokens carry the new version. Raises `WorkerError` where a bucket is missing."""

    async def load_adapter(self, path: str, version: int) -> None:
        """Sample with the LoRA adapter in a folder of peft's form from now on, in place of the one before. Other
        weights may come before it but not after. The engine was started for one of that rank."""

    async def sleep(self, level: int) -> None:
        """Give the device's memory to others: 1 keeps the weights in the host's, 2 wants new ones afterwards. Nothing
        is in flight."""

    async def wake(self, part: str) -> None:
        """Take memory back for the `weights`, which must come first, or the `cache`."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One message to get. `id` is unique among those in flight."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The answer, its tool calls parsed (those that cannot be read have an `error`), why it ended, and the tokens it
    took; None where the engine does not count them."""

    message: Message
    stop_reason: StopReason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChatEngine(ABC):
    """A policy that takes and gives messages, and no tokens: it can be played and measured, but not trained."""

    @abstractmethod
    async def chat(self, request: ChatRequest) -> ChatReply:
        """The assistant's next message. Raises `PromptTooLong` where the conversation fills the context, and
        `InvalidOutcome` where there is no answer."""
