"""A run's checkpoint as a model: its policy as a Hugging Face folder, made once and kept inside the checkpoint.

A checkpoint holds what DeepSpeed needs to go on, cut into the parts of the ranks that wrote it. So the policy is
started as its run started it, on as many ranks, given that state, and saved as the run saves its last one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.recipes import read_yaml
from envgym.config.schema import RunConfig, StageConfig
from envgym.disk import publish, unfinished
from envgym.errors import ConfigError, EnvgymError
from envgym.render import load_tokenizer
from envgym.settings import validated

from .launch import make_runtime, start_role
from .run_folder import CONTROLLER, RunFolder, check_form, run_of_checkpoint, stage_folders

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

Fetch = Callable[[str], Awaitable[str]]
"""Finds the folder or hub id that a model's name stands for (`find_model.fetch_model`)."""


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a run's checkpoint, or what is left of one."""
    return (folder / CONTROLLER).is_file() or run_of_checkpoint(folder) is not None


def other_checkpoints(missing: Path) -> str:
    """` There is …`: the checkpoints of the run that one which does not exist was looked for in, or nothing."""
    if run_of_checkpoint(missing) is None or not missing.parent.is_dir():
        return ""
    names = sorted(path.name for path in missing.parent.iterdir() if (path / CONTROLLER).is_file())
    return f" There is {', '.join(names)}" if names else " The run has no checkpoint yet"


async def model_of_checkpoint(checkpoint: Path, runtime: str, fetch: Fetch, display: Display) -> Path:
    """The folder of a checkpoint's policy, made now if it never was. `runtime`: where the ranks run that read it.

    Raises `ConfigError` in one line where it cannot be read, its ranks do not start, or its base is gone.
    """
    if checkpoint.is_symlink():  # `best` may be another one before this is done
        checkpoint = checkpoint.parent / checkpoint.readlink()
    final = checkpoint / "model"
    if (final / "config.json").is_file():
        return final
    origin = _origin(checkpoint)
    _check_ranks(checkpoint, origin.stage)
    try:
        base = await _base(origin, fetch)
    except EnvgymError as error:
        raise ConfigError(f"checkpoint {checkpoint} is of no use without the model it began with: {error}") from None
    try:
        with unfinished(final) as made:
            display.phase(f"reading the policy of {checkpoint}, once (kept in {final})")
            await _write(made, checkpoint, origin, runtime, base)
            publish(made, final)
    except OSError as error:
        raise ConfigError(f"the model of {checkpoint} cannot be written beside it: {error.strerror or error}") from None
    return final


@dataclass(frozen=True, slots=True)
class _Origin:
    """The stage that left a checkpoint: the run's settings, the folders of its stages, and which one it is."""

    config: RunConfig
    folders: list[RunFolder]
    index: int

    @property
    def stage(self) -> StageConfig:
        return self.config.stages[self.index]


def _origin(checkpoint: Path) -> _Origin:
    found = run_of_checkpoint(checkpoint)
    if found is None:
        raise ConfigError(f"checkpoint {checkpoint} is in no run folder, whose config.yaml says what it holds")
    run, index = found
    saved = run / "config.yaml"
    config = validated(RunConfig, read_yaml(saved), str(saved))
    if index >= len(config.stages):
        raise ConfigError(f"checkpoint {checkpoint} is of stage {index + 1}, and {saved} has {len(config.stages)}")
    return _Origin(config, stage_folders(run, config.learners), index)


def _check_ranks(checkpoint: Path, stage: StageConfig) -> None:
    check_form(checkpoint)
    written, ranks = len(list(checkpoint.glob("actor/rank-*.pt"))), stage.workers_of("actor").ranks
    if not (checkpoint / CONTROLLER).is_file() or not written:
        raise ConfigError(f"checkpoint {checkpoint} is not whole: choose another one")
    if written != ranks:
        raise ConfigError(f"checkpoint {checkpoint} was written by {written} ranks, and its run's config says {ranks}")


async def _base(origin: _Origin, fetch: Fetch) -> str:
    """The model that the stage began with. Where the policy has one of its own, the stage is told where it is."""
    if own := origin.stage.roles.get("actor"):
        own.model = own.model and await fetch(own.model)
    if origin.index == 0:
        return await fetch(origin.stage.model)
    before = origin.folders[origin.index - 1].model
    if not (before / "config.json").is_file():
        raise ConfigError(f"there is no model in {before}")
    return str(before)


async def _write(out: Path, checkpoint: Path, origin: _Origin, runtime: str, base: str) -> None:
    """Write the policy of a checkpoint, with its tokenizer, into `out`."""
    ranks = origin.stage.workers_of("actor").ranks
    # In processes of their own also where a run is debugged: several ranks do not fit into the controller.
    config = origin.config.model_copy(update={"runtime": runtime, "debug": False})
    workers = make_runtime(config, origin.folders[origin.index])
    try:
        try:
            actor = await start_role(config, origin.stage, "actor", base, workers)
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
