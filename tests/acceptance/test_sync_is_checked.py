"""Sampler and trainer hold the same policy after every sync; one that is lost stops the run."""

from __future__ import annotations

import pytest

import envgym
from envgym.engines.client import EngineClient
from envgym.errors import RunError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_lost_sync_stops_the_run(tmp_path, monkeypatch, store):
    begin, load, end = EngineClient.begin_weights, EngineClient.load_bucket, EngineClient.end_weights
    begun = 0

    async def begin_all_but_the_third(self) -> None:
        nonlocal begun
        begun += 1
        if begun != 3:  # of versions 0, 1, 2
            await begin(self)

    async def lose_the_third(self, bucket) -> None:
        if begun != 3:
            await load(self, bucket)

    async def end_all_but_the_third(self, n_buckets: int, version: int) -> None:
        if begun != 3:
            await end(self, n_buckets, version)

    monkeypatch.setattr(EngineClient, "begin_weights", begin_all_but_the_third)
    monkeypatch.setattr(EngineClient, "load_bucket", lose_the_third)
    monkeypatch.setattr(EngineClient, "end_weights", end_all_but_the_third)
    settings = {
        "env": "math_verify", "name": "lost", "runs_dir": str(tmp_path), "steps": 4,
        "rollout.tasks": 16, "eval.every": 0,
    }  # fmt: skip
    with pytest.raises(RunError, match="sampler and trainer disagree on the probe after sync 2") as error:
        envgym.train(settings, quiet=True)
    store("lost_sync", message=str(error.value))
