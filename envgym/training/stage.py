"""One stage of a run, from setting its parts up to its summary; resumed where it has a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig, StageConfig
from envgym.env import EnvSpec
from envgym.errors import CheckpointDamaged, ConfigError, RunError, WorkerError, cannot_write, extended
from envgym.evaluation.held_out import has_held_out
from envgym.launch.components import StageContext, stage_context
from envgym.launch.memory import check_episodes
from envgym.launch.models import fetch_model
from envgym.monitoring.report import plot
from envgym.monitoring.trackers import RunInfo, Trackers, run_id
from envgym.run_folder import RunFolder

from .checkpoints import Progress
from .components import Components, start_components
from .new_model import make_model
from .stop import Interrupts, Stopped
from .trainer import Trainer
from .update import steps_of

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

PHASES = ("start", "rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint", "save")
"""Phases of a stage whose time is in `summary.json`."""


@dataclass(slots=True)
class _Reached:
    """The parts of a stage, as far as they have come: its summary is made of them."""

    began: float
    saved: dict[str, Any] | None
    """The controller's state in the checkpoint that the stage is resumed from."""
    context: StageContext | None = None
    trainer: Trainer | None = None
    """From when it holds what the checkpoint held."""
    has_held_out: bool = True


async def run_stage(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """One run of the one loop: set up, restore, train, save. Returns its summary, which every way out writes.

    Raises `EnvgymError`, and `KeyboardInterrupt` once Ctrl-C has stopped it; both say which checkpoint is kept.
    """
    folder.create()
    checkpoint = folder.last_checkpoint()
    reached = _Reached(time.monotonic(), None if checkpoint is None else folder.read_state(checkpoint))
    folder.summary_file.unlink(missing_ok=True)  # an earlier end's: what comes now may be killed, and leave none
    interrupts = Interrupts(display)
    with _summary_on_exit(config, folder, reached), interrupts:
        async with AsyncExitStack() as stack:
            components = await _set_up(config, stage, folder, display, reached, stack)
            trainer = Trainer(config, stage, components, folder, display)
            await _restore(trainer, folder, checkpoint, reached)
            if config.report_to:
                info = run_info(config, stage, folder, trainer.progress.step)
                trainer.recorder.trackers = Trackers(config.report_to, info, display.note)
            interrupts.listen(trainer.stop.set)
            seconds = trainer.progress.seconds
            seconds["start"] = seconds.get("start", 0.0) + time.monotonic() - reached.began  # of each resume
            # What was imported and started stays to the end: no full collection need go through it at every step.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            await trainer.run()
            display.phase("saving the policy")
            saving = time.monotonic()
            await _save_models(stage, components, folder)
            seconds["save"] = time.monotonic() - saving
    plot(folder.path, folder.read_metrics())
    return folder.read_summary() or {}


async def _set_up(
    config: RunConfig,
    stage: StageConfig,
    folder: RunFolder,
    display: Display,
    reached: _Reached,
    stack: AsyncExitStack,
) -> Components:
    """The stage's components. The environment comes first: a bad data file is reported before anything long begins."""
    display.phase(f"setting up {stage.env.name}")
    reached.context = await stack.enter_async_context(stage_context(config, stage, folder))
    spec = reached.context.spec
    reached.has_held_out = has_held_out(spec, required=bool(stage.eval.every))
    check_recordings(stage, spec)
    steps_of(stage, spec.tasks("train").size)  # `epochs` of what has no end are refused now
    check_episodes(stage, spec)
    model = await fetch_model(stage.model, config, display, make_model)
    for role in stage.roles.values():
        if role.model and role.base_url is None:
            role.model = await fetch_model(role.model, config, display, make_model)
    components = await start_components(config, stage, reached.context, model, display)
    folder.keep_tokenizer(components.runner.agent.renderer.tokenizer)
    return components


async def _restore(trainer: Trainer, folder: RunFolder, checkpoint: Path | None, reached: _Reached) -> None:
    """Bring trainer and folder to where the checkpoint was kept, or to before the first step where there is none."""
    trainer.checkpoints.began = reached.began
    folder.rewind(-1 if reached.saved is None else reached.saved["progress"]["step"])
    if checkpoint is not None and reached.saved is not None:
        trainer.recorder.resume()
        await trainer.checkpoints.load(checkpoint, reached.saved)
    reached.trainer = trainer


@contextlib.contextmanager
def _summary_on_exit(config: RunConfig, folder: RunFolder, reached: _Reached) -> Iterator[None]:
    """Within it, every end of the stage writes the summary, and an error says which checkpoint is kept."""
    status = "failed"
    try:
        yield
        status = "completed"
    except Stopped:
        status = "stopped"
        raise KeyboardInterrupt(_kept(config, folder)) from None
    except CheckpointDamaged:
        raise
    except (RunError, WorkerError) as error:
        if reached.trainer is None or folder.last_checkpoint() is None:
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
        summary = _summary(config, reached, status)
        # A disk that is full is reported by the error that ended the run; a run that got to its end reports it here.
        with contextlib.suppress(*([] if status == "completed" else [OSError])):
            folder.write_summary(summary)
            if reached.trainer is not None and (trackers := reached.trainer.recorder.trackers) is not None:
                trackers.close(status)
                folder.write_summary({**summary, "trackers": trackers.summary()})


def check_recordings(stage: StageConfig, spec: EnvSpec) -> None:
    """Refuse recorded data of single answers for a learner that compares answers."""
    least = stage.learner_config()[0].min_group_size
    if not stage.agent_config()[0].uses_policy and spec.recordings_per_task < least:
        raise ConfigError(
            f"learner {stage.learner.name} compares answers to one task, and the data of {spec.id} have one for each: "
            "it wants preferences, rows with a chosen and a rejected answer"
        )


async def _save_models(stage: StageConfig, components: Components, folder: RunFolder) -> None:
    """Write the policy as the stage leaves it, and the other models that the settings ask for."""
    await components.wake_models()
    tokenizer = components.runner.agent.renderer.tokenizer
    models = {"actor": folder.model} | {role: folder.path / role for role, own in stage.roles.items() if own.save}
    for role, where in models.items():
        worker = components.workers[role]
        described = dict(components.learner.model_config_extras()) if role == "actor" else {}
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


def _summary(config: RunConfig, reached: _Reached, status: str) -> dict[str, Any]:
    """The content of `summary.json`. Before the loop has begun, it is that of the checkpoint there was."""
    trainer, began = reached.trainer, reached.began
    if trainer is not None:
        progress, buffer, began = trainer.progress, trainer.groups.buffer.state(), trainer.checkpoints.began
    else:
        saved = {} if reached.saved is None else reached.saved["progress"]
        progress = Progress(**{field.name: saved[field.name] for field in fields(Progress) if field.name in saved})
        buffer = {} if reached.saved is None else reached.saved.get("buffer", {})
        began -= progress.seconds.get("total", 0.0)
    seconds = {phase: progress.seconds.get(phase, 0.0) for phase in PHASES}
    services = reached.context.services if reached.context is not None else None
    return {
        "status": status,
        "seed": config.seed,
        "steps": progress.step,
        "eval": progress.evals,
        "seconds": {"total": time.monotonic() - began, **seconds},
        "tokens": progress.tokens,
        "mismatch": {"max_abs_logprob": progress.max_mismatch},
        "failures": buffer.get("failures", {}),
        "played_again": buffer.get("played_again", 0),
        "refills": buffer.get("refills", 0),
        "dropped_groups": buffer.get("dropped_groups", 0),
        "filtered_groups": buffer.get("filtered", {}),
        "alarms": dict(trainer.recorder.alarms.counts) if trainer else {},
        **({"best": progress.best} if progress.best else {}),
        **({} if reached.has_held_out else {"held_out_tasks": 0}),
        **({"services": dict(services.counters)} if services is not None and services.names else {}),
    }
