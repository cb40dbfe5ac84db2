"""Workers in the controller's own process, for `debug=true`: a breakpoint inside a worker works."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from envgym.errors import EnvgymError, WorkerError

from .child import describe_error, load_target


class InlineWorker:
    """A worker object behind the interface of a worker process."""

    def __init__(self, name: str, worker: Any) -> None:
        self._name = name
        self._worker = worker
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise WorkerError(f"{self._name}: the worker has been closed")
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except EnvgymError:
            raise
        except Exception as error:
            raise WorkerError(f"{self._name}: {describe_error(error)[1]}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        close = getattr(self._worker, "close", None)
        result = close() if close else None
        if inspect.isawaitable(result):
            await result


class InlineRuntime:
    """Builds workers here. A worker that blocks (a training step) blocks the controller meanwhile."""

    def __init__(self) -> None:
        self._workers: list[InlineWorker] = []

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> InlineWorker:
        """Build the worker. `environ` is set in this process, and stays."""
        os.environ.update(environ or {})
        try:
            worker = InlineWorker(name, load_target(target)(**kwargs))
        except EnvgymError:
            raise
        except Exception as error:
            raise WorkerError(f"{name}: {describe_error(error)[1]}") from error
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()
