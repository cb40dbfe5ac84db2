"""Weight sync: the actor's weights are sent to the engines, checksums show that they arrived, and a probe that both
compute the same policy from them.

A transfer has two phases: engines stop sampling and receive the weights bucket by bucket, then continue with the new
version once they have all of them. An engine that fails in between leaves the pool. Where engines and models share
GPUs, they take turns on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from envgym.config.schema import SyncConfig
from envgym.engine import Bucket
from envgym.engines.pool import EngineClient, EnginePool
from envgym.errors import ConfigError, RunError, WorkerDied, WorkerError
from envgym.types import Row, Segment, int_array
from envgym.workers.group import WorkerGroup

from .probe import Probe

MEMORY = Path("/dev/shm")
"""Folder of shared memory. A container's often has 64 MiB."""
MAX_BUCKETS = 4
"""Buckets that must fit into the folder: one is written while another is read, and a tensor may exceed a bucket."""


class Transfer(Protocol):
    """A transfer of the actor's weights to engines."""

    async def send(self, engines: EnginePool, version: int) -> int:
        """Replace the weights of all engines of a pool by the actor's, as policy `version`. Returns their bytes."""


class FileTransfer:
    """Transfer by files in the safetensors format, with checksums: one is gathered while engines load another.

    The files are in shared memory if the engines see rank 0's, else in a folder that both see: the machine's temporary
    folder, or `shared`, which must then be on a disk of all machines. `checkpoint`: the engines know the weights by
    their names in checkpoints, else by their names in transformers."""

    def __init__(self, actor: WorkerGroup, shared: Path, bucket_bytes: int, *, checkpoint: bool) -> None:
        self._actor = actor
        self._checkpoint = checkpoint
        self._folders = [MEMORY, Path(tempfile.gettempdir()), shared.absolute()]
        self._bucket_bytes = bucket_bytes
        self._chosen_folder: tuple[list[EngineClient], Path] | None = None

    async def send(self, engines: EnginePool, version: int) -> int:
        prefix = await self.shared_path(engines, MAX_BUCKETS * self._bucket_bytes)
        n_buckets = n_bytes = sent = 0
        await engines.load(lambda engine: engine.begin_weights())
        await self._actor.on_all(lambda rank: rank.begin_export(self._bucket_bytes, str(prefix), self._checkpoint))
        try:
            bucket = await self._next_bucket()
            while bucket is not None:
                loading = asyncio.ensure_future(_load(engines, bucket))
                try:
                    following_bucket = await self._next_bucket()
                finally:
                    await loading
                n_buckets, n_bytes, sent = n_buckets + 1, n_bytes + bucket.n_bytes, sent + bucket.checksum
                bucket = following_bucket
        finally:
            with contextlib.suppress(WorkerError):  # rank 0 may be dead
                await self._actor.on_first(lambda rank: rank.end_export())
        received = await engines.load(lambda engine: engine.end_weights(n_buckets, version))
        check_arrival("the weights", version, sent, received)
        return n_bytes

    async def _next_bucket(self) -> Bucket | None:
        return (await self._actor.on_all(lambda rank: rank.next_bucket()))[0]

    async def shared_path(self, engines: EnginePool, n_bytes: int) -> Path:
        """A prefix of file paths that rank 0 can write to and the engines can read."""
        name = f"envgym-{os.getpid()}-{id(self):x}"
        if self._chosen_folder is None or self._chosen_folder[0] != engines.clients:
            for folder in self._folders:
                if await self._is_shared(folder / name, engines, n_bytes):
                    self._chosen_folder = engines.clients, folder
                    break
            else:
                raise RunError(
                    f"rank 0 of the {self._actor.role} and the engines share no folder for weights: neither memory nor "
                    f"{self._folders[-1]} (set runs_dir to a disk that all machines have)"
                )
        return self._chosen_folder[1] / name

    async def _is_shared(self, path: Path, engines: EnginePool, n_bytes: int) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not await self._actor.on_first(lambda rank: rank.offer(str(path), n_bytes)):
            return False
        try:
            return all(await engines.on_all(lambda engine: engine.can_read(str(path))))
        finally:
            await self._actor.on_first(lambda rank: rank.withdraw(str(path)))


