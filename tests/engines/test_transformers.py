"""The sampling function of the transformers engine, on distributions small enough to know by heart."""

import asyncio
import math

import pytest
import torch

from envgym.engine import SamplingParams
from envgym.engines.spec import EngineSpec
from envgym.engines.transformers import TransformersEngine, sample_token, spans
from envgym.types import VersionSpan

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draw(n=4000, **sampling):
    generator = torch.Generator().manual_seed(0)
    draws = [sample_token(LOGITS, SamplingParams(max_tokens=1, **sampling), generator) for _ in range(n)]
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


def test_an_engine_that_sleeps_gives_its_memory_back(tiny_model, monkeypatch):
    """On a GPU torch keeps what is freed, for itself."""
    engine, calls = TransformersEngine(EngineSpec(str(tiny_model))), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(engine._model.device.type))
    engine._device = torch.device("cuda")
    asyncio.run(engine.sleep(1))
    assert calls == ["cpu"]
