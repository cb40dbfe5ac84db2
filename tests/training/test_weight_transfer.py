"""Transfers of the actor's weights: files with real ranks, and the order of calls of vLLM's own transfers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from envgym.config.schema import SyncConfig
from envgym.engines.pool import EnginePool
from envgym.engines.spec import read_bucket
from envgym.engines.vllm import WeightReader
from envgym.errors import ConfigError, RunError, WorkerError
from envgym.learner import RoleSpec
from envgym.models.weights_file import checksum
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import WorkerHandle, message_of
from envgym.training import weight_sync as module
from envgym.training.weight_sync import FileTransfer, NcclTransfer, make_transfer
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.export import write_bucket
from envgym.workers.group import WorkerGroup

CHECKSUM = 7
"""Of what `Actor` sends between GPUs."""


class Reader(WorkerHandle):
    """An engine that stores the weights; `corrupt` changes a bucket on its way. `received`: the checksum of what vLLM's
    own transfers bring, None for a message that was lost."""

    def __init__(self, folder=None, corrupt=lambda bucket: bucket, received=CHECKSUM):
        self.folder, self.corrupt, self.received = folder, corrupt, received
        self.tensors, self.max_files, self.calls, self.version = {}, 0, [], None

    async def send(self, message):
        method, args, _ = message
        return await getattr(self, method)(*args)

    async def can_read(self, path):
        return self.folder is None or Path(path).parent == self.folder

    async def connect(self, info):
        self.calls.append(("connect", info))

    async def begin_weights(self):
        self.calls.append("begin")
        self.checksum = 0

    async def load_bucket(self, bucket):
        self.calls.append(bucket)
        if not isinstance(bucket, dict):
            files = Path(bucket.path).parent.glob(f"{Path(bucket.path).name.rpartition('-')[0]}*")
            self.max_files = max(self.max_files, len(list(files)))
            tensors = read_bucket(self.corrupt(bucket))
            self.tensors |= tensors
            self.checksum += checksum(tensors)

    async def end_weights(self, n_buckets, version):
        self.calls.append(("end", n_buckets))
        self.version = version
        return self.checksum or self.received

    async def close(self):
        pass


async def no_start(number):
    raise WorkerError("no room")


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_all_weights_arrive_in_buckets_of_which_at_most_two_exist(tiny_model, tmp_path, zero_stage):
    async def main():
        runtime, reader = LocalRuntime(tmp_path / "logs"), Reader()
        try:
            settings = WorkersConfig(ranks=2, zero_stage=zero_stage)
            spec = WorkerSpec("actor", str(tiny_model), RoleSpec(trained=True), {"name": "sft"}, settings)
            actor = await WorkerGroup.start(runtime, spec)
            transfer = FileTransfer(actor, tmp_path / "shared", 2**16, checkpoint=True)
            n_bytes = await transfer.send(EnginePool(no_start, [reader]), 7)
            await transfer.send(EnginePool(no_start, [reader]), 8)
        finally:
            await runtime.close()
        return reader, n_bytes

    reader, n_bytes = asyncio.run(main())
    saved = load_file(tiny_model / "model.safetensors")
    assert reader.tensors.keys() == saved.keys()
    assert all(torch.equal(reader.tensors[name], tensor) for name, tensor in saved.items())
    assert n_bytes == sum(tensor.nbytes for tensor in saved.values())
    assert reader.version == 8
    assert reader.max_files <= 2
    assert not list(module.MEMORY.glob(f"envgym-{id(0):x}*"))


STAND_IN = '''
"""A worker with a stand-in for NCCL, which writes what it broadcasts to files."""

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import nccl_engine

from envgym.workers.model import ModelWorker


class Files:
    sent = 0

    def broadcast(self, tensor):
        save_file({"tensor": tensor.clone(memory_format=torch.contiguous_format)}, f"sent-{self.sent:03}")
        self.sent += 1


def broadcast_each(iterator, group, post_iter_func, **_):
    for item in iterator:
        group.broadcast(post_iter_func(item))


nccl_engine.open_trainer_endpoint = lambda info: Files()
nccl_engine.packed_nccl_broadcast_producer = broadcast_each
nccl_engine.NCCLTrainerWeightTransferEngine._post_send_sync = lambda self: None
'''


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_by_nccl_ranks_send_what_engines_were_told_to_expect(tmp_path, monkeypatch, zero_stage):
    """Whole tensors, in the order of their description: vLLM's receivers cut the stream by it."""
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip  # matrices of 100,000 numbers and more: DeepSpeed keeps smaller ones whole
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "stand_in.py").write_text(STAND_IN.replace("sent-", f"{tmp_path}/sent-"))
    monkeypatch.syspath_prepend(str(tmp_path))

    class Runtime:
        """Starts workers with the stand-in."""

        def __init__(self, runtime):
            self.start = lambda target, *args, **kwargs: runtime.start("stand_in:ModelWorker", *args, **kwargs)

    async def main():
        saved = load_file(tmp_path / "model" / "model.safetensors")
        runtime, reader = LocalRuntime(tmp_path / "logs"), Reader(received=checksum(saved))
        try:
            settings = WorkersConfig(ranks=2, zero_stage=zero_stage)
            spec = WorkerSpec("actor", str(tmp_path / "model"), RoleSpec(trained=True), {"name": "sft"}, settings)
            actor = await WorkerGroup.start(Runtime(runtime), spec)
            await NcclTransfer(actor, 1).send(EnginePool(no_start, [reader]), 7)
        finally:
            await runtime.close()
        return reader

    reader = asyncio.run(main())
    (_, connection), _, expected, _ = reader.calls
    assert (connection["world_size"], connection["rank_offset"]) == (2, 1)
    sent = [load_file(path)["tensor"] for path in sorted(tmp_path.glob("sent-*"))]
    assert [list(tensor.shape) for tensor in sent] == expected["shapes"]
    assert [str(tensor.dtype) for tensor in sent] == [f"torch.{name}" for name in expected["dtype_names"]]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert set(expected["names"]) == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in zip(expected["names"], sent, strict=True))


