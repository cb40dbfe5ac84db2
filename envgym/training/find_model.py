"""The model that a name stands for: a Hugging Face folder or hub id, a run, one of its checkpoints, or a recipe that
makes a model from nothing; and the one that a stage starts from."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from envgym import hub
from envgym.config.recipes import load_recipe, makes_model, read_yaml
from envgym.config.resolve import resolve
from envgym.config.schema import STAGE, RunConfig, StageConfig
from envgym.disk import cache_folder, publish, unfinished
from envgym.errors import ConfigError, EnvgymError
from envgym.models import check_no_file, is_path
from envgym.models.fresh import FreshModelConfig, make_fresh_model, text_of
from envgym.models.lora import ADAPTER_CONFIG
from envgym.render import load_tokenizer
from envgym.settings import Settings, validated

from .launch import make_runtime, prepared, start_components, start_role
from .run_folder import CONTROLLER, RunFolder, check_form, policy_of_run, run_of_checkpoint, stage_folders
from .trainer import Trainer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

CORPUS_TASKS = 2000
"""Training tasks whose text a new tokenizer learns its merges from."""


class _NewModel(Settings):
    """The key of a recipe that makes a model."""

    new_model: FreshModelConfig


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
        if _is_checkpoint(path):
            return str(await _model_of_checkpoint(path, config.runtime, display))
        if not (path / "config.yaml").exists():
            raise ConfigError(f"{name} holds no model: there is no config.json in it, and it is no run's folder")
        return str(policy_of_run(path))
    check_no_file(name)
    if is_path(name):
        raise ConfigError(f"model folder {name} does not exist.{_other_checkpoints(path)}".removesuffix("."))
    display.phase(f"looking for {name} on the Hugging Face hub, for up to {hub.SECONDS:g} s (there is no folder here)")
    return await asyncio.to_thread(hub.find_on_hub, name)


def with_results(stage: StageConfig, config: RunConfig, run: Path) -> StageConfig:
    """The stage's settings with what earlier stages left, in the run's folder, in place of `stage:NAME`. Raises
    `ConfigError` where one left nothing."""
    names = config.stage_names
    stages = dict(zip(names, zip(stage_folders(run, names), config.stages, strict=True), strict=True))

    def result(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: result(item) for key, item in value.items()}
        if isinstance(value, list):
            return [result(item) for item in value]
        if not isinstance(value, str) or not value.startswith(STAGE):
            return value
        folder, of = stages[value.removeprefix(STAGE)]
        left = folder.model if of.do == "train" else folder.episodes
        if not (left / "config.json" if of.do == "train" else left).is_file():
            raise ConfigError(f"{value} has left no {left.name} in {folder.path}")
        return str(left)

    settings = stage.model_dump(mode="json", exclude_unset=True)
    return validated(StageConfig, result(settings), "")


def made_model(name: str) -> Path:
    """The folder of the model that a recipe makes, which may be yet to come. Only what stands in the recipe counts: new
    contents of a data file that it names make no new model."""
    makes_it = {key: value for key, value in load_recipe(name).items() if key != "model_settings"}
    key = hashlib.sha256(yaml.safe_dump(makes_it).encode()).hexdigest()[:12]
    return cache_folder("models") / f"{Path(name).stem}-{key}"


async def make_model(name: str, display: Display, *, runtime: str = "local") -> Path:
    """The model a recipe makes, from the cache or made now: a new tokenizer and random weights, then the recipe's
    stage. What makes it is the cache's key, so a changed recipe makes a new model, but not where only the settings of
    runs on it changed."""
    recipe, final = load_recipe(name), made_model(name)
    if (final / "config.json").exists():
        return final
    with unfinished(final) as work:
        fresh = work / "fresh"
        run = {"model": str(fresh), "runtime": runtime, "name": "warm_up", "runs_dir": str(work)}
        try:
            size = validated(_NewModel, {"new_model": recipe["new_model"]}).new_model
            config = resolve(run, recipe=name)
        except EnvgymError as error:
            raise ConfigError(f"recipe {name}: {error}") from None
        if len(config.stages) > 1:
            raise ConfigError(f"recipe {name}: a model is warmed up in one stage, not in {len(config.stages)}")
        stage = config.stages[0]
        display.phase(f"making {name}: a tokenizer and random weights")
        folder = RunFolder(work / "warm_up")
        folder.create()
        async with prepared(config, stage, folder) as context:
            make_fresh_model(fresh, size, await text_of(context.spec, CORPUS_TASKS), config.seed)
            components = await start_components(config, stage, context, str(fresh), display)
            display.phase(f"making {name}: warming it up, once (kept in {final.parent})")
            await Trainer(config, stage, components, folder, display).run()
            await components.workers["actor"].save(str(folder.model))
            components.runner.agent.renderer.tokenizer.save_pretrained(folder.model)
        shutil.copy(folder.metrics_file, folder.model / "warm_up_metrics.jsonl")
        publish(folder.model, final)
    return final


# ---------------------------------------------------------------------------------------------------------
# The policy of a run's checkpoint, as a Hugging Face folder


def _is_checkpoint(folder: Path) -> bool:
    """True if a folder is a run's checkpoint, or what is left of one."""
    return (folder / CONTROLLER).is_file() or run_of_checkpoint(folder) is not None


