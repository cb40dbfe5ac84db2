"""The folder of a run, locked by this process: a new one, or the one to resume, with the settings that may change."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig
from envgym.config.words import LENGTHS, dotted_keys
from envgym.disk import folder_lock, unused_folder, write_atomically
from envgym.errors import ConfigError, EnvgymError, RunError, WorkerError, reported_as
from envgym.jobs.models import with_results
from envgym.loading import session_source, short_name
from envgym.run_folder import CONTROLLER, STOP, RunFolder, append_lines, run_of_checkpoint, stage_folders
from envgym.yaml_files import read_yaml

HARDWARE_KEYS = ("workers", "placement", "colocate", "engine.count", "engine.tensor_parallel", "rollout.processes")
"""Settings of all stages that may change on --resume, besides `roles.ROLE.workers`."""
SCHEDULE = ("learner.lr", "learner.lr_schedule", "learner.lr_min_ratio", "learner.warmup_steps", "learner.warmup_ratio")
LAST_STAGE_KEYS = (*LENGTHS, *SCHEDULE, "eval", "checkpoint", "keep", "rollout.max_tokens")
"""Settings that may change on --resume, for the last stage."""
RUN_KEYS = ("runtime", "report_to", "project")
"""Settings of the run that may change on --resume."""


CHANGEABLE = re.compile(
    rf"--runtime|debug|runs_dir|{'|'.join(RUN_KEYS)}|"
    rf"({'|'.join(map(re.escape, (*HARDWARE_KEYS, *LAST_STAGE_KEYS)))}|roles\.\w+\.workers)(\..*)?"
)
CHANGES = "changes.jsonl"
"""The file in a run's folder with the settings that changed on --resume."""


def check_changes(keys: Iterable[str]) -> None:
    """Raise `ConfigError` for settings and options that may not change on --resume."""
    fixed = [key if key.startswith("--") else f"{key}=…" for key in keys if not CHANGEABLE.fullmatch(key)]
    if fixed:
        raise ConfigError(
            f"--resume uses the run's saved settings; those that may change are {', '.join(LAST_STAGE_KEYS)}, "
            f"{', '.join(RUN_KEYS)} and the hardware ({', '.join(HARDWARE_KEYS)}): leave out {', '.join(fixed)}, or "
            "begin a new run with --from"
        )


@contextlib.contextmanager
def claimed_folder(
    config: RunConfig, *, resume: bool, note: Callable[[str], None] = lambda text: None
) -> Iterator[Path]:
    """The run's folder, locked: a new one with its config, or the existing one to resume, with a `note` on each setting
    that has changed. A run without a name gets one. Raises `RunError` for a folder that exists, cannot be resumed, or
    is locked by another process."""
    if config.name is None:
        stage = config.stages[-1]
        names = [short_name(name) or "remote" for name in (stage.env.name, stage.learner.name)]
        config.name = unused_folder(Path(config.runs_dir), *names).name
    folder = Path(config.runs_dir) / config.name
    with _resumed_folder(folder, config, note) if resume else _new_folder(folder, config):
        yield folder


@contextlib.contextmanager
def _resumed_folder(folder: Path, config: RunConfig, note: Callable[[str], None]) -> Iterator[None]:
    """Lock the folder of a run to resume, and save and note its changed settings."""
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run folder that can be resumed (see: envgym runs)")
    with folder_lock(folder, "envgym train"):
        (folder / STOP).unlink(missing_ok=True)
        changes = _save_changes(folder / "config.yaml", config)
        if changes:
            _record_changes(folder, config, changes)
            note(", ".join(f"{key}={new} (was {old})" for key, (old, new) in changes.items()))
        yield


