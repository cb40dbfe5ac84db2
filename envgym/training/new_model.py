"""Models that recipes make: a new tokenizer and random weights, trained in one stage and stored in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.recipes import load_recipe, recipe_model_folder
from envgym.config.resolve import resolve
from envgym.disk import publish, work_folder
from envgym.errors import ConfigError, EnvgymError, reported_as
from envgym.jobs.components import stage_context
from envgym.models.fresh import FreshModelConfig, make_fresh_model, sample_texts
from envgym.models.vision import save_tokenizer
from envgym.run_folder import RunFolder
from envgym.settings import Settings, validate_settings

from .components import start_components
from .trainer import Trainer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

CORPUS_TASKS = 2000
"""Training tasks whose text trains the merges of a new tokenizer."""


class _NewModel(Settings):
    """The setting of a recipe that makes a model."""

    new_model: FreshModelConfig


async def make_model(name: str, display: Display, *, runtime: str = "local") -> Path:
    """The folder of the model that a recipe makes: shipped with envgym, from the cache, or made now, from a new
    tokenizer and random weights by the recipe's stage. The cache's key covers the settings that make the model, and not
    those of runs on it."""
    recipe = load_recipe(name)
    final = recipe_model_folder(name)
    if (final / "config.json").exists():
        return final
    with work_folder(final) as work:
        untrained = work / "fresh"
        run = {"model": str(untrained), "runtime": runtime, "name": "warm_up", "runs_dir": str(work)}
        with reported_as(ConfigError, f"recipe {name}", cause=EnvgymError):
            size = validate_settings(_NewModel, {"new_model": recipe["new_model"]}).new_model
            config = resolve(run, recipe=name)
        if len(config.stages) > 1:
            raise ConfigError(f"recipe {name}: a model is warmed up in one stage, not in {len(config.stages)}")
        stage = config.stages[0]
        display.phase(f"making {name}: a tokenizer and random weights")
        folder = RunFolder(work / "warm_up")
        folder.create()
        async with stage_context(config, stage, folder) as context:
            make_fresh_model(untrained, size, await sample_texts(context.spec, CORPUS_TASKS), config.seed)
            components = await start_components(config, stage, context, str(untrained), display)
            display.phase(f"making {name}: warming it up, once (stored in {final.parent})")
            await Trainer(config, stage, components, folder, display).run()
            await components.workers["actor"].on_all(lambda rank: rank.save(str(folder.model)))
            save_tokenizer(components.runner.agent.renderer.tokenizer, folder.model)
        shutil.copy(folder.metrics_file, folder.model / "warm_up_metrics.jsonl")
        publish(folder.model, final)
    return final
