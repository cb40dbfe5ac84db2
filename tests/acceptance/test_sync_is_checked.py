"""Sampler and trainer hold the same policy after every sync; one that is lost stops the run."""

from __future__ import annotations

import pytest

import envgym
from envgym.engines.pool import EngineClient
from envgym.errors import RunError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_lost_sync_stops_the_run(tmp_path, monkeypatch, store):
    call, begun = EngineClient.call, 0

    async def lose_the_third(self, method, *args):  # of versions 0, 1, 2
        nonlocal begun
        begun += method == "begin_weights"
        return None if begun == 3 and method.endswith(("_weights", "_bucket")) else await call(self, method, *args)

    monkeypatch.setattr(EngineClient, "call", lose_the_third)
    settings = {
        "env": "math_verify", "name": "lost", "runs_dir": str(tmp_path), "steps": 4,
        "rollout.tasks_per_step": 16, "eval.every": 0,
    }  # fmt: skip
    with pytest.raises(
        RunError, match=r"the weights of policy 2 did not arrive at engine 0: .* received missing"
    ) as error:
        envgym.train(settings, quiet=True)
    store("lost_sync", message=str(error.value))
