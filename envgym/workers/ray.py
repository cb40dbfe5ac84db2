"""Workers as Ray actors, on one machine or a cluster.

Without a cluster (no `RAY_ADDRESS`) a local Ray is started, and ended with the runtime. Each worker is an asynchronous
actor: coroutine methods overlap, plain ones run one after the other, and calls begin in the order in which they were
made, as in the local runtime.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, WorkerDied, WorkerError, needs
from envgym.processes import family
from envgym.processes.runtime import UTF8, Described, Slot, close_object, describe_error, load_target, rebuilt_error
from envgym.processes.watchdog import CONTROLLER_LOG, CallWatch, watched_thread

START_TIMEOUT = 600.0
"""Seconds a worker may take to be placed, to import what it needs, and to return from its constructor."""
CLOSE_TIMEOUT = 10.0
"""Seconds a worker may take to end by itself when asked, before it is killed."""
CALLS_AT_ONCE = 2**20
"""Calls that an actor may have in flight: as good as any number. At Ray's own 1,000 an engine with as many requests in
flight would never get the call to go on, or that with new weights."""

RESERVE_TIMEOUT = 600.0
"""Seconds that machines and GPUs of a cluster may be held by others."""
LITTLE = 0.001
"""CPUs of a machine's bundle, which must hold something: how many cores are used is the workers' decision."""

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
        self._next = 0
        self._early: dict[int, asyncio.Future[None]] = {}
        self._forgotten: set[int] = set()
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._watch = CallWatch()

    async def start(self, target: str, kwargs: dict[str, Any]) -> Answer:
        try:
            self._worker = load_target(target)(**kwargs)
        except Exception as error:
            return _failure(error), None
        return None, os.getpid()

    async def call(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Run a method. Calls begin in the order of their numbers; Ray hands them over in any order."""
        if number > self._next:
            self._early[number] = asyncio.get_running_loop().create_future()
            await self._early[number]
        if number < self._next:  # forgotten before it came
            return _given_up(), None
        try:
            with watched_thread(function := getattr(self._worker, method)):
                result = function(*args, **kwargs)
            if not inspect.isawaitable(result):
                return None, result
            self._running[number] = asyncio.ensure_future(result)
        except Exception as error:
            return _failure(error), None
        finally:
            self._begin_after(number)
        try:
            with self._watch.watching(method):
                return None, await self._running[number]
        except asyncio.CancelledError:
            return _given_up(), None
        except Exception as error:
            return _failure(error), None
        finally:
            del self._running[number]

    async def forget(self, number: int) -> None:
        """Give a call up, whether it runs, waits for its turn or has yet to come."""
        if number in self._running:
            self._running[number].cancel()
        elif number >= self._next:
            self._forgotten.add(number)
            if number == self._next:
                self._begin_after(number - 1)

    def _begin_after(self, number: int) -> None:
        self._next = number + 1
        while self._next in self._forgotten:
            self._forgotten.remove(self._next)
            self._wake(self._next)
            self._next += 1
        self._wake(self._next)

    def _wake(self, number: int) -> None:
        if number in self._early:
            self._early.pop(number).set_result(None)

    async def close(self) -> None:
        await close_object(self._worker)


