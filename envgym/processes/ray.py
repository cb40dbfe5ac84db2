"""Workers as Ray actors, on one machine or a cluster.

Without a cluster (no `RAY_ADDRESS`) a local Ray is started, and ended with the runtime. Each worker is an asynchronous
actor: coroutine methods run concurrently, plain methods one after the other, and calls begin in the order in which they
were made, as in the local runtime.

After a SIGKILL of the controller a guard process ends the local Ray and all actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, WorkerDied, WorkerError, needs
from envgym.processes import family
from envgym.processes.host import Answer, CallId, Host
from envgym.processes.local import search_path
from envgym.processes.runtime import CALL_SECONDS, UTF8, Message, Slot, WorkerHandle, describe_error, rebuild_error
from envgym.processes.watchdog import CONTROLLER_LOG, CallWatch

from .gpus import least_gpu_bytes

FORWARDED = ("NCCL_", "HF_", "VLLM_", "TORCH_NCCL_")
"""Prefixes of the variables that workers get from the controller: a running cluster has an environment of its own."""
PLACE_TIMEOUT = 600.0
"""Seconds in which Ray must give a worker its place and a process; loading a large model may take up to
`CALL_SECONDS`."""
CLOSE_TIMEOUT = 10.0
"""Seconds a worker may take to end by itself when asked, before it is killed."""
MAX_CALLS = 2**20
"""Calls that an actor may have in flight: practically unlimited. At Ray's default of 1,000 an engine with as many
requests in flight would never receive the call to resume, or the call with new weights."""

RESERVE_TIMEOUT = 600.0
"""Seconds to wait for nodes and GPUs of a cluster that other jobs hold."""
BUNDLE_CPUS = 0.001
"""CPUs of a node's bundle, which must not be empty. Workers decide how many cores they use."""

CANCELLED: Answer = (describe_error(WorkerError("the call was cancelled")), None)


