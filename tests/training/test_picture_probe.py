"""The picture of the probe shows what a text cannot: a vision tower of older weights, and one that got none."""

import asyncio
import os
import sys

import numpy as np
import pytest

from envgym.engines.pool import EngineClient, EnginePool
from envgym.engines.spec import EngineSpec
from envgym.errors import RunError
from envgym.images import ImageFolder
from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.render import RenderConfig, load_renderer
from envgym.training.probe import picture_probe, text_probe
from envgym.training.weight_sync import FileTransfer, GpuTimeshare, WeightSync
from envgym.types import Row, Segment
from envgym.workers.config import ImageConfig, WorkersConfig, WorkerSpec
from envgym.workers.group import WorkerGroup

FAULTY = '''
"""vLLM with the faults that it had: outputs of the old vision tower, and the first tower's weights for later ones."""

import dataclasses

from safetensors.torch import save_file

from envgym.engines.spec import read_bucket
from envgym.engines.vllm import VLLMEngine
from envgym.models.weights_file import checksum


class Faulty(VLLMEngine):
    fault, tower = "", {}

    async def set_fault(self, fault):
        self.fault = fault

    async def load_bucket(self, bucket):
        tensors = read_bucket(bucket)
        if self.fault == "tower":
            tensors |= {name: self.tower[name] for name in tensors.keys() & self.tower.keys()}
            save_file(tensors, path := bucket.path + "-changed")
            await super().load_bucket(dataclasses.replace(bucket, path=path, checksum=checksum(tensors)))
            self._update.checksum += bucket.checksum - checksum(tensors)
        else:
            self.tower |= {n: t.clone() for n, t in tensors.items() if "vision" in n or "visual" in n}
            await super().load_bucket(bucket)

    def _begin_version(self, version):
        reset = self._engine.reset_encoder_cache
        if self.fault == "cache":
            self._engine.reset_encoder_cache = lambda: None
        super()._begin_version(version)
        self._engine.reset_encoder_cache = reset
'''


async def start_engine(number):
    raise AssertionError


async def sync_and_confirm(sync, version):
    await sync(version)
    sync.check_samples(None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_a_vision_tower_of_older_weights_is_seen_at_the_picture_alone(vision_model, tmp_path, monkeypatch, kind):
    folder = str(vision_model(kind))
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    images = ImageFolder(tmp_path / "images")
    renderer = load_renderer(folder, RenderConfig())
    probes = (text_probe(renderer, 512), picture_probe(renderer, 512, images.store))
    learner = {"name": "sft", "lr": 1e-2}
    config = ImageConfig(str(images.path))

    async def main():
        runtime = LocalRuntime(tmp_path / "logs")
        try:
            settings = WorkersConfig(dtype="float32")
            spec = WorkerSpec("actor", folder, RoleSpec(trained=True), learner, settings, images=config)
            actor = await WorkerGroup.start(runtime, spec)
            engine_spec = EngineSpec(folder, dtype="float32", max_model_len=512, concurrency=8)
            handle = await runtime.start("faulty:Faulty", {"spec": engine_spec}, name="engine")
            pool = EnginePool(start_engine, [EngineClient(handle)])
            assert (await pool.info()).takes_images
            files = FileTransfer(actor, tmp_path / "transfer", 2**24, checkpoint=True)
            timeshare = GpuTimeshare(None, {}, keeps_weights=False)
            sync = WeightSync(pool, actor, probes, None, "float32", files, files, timeshare)
            for placed in probes[1].images:
                images.store(placed.image)
            spans = [tuple([placed.span for placed in probe.images]) for probe in probes]
            both = [
                Row([Segment("action", p.token_ids, images=s)], "cross_entropy")
                for p, s in zip(probes, spans, strict=True)
            ]

            async def learn():
                await actor.accumulate(both[1:], {"cross_entropy": 1.0 * len(both[1])})
                await actor.step(1e-2)

            before = await actor.forward(both)
            differences = [await sync(0)]
            await learn()
            after = await actor.forward(both)
            differences.append(await sync(1))
            assert max(np.abs(a - b).mean() for a, b in zip(before, after, strict=True)) > 0.05
            for version, fault in ((2, "cache"), (4, "tower")):
                await handle.call(lambda engine: engine.set_fault(fault))  # noqa: B023
                await learn()
                with pytest.raises(RunError, match=f"disagree on .*the probe with a picture after sync {version}"):
                    await sync_and_confirm(sync, version)
                await handle.call(lambda engine: engine.set_fault(""))
                sync.alarm = None
                differences.append(await sync(version + 1))
            return differences
        finally:
            await runtime.close()

    differences = asyncio.run(main())
    assert max(differences) < 1e-4
