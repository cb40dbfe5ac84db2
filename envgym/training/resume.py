"""The folder of a run, claimed for this process: a new one, or that of a run that is resumed, and the settings that
may change then."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig
from envgym.config.words import LENGTHS
from envgym.disk import locked, write_atomically
from envgym.errors import ConfigError, EnvgymError, RunError, WorkerError, reported_as
from envgym.run_folder import STOP, RunFolder, stage_folders
from envgym.yaml_files import read_yaml

WHERE_IT_RUNS = ("workers", "placement", "colocate", "engine.count", "engine.tensor_parallel")
"""Settings that may be others when a run goes on, with `runtime`, `roles.ROLE.workers` and `steps`."""


MAY_CHANGE = re.compile(
    rf"(--runtime|debug|runs_dir|steps|runtime|({'|'.join(map(re.escape, WHERE_IT_RUNS))}|roles\.\w+\.workers)(\..*)?)"
)


def check_changes(keys: Iterable[str]) -> None:
    """Refuse settings and options that may not change when a run is resumed: it goes on as if nothing had happened.

    Raises `ConfigError`.
    """
    refused = [key if key.startswith("--") else f"{key}=…" for key in keys if not MAY_CHANGE.fullmatch(key)]
    if refused:
        raise ConfigError(
            "--resume goes on with the run's own settings; others may be steps, and where it runs (workers, placement, "
            f"colocate, engine.count): leave out {', '.join(refused)}"
        )


@contextlib.contextmanager
def claimed_folder(config: RunConfig, *, resume: bool) -> Iterator[Path]:
    """The run's folder: made and given its config, or, to resume, found. Nobody else trains in it meanwhile. Raises
    `RunError` otherwise. A run without a name is given one."""
    if config.name is None:
        stage = config.stages[-1]
        names = [Path(name.partition(":")[0]).stem or "remote" for name in (stage.env.name, stage.learner.name)]
        config.name = "-".join([*names, time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())])
    folder = Path(config.runs_dir) / config.name
    with _resumed_folder(folder, config) if resume else _new_folder(folder, config):
        yield folder


@contextlib.contextmanager
def _resumed_folder(folder: Path, config: RunConfig) -> Iterator[None]:
    """The folder of a run that is resumed."""
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run folder that could be resumed (see: envgym runs)")
    with locked(folder, "envgym train"):
        (folder / STOP).unlink(missing_ok=True)
        _save_changes(folder / "config.yaml", config)
        yield


@contextlib.contextmanager
def _new_folder(folder: Path, config: RunConfig) -> Iterator[None]:
    """A new run's folder, in place of one whose run ended before its first step. A user's mistake that is told before
    anything has begun leaves none behind."""
    if _is_stillborn(folder):
        with locked(folder, "envgym train"):
            if _is_stillborn(folder):
                shutil.rmtree(folder)
    if folder.exists():
        raise RunError(f"run folder {folder} exists: choose another --name, or go on with --resume {config.name}")
    with reported_as(RunError, f"run folder {folder} cannot be made"):
        folder.mkdir(parents=True)
    with locked(folder, "envgym train"):
        write_atomically(folder / "config.yaml", config.to_yaml())
        try:
            yield
        except WorkerError:
            raise  # whose logs are in it
        except EnvgymError:
            if not _has_begun(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _save_changes(file: Path, config: RunConfig) -> None:
    """Write down how far the last stage now goes and where all of them run, so that the next resume does the same. All
    else stays as it was."""
    saved, now = read_yaml(file), config.model_dump(mode="json")
    before = copy.deepcopy(saved)
    saved["runtime"] = now["runtime"]
    for old, new in zip(saved["stages"], now["stages"], strict=True):
        for key in WHERE_IT_RUNS:
            at, _, last = key.rpartition(".")
            (old[at] if at else old)[last] = (new[at] if at else new)[last]
        for role, own in new["roles"].items():
            if own["workers"] or role in old["roles"]:
                old["roles"].setdefault(role, {})["workers"] = own["workers"]
    saved["stages"][-1] |= {key: now["stages"][-1][key] for key in LENGTHS}
    if saved != before:
        write_atomically(file, yaml.safe_dump(saved, sort_keys=False))


def _is_stillborn(folder: Path) -> bool:
    """True if a run has ended before its first step: nothing in its folder is worth a name."""
    ended = [RunFolder(path.parent) for path in (*folder.glob("summary.json"), *folder.glob("*/summary.json"))]
    if len(ended) != 1:
        return False
    summary = ended[0].read_summary() or {}
    has_steps = summary["steps"] or "stages" in summary or any(record["step"] for record in ended[0].read_metrics())
    return summary["status"] != "completed" and not has_steps


def _has_begun(folder: Path) -> bool:
    """True if some stage of a run was set up."""
    return any(True for pattern in ("metrics.jsonl", "*/metrics.jsonl") for _ in folder.glob(pattern))


def resume_config(
    name_or_path: str, runs_dir: str, steps: Any = None, changes: Mapping[str, Any] | None = None
) -> RunConfig:
    """The saved configuration of a run, given by its name or its folder; its last stage now goes to `steps`, if they
    are given. `changes` are settings of where it runs (see `WHERE_IT_RUNS`), for all stages.

    Raises `RunError` where it has gone further already.
    """
    path = Path(name_or_path)
    folder = path if (path / "config.yaml").is_file() else Path(runs_dir) / name_or_path
    if not (folder / "config.yaml").is_file():
        raise RunError(f"there is no run {name_or_path!r} in {runs_dir}/ (see: envgym runs)")
    config = resolve(changes, file=folder / "config.yaml")
    config.runs_dir, config.name = str(folder.parent), folder.name
    last = config.stages[-1]
    if steps is not None:
        wanted = resolve({"steps": steps}, file=folder / "config.yaml").stages[-1].steps
        assert wanted is not None
        taken = max(
            (record["step"] for record in stage_folders(folder, config.stage_names)[-1].read_metrics()), default=0
        )
        if wanted != last.steps and wanted <= taken:
            raise RunError(f"run {folder} has taken {taken} steps: to go on, give steps a greater number")
        last.steps, last.epochs = wanted, None
    return config
