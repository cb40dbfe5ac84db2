"""Workers as Ray actors, on one machine or a cluster.

Without a cluster (no `RAY_ADDRESS`) a local Ray is started, and ended with the runtime. Each worker is an asynchronous
actor: coroutine methods overlap, plain ones run one after the other, as in the local runtime.

After a SIGKILL of the controller a guard process ends the local Ray and all actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envgym.errors import WorkerDied, WorkerError, missing_package

from . import guard
from .child import Described, describe_error, load_target, rebuilt_error

START_TIMEOUT = 600.0
"""Seconds a worker may take to be placed, to import what it needs, and to return from its constructor."""
CLOSE_TIMEOUT = 10.0
"""Seconds a worker may take to end by itself when asked, before it is killed."""

Answer = tuple[Described | None, Any]
"""(error, result): errors cross as (class of `envgym.errors` or empty, one line), so nothing foreign is unpickled."""


class Host:
    """The actor: one worker object and the calls that run on it."""

    def __init__(self, name: str, log: str, directory: str, path: list[str], keep_threads: bool) -> None:
        import ray

        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if os.path.isdir(directory):  # elsewhere in a cluster the controller's folder need not exist
            os.chdir(directory)
        sys.path += [entry for entry in path if entry not in sys.path]
        if not keep_threads:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to 1; how many to use is the worker's decision
        os.environ["ENVGYM_NODE_ADDRESS"] = ray.util.get_node_ip_address()
        self._worker: Any = None

    async def start(self, target: str, kwargs: dict[str, Any]) -> Answer:
        try:
            self._worker = load_target(target)(**kwargs)
        except Exception as error:
            return _failure(error), None
        return None, os.getpid()

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            return None, await result if inspect.isawaitable(result) else result
        except Exception as error:
            return _failure(error), None

    async def close(self) -> None:
        close = getattr(self._worker, "close", None)
        result = close() if close else None
        if inspect.isawaitable(result):
            await result


class RayWorker:
    """The controller's end of one actor. Made by `RayRuntime.start`."""

    def __init__(self, name: str, log: Path, actor: Any) -> None:
        self._name = name
        self.log = log
        self.pid = 0
        self._actor = actor
        self._closing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._name

    async def start(self, target: str, kwargs: Mapping[str, Any]) -> None:
        """Build the worker object in the actor; raises what its constructor raised."""
        self.pid = await self._answer(self._actor.start.remote(target, dict(kwargs)))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closing is not None:
            raise WorkerError(f"{self._name}: the worker has been closed")
        return await self._answer(self._actor.call.remote(method, args, kwargs))

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        import ray

        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):  # stuck or dead: killed below all the same
            await asyncio.wait_for(_future(self._actor.close.remote()), CLOSE_TIMEOUT)
        ray.kill(self._actor)

    async def _answer(self, reference: Any) -> Any:
        import ray

        try:
            error, result = await _future(reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayActorError as death:
            raise WorkerDied(f"{self._name} ended without being asked to (log: {self.log})") from death
        if error is None:
            return result
        raise rebuilt_error(error, self._name, self.log)


class RayRuntime:
    """Starts workers as Ray actors whose output goes to `log_dir/NAME.log` on the machine where they run.

    Where the cluster has GPUs each worker gets `gpus_per_worker` of one; less than 1 lets workers share.
    """

    def __init__(self, log_dir: Path | str, *, gpus_per_worker: float = 1.0) -> None:
        self._log_dir = Path(log_dir).resolve()
        self._gpus_per_worker = gpus_per_worker
        self._workers: list[RayWorker] = []
        self._ours = False
        self._guard: subprocess.Popen[bytes] | None = None

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> RayWorker:
        ray = self._ray()
        log = self._log_dir / f"{name}.log"
        gpus = self._gpus_per_worker if ray.cluster_resources().get("GPU") else 0
        keep_threads = "OMP_NUM_THREADS" in {**os.environ, **(environ or {})}
        actor = (
            ray.remote(Host)
            .options(num_cpus=0, num_gpus=gpus, runtime_env={"env_vars": dict(environ or {})})
            .remote(name, str(log), os.getcwd(), sys.path, keep_threads)
        )
        worker = RayWorker(name, log, actor)
        self._workers.append(worker)
        try:
            await asyncio.wait_for(worker.start(target, kwargs), START_TIMEOUT)
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                raise WorkerError(
                    f"{name} was not ready after {START_TIMEOUT:.0f} s: is there a free GPU for it? (log: {log})"
                ) from None
            raise
        return worker

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))
        if self._ours:
            self._ray().shutdown()
            self._ours = False
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def _ray(self) -> Any:
        """The `ray` module, connected."""
        try:
            import ray
        except ImportError:
            raise missing_package("ray", "ray", "runtime=ray") from None
        if not ray.is_initialized():
            local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": os.cpu_count(), "include_dashboard": False}
            before = guard.children().get(os.getpid(), set())
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
            self._ours = True
            if local:
                self._guard = guard.start(guard.children().get(os.getpid(), set()) - before)
        return ray


async def _future(reference: Any) -> Any:
    """An object reference as something asyncio can time out."""
    return await asyncio.wrap_future(reference.future())


def _failure(error: Exception) -> Described:
    traceback.print_exception(error)
    return describe_error(error)
