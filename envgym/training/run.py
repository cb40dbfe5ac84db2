"""A run from its configuration to its summary: stages one after the other, each in a folder of its own."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import copy
import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from envgym.config.resolve import resolve
from envgym.config.schema import RunConfig, StageConfig
from envgym.config.words import LENGTHS
from envgym.disk import locked, write_atomically
from envgym.env import EnvSpec
from envgym.episodes.files import holds_episodes
from envgym.errors import CheckpointDamaged, ConfigError, EnvgymError, RunError, WorkerError, cannot_write, extended
from envgym.evaluation.generate import Selection, collect
from envgym.evaluation.held_out import has_held_out
from envgym.evaluation.rescore import rescore
from envgym.launch.components import StageContext, prepared
from envgym.launch.memory import check_episodes
from envgym.launch.models import fetch_model, with_results
from envgym.monitoring.report import PICTURE, plot
from envgym.monitoring.trackers import RunInfo, Trackers, check_installed, run_id
from envgym.processes import event_loop
from envgym.run_folder import STOP, RunFolder, stage_folders
from envgym.yaml_files import read_yaml

from .checkpoints import Progress, set_aside
from .components import Components, start_components
from .new_model import make_model
from .stop import Interrupts, Stopped
from .trainer import Trainer
from .update import steps_of

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

WHERE_IT_RUNS = ("workers", "placement", "colocate", "engine.count", "engine.tensor_parallel")
"""Settings that may be others when a run goes on, with `runtime`, `roles.ROLE.workers` and `steps`."""
STOP_LOOK_SECONDS = 1.0
PHASES = ("start", "rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint", "save")
"""Phases of a stage whose time is in `summary.json`."""


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
            return event_loop.run(_run_stage(config, stage, folder, display))
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


@contextlib.contextmanager
def claimed_folder(config: RunConfig, *, resume: bool) -> Iterator[Path]:
    """The run's folder: made and given its config, or, to resume, found. Nobody else trains in it meanwhile. Raises
    `RunError` otherwise."""
    if config.name is None:
        stage = config.stages[-1]
        names = [Path(name.partition(":")[0]).stem or "remote" for name in (stage.env.name, stage.learner.name)]
        config.name = "-".join([*names, time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())])
    folder = Path(config.runs_dir) / config.name
    if resume:
        if not (folder / "config.yaml").is_file():
            raise RunError(f"{folder} is not a run folder that could be resumed (see: envgym runs)")
        with locked(folder, "envgym train"):
            (folder / STOP).unlink(missing_ok=True)
            _save_changes(folder / "config.yaml", config)
            yield folder
        return
    if _is_stillborn(folder):
        with locked(folder, "envgym train"):
            if _is_stillborn(folder):
                shutil.rmtree(folder)
    if folder.exists():
        raise RunError(f"run folder {folder} exists: choose another --name, or go on with --resume {config.name}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"run folder {folder} cannot be made: {error.strerror}") from None
    with locked(folder, "envgym train"):
        write_atomically(folder / "config.yaml", config.to_yaml())
        try:
            yield folder
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


async def _run_stage(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """One run of the one loop."""
    folder.create()
    checkpoint = folder.last_checkpoint()
    kept = None if checkpoint is None else folder.read_state(checkpoint)
    folder.summary_file.unlink(missing_ok=True)  # an earlier end's: what comes now may be killed, and leave none
    began = time.monotonic()
    trainer: Trainer | None = None
    context: StageContext | None = None
    interrupts = Interrupts(display)
    status, is_held_out = "failed", True
    try:
        with interrupts:
            display.phase(f"setting up {stage.env.name}")
            async with AsyncExitStack() as stack:
                # The environment first: a bad data file is reported before anything long begins.
                context = await stack.enter_async_context(prepared(config, stage, folder))
                is_held_out = has_held_out(context.spec, needed=bool(stage.eval.every))
                check_recordings(stage, context.spec)
                steps_of(stage, context.spec.tasks("train").size)  # `epochs` of what has no end are refused now
                check_episodes(stage, context.spec)
                model = await fetch_model(stage.model, config, display, make_model)
                for own in stage.roles.values():
                    if own.model and own.base_url is None:
                        own.model = await fetch_model(own.model, config, display, make_model)
                components = await start_components(config, stage, context, model, display)
                folder.keep_tokenizer(components.runner.agent.renderer.tokenizer)
                starting = Trainer(config, stage, components, folder, display)
                starting.checkpoints.began = began
                folder.rewind(-1 if kept is None else kept["progress"]["step"])
                if checkpoint is not None and kept is not None:
                    starting.recorder.resume()
                    await starting.checkpoints.load(checkpoint, kept)
                trainer = starting
                if config.report_to:
                    info = run_info(config, stage, folder, trainer.progress.step)
                    trainer.recorder.trackers = Trackers(config.report_to, info, display.note)
                interrupts.listen(trainer.stop.set)
                spent = trainer.progress.seconds
                spent["start"] = spent.get("start", 0.0) + time.monotonic() - began  # of each time it was resumed
                # What was imported and started stays to the end: no full collection need go through it at every step.
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
                await trainer.run()
                display.phase("saving the policy")
                saving = time.monotonic()
                await _save_models(stage, components, folder)
                spent["save"] = time.monotonic() - saving
        status = "completed"
    except Stopped:
        status = "stopped"
        raise KeyboardInterrupt(_kept(config, folder)) from None
    except CheckpointDamaged:
        raise
    except (RunError, WorkerError) as error:
        if trainer is None or folder.last_checkpoint() is None:
            raise
        raise extended(error, _kept(config, folder)) from None
    except OSError as error:
        if (problem := cannot_write(error)) is None:
            raise
        raise RunError("; ".join([problem, *([_kept(config, folder)] if folder.last_checkpoint() else [])])) from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        status = "stopped"
        raise
    finally:
        summary = _summary(config, trainer, kept, status, began) | ({} if is_held_out else {"held_out_tasks": 0})
        if context is not None and context.services.names:
            summary["services"] = dict(context.services.counters)
        # A disk that is full is reported by the error that ended the run; a run that got to its end reports it here.
        with contextlib.suppress(*([] if status == "completed" else [OSError])):
            folder.write_summary(summary)
            if trainer is not None and (trackers := trainer.recorder.trackers) is not None:
                trackers.close(status)
                summary["trackers"] = trackers.summary()
                folder.write_summary(summary)
    plot(folder.path, folder.read_metrics())
    return summary


def check_recordings(stage: StageConfig, spec: EnvSpec) -> None:
    """Refuse recorded data of single answers for a learner that compares answers."""
    least = stage.learner_config()[0].min_group_size
    if not stage.agent_config()[0].uses_policy and spec.recordings < least:
        raise ConfigError(
            f"learner {stage.learner.name} compares answers to one task, and the data of {spec.id} have one for each: "
            "it wants preferences, rows with a chosen and a rejected answer"
        )


async def _save_models(stage: StageConfig, components: Components, folder: RunFolder) -> None:
    """Write the policy as the stage leaves it, and the other models that the settings ask for."""
    await components.models_awake()
    tokenizer = components.runner.agent.renderer.tokenizer
    models = {"actor": folder.model} | {role: folder.path / role for role, own in stage.roles.items() if own.save}
    for role, where in models.items():
        worker = components.workers[role]
        described = dict(components.learner.description()) if role == "actor" else {}
        if components.learner.roles[role].head == "scalar":
            described["pad_token_id"] = tokenizer.pad_token_id
        await worker.save(str(where), described)
        tokenizer.save_pretrained(where)
        if stage.lora_of(role, components.learner.roles[role]).rank:
            await worker.export_adapter(str(folder.path / ("adapter" if role == "actor" else f"{role}_adapter")))
    if components.learner.config.ema_decay:
        await components.workers["actor"].save_average(str(folder.model_ema))
        tokenizer.save_pretrained(folder.model_ema)


def run_info(config: RunConfig, stage: StageConfig, folder: RunFolder, step: int) -> RunInfo:
    """The description of a stage for trackers; `step` is the one that a resumed run goes on from, else 0."""
    name = str(config.name)
    of_run = config.model_dump(mode="json", exclude={"stages"})
    return RunInfo(
        id=run_id(folder.path),
        name=name if len(config.stages) == 1 else f"{name}/{folder.path.name}",
        group=name,
        project=config.project,
        folder=folder.path,
        config={**stage.model_dump(mode="json"), **of_run},
        step=step,
    )


def _kept(config: RunConfig, folder: RunFolder) -> str:
    run = Path(config.runs_dir, config.name or "")
    return f"checkpoint {folder.last_checkpoint()} is kept; go on with: envgym train --resume {run}"


def _summary(
    config: RunConfig, trainer: Trainer | None, kept: Mapping[str, Any] | None, status: str, began: float
) -> dict[str, Any]:
    """The content of `summary.json`. Before the loop has begun, it is that of the checkpoint `kept` before."""
    if trainer is not None:
        progress, buffer, began = trainer.progress, trainer.groups.buffer.state(), trainer.checkpoints.began
    else:
        known = {} if kept is None else kept["progress"]
        progress = Progress(**{field.name: known[field.name] for field in fields(Progress) if field.name in known})
        buffer = {} if kept is None else kept.get("buffer", {})
        began -= progress.seconds.get("total", 0.0)
    spent = progress.seconds
    return {
        "status": status,
        "seed": config.seed,
        "steps": progress.step,
        "eval": progress.evals,
        "seconds": {
            "total": time.monotonic() - began,
            **{phase: spent.get(phase, 0.0) for phase in PHASES},
        },
        "tokens": progress.tokens,
        "mismatch": {"max_abs_logprob": progress.max_mismatch},
        "failures": buffer.get("failures", {}),
        "played_again": buffer.get("played_again", 0),
        "refills": buffer.get("refills", 0),
        "dropped_groups": buffer.get("dropped_groups", 0),
        "filtered_groups": buffer.get("filtered", {}),
        "alarms": dict(trainer.recorder.alarms.counts) if trainer else {},
        **({"best": progress.best} if progress.best else {}),
    }
