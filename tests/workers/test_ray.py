"""Workers as Ray actors, on a local Ray."""

import asyncio
import os
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from envgym.config.resolve import resolve
from envgym.errors import ConfigError, WorkerDied, WorkerError
from envgym.learner import RoleSpec
from envgym.placement.plan import Node, PlacedRuntime, StagePart, place_parts, placed_runtime
from envgym.processes import ray as ray_module
from envgym.processes.ray import RayRuntime, RayWorker
from envgym.processes.runtime import InlineRuntime, Slot
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.group import WorkerGroup
from tests.weight_files import export_group

TARGET = "polite_worker:Worker"


def test_ray_actors_learn_and_behave_like_local_workers(
    tmp_path, make_rows, normalizers, plain_gradient_descent, tied_model, learner, monkeypatch
):
    """One test, because starting Ray takes seconds: two ranks on ZeRO 2, then the handle's contract."""
    monkeypatch.syspath_prepend(Path(__file__).parent)  # where the actors find `polite_worker`
    rows = make_rows(7)

    async def take_step(runtime, **settings):
        settings = WorkersConfig(
            tokens_per_microbatch=60, dtype="float32", deepspeed=plain_gradient_descent, **settings
        )
        spec = WorkerSpec("actor", tied_model, RoleSpec(trained=True), learner, settings)
        group = await WorkerGroup.start(runtime, spec)
        metrics = await group.accumulate(rows, normalizers(rows)) | await group.step(1.0)
        await export_group(group, tmp_path / "weights")
        await group.close()
        del metrics["memory/max"]  # the controller of a run inline holds more than a worker
        return metrics, load_file(tmp_path / "weights")

    async def main():
        runtime = RayRuntime(tmp_path / "logs")
        try:
            expected, expected_weights = await take_step(InlineRuntime())
            metrics, tensors = await take_step(runtime, ranks=2, zero_stage=2)
            assert metrics == pytest.approx(expected, rel=1e-5)
            for name, tensor in expected_weights.items():
                torch.testing.assert_close(tensors[name], tensor, atol=1e-6, rtol=0)
            await contract(runtime, tmp_path)
        finally:
            await runtime.close()

    asyncio.run(main())


async def parked_calls(worker):
    """Coroutine methods overlap, any number of them; they begin in the order in which they were made, some given up."""
    numbers = range(1200)
    loads = [bytes(200_000) if number % 100 == 0 else b"" for number in numbers]  # Ray is slower with the larger
    calls = [
        asyncio.ensure_future(worker.call(lambda worker: worker.park(number, loads[number]))) for number in numbers
    ]
    cancelled_call = asyncio.ensure_future(worker.call(lambda worker: worker.be_cancelled()))
    await asyncio.sleep(0)  # they have been made
    calls[700].cancel()
    assert await worker.call(lambda worker: worker.greet(name="everyone"))
    cancelled_call.cancel()
    await asyncio.gather(cancelled_call, calls[700], return_exceptions=True)
    await worker.call(lambda worker: worker.wake())
    with pytest.raises(asyncio.CancelledError):
        calls[700].result()
    assert await asyncio.gather(*calls[:700], *calls[701:]) == [number for number in numbers if number != 700]
    parked = await worker.call(lambda worker: worker.parking())
    assert parked[-1] == "cancelled"
    assert [number for number in parked[:-1] if number != 700] == [number for number in numbers if number != 700]

    # A call that the actor cannot read is an error, and those after it do not wait for it.
    module = ModuleType("only_here")
    exec("def load(): ...", vars(module))
    with (
        patch.dict(sys.modules, only_here=module),
        pytest.raises(WorkerError, match=r"^polite: .*ModuleNotFoundError: .*only_here.* \(log: .*polite\.log\)$"),
    ):
        await worker.call(lambda worker: worker.park(0, module.load))
    assert await worker.call(lambda worker: worker.wait()) == "woken"


async def contract(runtime, tmp_path):
    worker = await runtime.start(TARGET, {"greeting": "hi"}, name="polite", environ={"MOOD": "good"})
    assert worker.name == "polite"
    assert await worker.call(lambda worker: worker.greet(name="Ray")) == ("hi Ray", "good")

    await parked_calls(worker)

    with pytest.raises(ConfigError, match=r"^no such key$"):
        await worker.call(lambda worker: worker.fail("user"))
    with pytest.raises(
        WorkerError,
        match=r"polite: ZeroDivisionError: by zero and more \(.*polite_worker\.py, line \d+\) \(log: .*polite\.log\)",
    ):
        await worker.call(lambda worker: worker.fail("bug"))
    assert "Traceback" in (tmp_path / "logs" / "polite.log").read_text()
    with pytest.raises(ConfigError, match="be polite"):
        await runtime.start(TARGET, {"greeting": "rude"}, name="rude")

    asleep = asyncio.ensure_future((await runtime.start(TARGET, {}, name="victim")).call(lambda worker: worker.wait()))
    victim = runtime._workers[-1]
    await victim.call(lambda worker: worker.greet("it"))
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="victim"):
        await asleep
    await victim.close()

    await worker.close()
    await worker.close()
    with pytest.raises(WorkerError, match="closed"):
        await worker.call(lambda worker: worker.greet("nobody"))


