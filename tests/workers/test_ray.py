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
from safetensors.torch import load_file

from envgym.errors import ConfigError, WorkerDied, WorkerError
from envgym.workers.config import WorkersConfig
from envgym.workers.group import WorkerGroup
from envgym.workers.ray import RayRuntime, RayWorker
from envgym.workers.runtime import InlineRuntime

TARGET = "polite_worker:Worker"


def test_ray_actors_learn_and_behave_like_local_workers(
    tmp_path, make_rows, denominators, plain_gradient_descent, tied_model, learner, monkeypatch
):
    """One test, because starting Ray takes seconds: two ranks on ZeRO 2, then the handle's contract."""
    monkeypatch.syspath_prepend(Path(__file__).parent)  # where the actors find `polite_worker`
    rows = make_rows(7)

    async def one_step(runtime, **settings):
        settings = WorkersConfig(
            tokens_per_microbatch=60, dtype="float32", deepspeed=plain_gradient_descent, **settings
        )
        group = await WorkerGroup.start(runtime, role="actor", model=tied_model, settings=settings, **learner)
        metrics = await group.accumulate(rows, denominators(rows)) | await group.step(1.0)
        await group.export(str(tmp_path / "weights"))
        await group.close()
        del metrics["memory/max"]  # the controller of a run inline holds more than a worker
        return metrics, load_file(tmp_path / "weights")

    async def main():
        runtime = RayRuntime(tmp_path / "logs")
        try:
            expected, expected_weights = await one_step(InlineRuntime())
            metrics, tensors = await one_step(runtime, ranks=2, zero_stage=2)
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
    calls = [asyncio.ensure_future(worker.call("park", number, loads[number])) for number in numbers]
    given_up = asyncio.ensure_future(worker.call("be_cancelled"))
    await asyncio.sleep(0)  # they have been made
    calls[700].cancel()
    assert await worker.call("greet", name="everyone")
    given_up.cancel()
    await asyncio.gather(given_up, calls[700], return_exceptions=True)
    await worker.call("wake")
    with pytest.raises(asyncio.CancelledError):
        calls[700].result()
    assert await asyncio.gather(*calls[:700], *calls[701:]) == [number for number in numbers if number != 700]
    began = await worker.call("parking")
    assert began[-1] == "cancelled"
    assert [number for number in began[:-1] if number != 700] == [number for number in numbers if number != 700]

    # A call that the actor cannot read is an error, and those after it do not wait for it.
    module = ModuleType("only_here")
    exec("def load(): ...", vars(module))
    with (
        patch.dict(sys.modules, only_here=module),
        pytest.raises(WorkerError, match=r"^polite: .*ModuleNotFoundError: .*only_here.* \(log: .*polite\.log\)$"),
    ):
        await worker.call("park", 0, module.load)
    assert await worker.call("wait") == "woken"


async def contract(runtime, tmp_path):
    worker = await runtime.start(TARGET, {"greeting": "hi"}, name="polite", environ={"MOOD": "good"})
    assert worker.name == "polite"
    assert await worker.call("greet", name="Ray") == ("hi Ray", "good")

    await parked_calls(worker)

    with pytest.raises(ConfigError, match=r"^no such key$"):
        await worker.call("fail", "user")
    with pytest.raises(WorkerError, match=r"polite: ZeroDivisionError: by zero and more \(log: .*polite\.log\)"):
        await worker.call("fail", "bug")
    assert "Traceback" in (tmp_path / "logs" / "polite.log").read_text()
    with pytest.raises(ConfigError, match="be polite"):
        await runtime.start(TARGET, {"greeting": "rude"}, name="rude")

    asleep = asyncio.ensure_future((await runtime.start(TARGET, {}, name="victim")).call("wait"))
    victim = runtime._workers[-1]
    await victim.call("greet", "it")
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="victim"):
        await asleep
    await victim.close()

    await worker.close()
    await worker.close()
    with pytest.raises(WorkerError, match="closed"):
        await worker.call("greet", "nobody")


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
    ("error", "said"),
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
def test_whatever_takes_an_actor_away_is_the_death_of_a_worker(error, said, tmp_path):
    """Else it would be a failure of the environment whose episode was waiting."""

    async def call(**how):
        actor = SimpleNamespace(call=Unanswered(error, **how), start=Unanswered(error, **how))
        await RayWorker("engine", tmp_path / "engine.log", actor).call("generate", 1)

    for how in ({}, {"at_once": True}):
        with pytest.raises(WorkerDied, match=rf"^engine ended without being asked to \(.*{said}.*engine\.log\)$"):
            asyncio.run(call(**how))


def test_gpus_that_the_cluster_does_not_have_are_refused_at_once(tmp_path, monkeypatch):
    """A worker that waits for one would wait for the run's own engine to end."""
    cluster = SimpleNamespace(cluster_resources=lambda: {"GPU": 1.0, "CPU": 2.0})
    monkeypatch.setattr(RayRuntime, "_ray", lambda self: cluster)
    runtime = RayRuntime(tmp_path)
    runtime._workers.append(RayWorker("engine", tmp_path, None))
    with pytest.raises(
        ConfigError, match=r"^actor-0 needs 1 GPU; the Ray cluster has 1, of which this run holds 1 \(engine\): "
    ):
        asyncio.run(runtime.start(TARGET, {}, name="actor-0"))
    with pytest.raises(ConfigError, match=r"^engine needs 2 GPU; the Ray cluster has 1: "):
        asyncio.run(RayRuntime(tmp_path, gpus_per_worker=2.0).start(TARGET, {}, name="engine"))