class NcclTransfer:
    """Transfer from rank 0's GPU to the engines' GPUs, by vLLM's NCCL engine."""

    def __init__(self, actor: WorkerGroup, workers_per_engine: int) -> None:
        self._actor = actor
        self._workers_per_engine = workers_per_engine
        self._connected: list[EngineClient] = []
        self._described: dict[str, Any] = {}

    async def send(self, engines: EnginePool, version: int) -> int:
        if self._connected != engines.clients:
            await self._connect(engines)
        await engines.load(lambda engine: engine.begin_weights())
        await asyncio.gather(
            self._actor.on_all(lambda rank: rank.send_nccl()),
            _load(engines, self._described),
        )
        return await _finish(self._actor, engines, 1, version)

    async def _connect(self, engines: EnginePool) -> None:
        address = await self._actor.on_first(lambda rank: rank.address())
        host, _, port = address.rpartition(":")
        world_size = 1 + self._workers_per_engine * len(engines.clients)
        shared = {"master_address": host, "master_port": int(port), "world_size": world_size, "packed": True}
        meeting = [
            client.call(lambda engine: engine.connect({**shared, "rank_offset": offset}))  # noqa: B023
            for offset, client in zip(range(1, world_size, self._workers_per_engine), engines.clients, strict=True)
        ]
        opening = self._actor.on_all(lambda rank: rank.open_nccl(address, world_size))
        described, *_ = await asyncio.gather(opening, *meeting)
        self._connected, self._described = engines.clients, described[0]


class IpcTransfer:
    """Transfer within GPUs that ranks and engines share, by vLLM's CUDA IPC engine: every rank shows its chunk to its
    own GPU's engine."""

    def __init__(self, actor: WorkerGroup, bucket_bytes: int) -> None:
        self._actor = actor
        self._bucket_bytes = bucket_bytes
        self._connected: list[EngineClient] = []

    async def send(self, engines: EnginePool, version: int) -> int:
        if self._connected != engines.clients:
            await engines.on_all(lambda engine: engine.connect({"packed": True}))
            self._connected = engines.clients
        await engines.load(lambda engine: engine.begin_weights())
        await self._actor.on_all(lambda rank: rank.begin_ipc(self._bucket_bytes))
        n_buckets = 0
        while chunks := [chunk for chunk in await self._actor.on_all(lambda rank: rank.next_ipc()) if chunk]:
            handles = {gpu: handle for chunk in chunks for gpu, handle in chunk["ipc_handles"].items()}
            await _load(engines, {**chunks[0], "ipc_handles": handles})
            n_buckets += 1
        return await _finish(self._actor, engines, n_buckets, version)


def make_transfer(config: SyncConfig, actor: WorkerGroup, files: FileTransfer, workers_per_engine: int) -> Transfer:
    """The transfer that the settings name. Raises `ConfigError` if it is not possible here."""
    if config.transfer != "files":
        if actor.info.device == "cpu":
            raise ConfigError(
                f"sync.transfer={config.transfer} is between GPUs, and the actor is on a CPU: leave it out"
            )
        if actor.settings.tensor_parallel > 1:
            raise ConfigError(f"sync.transfer={config.transfer} needs unsplit matrices: set workers.tensor_parallel=1")
    if config.transfer == "nccl":
        return NcclTransfer(actor, workers_per_engine)
    if config.transfer == "cuda_ipc":
        return IpcTransfer(actor, config.bucket_megabytes * 2**20)
    return files


def check_arrival(subject: str, version: int, sent: int, received: Sequence[int | None]) -> None:
    """Raise `RunError` unless every engine received the bytes that were sent: their checksums are equal."""
    for number, checksum in enumerate(received):
        if checksum != sent:
            raise RunError(
                f"{subject} of policy {version} did not arrive at engine {number}: the checksum of what was sent is "
                f"{sent:x}, of what was received {'missing' if checksum is None else f'{checksum:x}'}"
            )


async def refuse_replacement(number: int) -> EngineClient:
    """Raise an error instead of starting a replacement, for an engine that dies while it joins the pool."""
    raise WorkerDied("it died while it was given the weights")


def _load(engines: EnginePool, bucket: Bucket | Mapping[str, Any]) -> Coroutine[Any, Any, list[None]]:
    return engines.load(lambda engine: engine.load_bucket(bucket))


async def _finish(actor: WorkerGroup, engines: EnginePool, n_buckets: int, version: int) -> int:
    """End a transfer between GPUs, and check that it arrived. Returns its bytes."""
    received = await engines.load(lambda engine: engine.end_weights(n_buckets, version))
    sent = (await actor.on_all(lambda rank: rank.sent_checksum()))[0]
    check_arrival("the weights", version, sent, received)
    return actor.info.n_parameters * (4 if actor.info.dtype == "float32" else 2)