@contextlib.contextmanager
def _new_folder(folder: Path, config: RunConfig) -> Iterator[None]:
    """Make and lock a new run's folder. It replaces one whose run ended before its first step, and is deleted again if
    an error ends the run before a stage is set up."""
    if _is_reusable(folder):
        with folder_lock(folder, "envgym train"):
            if _is_reusable(folder):
                shutil.rmtree(folder)
    if folder.exists():
        raise RunError(
            f"run folder {folder} exists: choose another --name, or resume with --resume {config.name} "
            f'(in Python: another name, or resume="{config.name}")'
        )
    with reported_as(RunError, f"run folder {folder} cannot be made"):
        folder.mkdir(parents=True)
    with folder_lock(folder, "envgym train"):
        write_atomically(folder / "config.yaml", config.to_yaml())
        components = [part.name for stage in config.stages for part in (stage.env, stage.agent, stage.learner)]
        if cells := [source for source in dict.fromkeys(map(session_source, components)) if source]:
            write_atomically(folder / "cells.py", "\n\n".join(cells))
        try:
            yield
        except WorkerError:
            raise  # the folder has the worker's log
        except EnvgymError:
            if not _has_stage(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _save_changes(file: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Write the settings that may change into the config, so that the next resume has them too. Other settings stay
    unchanged. Returns the old and the new value of each that changed."""
    saved, current = read_yaml(file), config.model_dump(mode="json")
    original = copy.deepcopy(saved)
    saved |= {key: current[key] for key in RUN_KEYS}
    for old, new in zip(saved["stages"], current["stages"], strict=True):
        keys = (*HARDWARE_KEYS, *LAST_STAGE_KEYS) if old is saved["stages"][-1] else HARDWARE_KEYS
        for key in keys:
            section, _, name = key.rpartition(".")
            source = new[section] if section else new
            if name in source:  # a learner of its own kind may lack a schedule
                (old.setdefault(section, {}) if section else old)[name] = source[name]
        for role, settings in new["roles"].items():
            if settings["workers"] or role in old["roles"]:
                old["roles"].setdefault(role, {})["workers"] = settings["workers"]
    if saved == original:
        return {}
    old_values = dict(_numbered(resolve(file=file).model_dump(mode="json")))  # with what the file does not say
    write_atomically(file, yaml.safe_dump(saved, sort_keys=False))
    new_values = dict(_numbered(current))
    return {
        key: (old_values.get(key), new_values.get(key))
        for key in dict.fromkeys([*new_values, *old_values])
        if old_values.get(key) != new_values.get(key) and key not in ("name", "runs_dir", "debug")
    }


def _numbered(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a run by dotted keys, those of several stages with the stage's number."""
    stages = settings["stages"]
    yield from dotted_keys({key: value for key, value in settings.items() if key != "stages"})
    for number, stage in enumerate(stages, 1):
        yield from dotted_keys(stage, f"stages.{number}." if len(stages) > 1 else "")


def _record_changes(folder: Path, config: RunConfig, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Append the changes to the run's list of them, with the time and the last stage's step."""
    checkpoint = stage_folders(folder, config.stage_names)[-1].last_checkpoint()
    step = 0 if checkpoint is None else int(checkpoint.stem.removeprefix("step_"))
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "changes": changes}
    append_lines(folder / CHANGES, [record])


def _is_reusable(folder: Path) -> bool:
    """True if the folder's run ended before its first step, so that its name can be reused."""
    stages = [RunFolder(path.parent) for path in (*folder.glob("summary.json"), *folder.glob("*/summary.json"))]
    if len(stages) != 1:
        return False
    summary = stages[0].read_summary() or {}
    has_steps = summary["steps"] or "stages" in summary or any(record["step"] for record in stages[0].read_metrics())
    return summary["status"] != "completed" and not has_steps


def _has_stage(folder: Path) -> bool:
    """True if at least one stage of the run was set up, or has written episodes."""
    patterns = ("metrics.jsonl", "*/metrics.jsonl", "episodes.parquet*", "*/episodes.parquet*")
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def resume_config(name_or_path: str, runs_dir: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The saved configuration of a run, by name or folder, with the `changes` that `check_changes` allows.

    Raises `RunError` if the run has already taken more steps, and `ConfigError` for one of another version of envgym.
    """
    folder, changes = _saved_run(name_or_path, runs_dir), dict(changes or {})
    of_last = {key: changes.pop(key) for key in [*changes] if key in {key.partition(".")[0] for key in LAST_STAGE_KEYS}}
    if "processes" in of_last.get("rollout", {}):  # of all stages
        changes["rollout"] = {"processes": of_last["rollout"]["processes"]}
    RunConfig.read(folder / "config.yaml")
    config = resolve(changes, file=folder / "config.yaml")
    if of_last:
        n_steps = config.stages[-1].steps
        config = resolve(changes | {"stages": {config.stage_names[-1]: of_last}}, file=folder / "config.yaml")
        new_steps = config.stages[-1].steps
        records = stage_folders(folder, config.stage_names)[-1].read_metrics()
        n_taken = max((record["step"] for record in records), default=0)
        if new_steps is not None and new_steps != n_steps and new_steps <= n_taken:
            raise RunError(f"run {folder} has taken {n_taken} steps: set steps to a larger number to resume it")
    config.runs_dir, config.name = str(folder.parent), folder.name
    return config


def _saved_run(name_or_path: str, runs_dir: str) -> Path:
    """The folder of a run, by name or folder. Raises `RunError` if there is none."""
    path = Path(name_or_path)
    folder = path if (path / "config.yaml").is_file() else Path(runs_dir) / name_or_path
    if not (folder / "config.yaml").is_file():
        raise RunError(f"there is no run {name_or_path!r} in {runs_dir}/ (see: envgym runs)")
    return folder


def derived_config(name_or_path: str, runs_dir: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of a new run that begins with the weights and optimizers of another: of its last stage's last
    checkpoint, or of the one that is named. It has the stage's settings, with any `changes`.

    Raises `RunError` if there is no such run or checkpoint.
    """
    origin = run_of_checkpoint(Path(name_or_path))
    folder = _saved_run(name_or_path, runs_dir) if origin is None else origin[0]
    index, file = (-1 if origin is None else origin[1]), folder / "config.yaml"
    names = RunConfig.read(file).stage_names
    stage_folder = stage_folders(folder, names)[index]
    checkpoint = stage_folder.last_checkpoint() if origin is None else Path(name_or_path)
    if checkpoint is None or not (checkpoint / CONTROLLER).is_file():
        raise RunError(f"{checkpoint or stage_folder.path} holds no checkpoint to begin from")
    changes = {"name": None, "runs_dir": runs_dir, **(changes or {})}
    if "stages" in changes:
        raise ConfigError("--from begins with one stage: leave out stages, and give its settings directly")
    of_run = {key: changes.pop(key) for key in [*changes] if key in RunConfig.model_fields}
    config = resolve(of_run | {"stages": {names[index]: changes}}, file=file)
    stage = with_results(config.stages[index], config, folder)
    stage.from_checkpoint = str(checkpoint.resolve())
    return config.model_copy(update={"stages": [stage]})
