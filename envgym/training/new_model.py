"""Models that recipes make: a new tokenizer and random weights, warmed up by the one loop, and kept in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.recipes import load_recipe, recipe_model_folder
from envgym.config.resolve import resolve
from envgym.disk import publish, unfinished
from envgym.errors import ConfigError, EnvgymError, reported_as
from envgym.launch.components import stage_context
from envgym.models.fresh import FreshModelConfig, make_fresh_model, sample_texts
from envgym.run_folder import RunFolder
from envgym.settings import Settings, validated

from .components import start_components
from .trainer import Trainer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

CORPUS_TASKS = 2000
"""Training tasks whose text a new tokenizer learns its merges from."""


class _NewModel(Settings):
    """The key of a recipe that makes a model."""

    new_model: FreshModelConfig


async def make_model(name: str, display: Display, *, runtime: str = "local") -> Path:
    """The model a recipe makes, from the cache or made now: a new tokenizer and random weights, then the recipe's
    stage. What makes it is the cache's key, so a changed recipe makes a new model, but not where only the settings of
    runs on it changed."""
    recipe, final = load_recipe(name), recipe_model_folder(name)
    if (final / "config.json").exists():
        return final
    with unfinished(final) as work:
        fresh = work / "fresh"
        run = {"model": str(fresh), "runtime": runtime, "name": "warm_up", "runs_dir": str(work)}
        with reported_as(ConfigError, f"recipe {name}", of=EnvgymError):
            size = validated(_NewModel, {"new_model": recipe["new_model"]}).new_model
            config = resolve(run, recipe=name)
        if len(config.stages) > 1:
            raise ConfigError(f"recipe {name}: a model is warmed up in one stage, not in {len(config.stages)}")
        stage = config.stages[0]
        display.phase(f"making {name}: a tokenizer and random weights")
        folder = RunFolder(work / "warm_up")
        folder.create()
        async with stage_context(config, stage, folder) as context:
            make_fresh_model(fresh, size, await sample_texts(context.spec, CORPUS_TASKS), config.seed)
            components = await start_components(config, stage, context, str(fresh), display)
            display.phase(f"making {name}: warming it up, once (kept in {final.parent})")
            await Trainer(config, stage, components, folder, display).run()
            await components.workers["actor"].save(str(folder.model))
            components.runner.agent.renderer.tokenizer.save_pretrained(folder.model)
        shutil.copy(folder.metrics_file, folder.model / "warm_up_metrics.jsonl")
        publish(folder.model, final)
    return final
