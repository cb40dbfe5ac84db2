"""Nine families of vision-language models as policies on texts: vLLM and the trainer hold the same policy."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from envgym.engine import Request, SamplingParams
from envgym.engines import choose_engine
from envgym.engines.spec import EngineSpec
from envgym.errors import InvalidOutcome
from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.types import Row, Segment, int_array
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.lora import LoraConfig
from envgym.workers.model import ModelWorker
from tests.vision_models import KINDS
from tests.weight_files import bucket_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [tuple(range(20, 30 + 3 * n)) for n in range(8)]
"""Texts, without the tokens of images."""


def make_worker(folder, **settings):
    role = RoleSpec(trained=bool(settings))
    worker = ModelWorker(WorkerSpec("actor", str(folder), role, settings=WorkersConfig(dtype="float32"), **settings))
    return worker, worker.load()


async def differences(engine, worker, name):
    """|sampler - trainer| of every sampled token, in nats."""
    result = []
    for number, prompt in enumerate(PROMPTS):
        request = Request(f"{name}-{number}", int_array(prompt), SamplingParams(48))
        try:
            answer = await engine.call(lambda engine: engine.generate(request))  # noqa: B023
        except InvalidOutcome as error:  # random weights sample the placeholders of images, too
            if error.kind != "placeholder":
                raise
            continue
        action = Segment("action", answer.token_ids, logprobs=answer.logprobs, versions=answer.versions)
        [scores] = worker.forward([Row([Segment("prompt", int_array(prompt)), action])])
        result += np.abs(scores[len(prompt) :] - np.array(answer.logprobs)).tolist()
    return np.array(result)


async def started(runtime, folder, **settings):
    spec = EngineSpec(str(folder), max_model_len=128, **settings)
    return await runtime.start(choose_engine("vllm")[0], {"spec": spec}, name="vllm", environ={"OMP_NUM_THREADS": "1"})


async def send(engine, worker, folder, version):
    worker.begin_export(2**40, str(folder / "weights"), True)
    path = worker.next_bucket().path
    await engine.call(lambda engine: engine.begin_weights())
    await engine.call(lambda engine: engine.load_bucket(bucket_of(path)))
    await engine.call(lambda engine: engine.end_weights(1, version))
    worker.end_export()


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_are_one_policy(vision_model, tmp_path, store, kind):
    """With the weights of the folder, after a sync with others, and with an adapter."""
    (first, info), (second, _) = (make_worker(vision_model(kind, seed)) for seed in (0, 1))
    adapted, _ = make_worker(vision_model(kind), lora=LoraConfig(rank=8), learner={"name": "grpo"})
    for name, parameter in adapted.network.model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.export_adapter(str(tmp_path / "adapter"))

    async def main():
        runtime = LocalRuntime(tmp_path / "logs")
        try:
            engine = await started(runtime, vision_model(kind))
            before = await differences(engine, first, "before")
            await send(engine, second, tmp_path, 1)
            after = await differences(engine, second, "after")
            await engine.close()
            engine = await started(runtime, vision_model(kind), lora_rank=8)
            await engine.call(lambda engine: engine.load_adapter(str(tmp_path / "adapter"), 1))
            return {"before": before, "after_a_sync": after, "adapter": await differences(engine, adapted, "adapter")}
        finally:
            await runtime.close()

    found = asyncio.run(main())
    [moved] = second.forward([row := Row([Segment("action", int_array(PROMPTS[-1]))])])
    [same] = first.forward([row])
    store(
        f"vision_language_{kind}",
        tokens={when: len(numbers) for when, numbers in found.items()},
        mean={when: float(numbers.mean()) for when, numbers in found.items()},
        max={when: float(numbers.max()) for when, numbers in found.items()},
        seeds_differ_by=float(np.abs(moved - same).mean()),
        parameters=info.n_parameters,
        shares_prefixes=not info.not_shared,
    )
    assert max(numbers.mean() for numbers in found.values()) < 1e-6
    assert max(numbers.max() for numbers in found.values()) < 1e-4
    assert np.abs(moved - same).mean() > 0.1
    assert not info.not_shared
