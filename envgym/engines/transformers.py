"""Plain transformers as the engine, where vLLM cannot be installed. Simple and exact, not fast.

All waiting requests are sampled as one left-padded batch with a key-value cache; requests that arrive meanwhile form
the next batch.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from envgym.engine import Bucket, EngineInfo, Generation, HostedEngine, Request, SamplingParams
from envgym.errors import ConfigError, WorkerError
from envgym.models import capped_attention
from envgym.models.vision import takes_images
from envgym.models.weights_file import checksum
from envgym.processes.gpus import check_visible_gpu
from envgym.types import PlacedImage, StopReason, VersionSpan
from envgym.workers.config import number_format
from envgym.workers.lora import ADAPTER_WEIGHTS

from .spec import LONGEST_DEFAULT, EngineSpec, IncomingWeights, check_model_folder, end_tokens

MAX_BATCH = 256
"""Requests sampled together; the rest wait."""


@dataclass(slots=True)
class Sample:
    """A request in flight, and the tokens sampled for it so far."""

    request: Request
    stop: frozenset[int]
    future: asyncio.Future[Generation]
    generator: torch.Generator
    start: float = field(default_factory=time.monotonic)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: list[int] = field(default_factory=list)
    is_late: bool = False
    """Its last token came at the end of its time, or after it."""

    @property
    def sequence(self) -> list[int]:
        return [*self.request.token_ids, *self.token_ids]

    @property
    def finished(self) -> bool:
        is_full = len(self.token_ids) >= self.request.sampling.max_tokens
        return is_full or self.is_late or self.stopped or self.future.cancelled()

    @property
    def stopped(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.stop

    def generation(self) -> Generation:
        reason = StopReason.STOP if self.stopped else StopReason.LENGTH
        return Generation(self.token_ids, self.logprobs, reason, spans(self.versions))


class TransformersEngine:
    """Implements `envgym.engine.HostedEngine`.

    Several fields of its specification have no effect. `deterministic`: batches follow the order of arrival, and a
    request with a seed has its own generator. `concurrency`: a batch is everything in flight. `lora_rank`, `sleeps`,
    `gpu_share`: an adapter of any rank can be loaded, the model be moved, and memory is taken as needed.
    """

    def __init__(self, spec: EngineSpec) -> None:
        check_model_folder(spec.model)
        if spec.tensor_parallel > 1:
            raise ConfigError("engine.tensor_parallel needs engine.kind=vllm")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        check_visible_gpu(self._device.type)
        dtype = number_format(spec.dtype, on_cpu=self._device.type == "cpu")
        try:
            if takes_images(transformers.AutoConfig.from_pretrained(spec.model)):
                raise ConfigError(f"{spec.model} is a vision-language model, which engine.kind=vllm alone samples from")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype, **spec.engine_args)
            if "attn_implementation" not in spec.engine_args and (attention := capped_attention(loaded.config)):
                loaded.set_attn_implementation(attention)
        except (OSError, ValueError, TypeError, KeyError, MemoryError) as error:
            traceback.print_exception(error)
            reason = " ".join(str(error).split())[:400]
            raise ConfigError(f"transformers cannot load the model {spec.model!r}: {reason}") from None
        self._model: Any = loaded.to(self._device).eval()
        config = self._model.config
        self._max_model_len: int = spec.max_model_len or min(config.max_position_embeddings, LONGEST_DEFAULT)
        self._end_tokens = end_tokens(config, spec.model)
        self._generator = torch.Generator(self._device).manual_seed(spec.seed)
        self._version = 0
        self._steps = 0
        self._has_adapter = False
        self._update = IncomingWeights()
        self._waiting: list[Sample] = []
        self._sampling: asyncio.Task[None] | None = None
        self._may_step = asyncio.Event()
        self._may_step.set()

    async def info(self) -> EngineInfo:
        return EngineInfo(f"transformers {transformers.__version__}", self._max_model_len, checkpoint_names=False)

    async def steps(self) -> int:
        return self._steps

    async def generate(self, request: Request) -> Generation:
        sampling, generator = request.sampling, self._generator
        if sampling.seed is not None:
            generator = torch.Generator(self._device).manual_seed(sampling.seed)
        stop = frozenset((*sampling.stop_token_ids, *self._end_tokens))
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append(Sample(request, stop, future, generator))
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._sample_while_busy())
        return await future

    async def score(self, token_ids: tuple[int, ...], images: tuple[PlacedImage, ...] = ()) -> list[float]:
        assert not images, "this engine takes no images"
        await self._may_step.wait()
        ids = torch.tensor([token_ids], device=self._device)
        with torch.inference_mode():
            logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        self._steps += 1
        return [float(x) for x in logprobs.gather(1, ids[0, 1:, None])[:, 0]]

    async def connect(self, info: Mapping[str, Any]) -> None:
        raise ConfigError("sync.transfer=nccl and cuda_ipc need engine.kind=vllm")

    async def can_read(self, path: str) -> bool:
        return Path(path).exists()

    async def begin_weights(self) -> None:
        if self._has_adapter:
            raise WorkerError("an engine that has an adapter takes no other weights")
        self._may_step.clear()
        self._update = IncomingWeights()

    async def load_bucket(self, bucket: Bucket | Mapping[str, Any]) -> None:
        tensors = self._update.take(bucket)
        _, unexpected = self._model.load_state_dict(tensors, strict=False)
        if unexpected:
            raise WorkerError(f"these are not this model's weights: {unexpected[:3]}")

    async def end_weights(self, n_buckets: int, version: int) -> int:
        self._update.check(n_buckets)
        if missing := {name for name, _ in self._model.named_parameters()} - self._update.names:
            raise WorkerError(f"these are not all of this model's weights: {sorted(missing)[:3]} are missing")
        self._version = version
        self._may_step.set()
        return self._update.checksum

    async def load_adapter(self, path: str, version: int) -> int:
        import peft
        from safetensors.torch import load_file

        if not self._has_adapter:
            peft.inject_adapter_in_model(peft.LoraConfig.from_pretrained(path), self._model)
            self._model.eval()
            self._has_adapter = True
        saved = load_file(Path(path, ADAPTER_WEIGHTS))
        tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
        result = peft.set_peft_model_state_dict(self._model, tensors)
        if result.unexpected_keys:
            raise WorkerError(f"{path!r} holds no adapter of this model: {result.unexpected_keys[:3]}")
        self._version = version
        return checksum(saved)

    async def sleep(self, level: int) -> None:
        self._model.to("cpu")
        if self._device.type == "cuda":  # else torch keeps the memory
            torch.cuda.empty_cache()

    async def wake(self, part: str) -> None:
        self._model.to(self._device)

    async def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()

    async def _sample_while_busy(self) -> None:
        """Sample the waiting requests, batch by batch. An error fails the requests of its batch."""
        while self._waiting:
            await self._may_step.wait()
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            try:
                await self._sample(batch)
            except Exception as error:
                traceback.print_exception(error)
                for sample in batch:
                    if not sample.future.done():
                        sample.future.set_exception(WorkerError(f"sampling failed: {type(error).__name__}: {error}"))

    async def _sample(self, batch: list[Sample]) -> None:
        """Sample a batch to its end. After new weights the cache is recomputed from the tokens so far."""
        while not all(sample.finished for sample in batch):
            version, cache, mask = self._version, None, None
            while version == self._version and not all(sample.finished for sample in batch):
                logits, cache, mask = self._forward(batch, cache, mask)
                self._steps += 1
                drawn = [
                    (sample, *sample_token(row, sample.request.sampling, sample.generator))
                    for row, sample in zip(logits, batch, strict=True)
                    if not sample.finished
                ]
                samples, *columns = zip(*drawn, strict=True)
                # A GPU is waited for twice, and not at every token.
                tokens, logprobs = (torch.stack(column).tolist() for column in columns)
                for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
                    sample.token_ids.append(token)
                    sample.logprobs.append(logprob)
                    sample.versions.append(version)
                    sample.is_late = time.monotonic() - sample.start >= sample.request.seconds
                    if sample.finished and not sample.future.done():
                        sample.future.set_result(sample.generation())
                await asyncio.sleep(0)
                await self._may_step.wait()

    def _forward(
        self, batch: list[Sample], cache: Any, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Logits [B, V] of every sample's next token (float32), the cache and its mask [B, T] (left-padded)."""
        if mask is None:
            length = max(len(sample.sequence) for sample in batch)
            padding = [length - len(sample.sequence) for sample in batch]
            rows = [[0] * pad + sample.sequence for pad, sample in zip(padding, batch, strict=True)]
            ids = torch.tensor(rows, device=self._device)
            mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long().to(self._device)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
        else:
            ids = torch.tensor([sample.sequence[-1:] for sample in batch], device=self._device)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1
        with torch.inference_mode():
            inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
            output = self._model(ids, **inputs, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float(), output.past_key_values, mask


if TYPE_CHECKING:
    _: type[HostedEngine] = TransformersEngine  # compares the methods


def sample_token(
    logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from `logits` [V]; return it and its log-probability, in nats, in the distribution drawn from, both
    as tensors without dimensions.

    Temperature, then top-k, then top-p (the smallest set of most likely tokens that holds at least top_p), each
    renormalised. Temperature 0 takes the most likely, with its log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        token = logits.argmax()
        return token, logits.log_softmax(-1)[token]
    logits = logits / max(sampling.temperature, 1e-6)  # less would overflow, and fail the whole batch
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.softmax(-1).sort(descending=True)
        logits = logits.index_fill(0, index[ordered.cumsum(0) - ordered >= sampling.top_p], -torch.inf)
    logprobs = logits.log_softmax(-1)
    token = torch.multinomial(logprobs.exp(), 1, generator=generator)[0]
    return token, logprobs[token]


def spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    """Runs of equal policy versions as spans; `versions` has one number per token."""
    starts = [t for t, version in enumerate(versions) if t == 0 or version != versions[t - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True))