def _other_checkpoints(missing: Path) -> str:
    """` There is …`: the checkpoints of the run that one which does not exist was looked for in, or nothing."""
    if run_of_checkpoint(missing) is None or not missing.parent.is_dir():
        return ""
    names = sorted(path.name for path in missing.parent.iterdir() if (path / CONTROLLER).is_file())
    return f" There is {', '.join(names)}" if names else " The run has no checkpoint yet"


async def _model_of_checkpoint(checkpoint: Path, runtime: str, display: Display) -> Path:
    """The folder of a checkpoint's policy, made now if it never was and kept inside it. `runtime`: where the ranks run
    that read it.

    A checkpoint holds what DeepSpeed needs to go on, cut into the parts of the ranks that wrote it. So the policy is
    started as its run started it, on as many ranks, given that state, and saved as the run saves its last one.

    Raises `ConfigError` in one line where it cannot be read, its ranks do not start, or its base is gone.
    """
    if checkpoint.is_symlink():  # `best` may be another one before this is done
        checkpoint = checkpoint.parent / checkpoint.readlink()
    final = checkpoint / "model"
    if (final / "config.json").is_file():
        return final
    run, config, folders, index = _origin(checkpoint)
    # In processes of their own also where a run is debugged: several ranks do not fit into the controller.
    config, stage = config.model_copy(update={"runtime": runtime, "debug": False}), config.stages[index]
    _check_ranks(checkpoint, stage)
    try:
        if own := stage.roles.get("actor"):
            own.model = own.model and await fetch_model(own.model, config, display)
        stage = with_results(stage, config, run)
        base = await fetch_model(stage.model, config, display)
    except EnvgymError as error:
        raise ConfigError(f"checkpoint {checkpoint} is of no use without the model it began with: {error}") from None
    try:
        with unfinished(final) as made:
            display.phase(f"reading the policy of {checkpoint}, once (kept in {final})")
            await _write_policy(made, checkpoint, config, stage, folders[index], base)
            publish(made, final)
    except OSError as error:
        raise ConfigError(f"the model of {checkpoint} cannot be written beside it: {error.strerror or error}") from None
    return final


def _origin(checkpoint: Path) -> tuple[Path, RunConfig, list[RunFolder], int]:
    """The run that left a checkpoint: its folder, its settings, the folders of its stages, and which one it is of (from
    0)."""
    found = run_of_checkpoint(checkpoint)
    if found is None:
        raise ConfigError(f"checkpoint {checkpoint} is in no run folder, whose config.yaml says what it holds")
    run, index = found
    saved = run / "config.yaml"
    config = validated(RunConfig, read_yaml(saved), str(saved))
    if index >= len(config.stages):
        raise ConfigError(f"checkpoint {checkpoint} is of stage {index + 1}, and {saved} has {len(config.stages)}")
    return run, config, stage_folders(run, config.stage_names), index


def _check_ranks(checkpoint: Path, stage: StageConfig) -> None:
    check_form(checkpoint)
    written, ranks = len(list(checkpoint.glob("actor/rank-*.pt"))), stage.workers_of("actor").ranks
    if not (checkpoint / CONTROLLER).is_file() or not written:
        raise ConfigError(f"checkpoint {checkpoint} is not whole: choose another one")
    if written != ranks:
        raise ConfigError(f"checkpoint {checkpoint} was written by {written} ranks, and its run's config says {ranks}")


async def _write_policy(
    out: Path, checkpoint: Path, config: RunConfig, stage: StageConfig, folder: RunFolder, base: str
) -> None:
    """Write the policy of a checkpoint, with its tokenizer, into `out`."""
    ranks = stage.workers_of("actor").ranks
    workers = make_runtime(config, folder)
    try:
        try:
            actor = await start_role(config, stage, "actor", base, workers)
        except EnvgymError as error:
            which = f"the {ranks} ranks" if ranks > 1 else "the rank"
            raise ConfigError(f"{which} that wrote checkpoint {checkpoint} cannot be started here: {error}") from None
        try:
            await actor.load_state(str(checkpoint / "actor"))
        except EnvgymError as error:
            raise ConfigError(f"checkpoint {checkpoint} cannot be read: {error}") from None
        await actor.save(str(out))
        load_tokenizer(base).save_pretrained(out)
    finally:
        await workers.close()
