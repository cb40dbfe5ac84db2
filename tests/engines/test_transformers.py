"""The sampling function of the transformers engine, on distributions small enough to know by heart."""

import asyncio
import json
import math
import shutil
import time
from array import array
from types import SimpleNamespace

import pytest
import torch

from envgym.engine import Request, SamplingParams
from envgym.engines.spec import LONGEST_DEFAULT, EngineSpec
from envgym.engines.transformers import TransformersEngine, sample_token, spans
from envgym.errors import ConfigError
from envgym.learner import RoleSpec
from envgym.services.declarations import RewardModel
from envgym.services.reward_worker import RewardWorker
from envgym.types import VersionSpan
from envgym.workers.config import WorkerSpec
from envgym.workers.model import ModelWorker

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draw(n=4000, **sampling):
    generator = torch.Generator().manual_seed(0)
    pairs = (sample_token(LOGITS, SamplingParams(max_tokens=1, **sampling), generator) for _ in range(n))
    draws = [(int(token), float(logprob)) for token, logprob in pairs]
    return {token: (sum(t == token for t, _ in draws) / n, math.exp(lp)) for token, lp in set(draws)}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [x / 0.365 for x in (0.25, 0.09, 0.0225, 0.0025)]),
        ({"top_k": 2}, [0.625, 0.375]),
        ({"top_p": 0.6}, [0.625, 0.375]),  # the first alone holds less than 0.6
        ({"top_p": 0.45}, [1.0]),
        ({"top_k": 3, "top_p": 0.5}, [1.0]),  # renormalised first: 0.526 holds a half
    ],
)
def test_frequencies_and_logprobs_are_the_distribution(sampling, expected):
    drawn = draw(**sampling)
    assert sorted(drawn) == list(range(len(expected)))
    for token, probability in enumerate(expected):
        frequency, said = drawn[token]
        assert said == pytest.approx(probability, abs=1e-5)
        assert frequency == pytest.approx(probability, abs=0.03)


def test_greedy_reports_the_likeliest_at_temperature_one():
    assert draw(3, temperature=0.0) == {0: (1.0, pytest.approx(0.5))}


def test_spans():
    assert spans([0, 0, 3, 3, 3]) == (VersionSpan(0, 0, 2), VersionSpan(3, 2, 5))


def test_a_step_waits_for_the_gpu_as_often_for_many_requests_as_for_one(tiny_model, monkeypatch):
    """Each number that Python reads of a tensor is such a wait."""
    engine, waits = TransformersEngine(EngineSpec(str(tiny_model))), []
    for name in ("item", "tolist", "__int__", "__float__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, read=read: waits.append(tensor) or read(tensor))

    async def sample(n_requests):
        waits.clear()
        steps = await engine.steps()
        requests = (Request(f"{n_requests}-{n}", (3, 4 + n), SamplingParams(max_tokens=6)) for n in range(n_requests))
        await asyncio.gather(*(engine.generate(request) for request in requests))
        return len(waits) / (await engine.steps() - steps)

    assert asyncio.run(sample(8)) <= asyncio.run(sample(1)) == 2


def test_the_context_of_a_model_of_long_ones_is_that_of_vllm(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    (tmp_path / "long" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 262144}))
    for setting, expected in ((None, LONGEST_DEFAULT), (100_000, 100_000)):
        engine = TransformersEngine(EngineSpec(str(tmp_path / "long"), max_model_len=setting))
        assert asyncio.run(engine.info()).max_model_len == expected


@pytest.mark.parametrize("kind", [TransformersEngine, ModelWorker, RewardWorker])
def test_a_process_that_was_given_a_gpu_which_torch_does_not_see_does_not_start(tiny_model, monkeypatch, kind):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {
        TransformersEngine: EngineSpec(str(tiny_model)),
        ModelWorker: WorkerSpec("actor", str(tiny_model), RoleSpec()),
        RewardWorker: RewardModel(model=str(tiny_model)),
    }
    with pytest.raises(ConfigError, match=r"was given GPU 0 .* and torch sees none"):
        kind(arguments[kind])


def test_an_engine_that_sleeps_gives_its_memory_back(tiny_model, monkeypatch):
    """On a GPU torch keeps what is freed, for itself."""
    engine, calls = TransformersEngine(EngineSpec(str(tiny_model))), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(engine._model.device.type))
    engine._device = torch.device("cuda")
    asyncio.run(engine.sleep(1))
    assert calls == ["cpu"]


def test_time_that_runs_out_during_a_forward_pass_ends_the_turn_after_it():
    """Alone, and beside a request that goes on."""

    class Slow:
        def __call__(self, ids, **settings):
            time.sleep(0.02)
            return SimpleNamespace(logits=torch.zeros(len(ids), 1, 11), past_key_values=1)

    engine = object.__new__(TransformersEngine)
    vars(engine).update(
        _device=torch.device("cpu"), _model=Slow(), _max_model_len=100, _end_tokens=(), _version=0, _steps=0,
        _generator=torch.Generator().manual_seed(0), _waiting=[], _sampling=None, _may_step=asyncio.Event(),
    )  # fmt: skip
    engine._may_step.set()

    async def lengths(*seconds):
        sampling = SamplingParams(max_tokens=20)
        requests = [Request(f"r{n}", array("i", [1, 2]), sampling, limit) for n, limit in enumerate(seconds)]
        results = await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), 20)
        return [len(generation.token_ids) for generation in results]

    async def main():
        [alone] = await lengths(0.09)
        late, free = await lengths(0.09, math.inf)
        assert 0 < alone < 20
        assert 0 < late < free == 20

    asyncio.run(main())
