"""Starting the components of a stage, with workers that only record their calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from envgym.config.resolve import resolve
from envgym.engine import EngineInfo
from envgym.errors import ConfigError
from envgym.images import ImageFolder
from envgym.jobs.components import max_concurrency
from envgym.placement.plan import Node, PlacedRuntime, plan_of
from envgym.processes.runtime import WorkerHandle
from envgym.training.components import start_components
from envgym.workers.config import ImageConfig


class Handle(WorkerHandle):
    def __init__(self, runtime, name):
        self.runtime, self.name = runtime, name

    async def send(self, message):
        method, *_ = message
        self.runtime.calls.append((self.name, method))
        if method == "load" and (problem := self.runtime.problems.get(self.name)):
            raise problem
        info = SimpleNamespace(dtype="float32", packed=False, not_shared="", notes=(), adapter=False)
        return {"info": EngineInfo("noted", 64), "load": info}.get(method)

    async def close(self):
        self.runtime.calls.append((self.name, "close"))


class Runtime:
    """Starts workers that answer immediately; the engine once `engine` is set. `problems`: errors by worker."""

    def __init__(self, *, problems=()):
        self.problems = dict(problems)
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

    def start_stage(runtime, images=None, **settings):
        config = resolve({"env": "math_verify", "model": str(tiny_model), **settings})
        stage = config.stages[0]
        services = SimpleNamespace(names=(), of_policy=(), bind_policy=lambda *args, **kwargs: None)
        spec = stage.make_spec()
        spec.images = images
        context = SimpleNamespace(spec=spec, services=services, runtime=runtime)
        display = SimpleNamespace(phase=show, note=print)
        return asyncio.ensure_future(start_components(config, stage, context, str(tiny_model), display))

    def show(phase):
        start_stage.phases.append(phase)
        if phase.startswith("waiting"):
            start_stage.waits.set()

    start_stage.model, start_stage.phases, start_stage.waits = tiny_model, [], asyncio.Event()
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


@pytest.mark.parametrize(
    ("gpus", "gib", "settings", "at_once", "cached"),
    [
        (1, 80, {}, True, True),
        (2, 80, {}, True, False),  # one each
        (1, None, {}, False, False),  # of unknown size
        (1, 6, {}, False, False),  # too small for both
        (1, 80, {"colocate": "all"}, False, False),  # in turns
        (0, None, {}, True, False),
    ],
)
def test_on_one_gpu_the_actor_waits_for_the_engine_unless_the_engines_cache_is_planned(
    start, gpus, gib, settings, at_once, cached
):
    """The engine would measure the free memory, from which the actor takes."""

    async def main():
        runtime = Runtime()
        config = resolve({"env": "math_verify", "model": str(start.model), **settings})
        plan = plan_of(config.stages[0], {}, [Node("node", gpus, gib and gib * 2**30, 64 * 2**30)])
        placed = PlacedRuntime(runtime, plan)
        components = start(placed, **settings)
        await asyncio.wait_for(runtime.actor.wait(), 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (("actor-0", "load") in runtime.calls) == at_once
        runtime.engine.set()
        await components
        assert ("actor-0", "load") in runtime.calls
        size = runtime.arguments["engine"]["spec"].cache_bytes
        assert (size is not None) == cached
        assert size is None or 0.35 * gib < size / 2**30 < 0.5 * gib

    asyncio.run(main())


def test_workers_open_the_runs_images_unless_texts_alone_are_trained_on(start, tmp_path):
    async def images_of_actor(**settings):
        runtime = Runtime()
        runtime.engine.set()
        await start(runtime, images=ImageFolder(tmp_path), **settings)
        return runtime.arguments["actor-0"]["spec"].images

    size = {"shortest_edge": 784, "longest_edge": 3136}
    assert asyncio.run(images_of_actor()) == ImageConfig(str(tmp_path))
    assert asyncio.run(images_of_actor(render={"image_size": size})) == ImageConfig(str(tmp_path), size)
    texts_alone = {"engine": {"args": {"language_model_only": True}}}
    assert asyncio.run(images_of_actor(**texts_alone)) is None


def test_what_is_waited_for_is_shown(start):
    async def main():
        runtime = Runtime()
        components = start(runtime)
        await asyncio.wait_for(runtime.actor.wait(), 60)
        await asyncio.wait_for(start.waits.wait(), 60)
        assert start.phases[-1] == "waiting for the engine"
        runtime.engine.set()
        await components
        assert start.phases[-1] == "waiting for the engine"

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
