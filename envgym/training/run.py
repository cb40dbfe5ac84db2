"""A run from its configuration to its summary: its stages in order, each in a separate folder."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig, StageConfig
from envgym.errors import CheckpointDamaged, ConfigError, RunError
from envgym.evaluation.result import result_of
from envgym.jobs.models import with_results
from envgym.jobs.parts import part_of_rollout
from envgym.jobs.rollout import roll_out_to_file
from envgym.jobs.score import saved_groups, score_to_file
from envgym.monitoring.report import PICTURE
from envgym.monitoring.trackers import check_installed
from envgym.processes import event_loop
from envgym.run_folder import STOP, RunFolder, stage_folders

from .checkpoints import set_aside
from .new_model import make_model
from .resume import claimed_folder
from .stage import checkpoint_message, run_stage

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

STOP_POLL_SECONDS = 1.0


def train(config: RunConfig, *, resume: bool = False, display: Display) -> dict[str, Any]:
    """Run all stages and return the summary of the last (the content of its `summary.json`).

    With `resume`, resumes the run of that name from its last checkpoint. Raises `EnvgymError`, and `KeyboardInterrupt`
    once Ctrl-C has stopped the run and a checkpoint is saved.
    """
    check_installed(config.report_to)
    if any(stage.engine.kind == "openai" for stage in config.stages):
        raise ConfigError("engine.kind=openai gives no tokens to train on: an API can be evaluated and rolled out only")
    with claimed_folder(config, resume=resume, note=display.note) as folder:
        display.begin(config.name, f"{config.stages[-1].env.name}, {config.stages[-1].model}")
        with _watching_stop_file(folder):
            return _run_stages(config, folder, display)


@contextlib.contextmanager
def _watching_stop_file(folder: Path) -> Iterator[None]:
    """Interrupt the main thread, as Ctrl-C does, once `envgym stop` has made the run's stop file."""
    is_finished = threading.Event()

    def watch() -> None:
        while not is_finished.wait(STOP_POLL_SECONDS):
            if (folder / STOP).exists():
                (folder / STOP).unlink(missing_ok=True)
                _thread.interrupt_main()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_finished.set()


def _run_stages(config: RunConfig, folder: Path, display: Display) -> dict[str, Any]:
    stages = list(zip(stage_folders(folder, config.stage_names), config.stages, strict=True))
    summary: dict[str, Any] = {}
    for stage_folder, stage in stages:
        summary = stage_folder.read_summary() or {}
        steps, epochs = (stage.steps or 0, stage.epochs) if stage.kind == "train" else (0, None)
        # A resumed run may be longer.
        is_long_enough = summary.get("steps", 0) >= steps and summary.get("epochs") == epochs
        if summary.get("status") == "completed" and is_long_enough:
            continue
        resolved = with_results(stage, config, folder)
        if stage.kind == "train":
            summary = _run_training(config, resolved, stage_folder, display)
        else:
            try:
                summary = _write_episodes(config, resolved, stage_folder, display)
            except KeyboardInterrupt as error:
                problem = str(error).partition(";")[0] or f"run {config.name} was stopped"
                raise KeyboardInterrupt(f"{problem}; resume with: envgym train --resume {folder}") from None
    if len(stages) > 1:
        folders = [stage_folder.path.name for stage_folder, _ in stages]
        summary |= {"stages": folders}
        RunFolder(folder).write_summary(summary)
    picture = stages[-1][0].path / PICTURE
    display.finish({**summary, "run": str(folder)} | ({"picture": str(picture)} if picture.exists() else {}))
    return summary


def _write_episodes(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """Run a stage that writes rolled out or scored episodes to a file. A resumed one keeps its finished episodes."""
    folder.create()
    stage_run = config.model_copy(update={"stages": [stage]})
    start = time.monotonic()
    if stage.kind == "rollout":
        tasks, samples = stage.rollout.tasks_per_step, stage.rollout.group_size
        part = part_of_rollout(stage_run, tasks=tasks, samples=samples)
        _, episodes = roll_out_to_file(part, folder.episodes, display, make_model, overwrite=True)
    else:
        source = Path(str(stage.data.get("path")))
        _, episodes, _ = score_to_file(stage_run, source, folder.episodes, display, overwrite=True)
    result = result_of(saved_groups(episodes))
    summary = {
        "status": "completed",
        "do": stage.kind,
        "seed": config.seed,
        "steps": 0,
        "file": str(folder.episodes),
        "episodes": len(episodes),
        **{name: result[name] for name in ("score", "ci95", "truncated", "failures")},
        "eval": {},
        "seconds": {"total": time.monotonic() - start},
        "tokens": {"sampled": result["tokens"] if stage.kind == "rollout" else 0, "trained": 0},
    }
    folder.write_summary(summary)
    return summary


def _run_training(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """Run a training stage, from its newest readable checkpoint if it has one."""
    while True:
        checkpoint = folder.last_checkpoint()
        if checkpoint is not None:
            display.note(f"resuming {config.name} from {checkpoint.name}")
        try:
            return event_loop.run(run_stage(config, stage, folder, display))
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            raise KeyboardInterrupt(str(error) or _early_stop_message(config, folder)) from None
        except CheckpointDamaged as error:
            previous = None if checkpoint is None else set_aside(folder, checkpoint)
            if previous is None:
                problem = f"{error}; there is no earlier checkpoint"
                raise RunError(f"{problem}: start a new run, with another --name") from None
            display.note(f"checkpoint {checkpoint} is damaged: {error}; resuming from {previous.name}")


def _early_stop_message(config: RunConfig, folder: RunFolder) -> str:
    """The message after a stop before the run has taken a step since it was started or resumed."""
    if folder.last_checkpoint() is None:
        return f"run {config.name} was stopped before its first step"
    return f"run {config.name} was stopped; {checkpoint_message(config, folder)}"