class RayWorker:
    """The controller's end of one actor. Made by `RayRuntime.start`."""

    def __init__(self, name: str, log: Path, actor: Any, watch: CallWatch | None = None) -> None:
        self._call_watch = watch or CallWatch()
        self.name = name
        self.log = log
        self.pid = 0
        self._actor = actor
        self._calls = 0
        self._closing: asyncio.Task[None] | None = None

    async def start(self, target: str, kwargs: Mapping[str, Any]) -> None:
        """Build the worker object in the actor; raises what its constructor raised."""
        with self._explained():
            answer = await _future(self._actor.start.remote(target, dict(kwargs)))
        self.pid = self._result(answer)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closing is not None:
            raise WorkerError(f"{self.name}: the worker has been closed")
        from ray.exceptions import RayTaskError

        with self._explained():
            number = self._calls
            reference = self._actor.call.remote(number, method, args, kwargs)
            self._calls += 1
            try:
                with self._call_watch.watching(f"{self.name}: {method}"):
                    answer = await _future(reference)
            except (asyncio.CancelledError, RayTaskError):  # given up, or never begun: later ones must not wait for it
                self._actor.forget.remote(number)
                raise
        return self._result(answer)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        import ray

        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):  # stuck or dead: killed below all the same
            await asyncio.wait_for(_future(self._actor.close.remote()), CLOSE_TIMEOUT)
        ray.kill(self._actor)

    def _result(self, answer: Answer) -> Any:
        error, result = answer
        if error is None:
            return result
        raise rebuilt_error(error, self.name, self.log)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise our errors for Ray's. A call that cannot be carried is an error; whatever else is lost (memory, a
        machine, an object, the actor) takes the worker with it."""
        import ray

        try:
            yield
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{self.name}: {_last_line(error)} (log: {self.log})") from error
        except ray.exceptions.RayError as death:
            reason = f"{type(death).__name__}: {' '.join(str(death).split())[:200]}"
            raise WorkerDied(f"{self.name} ended without being asked to ({reason}; log: {self.log})") from death


class RayRuntime:
    """Starts workers as Ray actors whose output goes to `log_dir/NAME.log` on the machine where they run.

    `reserve` holds machines and GPUs for all of a stage's workers, who are then started on their `slot` of them.
    """

    def __init__(self, log_dir: Path | str) -> None:
        self._log_dir = Path(log_dir).resolve()
        self._watch = CallWatch(self._log_dir / CONTROLLER_LOG)
        self._workers: list[RayWorker] = []
        self._ours = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._group: Any = None
        self._reserving: asyncio.Task[None] | None = None
        self._nodes: list[str] = []
        self._gpus: list[list[int]] = []
        """The GPUs held on each machine, by Ray's numbers."""

    def nodes(self, *, free: bool = False) -> list[tuple[str, int, int]]:
        """The cluster's machines that take workers: name, GPUs (with `free`, those that nobody holds), bytes of memory.
        This one first, then by name; `reserve` and slots mean them by their number."""
        ray = self._ray()
        own = ray.get_runtime_context().get_node_id()
        found = [node for node in ray.nodes() if node["Alive"] and node["Resources"].keys() & {"CPU", "GPU"}]
        found.sort(key=lambda node: (node["NodeID"] != own, node["NodeName"], node["NodeID"]))
        self._nodes = [node["NodeID"] for node in found]
        left = ray._private.state.available_resources_per_node() if free else {}
        resources = [left.get(node["NodeID"], node["Resources"]) for node in found]
        return [
            (node["NodeName"], int(there.get("GPU", 0)), int(node["Resources"].get("memory", 0)))
            for node, there in zip(found, resources, strict=True)
        ]

    async def reserve(self, bundles: Sequence[int]) -> None:
        """Hold as many GPUs as said on as many machines as there are numbers, in one placement group, once.

        Raises `ConfigError` where another job holds them for longer than `RESERVE_TIMEOUT`.
        """
        if self._reserving is None:
            self._reserving = asyncio.create_task(self._reserve(list(bundles)))
        await asyncio.shield(self._reserving)

    async def _reserve(self, bundles: list[int]) -> None:
        ray = self._ray()
        from ray.util.placement_group import placement_group

        wanted = [{"CPU": LITTLE} | ({"GPU": float(gpus)} if gpus else {}) for gpus in bundles]
        there = [{"ray.io/node-id": node} for node in self._nodes[: len(bundles)]]
        self._group = placement_group(wanted, bundle_label_selector=there or None)
        try:
            await asyncio.wait_for(_future(self._group.ready()), RESERVE_TIMEOUT)
        except TimeoutError:
            ray.util.remove_placement_group(self._group)
            raise ConfigError(
                f"the Ray cluster did not give this run {_machines(bundles)} within {RESERVE_TIMEOUT:.0f} s: another "
                "job holds them (see: ray status)"
            ) from None
        asking = [_gpu_numbers(ray, self._strategy(number), gpus) for number, gpus in enumerate(bundles)]
        self._gpus = [[int(gpu) for gpu in await _future(found)] if found else [] for found in asking]

    def _strategy(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    async def start(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        name: str,
        environ: Mapping[str, str] | None = None,
        slot: Slot | None = None,
    ) -> RayWorker:
        """`slot`: where, of what is reserved. Without one: anywhere, with a GPU where there are some."""
        ray = self._ray()
        log = self._log_dir / f"{name}.log"
        keep_threads = "OMP_NUM_THREADS" in {**os.environ, **(environ or {})}
        own, options = dict(environ or {}), {"num_gpus": float(ray.cluster_resources().get("GPU", 0.0) > 0)}
        if slot is not None:
            # The group holds the GPUs; which of them a worker sees is the plan's to say, and not Ray's.
            options = {"num_gpus": 0.0, "scheduling_strategy": self._strategy(slot.node)}
            if held := self._gpus[slot.node]:
                visible = ",".join(str(held[gpu]) for gpu in slot.gpus)
                own |= {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        actor = (
            ray.remote(Host)
            .options(num_cpus=0, max_concurrency=CALLS_AT_ONCE, runtime_env={"env_vars": own}, **options)
            .remote(name, str(log), os.getcwd(), sys.path, keep_threads)
        )
        worker = RayWorker(name, log, actor, self._watch)
        self._workers.append(worker)
        try:
            await asyncio.wait_for(worker.start(target, kwargs), START_TIMEOUT)
        except BaseException as error:
            ray.kill(actor)
            self._workers.remove(worker)
            if isinstance(error, TimeoutError):
                raise WorkerError(
                    f"{name} was not ready after {START_TIMEOUT:.0f} s: is there a free GPU for it? (log: {log})"
                ) from None
            raise
        return worker

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))
        if self._group is not None:
            self._ray().util.remove_placement_group(self._group)
            self._group = self._reserving = None
        if self._ours:
            self._ray().shutdown()
            self._ours = False
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def _ray(self) -> Any:
        """The `ray` module, connected."""
        with needs("ray", "ray", "runtime=ray"):
            import ray
        if not ray.is_initialized():
            local = {"address": "local", "num_cpus": os.cpu_count(), "include_dashboard": False}
            if "RAY_ADDRESS" in os.environ:
                local = {}
            before = family.children().get(os.getpid(), set())
            os.environ.update(UTF8)  # which a cluster of our own inherits
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
            self._ours = True
            if local:
                self._guard = family.start_guard(family.children().get(os.getpid(), set()) - before)
        return ray


def _gpu_numbers(ray: Any, strategy: Any, gpus: int) -> Any:
    """A reference to the numbers of the GPUs that a bundle holds, as somebody who has them all is told; None where it
    holds none."""
    if not gpus:
        return None

    def gpu_ids() -> list[int]:
        import ray

        return list(ray.get_gpu_ids())

    return ray.remote(gpu_ids).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy).remote()


def _machines(bundles: Sequence[int]) -> str:
    each = " and ".join(f"{gpus} GPUs" for gpus in bundles) if any(bundles) else "its place"
    return f"{len(bundles)} machines with {each}" if len(bundles) > 1 else each


async def _future(reference: Any) -> Any:
    """An object reference as something asyncio can time out."""
    return await asyncio.wrap_future(reference.future())


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _given_up() -> Described:
    return describe_error(WorkerError("the call was given up"))


def _failure(error: Exception) -> Described:
    traceback.print_exception(error)
    return describe_error(error)
