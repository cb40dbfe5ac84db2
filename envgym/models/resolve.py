"""What `--model` may be: a Hugging Face folder or hub id, a run, one of its checkpoints, or a recipe that makes a model
from nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from envgym.config.recipes import load_recipe, makes_model, read_yaml
from envgym.config.schema import RunConfig, resolve, validated
from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.hashing import derived_seed
from envgym.training.launch import prepared, start_parts
from envgym.training.run_folder import RunFolder, stage_folders
from envgym.training.trainer import Trainer
from envgym.types import Action, Message, Observation, as_messages

from .checkpoint import is_checkpoint, model_of_checkpoint, other_checkpoints
from .fresh import FreshModelConfig, make_fresh_model
from .lora import ADAPTER_CONFIG
from .name import is_path

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


def policy_of_run(folder: Path) -> Path:
    """The model folder that a run left, or its last stage; `folder` itself where it is no run's."""
    if not (folder / "config.yaml").exists():
        return folder
    config = RunConfig.model_validate(read_yaml(folder / "config.yaml"))
    stage = stage_folders(folder, config)[-1]
    if not (stage.model / "config.json").exists():
        last = stage.last_checkpoint()
        instead = f", or take its policy as it was: --model {last}" if last else ""
        raise ConfigError(
            f"run {folder} has not ended, so it has left no policy: envgym train --resume {folder}{instead}"
        )
    return stage.model


def cache_folder() -> Path:
    """Where models made here are kept: $ENVGYM_CACHE, by default ~/.cache/envgym."""
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
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final.parent)
    work = final.parent / f"{name}.{os.getpid()}.unfinished"
    work.mkdir()
    try:
        fresh = work / "fresh"
        config = resolve({"model": str(fresh), "runtime": runtime, "name": name, "runs_dir": str(work)}, recipe=name)
        stage = config.stages[0]
        display.phase(f"making {name}: a tokenizer and random weights")
        folder = RunFolder(work / name)
        folder.create()
        async with prepared(config, stage, folder) as place:
            size = validated(FreshModelConfig, recipe["new_model"], f"recipe {name}: new_model")
            make_fresh_model(fresh, size, await text_of(place.spec, CORPUS_TASKS), config.seed)
            parts = await start_parts(config, stage, place, str(fresh), display)
            display.phase(f"making {name}: warming it up, once (kept in {final.parent})")
            await Trainer(config, stage, parts, folder, display).run()
            await parts.workers["actor"].save(str(folder.model))
            parts.runner.agent.renderer.tokenizer.save_pretrained(folder.model)
        shutil.copy(folder.metrics_file, folder.model / "warm_up_metrics.jsonl")
        if not final.exists():
            os.replace(folder.model, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _remove_abandoned(cache: Path) -> None:
    """Delete what makers that were killed have left."""
    for folder in cache.glob("*.unfinished"):
        if not Path("/proc", folder.name.split(".")[-2]).exists():
            shutil.rmtree(folder, ignore_errors=True)


async def text_of(spec: EnvSpec, n_tasks: int) -> list[str]:
    """What is said in an environment: the observations and demonstrations of its first training tasks, and the
    words every chat template uses."""
    texts = []
    tasks = spec.tasks("train")
    for index in range(n_tasks if tasks.size is None else min(n_tasks, tasks.size)):
        task = await tasks.get(index)
        async with spec.of(task).make() as env:
            observation, _ = await env.reset(seed=index, options={"task": task})
            turns = spec.of(task).demonstrations(task, derived_seed(0, index))
            said = [*_messages(observation)]
            tools = json.dumps([tool.as_dict() for tool in observation.tools]) if observation.tools else ""
            for number, turn in enumerate(turns, start=1):
                said.append(turn if isinstance(turn, Message) else Message.of("assistant", turn))
                if number < len(turns):
                    observation, *_ = await env.step(Action(said[-1].text, (), said[-1].tool_calls))
                    said += _messages(observation)
        texts += [f"{message.role}\n{message.text}" for message in (*said, Message.of("system", tools))]
        texts += [json.dumps(message.as_dict()["tool_calls"]) for message in said if message.tool_calls]
    return texts


def _messages(observation: Observation) -> tuple[Message, ...]:
    return observation.messages or as_messages(observation.text or "")
