"""Sampler and trainer hold the same policy after every sync; one that is lost stops the run."""

from __future__ import annotations

import pytest

import envgym
from envgym.engines.client import EngineClient
from envgym.errors import RunError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_lost_sync_stops_the_run(tmp_path, monkeypatch, store):
    load = EngineClient.load_weights

    async def lose_the_second(self, path: str, version: int) -> None:
        if version != 2:
            await load(self, path, version)

    monkeypatch.setattr(EngineClient, "load_weights", lose_the_second)
    settings = {
        "env": "math_verify", "name": "lost", "runs_dir": str(tmp_path), "steps": 4,
        "rollout.tasks": 16, "eval.every": 0,
    }  # fmt: skip
    with pytest.raises(RunError, match="sampler and trainer disagree on the probe after sync 2") as error:
        envgym.train(settings, quiet=True)
    store("lost_sync", message=str(error.value))
