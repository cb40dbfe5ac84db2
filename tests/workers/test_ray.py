"""Workers as Ray actors, on a local Ray."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from envgym.errors import ConfigError, WorkerDied, WorkerError
from envgym.workers.config import WorkersConfig
from envgym.workers.group import WorkerGroup
from envgym.workers.inline import InlineRuntime
from envgym.workers.ray import RayRuntime

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
        metrics = await group.learn(rows, denominators(rows), 1.0)
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


async def contract(runtime, tmp_path):
    worker = await runtime.start(TARGET, {"greeting": "hi"}, name="polite", environ={"MOOD": "good"})
    assert worker.name == "polite"
    assert await worker.call("greet", name="Ray") == ("hi Ray", "good")

    waiting = asyncio.ensure_future(worker.call("wait"))
    await worker.call("wake")  # coroutine methods overlap
    assert await waiting == "woken"

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