class GpuTimeshare:
    """Moves engines and models on and off the GPUs that they share; does nothing where no role shares any.

    `give_to_engines`, to sample: models are offloaded, engines wake. `give_to_models`, to train, score or save: engines
    sleep, models are loaded. `hand_over` sends new weights in between: optimizers are offloaded, engines allocate their
    weights and receive the new ones, the actor is offloaded, and only then engines allocate their cache.
    """

    def __init__(self, pool: EnginePool | None, roles: Mapping[str, WorkerGroup], *, keeps_weights: bool) -> None:
        self._pool = pool if roles else None
        self._roles = roles
        self._keeps_weights = keeps_weights
        self._sampling = False

    async def give_to_models(self, *, for_new_weights: bool = False) -> None:
        """Give the models the memory. `for_new_weights`: the engines need not save weights that will be replaced."""
        if self._pool is None or not self._sampling:
            return
        await self._pool.sleep(2 if for_new_weights and not self._keeps_weights else 1)
        await asyncio.gather(*(group.on_all(lambda rank: rank.onload()) for group in self._roles.values()))
        self._sampling = False

    async def give_to_engines(self) -> None:
        """Give the engines the memory."""
        if self._pool is not None and not self._sampling:
            await self.hand_over(None)

    async def hand_over(self, send: Callable[[], Awaitable[None]] | None) -> None:
        """Give the engines the memory, and new weights by `send`, if there are any."""
        if self._pool is not None:
            await asyncio.gather(
                *(
                    group.on_all(lambda rank: rank.offload(role == "actor"))  # noqa: B023
                    for role, group in self._roles.items()
                )
            )
            await self._pool.wake("weights")
        if send is not None:
            await send()
        if self._pool is not None:
            if "actor" in self._roles:
                await self._roles["actor"].on_all(lambda rank: rank.offload(False))
            await self._pool.wake("cache")
            self._sampling = True

    @contextlib.asynccontextmanager
    async def actor_on_device(self) -> AsyncIterator[None]:
        """Context in which the actor's weights are on the device."""
        is_offloaded = self._sampling and "actor" in self._roles
        if is_offloaded:
            await self._roles["actor"].on_all(lambda rank: rank.onload())
        try:
            yield
        finally:
            if is_offloaded:
                await self._roles["actor"].on_all(lambda rank: rank.offload(False))


MEAN_SHARE = 0.12
"""The largest mean difference on the probe, as a share of `sync.tolerance`, if that is set."""
FACTOR = 2.5
"""The largest difference after a sync, as a multiple of the one when both had read the same files: between those of
right syncs and of wrong ones (`benchmarks/sync_families.py`)."""
SMALLEST = {"float32": 1e-3, "16 bit": 0.01}
"""The difference, in nats, that is never too large: where it is small, the update changes it by larger factors."""
LARGEST = {"float32": 0.05, "16 bit": 0.5}
"""The difference, in nats, that is always too large, also when both have read the same files."""


