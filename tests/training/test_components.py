"""Starting the components of a stage, with workers that only record their calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from envgym.config.resolve import resolve
from envgym.engine import EngineInfo
from envgym.errors import ConfigError
from envgym.launch.components import max_concurrency
from envgym.launch.placement import Node, PlacedRuntime, plan_of
from envgym.training.components import start_components


class Handle:
    def __init__(self, runtime, name):
        self.runtime, self.name = runtime, name

    async def call(self, method, *args, **kwargs):
        self.runtime.calls.append((self.name, method))
        if method == "load" and (problem := self.runtime.problems.get(self.name)):
            raise problem
        info = SimpleNamespace(dtype="float32", packed=False, not_shared="", notes=(), adapter=False)
        return {"info": EngineInfo("noted", 64), "device_type": self.runtime.device, "load": info}.get(method)

    async def close(self):
        self.runtime.calls.append((self.name, "close"))


class Runtime:
    """Starts workers that answer immediately; the engine once `engine` is set. `problems`: errors by worker."""

    def __init__(self, *, device="cpu", problems=()):
        self.device, self.problems = device, dict(problems)
        self.calls, self.arguments = [], {}
        self.engine = asyncio.Event()
        self.actor = asyncio.Event()

    async def start(self, target, kwargs, *, name, environ=None):
        self.arguments[name] = kwargs
        if name == "engine":
            await self.engine.wait()
            if problem := self.problems.get(name):
                raise problem
        else:
            self.actor.set()
        return Handle(self, name)

    async def close(self):
        pass


@pytest.fixture
def start(tiny_model):
    """start(runtime, **settings): a future of a stage's components."""

    def start_stage(runtime, **settings):
        config = resolve({"env": "math_verify", "model": str(tiny_model), **settings})
        stage = config.stages[0]
        services = SimpleNamespace(names=(), of_policy=(), bind_policy=lambda *args, **kwargs: None)
        context = SimpleNamespace(spec=stage.make_spec(), services=services, runtime=runtime)
        display = SimpleNamespace(phase=lambda text: None, note=print)
        return asyncio.ensure_future(start_components(config, stage, context, str(tiny_model), display))

    return start_stage


def test_engine_and_actor_start_concurrently(start):
    async def main():
        runtime = Runtime()
        components = start(runtime)
        await asyncio.wait_for(runtime.actor.wait(), 60)
        assert not runtime.engine.is_set()
        runtime.engine.set()
        assert list((await components).workers) == ["actor"]

    asyncio.run(main())


def test_on_an_accelerator_the_actor_loads_after_the_engine_has_measured_free_memory(start):
    async def main():
        runtime = Runtime(device="cuda")
        components = start(runtime)
        await asyncio.wait_for(runtime.actor.wait(), 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert ("actor-0", "load") not in runtime.calls
        runtime.engine.set()
        await components
        assert ("actor-0", "load") in runtime.calls

    asyncio.run(main())


def test_the_engines_error_is_raised_and_the_actor_is_ended(start):
    async def main():
        problems = {"engine": ConfigError("no such engine argument"), "actor-0": ConfigError("does not load")}
        runtime = Runtime(problems=problems)
        components = start(runtime)
        await asyncio.wait_for(runtime.actor.wait(), 60)
        for _ in range(20):
            await asyncio.sleep(0)
        runtime.engine.set()
        with pytest.raises(ConfigError, match="no such engine argument"):
            await components
        assert ("actor-0", "close") in runtime.calls

    asyncio.run(main())


def test_the_engine_has_capacity_for_all_concurrent_episodes(start):
    async def main():
        runtime = Runtime()
        runtime.engine.set()
        await start(runtime, rollout={"tasks_per_step": 40, "group_size": 16}, eval={"tasks": 100})
        assert runtime.arguments["engine"]["spec"].concurrency == 640

    asyncio.run(main())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_engine_knows_whether_weights_change_while_it_samples(start, max_staleness):
    async def main():
        runtime = Runtime()
        runtime.engine.set()
        await start(runtime, rollout={"max_staleness": max_staleness})
        assert runtime.arguments["engine"]["spec"].in_flight == (max_staleness > 0)

    asyncio.run(main())


@pytest.mark.parametrize(("gpu_bytes", "tokens"), [(80 * 2**30, 16384), (None, 4096)])
def test_workers_get_the_micro_batches_that_their_gpus_have_room_for(start, gpu_bytes, tokens):
    async def main():
        runtime = Runtime()
        runtime.engine.set()
        plan = plan_of(resolve({"env": "math_verify"}).stages[0], {}, [Node("node", 2, gpu_bytes)])
        await start(PlacedRuntime(runtime, plan))
        assert runtime.arguments["actor-0"]["spec"].settings.tokens_per_rank == tokens

    asyncio.run(main())


def test_max_concurrency():
    def episodes(**rollout):
        return max_concurrency(resolve({"env": "math_verify", "rollout": rollout, "eval": {"tasks": 300}}).stages[0])

    assert episodes(tasks_per_step=2, group_size=4) == 300
    assert episodes(tasks_per_step=100, group_size=8) == 800
    assert episodes(tasks_per_step=100, group_size=8, concurrency=32) == 32
