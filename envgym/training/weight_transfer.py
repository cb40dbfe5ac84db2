"""Transfers of the actor's weights to the engines: files in memory or on a disk that both see, and, between GPUs,
vLLM's own transfers.

Each has two phases: engines stop sampling and receive the weights bucket by bucket, then continue with the new version
once they have all of them. An engine that fails in between leaves the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from envgym.config.schema import SyncConfig
from envgym.engine import Bucket
from envgym.engines.pool import EngineClient, EnginePool
from envgym.errors import ConfigError, RunError, WorkerDied, WorkerError
from envgym.workers.group import WorkerGroup

MEMORY = Path("/dev/shm")
"""Folder of shared memory. A container's often has 64 MiB."""
MAX_BUCKETS = 4
"""Buckets that must fit into the folder: one is written while another is read, and a tensor may exceed a bucket."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The size in bytes of a finished transfer, and its duration."""

    n_bytes: int
    seconds: float


class Transfer(Protocol):
    """A transfer of the actor's weights to engines."""

    async def send(self, engines: EnginePool, version: int) -> Receipt:
        """Replace the weights of all engines of a pool by the actor's, as policy `version`."""


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

    async def send(self, engines: EnginePool, version: int) -> Receipt:
        start = time.monotonic()
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
        return Receipt(n_bytes, time.monotonic() - start)

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

    async def send(self, engines: EnginePool, version: int) -> Receipt:
        start = time.monotonic()
        if self._connected != engines.clients:
            await self._connect(engines)
        await engines.load(lambda engine: engine.begin_weights())
        await asyncio.gather(
            self._actor.on_all(lambda rank: rank.send_nccl()),
            _load(engines, self._described),
        )
        received = await engines.load(lambda engine: engine.end_weights(1, version))
        check_arrival("the weights", version, await _sent_checksum(self._actor), received)
        return Receipt(_bytes_of(self._actor), time.monotonic() - start)

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

    async def send(self, engines: EnginePool, version: int) -> Receipt:
        start = time.monotonic()
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
        received = await engines.load(lambda engine: engine.end_weights(n_buckets, version))
        check_arrival("the weights", version, await _sent_checksum(self._actor), received)
        return Receipt(_bytes_of(self._actor), time.monotonic() - start)


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


async def _sent_checksum(actor: WorkerGroup) -> int:
    return (await actor.on_all(lambda rank: rank.sent_checksum()))[0]


def _bytes_of(actor: WorkerGroup) -> int:
    return actor.info.n_parameters * (4 if actor.info.dtype == "float32" else 2)
