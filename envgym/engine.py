"""The interface of engines: token ids and sampling parameters in; token ids, log-probabilities and versions out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, Field

from envgym.errors import ConfigError, InvalidStep, PromptTooLong, UnknownKey, printable_line
from envgym.settings import Settings, as_list, validate_settings
from envgym.types import Message, PlacedImage, StopReason, ToolSpec, VersionSpan
from envgym.types.pickles import pickle_by_values

MaxTokens = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
StopText = Annotated[str, Field(min_length=1)]


class TurnSampling(Settings):
    """The sampling parameters that an environment may set for one turn, with the limits of a run's settings."""

    max_tokens: MaxTokens = 1
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: int = Field(0, ge=-1)  # -1 is vLLM's 0
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()
    seed: int | None = None
    stop: Annotated[tuple[StopText, ...], BeforeValidator(as_list)] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling one turn. Frozen: no two episodes can share mutable parameters.

    `top_p` below 1 truncates the support and biases importance ratios, so the default is 1.
    `temperature` 0 is greedy. `seed` makes one request repeatable (deterministic mode). `stop` are texts: an
    engine may end a turn with the token that completes one of them, and the agent cuts off later tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def with_overrides(self, overrides: Mapping[str, Any] | None) -> SamplingParams:
        """A copy with the fields that an environment sets for one turn. Raises `ConfigError` for an unknown field, and
        `InvalidStep` for a value that a run's settings cannot have."""
        if not overrides:
            return self
        try:
            checked = validate_settings(TurnSampling, overrides)
        except ConfigError as error:
            kind = ConfigError if isinstance(error, UnknownKey) else InvalidStep
            raise kind(printable_line(f"the environment's sampling parameters: {error}")) from None
        return replace(self, **checked.model_dump(exclude_unset=True))

    def within_context(self, max_model_len: int, prompt_tokens: int) -> SamplingParams:
        """A copy whose `max_tokens` fit into a context of `max_model_len` after the prompt.

        Raises `PromptTooLong` if not even one token fits.
        """
        if prompt_tokens >= max_model_len:
            raise PromptTooLong(
                f"a prompt of {prompt_tokens} tokens leaves no room to answer in a context of {max_model_len}: "
                "raise max_model_len or shorten the prompt"
            )
        return replace(self, max_tokens=min(self.max_tokens, max_model_len - prompt_tokens))


@dataclass(frozen=True, slots=True)
class Request:
    """A turn to sample after `token_ids` [T] (int32), which must not change meanwhile. `id` is unique among
    the requests in flight. The caller ensures that prompt and `sampling.max_tokens` fit into the context. A turn that
    is not over after `seconds` ends with its next token, as at `max_tokens`. `images` are those among the tokens, in
    order; only engines whose `EngineInfo.takes_images` get any."""

    id: str
    token_ids: array[int]
    sampling: SamplingParams
    seconds: float = math.inf
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A sampled turn: `token_ids` [T] int32 (end-of-turn token included), `logprobs` [T] float32, in nats, under the
    sampling distribution, the reason it ended, and a `VersionSpan` (version, start, end) for each span of tokens."""

    token_ids: array[int]
    logprobs: array[float]
    stop_reason: StopReason
    versions: tuple[VersionSpan, ...]


pickle_by_values(SamplingParams, Request, Generation)

IMAGE_ADVICE = "set engine.kind=vllm, without engine.args.language_model_only"
"""What a user can do who has images and an engine that takes none."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A started engine: kind (`vllm 0.32.0`), context length in tokens, whether `load_bucket` takes weights under their
    names in checkpoints, else in transformers' model, and the advice for users with images, empty if it samples after
    images."""

    kind: str
    max_model_len: int
    checkpoint_names: bool = True
    image_advice: str = IMAGE_ADVICE

    @property
    def takes_images(self) -> bool:
        """True if it samples after images."""
        return not self.image_advice


class Engine(Protocol):
    """A policy to sample from. Calls may overlap; each returns when its request finishes."""

    async def info(self) -> EngineInfo: ...

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Raises `InvalidOutcome` of kind `engine` for an aborted request, which is no truncated
        completion; of kind `images` for images that are not those of the tokens; of kind `placeholder` where the policy
        has sampled a token that stands for a part of an image."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of a model's weights, in a file that exists until the engines have read it."""

    number: int
    path: str
    n_bytes: int
    checksum: int


class HostedEngine(Engine, Protocol):
    """An engine in its own process, whose weights and memory the trainer controls. Its class is made with one argument,
    an `EngineSpec`, and gets its name by an entry point of the group `envgym.engines`. The policy's version is 0 before
    the first weights come. It needs `connect` only for vLLM's transfers, `load_adapter` only for LoRA, and `sleep` and
    `wake` only to take turns with models on a GPU."""

    async def steps(self) -> int:
        """Number of forward steps so far. It grows while anything is sampled or scored, which tells a slow engine from
        a hanging one."""

    async def score(self, token_ids: tuple[int, ...], images: tuple[PlacedImage, ...] = ()) -> list[float]:
        """Return log p(token t | tokens before t) at temperature 1 for t = 1 .. T-1: T-1 numbers, in nats. The caller
        ensures that T tokens fit into the context. `images` are those of a `Request`, and are passed only if there are
        any."""

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer for vLLM's own weight transfer; `info` are the arguments of vLLM's method. Raises
        `ConfigError` without such a transfer."""

    async def can_read(self, path: str) -> bool:
        """True if this process can read a file that the trainer has written."""

    async def begin_weights(self) -> None:
        """Pause sampling, with requests in flight suspended, to replace the weights."""

    async def load_bucket(self, bucket: Bucket | Mapping[str, Any]) -> None:
        """Load some of the weights, in the order of buckets' numbers; a mapping holds the arguments of vLLM's own
        transfer. Raises `WorkerError` for a bucket that is damaged or out of order."""

    async def end_weights(self, n_buckets: int, version: int) -> int:
        """Resume sampling with the new weights; tokens sampled from now on get `version`, also those of requests in
        flight. Returns the checksum of the weights received, the sum of the buckets' (`IncomingWeights.checksum` of
        `envgym.engines.spec`). Raises `WorkerError` if a bucket is missing."""

    async def load_adapter(self, path: str, version: int) -> int:
        """Sample with the LoRA adapter in a peft folder from now on, in place of the previous one; returns the checksum
        of the adapter read. Full weights may be loaded before the first adapter, not after. The engine was started for
        an adapter of that rank."""

    async def sleep(self, level: int) -> None:
        """Release the device's memory. Level 1 keeps the weights in host memory; level 2 drops them, and new ones must
        follow. No request may be in flight."""

    async def wake(self, part: str) -> None:
        """Allocate memory again: for the `weights`, which must come first, or the `cache`."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A message to generate. `id` is unique among the requests in flight."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The assistant's message, its tool calls parsed (an unreadable one has an `error`), the reason it ended, and the
    numbers of tokens; None if the engine does not count them."""

    message: Message
    stop_reason: StopReason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChatEngine(ABC):
    """A policy that takes and returns messages, without tokens: it can be evaluated, but not trained."""

    @abstractmethod
    async def chat(self, request: ChatRequest) -> ChatReply:
        """Generate the assistant's next message. Raises `PromptTooLong` if the conversation fills the context, and
        `InvalidOutcome` if there is no reply."""
