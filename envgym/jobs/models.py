"""Models by name: a Hugging Face folder or hub id, a run, one of its checkpoints, or a recipe that makes a model; and
the results of earlier stages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym import hub
from envgym.config.recipes import makes_model
from envgym.config.schema import STAGE, RunConfig, StageConfig
from envgym.disk import publish, work_folder
from envgym.errors import ConfigError, EnvgymError, reported_as
from envgym.models import check_no_file, is_path
from envgym.models.export import rounding_in_words
from envgym.models.sizes import number_format_of
from envgym.models.vision import save_tokenizer
from envgym.placement.memory import model_folder
from envgym.render import load_renderer
from envgym.run_folder import (
    CONTROLLER,
    RunFolder,
    policy_of_run,
    run_of_checkpoint,
    run_of_model,
    stage_folders,
    stage_name,
)
from envgym.settings import validate_settings
from envgym.workers.lora import ADAPTER_CONFIG
from envgym.yaml_files import read_yaml

from .components import open_runtime, start_role

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

MakeModel = Callable[..., Awaitable[Path]]
"""`make_model(name, display, runtime=…)`: the folder of the model that a recipe makes
(`envgym.training.new_model.make_model`). It is passed down to jobs, which lie below the training that it needs."""


async def fetch_model(name: str, config: RunConfig, display: Display, make_model: MakeModel) -> str:
    """The folder or hub id of the model `name`. A checkpoint's policy is converted to a model folder, once;
    `make_model` makes a recipe's model."""
    if config.stages[-1].engine.kind == "openai":
        return name  # the API's name of it
    if makes_model(name):
        return str(await make_model(name, display, runtime=config.runtime))
    path = Path(name)
    if path.is_dir():
        if (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists():
            raise ConfigError(f"{name} is an adapter without its base: merge it first (envgym model merge {name} OUT)")
        if (path / "config.json").exists():
            return str(path)
        if (path / CONTROLLER).is_file() or run_of_checkpoint(path) is not None:  # a checkpoint, perhaps damaged
            return str(await _model_of_checkpoint(path, config.runtime, display, make_model))
        if not (path / "config.yaml").exists():
            raise ConfigError(
                f"{name} holds no model: there is no config.json in it, and it is not the folder of a run"
            )
        return str(policy_of_run(path))
    check_no_file(name)
    if is_path(name):
        raise ConfigError(f"model folder {name} does not exist.{_other_checkpoints(path)}".removesuffix("."))
    display.phase(f"looking for {name} on the Hugging Face hub, for up to {hub.SECONDS:g} s (there is no folder here)")
    return await asyncio.to_thread(hub.find_on_hub, name)


def base_of_model(model: Path) -> Path | None:
    """The folder of the model before the training that left `model`, before the first stage of a run of several; None
    if no run has left it, or that folder is not here."""
    if (origin := run_of_model(model)) is None:
        return None
    run, index = origin
    stages = read_yaml(run / "config.yaml")["stages"]
    names = {stage_name(stage.get("name"), stage["learner"]["name"]): stage["model"] for stage in stages}
    name = stages[index]["model"]
    while name.startswith(STAGE):
        name = names[name.removeprefix(STAGE)]
    with contextlib.suppress(EnvgymError):
        # A relative path is of the folder in which the run was started, usually that of its `runs`.
        relative = run.parent.parent / name
        is_relative = relative.is_dir() and not Path(name).is_dir() and not makes_model(name)
        folder = model_folder(str(relative) if is_relative else name)
        folder = folder / "model" if run_of_checkpoint(folder) else folder
        return folder if (folder / "config.json").is_file() else None
    return None


def with_own_format(stage: StageConfig, model: str, note: Callable[[str], None]) -> StageConfig:
    """The settings of a stage that only samples: the policy of a run that trained in float32 is sampled in float32 on a
    GPU too, since 16 bits could undo the training. `note` is called with what is left of it in a format that is set."""
    if run_of_model(Path(model)) is None or number_format_of(Path(model)) != "float32":
        return stage
    dtype = next((dtype for dtype in (stage.engine.dtype, stage.workers.dtype) if dtype != "auto"), "float32")
    if words := rounding_in_words(Path(model), dtype, base_of_model(Path(model))):
        note(f"engine.dtype={dtype}: {words}")
    return stage.model_copy(update={"engine": stage.engine.model_copy(update={"dtype": dtype})})


def with_results(stage: StageConfig, config: RunConfig, run: Path) -> StageConfig:
    """The stage's settings with the paths of earlier stages' results in place of `stage:NAME`. Raises `ConfigError` if
    a result does not exist."""
    names = config.stage_names
    stages = dict(zip(names, zip(stage_folders(run, names), config.stages, strict=True), strict=True))

    def result(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: result(item) for key, item in value.items()}
        if isinstance(value, list):
            return [result(item) for item in value]
        if not isinstance(value, str) or not value.startswith(STAGE):
            return value
        folder, source = stages[value.removeprefix(STAGE)]
        path = folder.model if source.kind == "train" else folder.episodes
        if not (path / "config.json" if source.kind == "train" else path).is_file():
            raise ConfigError(f"{value} has left no {path.name} in {folder.path}")
        return str(path)

    settings = stage.model_dump(mode="json", exclude_unset=True)
    return validate_settings(StageConfig, result(settings), "")


# ---------------------------------------------------------------------------------------------------------
# The policy of a run's checkpoint, as a Hugging Face folder


def _other_checkpoints(missing: Path) -> str:
    """` There is …`: the checkpoints of the run that the missing one would be of; empty if there is no such run."""
    if run_of_checkpoint(missing) is None or not missing.parent.is_dir():
        return ""
    names = sorted(path.name for path in missing.parent.iterdir() if (path / CONTROLLER).is_file())
    return f" There is {', '.join(names)}" if names else " The run has no checkpoint yet"


async def _model_of_checkpoint(checkpoint: Path, runtime: str, display: Display, make_model: MakeModel) -> Path:
    """The model folder of a checkpoint's policy, written into the checkpoint the first time. `runtime`: of the ranks
    that read it.

    A checkpoint holds DeepSpeed's state, split over the ranks that wrote it. So the policy is started as in its run, on
    equally many ranks, loads that state, and is saved as at the end of a run.

    Raises `ConfigError` if it cannot be read, its ranks do not start, or its base model is missing.
    """
    if checkpoint.is_symlink():  # `best` may change meanwhile
        checkpoint = checkpoint.parent / checkpoint.readlink()
    final = checkpoint / "model"
    if (final / "config.json").is_file():
        return final
    run, config, folders, index = _origin(checkpoint)
    # Separate processes even for a debugged run: several ranks do not fit into the controller.
    config, stage = config.model_copy(update={"runtime": runtime, "debug": False}), config.stages[index]
    _check_ranks(checkpoint, stage)
    problem = f"checkpoint {checkpoint} cannot be used without the model that its run started from"
    with reported_as(ConfigError, problem, cause=EnvgymError):
        if actor := stage.roles.get("actor"):
            actor.model = actor.model and await fetch_model(actor.model, config, display, make_model)
        stage = with_results(stage, config, run)
        base = await fetch_model(stage.model, config, display, make_model)
    problem = f"the model of {checkpoint} cannot be written into it"
    with reported_as(ConfigError, problem), work_folder(final) as folder:
        display.phase(f"reading the policy of {checkpoint}, once (saved in {final})")
        await _write_policy(folder, checkpoint, config, stage, folders[index], base)
        publish(folder, final)
    return final


def _origin(checkpoint: Path) -> tuple[Path, RunConfig, list[RunFolder], int]:
    """The run of a checkpoint: its folder, its settings, the folders of its stages, and the index of the stage."""
    origin = run_of_checkpoint(checkpoint)
    if origin is None:
        raise ConfigError(f"checkpoint {checkpoint} is not in a run folder, whose config.yaml is needed to read it")
    run, index = origin
    file = run / "config.yaml"
    config = RunConfig.read(file)
    if index >= len(config.stages):
        raise ConfigError(f"checkpoint {checkpoint} is of stage {index + 1}, and {file} has {len(config.stages)}")
    return run, config, stage_folders(run, config.stage_names), index


def _check_ranks(checkpoint: Path, stage: StageConfig) -> None:
    n_files, ranks = len(list(checkpoint.glob("actor/rank-*.pt"))), stage.workers_of("actor").ranks
    if not (checkpoint / CONTROLLER).is_file() or not n_files:
        raise ConfigError(f"checkpoint {checkpoint} is incomplete: choose another one")
    if n_files != ranks:
        raise ConfigError(f"checkpoint {checkpoint} was written by {n_files} ranks, and its run's config has {ranks}")


async def _write_policy(
    folder: Path, checkpoint: Path, config: RunConfig, stage: StageConfig, run_folder: RunFolder, base: str
) -> None:
    """Write the policy of a checkpoint, with its tokenizer, into `folder`."""
    ranks = stage.workers_of("actor").ranks
    async with open_runtime(config, run_folder) as runtime:
        label = f"the {ranks} ranks" if ranks > 1 else "the rank"
        problem = f"{label} that wrote checkpoint {checkpoint} cannot be started here"
        with reported_as(ConfigError, problem, cause=EnvgymError):
            actor = await start_role(config, stage, "actor", base, runtime, images=run_folder.images)
        with reported_as(ConfigError, f"checkpoint {checkpoint} cannot be read", cause=EnvgymError):
            await actor.on_all(lambda rank: rank.load_state(str(checkpoint / "actor")))
        await actor.on_all(lambda rank: rank.save(str(folder)))
        save_tokenizer(load_renderer(base, stage.render).tokenizer, folder)
