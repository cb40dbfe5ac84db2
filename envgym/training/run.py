"""A run from its configuration to its summary: stages one after the other, each in a folder of its own."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig, StageConfig
from envgym.episodes.files import holds_episodes
from envgym.errors import CheckpointDamaged, ConfigError, RunError
from envgym.evaluation.generate import Selection, collect
from envgym.evaluation.rescore import rescore
from envgym.launch.models import with_results
from envgym.monitoring.report import PICTURE
from envgym.monitoring.trackers import check_installed
from envgym.processes import event_loop
from envgym.run_folder import STOP, RunFolder, stage_folders

from .checkpoints import set_aside
from .new_model import make_model
from .resume import claimed_folder
from .stage import run_stage

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

STOP_LOOK_SECONDS = 1.0


def train(config: RunConfig, *, resume: bool = False, display: Display) -> dict[str, Any]:
    """Run all stages and return the summary of the last (the content of its `summary.json`).

    With `resume`, the run of that name goes on from its last checkpoint. Raises `EnvgymError` where it cannot go
    on, and `KeyboardInterrupt` once Ctrl-C has stopped it and a checkpoint is kept.
    """
    check_installed(config.report_to)
    if any(stage.engine.kind == "openai" for stage in config.stages):
        raise ConfigError("engine.kind=openai gives no tokens to train on: an API can be evaluated and rolled out only")
    with claimed_folder(config, resume=resume) as folder:
        display.begin(config.name, f"{config.stages[-1].env.name}, {config.stages[-1].model}")
        with _stopped_when_asked(folder):
            return _run_stages(config, folder, display)


@contextlib.contextmanager
def _stopped_when_asked(folder: Path) -> Iterator[None]:
    """Within it, `envgym stop` from elsewhere does what Ctrl-C does here."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(STOP_LOOK_SECONDS):
            if (folder / STOP).exists():
                (folder / STOP).unlink(missing_ok=True)
                _thread.interrupt_main()

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _run_stages(config: RunConfig, folder: Path, display: Display) -> dict[str, Any]:
    stages = list(zip(stage_folders(folder, config.stage_names), config.stages, strict=True))
    summary: dict[str, Any] = {}
    for stage_folder, stage in stages:
        summary = stage_folder.read_summary() or {}
        if summary.get("status") == "completed" and summary["steps"] >= (stage.steps or 0):
            continue
        ready = with_results(stage, config, folder)
        if stage.do == "train":
            summary = _run_to_end(config, ready, stage_folder, display)
        else:
            summary = _run_to_file(config, ready, stage_folder, display)
    if len(stages) > 1:
        folders = [stage_folder.path.name for stage_folder, _ in stages]
        RunFolder(folder).write_summary({**summary, "stages": folders})
    picture = stages[-1][0].path / PICTURE
    display.finish({**summary, "run": str(folder)} | ({"picture": str(picture)} if picture.exists() else {}))
    return summary


def _run_to_file(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """Run a stage that plays tasks or judges answers into a file; what was played before is not played again."""
    folder.create()
    alone = config.model_copy(update={"stages": [stage]})
    if stage.do == "rollout":
        selection = Selection("train", 0, stage.rollout.tasks, stage.rollout.group_size)
        result = collect(alone, selection, folder.episodes, display, overwrite=True, make_model=make_model)
    else:
        source = Path(str(stage.data.get("path")))
        if holds_episodes(source):  # they bring their tasks
            alone.stages = [stage.model_copy(update={"data": {}})]
        result = rescore(alone, source, folder.episodes, display, overwrite=True)
    summary = {"status": "completed", "do": stage.do, "seed": config.seed, "steps": 0, **result}
    folder.write_summary(json.loads(json.dumps(summary, default=str)))
    return summary


def _run_to_end(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """Run a stage, from the newest checkpoint that can be read where there are some."""
    while True:
        newest = folder.last_checkpoint()
        try:
            return event_loop.run(run_stage(config, stage, folder, display))
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            raise KeyboardInterrupt(str(error) or _stopped_early(config.name or "", folder)) from None
        except CheckpointDamaged as error:
            older = None if newest is None else set_aside(folder, newest)
            if older is None:
                raise RunError(
                    f"{error}; there is no checkpoint before it: start the run anew, with another --name"
                ) from None
            display.note(f"checkpoint {newest} is damaged: {error}; going on from {older.name}, the one before")


def _stopped_early(name: str, folder: RunFolder) -> str:
    """The message after Ctrl-C where no step was taken that is not kept already."""
    checkpoint = folder.last_checkpoint()
    if checkpoint is None:
        return f"run {name} was stopped before its first step"
    return f"run {name} was stopped; {checkpoint} is kept, go on with: envgym train --resume {folder.path}"