class Actor:
    """An actor of two small tensors. The folders `full` have no space."""

    role, info = "actor", SimpleNamespace(n_parameters=4, dtype="float32", device="cuda:0")

    settings = WorkersConfig()

    def __init__(self, full=()):
        self.full, self.calls, self.n_left = full, [], 2

    async def on_first(self, call):
        method, args, _ = message_of(call)
        if method == "address":
            self.calls.append((method,))
            return "10.0.0.1:5000"
        if method == "offer":
            Path(args[0]).touch()
            return Path(args[0]).parent not in self.full
        if method == "withdraw":
            Path(args[0]).unlink()
        if method == "end_export":
            for path in self.calls:
                Path(path).unlink()

    async def on_all(self, call):
        method, args, _ = message_of(call)
        if method == "begin_export":
            self.n_left, self.prefix = 2, args[1]
            return [None]
        if method == "next_bucket":
            self.n_left -= 1
            if self.n_left < 0:
                return [None]
            self.calls.append(f"{self.prefix}-{self.n_left}")
            return [write_bucket(1 - self.n_left, self.calls[-1], {str(self.n_left): torch.ones(2)})]
        self.calls.append((method, *args))
        description = {"names": ["w"], "shapes": [[4]]}
        answers = {"open_nccl": description, "sent_checksum": CHECKSUM}
        if method == "next_ipc":
            self.n_left -= 1
            chunks = [{"names": ["w"], "ipc_handles": {f"GPU-{rank}": self.n_left}} for rank in range(2)]
            return chunks if self.n_left >= 0 else [None, None]
        return [answers.get(method)] * 2


def test_files_are_in_a_folder_that_all_engines_see(tmp_path, monkeypatch):
    """Shared memory, the machine's disk, the run's folder: the first with space that all of them share."""
    shared = tmp_path / "run" / "transfer"

    async def main(full, *readers):
        actor = Actor(full)
        await FileTransfer(actor, shared, 100, checkpoint=True).send(EnginePool(no_start, list(readers)), 1)
        assert all(reader.version == 1 for reader in readers)
        return {Path(path).parent for path in actor.calls}

    assert asyncio.run(main((), Reader(), Reader())) == {module.MEMORY}
    assert asyncio.run(main([module.MEMORY], Reader())) == {Path(module.tempfile.gettempdir())}
    assert asyncio.run(main((), Reader(), Reader(shared))) == {shared}
    assert list(shared.iterdir()) == []
    with pytest.raises(RunError, match=r"share no folder for weights.*set runs_dir to a disk that all machines have"):
        asyncio.run(main((), Reader(tmp_path)))


def test_the_folder_is_chosen_again_for_other_engines(tmp_path):
    """A replacement engine may be on another machine, which shares only the run's folder."""
    shared = tmp_path / "run" / "transfer"

    async def main():
        actor = Actor()
        transfer, readers = FileTransfer(actor, shared, 100, checkpoint=True), [Reader(), Reader(shared)]
        folders = []
        for version, reader in enumerate(readers):
            actor.calls.clear()
            await transfer.send(EnginePool(no_start, [reader]), version)
            folders.append({Path(path).parent for path in actor.calls})
        assert [reader.version for reader in readers] == [0, 1]
        return folders

    assert asyncio.run(main()) == [{module.MEMORY}, {shared}]


def test_an_engine_with_a_corrupt_bucket_leaves_the_pool(tmp_path):
    def flip(bucket):
        content = bytearray(Path(bucket.path).read_bytes())
        content[-1] ^= 1
        copy = tmp_path / "flipped"
        copy.write_bytes(content)
        return SimpleNamespace(number=bucket.number, path=str(copy), checksum=bucket.checksum)

    async def main():
        good, bad, notes = Reader(), Reader(corrupt=flip), []
        pool = EnginePool(no_start, [good, bad], note=notes.append)
        await FileTransfer(Actor(), tmp_path, 100, checkpoint=True).send(pool, 3)
        assert (good.version, bad.version) == (3, None)
        assert pool.clients == [good]
        assert "has changed on its way" in notes[0]

    asyncio.run(main())