class Actor:
    """Brings the worker's `Host` its calls, in order."""

    def __init__(self, name: str, log: str, directory: str, path: list[str], keep_threads: bool) -> None:
        """Prepare the actor's process: output to the file `log`, the controller's folder and import path. Unless
        `keep_threads`, the number of threads is left to the worker."""
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
        os.environ["PATH"] = search_path()
        os.environ["ENVGYM_NODE_ADDRESS"] = ray.util.get_node_ip_address()
        self._host = Host()
        self._orders: defaultdict[str, _Order] = defaultdict(_Order)
        """The order of each caller's calls."""
        self._answers: dict[CallId, asyncio.Future[Answer]] = {}

    async def start(self, target: str, kwargs: dict[str, Any]) -> Answer:
        return self._host.start(target, kwargs)

    async def call(
        self, caller: str, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Answer:
        """Run a method. Each caller's calls begin in the order of their numbers; Ray hands them over in any order."""
        order, call = self._orders[caller], (caller, number)
        if order.contains(number):  # cancelled before it arrived
            return CANCELLED
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[call] = future
        order.begin(number, partial(self._host.run, call, method, args, kwargs, partial(_settle, future)))
        try:
            return await future
        finally:
            del self._answers[call]

    async def cancel(self, caller: str, number: int) -> None:
        """Cancel a call, whether it is running, waiting for its turn or not yet received."""
        order, call = self._orders[caller], (caller, number)
        if order.has_begun(number):
            self._host.cancel(call)
        else:
            order.begin(number, lambda: None)
        if call in self._answers:
            _settle(self._answers[call], CANCELLED)

    async def close(self) -> None:
        await self._host.close()


class _Order:
    """Begins calls in the order of their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._arrived: dict[int, Callable[[], None]] = {}
        """Calls that wait for an earlier one."""

    def has_begun(self, number: int) -> bool:
        return number < self._next

    def contains(self, number: int) -> bool:
        """True for a call that has begun or waits."""
        return self.has_begun(number) or number in self._arrived

    def begin(self, number: int, begin: Callable[[], None]) -> None:
        """Begin a call once those before it have begun."""
        self._arrived[number] = begin
        while self._next in self._arrived:
            self._next += 1
            self._arrived.pop(self._next - 1)()


def _settle(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():  # else the call was cancelled
        future.set_result(answer)


class RayWorker(WorkerHandle[Any]):
    """A handle of one actor: the controller's, made by `RayRuntime.start`, which ends it, or that of another actor,
    which does not (`ends_actor`)."""

    def __init__(
        self, name: str, log: Path, actor: Any, watch: CallWatch | None = None, *, ends_actor: bool = True
    ) -> None:
        self._call_watch = watch or CallWatch()
        self.name = name
        self.log = log
        self.pid = 0
        self._actor = actor
        self._caller = secrets.token_hex(8)
        self._calls = 0
        self._ends_actor = ends_actor

    async def wait_for_place(self) -> None:
        """Wait for the actor's process. Raises `WorkerError` if Ray has not started it within `PLACE_TIMEOUT`."""
        try:
            with self._translated_errors():
                await asyncio.wait_for(_future(self._actor.__ray_ready__.remote()), PLACE_TIMEOUT)
        except TimeoutError:
            raise WorkerError(
                f"{self.name} got no place within {PLACE_TIMEOUT:.0f} s: is there a free GPU for it? (see: ray status)"
            ) from None

    async def start(self, target: str, kwargs: Mapping[str, Any]) -> None:
        """Build the worker object in the actor; raises what its constructor raised."""
        with self._translated_errors():
            answer = await _future(self._actor.start.remote(target, dict(kwargs)))
        self.pid = self._result(answer)

    async def send(self, message: Message) -> Any:
        if self._closing is not None:
            raise WorkerError(f"{self.name}: the worker has been closed")
        from ray.exceptions import RayTaskError

        with self._translated_errors():
            number = self._calls
            reference = self._actor.call.remote(self._caller, number, *message)
            self._calls += 1
            try:
                with self._call_watch.watching(f"{self.name}: {message[0]}"):
                    answer = await _future(reference)
            except (asyncio.CancelledError, RayTaskError):  # cancelled, or never begun: later calls must not wait
                self._actor.cancel.remote(self._caller, number)
                raise
        return self._result(answer)

    async def kill(self) -> None:
        import ray

        ray.kill(self._actor)

    async def reference(self) -> RayReference:
        return RayReference(self.name, self.log, self._actor._actor_id.hex(), self._actor)

    async def _close(self) -> None:
        if not self._ends_actor:
            return
        import ray

        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):  # stuck or dead: killed below
            await asyncio.wait_for(_future(self._actor.close.remote()), CLOSE_TIMEOUT)
        ray.kill(self._actor)

    def _result(self, answer: Answer) -> Any:
        error, result = answer
        if error is None:
            return result
        raise rebuild_error(error, self.name, self.log)

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise envgym's errors for Ray's: `WorkerError` for a call that Ray cannot send, else `WorkerDied` (memory, a
        node, an object or the actor is lost)."""
        import ray

        try:
            yield
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{self.name}: {_last_line(error)} (log: {self.log})") from error
        except ray.exceptions.RayError as death:
            reason = f"{type(death).__name__}: {' '.join(str(death).split())[:200]}"
            raise WorkerDied(f"{self.name} ended without being asked to ({reason}; log: {self.log})") from death


@dataclass(frozen=True, slots=True)
class RayReference:
    """An actor that other actors call."""

    name: str
    log: Path
    id: str
    actor: Any = field(compare=False, repr=False)

    async def open(self) -> RayWorker:
        return RayWorker(self.name, self.log, self.actor, ends_actor=False)


class RayRuntime:
    """Starts workers as Ray actors whose output goes to `log_dir/NAME.log` on the machine where they run.

    `reserve` holds nodes and GPUs for all workers of a stage, each of which is then started in its `slot`.
    """

    def __init__(self, log_dir: Path | str) -> None:
        self._log_dir = Path(log_dir).resolve()
        self._watch = CallWatch(self._log_dir / CONTROLLER_LOG)
        self._workers: list[RayWorker] = []
        self._owns_ray = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._group: Any = None
        self._reserving: asyncio.Task[None] | None = None
        self._nodes: list[str] = []
        self._gpu_bytes: dict[str, int | None] = {}
        """Memory of the smallest GPU, by node."""
        self._gpus: list[list[str]] = []
        """The reserved GPUs of each node, by Ray's numbers."""

    def nodes(self, *, only_free: bool = False) -> list[tuple[str, int, int | None, int]]:
        """The cluster's nodes that take workers: name, GPUs (with `only_free`, only unreserved ones), bytes of the
        smallest GPU (None: unknown), bytes of memory. This node comes first, then by name; `reserve` and slots use
        indexes of this list."""
        ray = self._ray()
        this_node = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].keys() & {"CPU", "GPU"}]
        nodes.sort(key=lambda node: (node["NodeID"] != this_node, node["NodeName"], node["NodeID"]))
        self._nodes = [node["NodeID"] for node in nodes]
        available = ray._private.state.available_resources_per_node() if only_free else {}
        resources = [available.get(node["NodeID"], node["Resources"]) for node in nodes]
        self._ask_for_gpu_bytes({node["NodeID"] for node in nodes if node["Resources"].get("GPU")})
        return [
            (
                node["NodeName"],
                int(free_resources.get("GPU", 0)),
                self._gpu_bytes.get(node["NodeID"]),
                int(node["Resources"].get("memory", 0)),
            )
            for node, free_resources in zip(nodes, resources, strict=True)
        ]

    def _ask_for_gpu_bytes(self, nodes: set[str]) -> None:
        """Ask each node once. One that does not answer within a minute counts as unknown."""
        ray = self._ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        references = {
            node: ray.remote(least_gpu_bytes)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
            for node in nodes - self._gpu_bytes.keys()
        }
        for node, reference in references.items():
            self._gpu_bytes[node] = None
            with contextlib.suppress(ray.exceptions.RayError):
                self._gpu_bytes[node] = ray.get(reference, timeout=60)

    async def reserve(self, bundles: Sequence[int]) -> None:
        """Reserve `bundles[i]` GPUs on node i, in one placement group; later calls only wait for the first.

        Raises `ConfigError` if another job holds them for longer than `RESERVE_TIMEOUT`.
        """
        if self._reserving is None:
            self._reserving = asyncio.create_task(self._reserve(list(bundles)))
        await asyncio.shield(self._reserving)

    async def _reserve(self, bundles: list[int]) -> None:
        """Create the placement group, wait for it, and record the numbers of its GPUs."""
        ray = self._ray()
        from ray.util.placement_group import placement_group

        resources = [{"CPU": BUNDLE_CPUS} | ({"GPU": float(gpus)} if gpus else {}) for gpus in bundles]
        labels = [{"ray.io/node-id": node} for node in self._nodes[: len(bundles)]]
        self._group = placement_group(resources, bundle_label_selector=labels or None)
        try:
            await asyncio.wait_for(_future(self._group.ready()), RESERVE_TIMEOUT)
        except TimeoutError:
            ray.util.remove_placement_group(self._group)
            raise ConfigError(
                f"the Ray cluster did not give this run {_machines(bundles)} within {RESERVE_TIMEOUT:.0f} s: another "
                "job holds them (see: ray status)"
            ) from None
        references = [_gpu_numbers(ray, self._strategy(number), gpus) for number, gpus in enumerate(bundles)]
        self._gpus = [[str(gpu) for gpu in await _future(ids)] if ids else [] for ids in references]

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
        """Start a worker in `slot` of the reservation; without a slot anywhere, with a GPU if the cluster has any."""
        ray = self._ray()
        log = self._log_dir / f"{name}.log"
        keep_threads = "OMP_NUM_THREADS" in {**os.environ, **(environ or {})}
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        variables = forwarded | dict(environ or {})
        options: dict[str, Any] = {"num_gpus": float(ray.cluster_resources().get("GPU", 0.0) > 0)}
        if slot is not None:
            # The group holds the GPUs; the placement, not Ray, decides which of them a worker sees.
            options = {"num_gpus": 0.0, "scheduling_strategy": self._strategy(slot.node)}
            if node_gpus := self._gpus[slot.node]:
                visible = ",".join(node_gpus[gpu] for gpu in slot.gpus)
                variables |= {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        actor = (
            ray.remote(Actor)
            .options(num_cpus=0, max_concurrency=MAX_CALLS, runtime_env={"env_vars": variables}, **options)
            .remote(name, str(log), os.getcwd(), sys.path, keep_threads)
        )
        worker = RayWorker(name, log, actor, self._watch)
        self._workers.append(worker)
        try:
            await worker.wait_for_place()
            await asyncio.wait_for(worker.start(target, kwargs), CALL_SECONDS)
        except BaseException as error:
            ray.kill(actor)
            self._workers.remove(worker)
            if isinstance(error, TimeoutError):
                raise WorkerError(f"{name} was not ready after {CALL_SECONDS:.0f} s (log: {log})") from None
            raise
        return worker

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))
        if self._group is not None:
            self._ray().util.remove_placement_group(self._group)
            self._group = self._reserving = None
        if self._owns_ray:
            self._ray().shutdown()
            self._owns_ray = False
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def _ray(self) -> Any:
        """The `ray` module, connected: to the cluster of `RAY_ADDRESS`, or to a new local one, which is ended with this
        process."""
        with needs("ray", "ray", "runtime=ray"):
            import ray
        if not ray.is_initialized():
            local = {"address": "local", "num_cpus": os.cpu_count(), "include_dashboard": False}
            if "RAY_ADDRESS" in os.environ:
                local = {}
            previous = family.children().get(os.getpid(), set())
            os.environ.update(UTF8)  # inherited by a local cluster
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
            self._owns_ray = True
            if local:
                self._guard = family.start_guard(family.children().get(os.getpid(), set()) - previous)
        return ray


def _gpu_numbers(ray: Any, strategy: Any, gpus: int) -> Any:
    """A reference to the numbers of a bundle's GPUs, which Ray only shows to a task that takes all of them; None for a
    bundle without GPUs."""
    if not gpus:
        return None

    def gpu_ids() -> list[int | str]:
        import ray

        return list(ray.get_gpu_ids())

    return ray.remote(gpu_ids).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy).remote()


def _machines(bundles: Sequence[int]) -> str:
    gpus_each = " and ".join(f"{gpus} GPUs" for gpus in bundles) if any(bundles) else "its place"
    return f"{len(bundles)} machines with {gpus_each}" if len(bundles) > 1 else gpus_each


async def _future(reference: Any) -> Any:
    """The value of an object reference, awaited so that asyncio can time it out."""
    return await asyncio.wrap_future(reference.future())


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
