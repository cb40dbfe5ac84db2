"""The `llm_engine` of an executor, with vLLM's types; the run's own engine answers its requests.

The executor and the engine's client run in different processes. A request goes to a queue, from which the environment
takes it (`ExecutorRun.next`) and returns the answer (`ExecutorRun.answer`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from envgym.errors import InvalidStep

SUPPORTED = ("max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed")
OF_TEXT = ("logprobs", "skip_special_tokens", "include_stop_str_in_output")
"""Parameters of vLLM's answer as text: here it is tokens, with a log-probability each."""


@dataclass
class VLLMSamplingParams:
    """An episode's own copy of the parameters of its next turn, as vLLM has them. The file may change or replace it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    min_tokens: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = False

    @classmethod
    def from_run(cls, sampling: Mapping[str, Any]) -> VLLMSamplingParams:
        """A copy of the run's parameters."""
        params = {name: sampling[name] for name in SUPPORTED if name in sampling}
        return cls(**params | {"stop_token_ids": list(sampling.get("stop_token_ids", ()))})


def overrides(params: Any, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in `params`, an object or a mapping, that differ from the run's own, `sampling`.

    Raises `InvalidStep` for an unsupported parameter, rather than ignore it.
    """
    all_fields = fields(VLLMSamplingParams)
    values = params if isinstance(params, Mapping) else {f.name: getattr(params, f.name, None) for f in all_fields}
    for name, default in ((f.name, f.default) for f in all_fields if f.name not in (*SUPPORTED, *OF_TEXT)):
        if (value := values.get(name)) and value != default:
            raise InvalidStep(
                f"the agent set the sampling parameter {name}={value!r:.60}, which has no effect here: "
                f"there are {', '.join(SUPPORTED)}"
            )
    changed: dict[str, Any] = {}
    for name in SUPPORTED:
        value = values.get(name)
        if value is None:
            continue
        if name == "top_k":
            value = max(0, value)  # vLLM's -1 also means all tokens
        elif name == "stop_token_ids":
            value = tuple(dict.fromkeys((*sampling.get(name, ()), *value)))  # the end of a turn always stops
        if value != sampling.get(name):
            changed[name] = value
    return changed


# -- the engine -------------------------------------------------------------------------------------------

current: ContextVar[ExecutorRun | None] = ContextVar("current", default=None)
"""The episode of the current context. Executors share one engine object, as in OpenRLHF."""
runs: WeakSet[ExecutorRun] = WeakSet()
"""The running episodes of this process."""


class OutOfRoom(ValueError):
    """The context or the episode's token budget is used up."""


class ExecutorRun:
    """One execution: its requests to the engine, and its result. `sampling` are the run's parameters."""

    def __init__(self, tokenizer: Any, sampling: Mapping[str, Any]) -> None:
        self.request_error: Exception | None = None
        """The error of a failed request, whatever the file made of it."""
        self.queued_results: list[Any] = []
        """Results from the older interface's queue."""
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[str, Any] | Exception] = asyncio.Queue()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any] | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self, coroutine: Any) -> None:
        """Run the coroutine of `execute`; its result or exception is the last event."""

        async def execute() -> None:
            current.set(self)
            runs.add(self)
            try:
                result = await coroutine
                if result is None and self.queued_results:
                    result = self.queued_results[0]
                self._events.put_nowait(("result", result))
            except Exception as error:
                self._events.put_nowait(self._with_cause(error))
            finally:
                self._is_over = True

        self._task = asyncio.create_task(execute())

    async def next(self) -> tuple[str, Any]:
        """The next event: `generate` with (number, token ids, overrides), or `result`. Raises the exception of
        `execute`."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def answer(self, number: int, generation: Mapping[str, Any] | None) -> None:
        """Answer a request: token ids, log-probabilities and finish reason; None if context or budget is full."""
        self._waiting.pop(number).set_result(generation)

    def _with_cause(self, error: Exception) -> Exception:
        """The exception of `execute` with its cause, which a server in the file may have reduced to "500"."""
        if self.request_error is None or self.request_error is error:
            return error
        cause = f"{type(self.request_error).__name__}: {self.request_error}"
        return InvalidStep(f"llm_engine.generate raised {cause}; execute then raised {type(error).__name__}: {error}")

    async def generate(self, token_ids: list[int], params: Any) -> SimpleNamespace:
        """Sample after `token_ids`; callable from any thread and event loop. Raises `OutOfRoom` without room. Any other
        error is stored as `request_error` and raised."""
        if self._is_over:
            raise RuntimeError("the episode of this request has ended")
        try:
            generating = asyncio.run_coroutine_threadsafe(self._generate(token_ids, params), self._loop)
            return await asyncio.wrap_future(generating)
        except OutOfRoom:
            raise
        except Exception as error:
            self.request_error = error
            raise

    async def _generate(self, token_ids: list[int], params: Any) -> SimpleNamespace:
        """vLLM's `RequestOutput`."""
        changed = overrides(params, self._sampling)
        number = next(self._numbers)
        self._waiting[number] = self._loop.create_future()
        self._events.put_nowait(("generate", (number, token_ids, changed)))
        generation = await self._waiting[number]
        if generation is None:
            raise OutOfRoom("the context or the episode's token budget is used up")
        ids = list(generation["token_ids"])
        pairs = zip(ids, generation["logprobs"], strict=True)
        logprobs = [{id: SimpleNamespace(logprob=value, rank=None, decoded_token=None)} for id, value in pairs]
        output = SimpleNamespace(
            index=0,
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=generation["finish_reason"],
            stop_reason=None,
        )
        return SimpleNamespace(
            request_id=str(number), prompt=None, prompt_token_ids=list(token_ids), outputs=[output], finished=True
        )

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def current_run() -> ExecutorRun:
    """The episode of this context. Without one, record a `RuntimeError` in every running episode, and raise it."""
    run = current.get()
    if run is None:
        error = RuntimeError(
            "called outside its episode's context: in a thread without it (asyncio.to_thread carries it over), "
            "or by a server in the file; agent=external gives a program an address that speaks "
            "OpenAI's API"
        )
        for run in list(runs):
            run.request_error = error
        raise error
    return run


class EngineProxy:
    """`generate(prompt_token_ids, sampling_params)`, to await (the current interface) or to iterate (vLLM's own)."""

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> _Generating:
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        if isinstance(token_ids, str):
            raise TypeError("llm_engine.generate takes token ids, not text: tokens in, tokens out")
        plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        return _Generating(current_run(), [int(id) for id in plain], sampling_params)


class _Generating:
    def __init__(self, run: ExecutorRun, token_ids: list[int], params: Any) -> None:
        self._run, self._token_ids, self._params = run, token_ids, params

    def __await__(self) -> Generator[Any, None, SimpleNamespace]:
        return self._run.generate(self._token_ids, self._params).__await__()

    async def __aiter__(self) -> AsyncIterator[SimpleNamespace]:
        yield await self


class QueueProxy:
    """The `result_queue` of the older interface: an item is the result of the episode that puts it."""

    async def put(self, result: Any) -> None:
        current_run().queued_results.append(result)

    def put_nowait(self, result: Any) -> None:
        current_run().queued_results.append(result)