class Unanswered:
    """An actor's method whose calls come to nothing, for a reason of Ray's."""

    def __init__(self, error, *, at_once=False):
        self.error, self.at_once = error, at_once

    def remote(self, *args):
        if self.at_once:
            raise self.error
        future = Future()
        future.set_exception(self.error)
        return SimpleNamespace(future=lambda: future)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ray.exceptions.ActorDiedError(), "ActorDiedError"),
        (ray.exceptions.ActorUnavailableError("no answer", None), "ActorUnavailableError"),
        (ray.exceptions.OutOfMemoryError("Task was killed:\nthe node ran low on memory"), "killed: the node ran low"),
        (ray.exceptions.NodeDiedError("the node of it died"), "NodeDiedError: the node of it died"),
        (ray.exceptions.ObjectLostError("00" * 28, None, ""), "ObjectLostError"),
        (ray.exceptions.OwnerDiedError("00" * 28, None, ""), "OwnerDiedError"),
        (ray.exceptions.LocalRayletDiedError(), "LocalRayletDiedError"),
        (ray.exceptions.WorkerCrashedError(), "WorkerCrashedError"),
        (ray.exceptions.RaySystemError("lost"), "RaySystemError"),
    ],
)
def test_whatever_takes_an_actor_away_is_the_death_of_a_worker(error, message, tmp_path):
    """Else it would be a failure of the environment whose episode was waiting."""

    async def call(**options):
        actor = SimpleNamespace(call=Unanswered(error, **options), start=Unanswered(error, **options))
        await RayWorker("engine", tmp_path / "engine.log", actor).call(lambda worker: worker.generate(1))

    for options in ({}, {"at_once": True}):
        with pytest.raises(WorkerDied, match=rf"^engine ended without being asked to \(.*{message}.*engine\.log\)$"):
            asyncio.run(call(**options))


@pytest.fixture
def cluster(monkeypatch):
    """A Ray of two machines with one and three GPUs, that are none."""
    ray_cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False}
    )
    ray_cluster.add_node(num_cpus=2, num_gpus=3)
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    yield ray_cluster
    ray.shutdown()
    ray_cluster.shutdown()


def test_on_a_cluster_workers_are_where_the_plan_has_them(cluster, tmp_path, monkeypatch):
    """On the machine and the GPUs of their slots, of which the run holds as many as it needs."""
    monkeypatch.setattr(ray_module, "RESERVE_TIMEOUT", 2.0)
    monkeypatch.setattr(ray_module, "least_gpu_bytes", lambda: 24 * 2**30)

    async def main():
        runtime = RayRuntime(tmp_path / "logs")
        nodes = [Node(*node) for node in runtime.nodes()]
        assert [(node.gpus, node.gpu_bytes) for node in nodes] == [(1, 24 * 2**30), (3, 24 * 2**30)]
        ranks = StagePart("actor", ("actor-0", "actor-1"))
        plan = place_parts([ranks, StagePart("engine", ("engine",))], nodes, [])
        placed = PlacedRuntime(runtime, plan)
        variable = {"key": "CUDA_VISIBLE_DEVICES"}
        workers = [await placed.start("os:getenv", variable, name=name) for name in ("actor-0", "actor-1", "engine")]
        names = [await worker.call(lambda value: value.strip()) for worker in workers]
        assert [len(names[0]), len(names[1]), names[2]] == [1, 1, "0"]
        assert names[0] != names[1]
        assert ray.available_resources().get("GPU", 0.0) == 1.0  # held, though Ray gave them to no worker

        second_runtime = RayRuntime(tmp_path / "other")
        assert [gpus for _, gpus, *_ in second_runtime.nodes(only_free=True)] == [0, 1]
        with pytest.raises(ConfigError, match=r"did not give this run 2 machines with 1 GPUs and 3 GPUs within 2 s"):
            await second_runtime.reserve([1, 3])
        await runtime.close()

    asyncio.run(main())


def test_actors_get_the_controllers_variables_programs_and_gpus_by_their_names(cluster, tmp_path, monkeypatch):
    """MIG and some drivers name GPUs, and do not number them; a cluster that runs has variables of its own."""
    monkeypatch.setattr(ray_module, "_gpu_numbers", lambda ray, strategy, gpus: ray.put(["GPU-a", "GPU-b"][:gpus]))

    async def main():
        runtime = RayRuntime(tmp_path / "logs")
        runtime.nodes()
        await runtime.reserve([1])
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
        monkeypatch.setenv("UNRELATED", "here")
        seen = {}
        for name in ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "UNRELATED", "PATH"):
            variable = await runtime.start("os:getenv", {"key": name, "default": ""}, name=name, slot=Slot(0, (0,)))
            seen[name] = await variable.call(lambda value: value.strip())
        await runtime.close()
        return seen

    seen = asyncio.run(main())
    assert seen.pop("PATH").startswith(f"{Path(sys.executable).parent}:")
    assert seen == {"CUDA_VISIBLE_DEVICES": "GPU-a", "NCCL_SOCKET_IFNAME": "eth7", "UNRELATED": ""}


def test_a_cluster_of_one_gpu_is_refused_at_once_with_the_reason(tmp_path, monkeypatch):
    """A worker that waits for one would wait for the run's own engine to end."""
    monkeypatch.setattr(RayRuntime, "nodes", lambda self, only_free=False: [("head", 1, None, 2**34)])
    stage = resolve({"env": "math_verify", "colocate": "none"}).stages[0]
    with pytest.raises(ConfigError, match=r"^actor needs 1 GPU; free are 0 of 1 on head: lower .*colocate=all"):
        placed_runtime(stage, [], RayRuntime(tmp_path))
