"""The `llm_engine` that an executor is given: its requests are answered by the run's own engine.

The executor runs in another process than the engine's client. What it asks for is put in a queue, from which the
environment takes it (`Run.next`), and comes back as an answer (`Run.answer`).
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Generator, Mapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from envgym.errors import InvalidStep

from .sampling import CompletionOutput, Logprob, RequestOutput, overrides

current: ContextVar[Run | None] = ContextVar("current", default=None)
"""The episode that is being executed. Executors share one engine object, as they do where they come from."""
runs: WeakValueDictionary[str, Run] = WeakValueDictionary()
"""The episodes that are being executed in this process, by their id."""


class NoRoom(ValueError):
    """The context, or what the episode may sample, is used up."""


class Run:
    """One execution: what it asks of the engine, and its result. `ours` are the run's sampling parameters."""

    def __init__(self, tokenizer: Any, ours: Mapping[str, Any]) -> None:
        self.id = uuid.uuid4().hex
        self.ours = ours
        self.refused: Exception | None = None
        """Why a request of the engine failed, by whatever way the file hears of it."""
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self.results: asyncio.Queue[Any] = asyncio.Queue()
        self._tokenizer = tokenizer
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any] | None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, executing: Any) -> None:
        """Run the coroutine `executing`; its result, or what it raises, is the last event."""

        async def execute() -> None:
            current.set(self)
            runs[self.id] = self
            try:
                result = await executing
                if result is None and not self.results.empty():  # the older interface hands it to a queue
                    result = self.results.get_nowait()
                self._events.put_nowait(("result", result))
            except Exception as error:
                self._events.put_nowait(("error", self._cause(error)))
            finally:
                self._is_over = True

        self._task = asyncio.create_task(execute())

    async def next(self) -> tuple[str, Any]:
        """The next event: `generate` with (number, token ids, overrides), or `result`. Raises what `execute` raised."""
        kind, value = await self._events.get()
        if kind == "error":
            raise value
        return kind, value

    def answer(self, number: int, generation: Mapping[str, Any] | None) -> None:
        """Answer a request: token ids, log-probabilities and finish reason; None where there is no room for more."""
        self._waiting.pop(number).set_result(generation)

    def _cause(self, error: Exception) -> Exception:
        """What `execute` raised, with what it may not know: a server of the file's own says no more than "500"."""
        if self.refused is None or self.refused is error:
            return error
        said = f"{type(self.refused).__name__}: {self.refused}"
        return InvalidStep(f"llm_engine.generate raised {said}; execute then raised {type(error).__name__}: {error}")

    async def generate(self, token_ids: list[int], params: Any) -> RequestOutput:
        """Sample, from whichever thread and event loop."""
        if self._is_over:
            raise RuntimeError("the episode that asks is over")
        try:
            if asyncio.get_running_loop() is self._loop:
                return await self._generate(token_ids, params)
            asking = asyncio.run_coroutine_threadsafe(self._generate(token_ids, params), self._loop)
            return await asyncio.wrap_future(asking)
        except NoRoom:
            raise
        except Exception as error:
            self.refused = error
            raise

    async def _generate(self, token_ids: list[int], params: Any) -> RequestOutput:
        number = next(self._numbers)
        future: asyncio.Future[Mapping[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._events.put_nowait(("generate", (number, token_ids, overrides(params, self.ours))))
        said = await future
        if said is None:
            raise NoRoom("the context, or what the episode may sample, is used up")
        ids = list(said["token_ids"])
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        logprobs = [{id: Logprob(logprob)} for id, logprob in zip(ids, said["logprobs"], strict=True)]
        output = CompletionOutput(text, ids, logprobs, said["finish_reason"])
        return RequestOutput(list(token_ids), [output], request_id=str(number))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def running() -> Run:
    """The episode that asks. Raises `RuntimeError` where that cannot be told, which every episode here is told of."""
    run = current.get()
    if run is None:
        error = RuntimeError(
            "called where its episode is not known: from a thread, or a server of its own, to which no context is "
            "carried (asyncio.to_thread and HTTP by httpx, aiohttp, requests or urllib carry it)"
        )
        for other in list(runs.values()):
            other.refused = error
        raise error
    return run


class EngineProxy:
    """`generate(prompt_token_ids, sampling_params)`, to be awaited (the current interface) or iterated (vLLM's own)."""

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> _Generating:
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        if isinstance(token_ids, str):
            raise TypeError("llm_engine.generate takes token ids, not text: tokens in, tokens out")
        plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        return _Generating(running(), [int(id) for id in plain], sampling_params)


class _Generating:
    def __init__(self, run: Run, token_ids: list[int], params: Any) -> None:
        self._run, self._token_ids, self._params = run, token_ids, params

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._run.generate(self._token_ids, self._params).__await__()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        yield await self


class QueueProxy:
    """The `result_queue` of the older interface: what is put there is the result of the episode that puts it."""

    async def put(self, result: Any) -> None:
        running().results.put_nowait(result)

    def put_nowait(self, result: Any) -> None:
        running().results.put_nowait(result)
