"""The model that a name stands for: a Hugging Face folder or hub id, a run, one of its checkpoints, or a recipe that
makes a model from nothing; and what earlier stages left for a later one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym import hub
from envgym.config.recipes import makes_model, recipe_model_folder
from envgym.config.schema import STAGE, RunConfig, StageConfig
from envgym.disk import publish, work_folder
from envgym.errors import ConfigError, EnvgymError, reported_as
from envgym.models import check_no_file, is_path
from envgym.render import load_tokenizer
from envgym.run_folder import (
    CONTROLLER,
    RunFolder,
    check_checkpoint_format,
    policy_of_run,
    run_of_checkpoint,
    stage_folders,
)
from envgym.settings import validate_settings
from envgym.workers.lora import ADAPTER_CONFIG
from envgym.yaml_files import read_yaml

from .components import open_runtime, start_role

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

MakeModel = Callable[..., Awaitable[Path]]
"""`make_model(name, display, runtime=…)`: the folder of the model that a recipe makes. Training passes its own, since
only the loop can make one."""


async def cached_recipe_model(name: str, display: Display, *, runtime: str) -> Path:
    """The model of a recipe, where it was made before. Raises `ConfigError` with the command that makes it."""
    final = recipe_model_folder(name)
    if not (final / "config.json").exists():
        raise ConfigError(f"model {name} has not been made on this machine yet: envgym model {name}")
    return final


async def fetch_model(
    name: str, config: RunConfig, display: Display, make_model: MakeModel = cached_recipe_model
) -> str:
    """The folder or hub id that `name` stands for. A checkpoint's policy is written now if it never was, and
    `make_model` makes the model of a recipe."""
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
            return str(await _model_of_checkpoint(path, config.runtime, display, make_model))
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
        left = folder.model if of.kind == "train" else folder.episodes
        if not (left / "config.json" if of.kind == "train" else left).is_file():
            raise ConfigError(f"{value} has left no {left.name} in {folder.path}")
        return str(left)

    settings = stage.model_dump(mode="json", exclude_unset=True)
    return validate_settings(StageConfig, result(settings), "")


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


async def _model_of_checkpoint(checkpoint: Path, runtime: str, display: Display, make_model: MakeModel) -> Path:
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
    problem = f"checkpoint {checkpoint} is of no use without the model it began with"
    with reported_as(ConfigError, problem, cause=EnvgymError):
        if own := stage.roles.get("actor"):
            own.model = own.model and await fetch_model(own.model, config, display, make_model)
        stage = with_results(stage, config, run)
        base = await fetch_model(stage.model, config, display, make_model)
    problem = f"the model of {checkpoint} cannot be written beside it"
    with reported_as(ConfigError, problem), work_folder(final) as made:
        display.phase(f"reading the policy of {checkpoint}, once (kept in {final})")
        await _write_policy(made, checkpoint, config, stage, folders[index], base)
        publish(made, final)
    return final


def _origin(checkpoint: Path) -> tuple[Path, RunConfig, list[RunFolder], int]:
    """The run that left a checkpoint: its folder, its settings, the folders of its stages, and which one it is of (from
    0)."""
    found = run_of_checkpoint(checkpoint)
    if found is None:
        raise ConfigError(f"checkpoint {checkpoint} is in no run folder, whose config.yaml says what it holds")
    run, index = found
    saved = run / "config.yaml"
    config = validate_settings(RunConfig, read_yaml(saved), str(saved))
    if index >= len(config.stages):
        raise ConfigError(f"checkpoint {checkpoint} is of stage {index + 1}, and {saved} has {len(config.stages)}")
    return run, config, stage_folders(run, config.stage_names), index


def _check_ranks(checkpoint: Path, stage: StageConfig) -> None:
    check_checkpoint_format(checkpoint)
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
    async with open_runtime(config, folder) as runtime:
        which = f"the {ranks} ranks" if ranks > 1 else "the rank"
        problem = f"{which} that wrote checkpoint {checkpoint} cannot be started here"
        with reported_as(ConfigError, problem, cause=EnvgymError):
            actor = await start_role(config, stage, "actor", base, runtime)
        with reported_as(ConfigError, f"checkpoint {checkpoint} cannot be read", cause=EnvgymError):
            await actor.load_state(str(checkpoint / "actor"))
        await actor.save(str(out))
        load_tokenizer(base).save_pretrained(out)