def test_nccl_connects_once_and_sends_while_the_engines_receive():
    async def main():
        actor, readers = Actor(), [Reader(), Reader()]
        config = SyncConfig(transfer="nccl")
        transfer = make_transfer(config, actor, None, workers_per_engine=2)
        pool = EnginePool(no_start, readers)
        await transfer.send(pool, 1)
        await transfer.send(pool, 2)
        connection = {"master_address": "10.0.0.1", "master_port": 5000, "world_size": 5, "packed": True}
        offsets = [reader.calls[0][1].pop("rank_offset") for reader in readers]
        assert offsets == [1, 3]
        description = {"names": ["w"], "shapes": [[4]]}
        for reader in readers:
            assert reader.calls == [("connect", connection), *["begin", description, ("end", 1)] * 2]
        assert [call[0] for call in actor.calls] == ["address", "open_nccl", *["send_nccl", "sent_checksum"] * 2]
        assert actor.calls[1] == ("open_nccl", "10.0.0.1:5000", 5)

        pool.members.pop()  # an engine died: the others need a new group
        await transfer.send(pool, 3)
        assert [call[0] for call in actor.calls[6:]] == ["address", "open_nccl", "send_nccl", "sent_checksum"]
        assert actor.calls[7] == ("open_nccl", "10.0.0.1:5000", 3)

    asyncio.run(main())


def test_cuda_ipc_sends_the_handles_of_every_gpu():
    async def main():
        actor, reader = Actor(), Reader()
        await make_transfer(SyncConfig(transfer="cuda_ipc", bucket_megabytes=1), actor, None, 1).send(
            EnginePool(no_start, [reader]), 1
        )
        handles = [call["ipc_handles"] for call in reader.calls if isinstance(call, dict)]
        assert handles == [{"GPU-0": 1, "GPU-1": 1}, {"GPU-0": 0, "GPU-1": 0}]
        assert reader.calls[0] == ("connect", {"packed": True})
        assert reader.calls[-1] == ("end", 2)
        assert actor.calls[0] == ("begin_ipc", 2**20)

    asyncio.run(main())


@pytest.mark.parametrize(("received", "words"), [(8, "received 8"), (None, "received missing")])
@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
def test_other_bytes_than_those_sent_stop_the_run(kind, received, words):
    readers = [Reader(), Reader(received=received)]
    transfer = make_transfer(SyncConfig(transfer=kind), Actor(), None, 1)
    with pytest.raises(RunError, match=f"weights of policy 4 did not arrive at engine 1: .* sent is 7, .* {words}"):
        asyncio.run(transfer.send(EnginePool(no_start, readers), 4))


def test_a_lost_message_of_the_files_stops_the_run(tmp_path):
    class Deaf(Reader):
        async def end_weights(self, n_buckets, version):
            return None

    transfer = FileTransfer(Actor(), tmp_path, 100, checkpoint=True)
    with pytest.raises(RunError, match="did not arrive at engine 0"):
        asyncio.run(transfer.send(EnginePool(no_start, [Deaf()]), 4))


def test_the_engine_sums_up_what_the_transfers_between_gpus_bring():
    """Of the tensors as vLLM hands them to the model, in any parts."""
    weights = {"a": torch.arange(9.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.zeros(2)}
    loaded = []

    class Worker(WeightReader):
        model_runner = SimpleNamespace(get_model=lambda: model)

        def update_weights(self, info):
            for names in info:
                model.load_weights((name, weights[name]) for name in names)

    class Model(torch.nn.Module):
        def load_weights(self, weights):
            loaded.extend(name for name, _ in weights)

    model = Model()
    assert Worker().receive(["b"]) + Worker().receive(["c", "a"]) == checksum(weights)
    assert loaded == ["b", "c", "a"]
    assert Worker().receive(["a"]) != checksum({"a": weights["a"] + 1}) != checksum({"z": weights["a"] + 1})
    model.load_weights([])  # is the model's own again
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
def test_transfers_between_gpus_need_gpus(kind):
    actor = SimpleNamespace(info=SimpleNamespace(device="cpu"), settings=WorkersConfig())
    with pytest.raises(ConfigError, match=f"sync.transfer={kind} is between GPUs, and the actor is on a CPU"):
        make_transfer(SyncConfig(transfer=kind), actor, None, 1)
    actor = SimpleNamespace(info=SimpleNamespace(device="cuda:0"), settings=WorkersConfig(ranks=2, tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"workers.tensor_parallel=1"):
        make_transfer(SyncConfig(transfer=kind), actor, None, 1)