@dataclass(slots=True)
class WeightSync:
    """Sends the actor's weights, or its LoRA adapter alone, to the engines, and compares the two.

    Their checksums tell whether the bytes arrived. Whether both then compute the same policy is relative: the
    difference of their log-probabilities of a probe (`policy_difference`) is compared with the one that this model
    has in these number formats when the engines have read the same files as the actor, before the first sync. If a run
    resumes, or begins from another's checkpoint, the engines have read older files, and its first sync gives the
    difference to compare with. A larger one stops the run if the first tokens that the engines sample confirm it.

    `tolerance`, if it is set, is the largest difference in log-probability, in nats, at which the two count as the same
    policy, in place of that comparison.
    """

    engine: EnginePool
    actor: WorkerGroup
    probes: tuple[Probe, ...]
    """The texts on which the two are compared."""
    tolerance: float | None
    precision: str
    """The lower of the actor's and the engines' number formats: `float32` or `16 bit`."""
    transfer: Transfer
    files: FileTransfer
    """The transfer of an adapter, and once of its base."""
    timeshare: GpuTimeshare
    base_is_quantized: bool = False
    """The actor's frozen weights were quantized to 4 bits, and so differ from those of the folder that engines load."""
    from_checkpoint: bool = False
    """The actor begins with the weights of another run's checkpoint, the engines with those of the model's folder."""
    weights_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the update of the actor's weights until the engines have them."""
    version: int | None = None
    """The policy version of the engines."""
    n_bytes: int | None = None
    """Bytes of the last transfer of full weights."""
    references: dict[Probe, tuple[float, float]] = field(default_factory=dict)
    """Per probe, the differences with which later ones are compared, in nats: of the policies, and the mean of the
    tokens."""
    alarm: tuple[str, float] | None = None
    """The large difference on a probe that the engines' next sampled tokens must confirm, and the reference's mean."""

    difference: float | None = None
    """The largest difference of a token after the last sync, in nats."""
    _lag: float | None = None
    """`sync_lag` of the last sync, the largest of any engine and probe."""
    _logprobs: list[list[float]] = field(default_factory=list)
    """The actor's log-probabilities of the probes at that sync."""

    def __post_init__(self) -> None:
        self.engine.join = self.join

    async def __call__(self, version: int) -> float | None:
        """Load the actor's weights into the engines as policy `version`.

        Returns the largest difference in log-probability (nats) of any engine on a probe; None if every engine died:
        replacements get this version when they join. Raises `RunError` if the weights did not arrive, or if the engines
        compute another policy from them.
        """
        actor_logprobs = await self._probe_logprobs()
        has_same_files = version == 0 and not self.base_is_quantized and not self.from_checkpoint
        if self.version is None and has_same_files and self.tolerance is None:
            await self.timeshare.hand_over(None)
            await self._compare_with("before the first sync", self.engine, actor_logprobs)
            await self.timeshare.give_to_models()

        async def send() -> None:
            await self._send(self.engine, version, with_base=self.version is None)

        await self.timeshare.hand_over(send)
        self.version, self._lag = version, None
        self.difference = await self._compare_with(f"after sync {version}", self.engine, actor_logprobs)
        self._logprobs = actor_logprobs
        return self.difference

    def metrics(self) -> dict[str, float]:
        """`sync/lag` of the last sync; and `sync/probe_surprise` of the text alone, the actor's mean -log p of a token
        as a multiple of that of a guess among all tokens."""
        lag = {} if self._lag is None else {"sync/lag": self._lag}
        if not self._logprobs:
            return lag
        return lag | {"sync/probe_surprise": -fmean(self._logprobs[0]) / math.log(self.actor.info.vocabulary)}

    async def join(self, engine: EngineClient) -> None:
        """Give a replacement engine the weights of the current version; waits while the actor's are being updated."""
        async with self.weights_lock:
            if self.version is None:  # the first sync will include it
                return
            pool = EnginePool(refuse_replacement, [engine])
            async with self.timeshare.actor_on_device():
                actor_logprobs = await self._probe_logprobs()
                await self._send(pool, self.version, with_base=True)
            if await self._compare_with("of a restarted engine", pool, actor_logprobs) is None:
                raise WorkerDied("it died while it was given the weights")

    async def _send(self, engine: EnginePool, version: int, *, with_base: bool) -> None:
        adapter = self.actor.info.adapter
        if not adapter or (self.base_is_quantized and with_base):
            self.n_bytes = await (self.files if adapter else self.transfer).send(engine, version)
        if adapter:
            await self._send_adapter(engine, version)

    async def _send_adapter(self, engine: EnginePool, version: int) -> None:
        folder = await self.files.shared_path(engine, 8 * self.actor.info.n_trained)
        try:
            sent = (await self.actor.on_all(lambda rank: rank.export_adapter(str(folder))))[0]
            received = await engine.on_all(lambda engine: engine.load_adapter(str(folder), version))
            check_arrival("the adapter", version, sent, received)
        finally:
            await self.actor.on_first(lambda rank: rank.withdraw(str(folder)))

    async def _probe_logprobs(self) -> list[list[float]]:
        """The actor's log-probabilities of each probe."""
        rows = []
        for probe in self.probes:
            if probe.store is not None:
                for placed in probe.images:
                    probe.store(placed.image)  # anew: the file may have been deleted as an old one
            spans = tuple([placed.span for placed in probe.images])
            # As an action: workers compute no log-probabilities of other tokens.
            rows.append(Row([Segment("action", int_array(probe.token_ids), images=spans)]))
        return [logprobs[1:].tolist() for logprobs in await self.actor.forward(rows)]

    async def _compare_with(self, moment: str, engines: EnginePool, actor: Sequence[list[float]]) -> float | None:
        """Compare the actor's log-probabilities of each probe with those of engines; returns the largest difference of
        a token, None without a live engine. Raises `RunError` as `_compare` does."""
        maximum = None
        for probe, logprobs in zip(self.probes, actor, strict=True):
            subject = f"the probe{' with a picture' if probe.images else ''} {moment}"
            for engine_logprobs in await engines.probe(probe.token_ids, probe.images):
                difference = self._compare(probe, subject, logprobs, engine_logprobs)
                maximum = max(difference, maximum or 0.0)
        return maximum

    def _compare(self, probe: Probe, subject: str, actor: Sequence[float], engine: Sequence[float]) -> float:
        """Compare log-probabilities of a probe; returns the largest difference of a token.

        Raises `RunError` if the two are another policy: at once beyond `sync.tolerance` or `LARGEST`, else after the
        engines' first samples (`check_samples`)."""
        if (n := len(actor)) != len(engine):
            raise RunError(f"the engine's score returned {len(engine)} numbers for {n + 1} tokens: {n} are needed")
        previous = self._logprobs[self.probes.index(probe)] if self._logprobs else actor
        if (lag := sync_lag(previous, actor, engine)) is not None:
            self._lag = max(lag, self._lag or 0.0)
        actor, engine = actor[probe.start - 1 :], engine[probe.start - 1 :]
        sizes = [abs(a - b) for a, b in zip(actor, engine, strict=True)]
        maximum, mean = max(sizes), fmean(sizes)
        if self.tolerance is not None:
            mean_subject = f"{subject} of {len(sizes)} tokens (largest difference {maximum:.2g})"
            self._check(mean_subject, mean, MEAN_SHARE * self.tolerance)  # first, since `max` may drop a NaN
            self._check(subject, maximum, self.tolerance)
            return maximum
        difference = policy_difference(actor, engine)
        self._check(subject, difference, LARGEST[self.precision])
        reference, reference_mean = self.references.setdefault(probe, (difference, mean))
        if difference > max(FACTOR * reference, SMALLEST[self.precision]):
            words = f"{subject} (by {difference:.2g} nats; {reference:.2g} with the same files)"
            self.alarm = words, reference_mean
        return maximum

    def check_samples(self, difference: float | None) -> None:
        """Compare the actor's log-probabilities of sampled tokens with the engines', before an optimizer step:
        `difference` is their mean difference in nats, None where they cannot be compared. Raises `RunError` if it is
        too large, or if an alarm of the probe cannot be refuted."""
        subject, bound = "this step's episodes", self.tolerance or LARGEST[self.precision]
        if self.alarm is not None:
            words, reference_mean = self.alarm
            subject, bound = f"{subject}, as on {words}", max(FACTOR * reference_mean, SMALLEST[self.precision])
            difference = math.inf if difference is None else difference
        self._check(subject, difference or 0.0, bound)
        self.alarm = None

    def _check(self, subject: str, difference: float, bound: float) -> None:
        """Raise `RunError` if sampler and trainer differ by more than `bound` nats, or by NaN."""
        if difference <= bound:
            return
        on_average, limit = " on average", f"{bound:.2g} nats"
        if self.tolerance is not None:
            share = "" if bound == self.tolerance else f"{MEAN_SHARE:.0%} of "
            on_average, limit = on_average if share else "", f"{share}sync.tolerance={self.tolerance:g}"
        raise RunError(
            f"sampler and trainer disagree on {subject}: log-probabilities differ by {difference:.2g}{on_average}, "
            f"more than {limit}. The bytes arrived (their checksums are equal): the engine assigns the weights to "
            "other places, computes differently (dtype, kernels), or is not this model; sync.tolerance=N sets the bound"
        )


