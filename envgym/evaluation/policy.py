"""Evaluating a policy on an environment's held-out tasks, by the runner that trains."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config import Component, RunConfig
from envgym.models import fetch_model
from envgym.placement import make_agent, make_runner, prepared, sampling_of, start_sampling
from envgym.rollout import Play
from envgym.run_folder import RunFolder
from envgym.types import Group, Task

from .held_out import HeldOut

if TYPE_CHECKING:
    from envgym.display import Display


def evaluate_policy(config: RunConfig, display: Display) -> dict[str, Any]:
    """Play the held-out tasks of the last stage's environment with its model and return what came of it.

    Keys: env, model, n_tasks, n_episodes, score, ci95, truncated, failures (kind -> count), unscored, seconds,
    tokens, and `greedy` with the same for greedy sampling. Raises `EnvgymError`; the workers' logs are then kept.
    """
    logs = Path(tempfile.mkdtemp(prefix="envgym-eval-"))
    result = asyncio.run(_evaluate(config, RunFolder(logs), display))
    shutil.rmtree(logs)
    return result


async def _evaluate(config: RunConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    stage = config.stages[-1]
    began = time.monotonic()
    folder.create()
    async with prepared(config, stage, folder) as place:
        model = await fetch_model(stage.model, config, display)
        if not stage.agent_config()[0].samples:  # it plays what is recorded, which says nothing of the policy
            stage.agent = Component(name=place.spec.agent)
        agent = make_agent(stage, model)
        engine, context = await start_sampling(config, stage, [place], agent, model, display)
        runner = make_runner(config, stage, place.spec, agent, engine, context)

        async def play(tasks: Sequence[Task], play: Play) -> list[Group]:
            return await runner.play(tasks, play, display.rollout)

        held_out = HeldOut(play, place.spec, sampling_of(stage, agent.renderer.stop_token_ids), stage.eval)
        display.phase("evaluating")
        result = await held_out.sampled()
        greedy = {"greedy": await held_out.greedily()} if stage.eval.greedy else {}
    seconds = time.monotonic() - began
    return {"env": stage.env.name, "model": stage.model, **result, **greedy, "seconds": seconds}
