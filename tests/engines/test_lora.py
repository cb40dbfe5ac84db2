"""LoRA adapters in both engines: what is sampled with one is what peft says of it, in float32."""

import asyncio
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from envgym.engine import Request, SamplingParams
from envgym.engines import choose_engine
from envgym.engines.spec import EngineSpec
from envgym.errors import WorkerError
from envgym.models.weights_file import write_weights
from envgym.processes.local import LocalRuntime
from tests.weight_files import load as load_weights

RANK = 6  # vLLM has no adapters of that size, and takes it for one of 8


class Policy:
    """A base that is not the folder's, and adapters of it."""

    def __init__(self, folder: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.mul_(1.1)
        self.base_weights = base.state_dict()
        config = peft.LoraConfig(r=RANK, lora_alpha=9, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, config).eval()

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 10

    @torch.no_grad()
    def logprobs(self, token_ids):
        ids = torch.tensor([token_ids])
        return self.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def policy(tiny_model):
    return Policy(tiny_model)


@pytest.fixture(scope="module", params=["vllm", pytest.param("transformers", marks=pytest.mark.slow)])
def engine(request, tiny_model, policy, tmp_path_factory):
    """An engine with the policy's base, which has to come before the first adapter: `call`, `generate`."""
    runner, runtime = asyncio.Runner(), LocalRuntime(tmp_path_factory.mktemp("logs"))
    arguments = {"spec": EngineSpec(str(tiny_model), max_model_len=256, lora_rank=RANK)}
    worker = runner.run(
        runtime.start(choose_engine(request.param)[0], arguments, name=request.param, environ={"OMP_NUM_THREADS": "1"})
    )
    path = tmp_path_factory.mktemp("weights") / "base.safetensors"
    write_weights(path, policy.base_weights)
    runner.run(load_weights(worker, path, 0))
    worker.run = runner.run
    yield worker
    runner.run(runtime.close())
    runner.close()


def load(engine, policy, folder: Path, seed: int, version: int) -> None:
    policy.draw(seed)
    policy.model.save_pretrained(folder)
    engine.run(engine.call(lambda engine: engine.load_adapter(str(folder), version)))
    shutil.rmtree(folder)  # an engine reads it once


def assert_exact(policy, request, generation, start=0, end=None):
    said = torch.tensor(generation.logprobs[start:end])
    expected = policy.logprobs([*request.token_ids, *generation.token_ids])[len(request.token_ids) - 1 :][start:end]
    torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-5)  # of a logprob of -5, float32 keeps 5e-7


def test_each_adapter_is_the_policy_from_then_on(engine, policy, tmp_path):
    wave = [Request(f"r{i}", tuple(range(3, 20 + i)), SamplingParams(max_tokens=8)) for i in range(16)]
    token_ids = tuple(range(3, 60))
    answers = []
    for version in (1, 2, 3):  # the same prompts each time: what is cached of them is of the adapter before
        load(engine, policy, tmp_path / "adapter", seed=version, version=version)

        async def sample():
            return await asyncio.gather(*(engine.call(lambda engine: engine.generate(request)) for request in wave))

        for request, generation in zip(wave, engine.run(sample()), strict=True):
            assert_exact(policy, request, generation)
            assert {span.version for span in generation.versions} == {version}
        scored = torch.tensor(engine.run(engine.call(lambda engine: engine.score(token_ids))))
        torch.testing.assert_close(scored, policy.logprobs(token_ids), atol=1e-5, rtol=1e-5)
        answers.append(scored)
    assert (answers[1] - answers[0]).abs().max() > 0.1


def test_an_adapter_in_mid_flight(engine, policy, tmp_path):
    wave = [Request(f"flight{i}", tuple(range(3, 20 + i)), SamplingParams(max_tokens=200)) for i in range(4)]

    async def swap():
        flying = [asyncio.create_task(engine.call(lambda engine: engine.generate(request))) for request in wave]
        await asyncio.sleep(0)
        # The engine has taken the wave up when it answers the next call.
        await engine.call(lambda engine: engine.info())
        await engine.call(lambda engine: engine.load_adapter(str(tmp_path / "new"), 5))
        return await asyncio.gather(*flying)

    policy.draw(5)
    policy.model.save_pretrained(tmp_path / "new")
    for _ in range(20):  # on a busy machine the wave may land before we are scheduled again
        load(engine, policy, tmp_path / "old", seed=4, version=4)
        results = engine.run(swap())
        if any(len(generation.versions) == 2 for generation in results):
            break
    assert any(len(generation.versions) == 2 for generation in results)
    for request, generation in zip(wave, results, strict=True):
        for span in generation.versions:
            policy.draw(span.version)
            assert_exact(policy, request, generation, span.start, span.end)


def test_other_weights_under_an_adapter_are_refused(engine, policy, tmp_path):
    load(engine, policy, tmp_path / "adapter", seed=1, version=1)
    with pytest.raises(WorkerError, match="an engine that has an adapter takes no other weights"):
        engine.run(engine.call(lambda engine: engine.begin_weights()))
