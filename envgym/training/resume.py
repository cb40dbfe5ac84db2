"""The folder of a run, locked by this process: a new one, or the one to resume, with the settings that may change."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig
from envgym.config.words import LENGTHS
from envgym.disk import folder_lock, unused_folder, write_atomically
from envgym.errors import ConfigError, EnvgymError, RunError, WorkerError, reported_as
from envgym.loading import session_source, short_name
from envgym.run_folder import STOP, RunFolder, stage_folders
from envgym.yaml_files import read_yaml

HARDWARE_KEYS = ("workers", "placement", "colocate", "engine.count", "engine.tensor_parallel")
"""Settings that may change on --resume, besides `runtime`, `roles.ROLE.workers` and `steps`."""


CHANGEABLE = re.compile(
    rf"(--runtime|debug|runs_dir|steps|runtime|({'|'.join(map(re.escape, HARDWARE_KEYS))}|roles\.\w+\.workers)(\..*)?)"
)


def check_changes(keys: Iterable[str]) -> None:
    """Raise `ConfigError` for settings and options that may not change on --resume."""
    fixed = [key if key.startswith("--") else f"{key}=…" for key in keys if not CHANGEABLE.fullmatch(key)]
    if fixed:
        raise ConfigError(
            "--resume uses the run's saved settings; only steps may change, and the hardware (workers, placement, "
            f"colocate, engine.count): leave out {', '.join(fixed)}"
        )


@contextlib.contextmanager
def claimed_folder(config: RunConfig, *, resume: bool) -> Iterator[Path]:
    """The run's folder, locked: a new one with its config, or the existing one to resume. A run without a name gets
    one. Raises `RunError` for a folder that exists, cannot be resumed, or is locked by another process."""
    if config.name is None:
        stage = config.stages[-1]
        names = [short_name(name) or "remote" for name in (stage.env.name, stage.learner.name)]
        config.name = unused_folder(Path(config.runs_dir), *names).name
    folder = Path(config.runs_dir) / config.name
    with _resumed_folder(folder, config) if resume else _new_folder(folder, config):
        yield folder


@contextlib.contextmanager
def _resumed_folder(folder: Path, config: RunConfig) -> Iterator[None]:
    """Lock the folder of a run to resume, and save its changed settings."""
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run folder that can be resumed (see: envgym runs)")
    with folder_lock(folder, "envgym train"):
        (folder / STOP).unlink(missing_ok=True)
        _save_changes(folder / "config.yaml", config)
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


def _save_changes(file: Path, config: RunConfig) -> None:
    """Write the length of the last stage and all hardware settings into the config, so that the next resume has them
    too. Other settings stay unchanged."""
    saved, current = read_yaml(file), config.model_dump(mode="json")
    original = copy.deepcopy(saved)
    saved["runtime"] = current["runtime"]
    for old, new in zip(saved["stages"], current["stages"], strict=True):
        for key in HARDWARE_KEYS:
            section, _, name = key.rpartition(".")
            (old[section] if section else old)[name] = (new[section] if section else new)[name]
        for role, settings in new["roles"].items():
            if settings["workers"] or role in old["roles"]:
                old["roles"].setdefault(role, {})["workers"] = settings["workers"]
    saved["stages"][-1] |= {key: current["stages"][-1][key] for key in LENGTHS}
    if saved != original:
        write_atomically(file, yaml.safe_dump(saved, sort_keys=False))


def _is_reusable(folder: Path) -> bool:
    """True if the folder's run ended before its first step, so that its name can be reused."""
    stages = [RunFolder(path.parent) for path in (*folder.glob("summary.json"), *folder.glob("*/summary.json"))]
    if len(stages) != 1:
        return False
    summary = stages[0].read_summary() or {}
    has_steps = summary["steps"] or "stages" in summary or any(record["step"] for record in stages[0].read_metrics())
    return summary["status"] != "completed" and not has_steps


def _has_stage(folder: Path) -> bool:
    """True if at least one stage of the run was set up."""
    return any(True for pattern in ("metrics.jsonl", "*/metrics.jsonl") for _ in folder.glob(pattern))


def resume_config(
    name_or_path: str, runs_dir: str, steps: Any = None, changes: Mapping[str, Any] | None = None
) -> RunConfig:
    """The saved configuration of a run, by name or folder. `steps` is the new length of the last stage; `changes` are
    hardware settings (`HARDWARE_KEYS`) for all stages.

    Raises `RunError` if the run has already taken more steps.
    """
    path = Path(name_or_path)
    folder = path if (path / "config.yaml").is_file() else Path(runs_dir) / name_or_path
    if not (folder / "config.yaml").is_file():
        raise RunError(f"there is no run {name_or_path!r} in {runs_dir}/ (see: envgym runs)")
    config = resolve(changes, file=folder / "config.yaml")
    config.runs_dir, config.name = str(folder.parent), folder.name
    last = config.stages[-1]
    if steps is not None:
        new_steps = resolve({"steps": steps}, file=folder / "config.yaml").stages[-1].steps
        assert new_steps is not None
        records = stage_folders(folder, config.stage_names)[-1].read_metrics()
        n_taken = max((record["step"] for record in records), default=0)
        if new_steps != last.steps and new_steps <= n_taken:
            raise RunError(f"run {folder} has taken {n_taken} steps: set steps to a larger number to resume it")
        last.steps, last.epochs = new_steps, None
    return config