def sync_lag(previous: Sequence[float], actor: Sequence[float], engine: Sequence[float]) -> float | None:
    """How much an engine's log-probabilities of a probe are those of the actor's weights before the last update: 0 if
    they differ from the new ones by rounding alone, 1 if they are the old ones. It is the correlation of the engine's
    difference with the update's, or the share of the update that is missing if that is less. None without an update."""
    update = [old - new for old, new in zip(previous, actor, strict=True)]
    difference = [sampler - new for sampler, new in zip(engine, actor, strict=True)]
    squares = math.fsum(x * x for x in update), math.fsum(x * x for x in difference)
    if not all(squares):
        return None if not squares[0] else 0.0
    product = math.fsum(x * y for x, y in zip(update, difference, strict=True))
    return min(product / math.sqrt(squares[0] * squares[1]), product / squares[0])


def policy_difference(actor: Sequence[float], engine: Sequence[float]) -> float:
    """The difference of two policies on a text, from their log-probabilities of its tokens, in nats: the mean absolute
    difference, each token weighted by its probability under the actor. It is about what tokens differ by that the
    policy samples; unlikely tokens, whose logits are rounded the most, count little. NaN if any is NaN."""
    top = max(actor)
    weights = [math.exp(logprob - top) for logprob in actor]
    differences = [abs(a - b) for a, b in zip(actor, engine, strict=True)]
    return sum(weight * difference for weight, difference in zip(weights, differences, strict=True)) / sum(weights)
