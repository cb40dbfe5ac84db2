"""The model that a name stands for: a Hugging Face folder or hub id, a run, one of its checkpoints, or a recipe that
makes a model from nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from envgym.config.recipes import load_recipe, makes_model
from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig
from envgym.disk import publish, unfinished
from envgym.errors import ConfigError
from envgym.models import is_path
from envgym.models.fresh import FreshModelConfig, make_fresh_model, text_of
from envgym.models.lora import ADAPTER_CONFIG
from envgym.settings import validated

from .checkpoint_model import is_checkpoint, model_of_checkpoint, other_checkpoints
from .launch import prepared, start_components
from .run_folder import RunFolder, policy_of_run
from .trainer import Trainer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

CORPUS_TASKS = 2000
"""Training tasks whose text a new tokenizer learns its merges from."""


async def fetch_model(name: str, config: RunConfig, display: Display) -> str:
    """The folder or hub id that `name` stands for; the model of a recipe or checkpoint is made now if it never was."""
    if config.stages[-1].engine.kind == "openai":
        return name  # as the API knows it
    if makes_model(name):
        return str(await make_model(name, display, runtime=config.runtime))
    path = Path(name)
    if path.is_dir():
        if (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists():
            raise ConfigError(f"{name} is an adapter without its base: merge it first (envgym model merge {name} OUT)")
        if (path / "config.json").exists():
            return str(path)
        if is_checkpoint(path):
            return str(
                await model_of_checkpoint(
                    path, config.runtime, lambda base: fetch_model(base, config, display), display
                )
            )
        if not (path / "config.yaml").exists():
            raise ConfigError(f"{name} holds no model: there is no config.json in it, and it is no run's folder")
        return str(policy_of_run(path))
    if is_path(name):
        raise ConfigError(f"model folder {name} does not exist.{other_checkpoints(path)}".removesuffix("."))
    display.phase(f"looking for {name} on the Hugging Face hub (there is no such folder here)")
    return name


def cache_folder() -> Path:
    """Folder for models made here: $ENVGYM_CACHE, by default ~/.cache/envgym."""
    return Path(os.environ.get("ENVGYM_CACHE", "~/.cache/envgym")).expanduser() / "models"


async def make_model(name: str, display: Display, *, runtime: str = "local") -> Path:
    """The model a recipe makes, from the cache or made now: a new tokenizer and random weights, then the recipe's
    stage. What makes it is the cache's key, so a changed recipe makes a new model, but not where only the settings of
    runs on it changed."""
    recipe = load_recipe(name)
    makes_it = {key: value for key, value in recipe.items() if key != "model_settings"}
    key = hashlib.sha256(yaml.safe_dump(makes_it).encode()).hexdigest()[:12]
    final = cache_folder() / f"{name}-{key}"
    if (final / "config.json").exists():
        return final
    with unfinished(final) as work:
        fresh = work / "fresh"
        config = resolve({"model": str(fresh), "runtime": runtime, "name": name, "runs_dir": str(work)}, recipe=name)
        stage = config.stages[0]
        display.phase(f"making {name}: a tokenizer and random weights")
        folder = RunFolder(work / name)
        folder.create()
        async with prepared(config, stage, folder) as context:
            size = validated(FreshModelConfig, recipe["new_model"], f"recipe {name}: new_model")
            make_fresh_model(fresh, size, await text_of(context.spec, CORPUS_TASKS), config.seed)
            components = await start_components(config, stage, context, str(fresh), display)
            display.phase(f"making {name}: warming it up, once (kept in {final.parent})")
            await Trainer(config, stage, components, folder, display).run()
            await components.workers["actor"].save(str(folder.model))
            components.runner.agent.renderer.tokenizer.save_pretrained(folder.model)
        shutil.copy(folder.metrics_file, folder.model / "warm_up_metrics.jsonl")
        publish(folder.model, final)
    return final
