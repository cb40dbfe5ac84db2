"""One stage of a run, from the setup of its components to its summary; resumed if it has a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.learning_rate import POLICY_GRADIENT, rate_in_words, size_of
from envgym.config.recipes import rates_of_recipe
from envgym.config.schema import RunConfig, StageConfig
from envgym.env import EnvSpec
from envgym.errors import (
    CheckpointDamaged,
    ConfigError,
    EnvgymError,
    RunError,
    WorkerError,
    extend_message,
    report_full_disk,
)
from envgym.evaluation.held_out import check_held_out
from envgym.jobs.components import StageContext, stage_context
from envgym.jobs.models import fetch_model
from envgym.models.vision import save_tokenizer
from envgym.monitoring.report import plot
from envgym.monitoring.trackers import RunInfo, Trackers, run_id
from envgym.placement.memory import model_folder
from envgym.processes.garbage import rare_collections
from envgym.registry import task_set_of
from envgym.run_folder import RunFolder

from .checkpoints import Progress
from .components import Components, start_components
from .new_model import make_model
from .step import evaluation_interval, fit_steps, steps_of
from .trainer import Interrupts, Stopped, Trainer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

PHASES = ("start", "rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint", "save")
"""Phases of a stage whose durations are in `summary.json`."""


@dataclass(slots=True)
class _StageState:
    """The parts of a stage that exist so far, from which its summary is made."""

    start_time: float
    controller_state: dict[str, Any] | None
    """The controller's state in the checkpoint to resume from."""
    context: StageContext | None = None
    trainer: Trainer | None = None
    """Set once the checkpoint is restored."""
    has_held_out: bool = True
    gives_rewards: bool = True


async def run_stage(config: RunConfig, stage: StageConfig, folder: RunFolder, display: Display) -> dict[str, Any]:
    """Set up, restore, train and save one stage. Returns its summary, which is written on any exit.

    Raises `EnvgymError`, and `KeyboardInterrupt` once Ctrl-C has stopped it; both messages name the saved checkpoint.
    """
    folder.create()
    checkpoint = folder.last_checkpoint()
    state = _StageState(time.monotonic(), None if checkpoint is None else folder.read_state(checkpoint))
    folder.summary_file.unlink(missing_ok=True)  # a killed run must not leave an earlier summary
    interrupts = Interrupts(display)
    with _summary_on_exit(config, folder, state), interrupts:
        async with AsyncExitStack() as stack:
            components = await _set_up(config, stage, folder, display, state, stack)
            trainer = Trainer(config, stage, components, folder, display)
            await _restore(trainer, folder, checkpoint, state)
            if config.report_to:
                info = run_info(config, stage, folder, trainer.progress.step)
                trainer.recorder.trackers = Trackers(config.report_to, info, display.note)
            interrupts.listen(trainer.stop.set)
            seconds = trainer.progress.seconds
            seconds["start"] = seconds.get("start", 0.0) + time.monotonic() - state.start_time  # adds up over resumes
            stack.enter_context(rare_collections())
            await trainer.run()
            display.phase("saving the policy")
            save_start = time.monotonic()
            await _save_models(stage, components, folder, display)
            seconds["save"] = time.monotonic() - save_start
    plot(folder.path, folder.read_metrics())
    return folder.read_summary() or {}


async def _set_up(
    config: RunConfig,
    stage: StageConfig,
    folder: RunFolder,
    display: Display,
    state: _StageState,
    stack: AsyncExitStack,
) -> Components:
    """Start the stage's components. The environment comes first, so that a bad data file is reported immediately."""
    display.phase(f"setting up {stage.env.name}")
    state.context = await stack.enter_async_context(stage_context(config, stage, folder))
    spec = state.context.spec
    state.has_held_out = check_held_out(spec, required=bool(stage.eval.every))
    state.gives_rewards = any(part.gives_rewards for part in spec.parts())
    check_recordings(stage, spec)
    check_training_tasks(spec)
    n_tasks = spec.tasks("train").epoch_size
    fit_steps(stage, n_tasks, display.note)
    steps_of(stage, n_tasks)  # these reject epochs of endless tasks early
    evaluation_interval(stage, n_tasks)
    model = await fetch_model(stage.model, config, display, make_model)
    for role in stage.roles.values():
        if role.model and role.base_url is None:
            role.model = await fetch_model(role.model, config, display, make_model)
    note_learning_rate(config, stage, model, display)
    components = await start_components(config, stage, state.context, model, display)
    folder.save_tokenizer(components.runner.agent.renderer.tokenizer)
    return components


def note_learning_rate(run: RunConfig, stage: StageConfig, model: str, display: Display) -> None:
    """Say at the start of training that the learning rate is the default for the model, or too small for it, where
    there are defaults: for policy gradients, and the learners of recipes that name theirs."""
    learner_class, config = stage.learner_config()
    kind = POLICY_GRADIENT if learner_class.needs_policy_samples else None
    with contextlib.suppress(EnvgymError):  # the recipe's file may be gone when the run is resumed
        kind = kind or rates_of_recipe(run.recipe, stage.learner.name)
    is_lora = stage.lora.rank > 0
    if kind and (words := rate_in_words(config.lr, size_of(model_folder(model)), lora=is_lora, kind=kind)):
        display.note(words)


def check_training_tasks(spec: EnvSpec) -> None:
    """Raise `RunError` if all tasks are held out; for a named task set, with one to train on."""
    if spec.tasks("train").size == 0:
        task_set = task_set_of(spec.id)
        advice = f": train on {task_set.train_on}, say" if task_set is not None and task_set.train_on else ""
        raise RunError(f"environment {spec.id} has no training tasks, all are held out{advice}")


async def _restore(trainer: Trainer, folder: RunFolder, checkpoint: Path | None, state: _StageState) -> None:
    """Restore trainer and folder from the checkpoint; without one, empty the folder."""
    saved = state.controller_state
    trainer.checkpoints.start_time = state.start_time
    folder.rewind(-1 if saved is None else saved["progress"]["step"])
    if checkpoint is not None and saved is not None:
        trainer.recorder.resume()
        await trainer.checkpoints.load(checkpoint, saved)
    elif trainer.stage.from_checkpoint is not None:
        await trainer.checkpoints.load_models(Path(trainer.stage.from_checkpoint))
    state.trainer = trainer


@contextlib.contextmanager
def _summary_on_exit(config: RunConfig, folder: RunFolder, state: _StageState) -> Iterator[None]:
    """Write the summary on any exit, and add the saved checkpoint to an error's message."""
    status = "failed"
    try:
        with report_full_disk():
            yield
        status = "completed"
    except Stopped:
        status = "stopped"
        raise KeyboardInterrupt(checkpoint_message(config, folder)) from None
    except CheckpointDamaged:
        raise
    except (RunError, WorkerError) as error:
        if not _has_steps(folder, state):
            raise
        raise extend_message(error, checkpoint_message(config, folder)) from error.__cause__
    except (asyncio.CancelledError, KeyboardInterrupt):
        status = "stopped"
        raise
    finally:
        summary = _summary(config, state, status)
        # The error that ended the run already reports a full disk; a completed run reports it here.
        with contextlib.suppress(*([] if status == "completed" else [OSError])):
            folder.write_summary(summary)
            if state.trainer is not None and (trackers := state.trainer.recorder.trackers) is not None:
                trackers.close(status)
                folder.write_summary({**summary, "trackers": trackers.summary()})


def _has_steps(folder: RunFolder, state: _StageState) -> bool:
    """True if there is a checkpoint to resume from. After a failure in the first step there is nothing in it, and to
    repeat the command with other settings is what helps."""
    return state.trainer is not None and state.trainer.progress.step > 0 and folder.last_checkpoint() is not None


def check_recordings(stage: StageConfig, spec: EnvSpec) -> None:
    """Raise `ConfigError` if the learner compares completions and the recorded data have one per task."""
    min_group_size = stage.learner_config()[0].min_group_size
    if not stage.agent_config()[0].uses_policy and spec.recordings_per_task < min_group_size:
        raise ConfigError(
            f"learner {stage.learner.name} compares the completions of a task, and the data of {spec.id} have one per "
            "task: use preferences, rows with a chosen and a rejected completion"
        )


async def _save_models(stage: StageConfig, components: Components, folder: RunFolder, display: Display) -> None:
    """Save the trained policy, and the other models with `roles.ROLE.save`."""
    await components.timeshare.give_to_models()
    tokenizer = components.runner.agent.renderer.tokenizer
    saved_roles = [role for role, settings in stage.roles.items() if settings.save]
    for role, path in {"actor": folder.model, **{role: folder.path / role for role in saved_roles}}.items():
        worker = components.workers[role]
        config_extras = dict(components.learner.model_config_extras()) if role == "actor" else {}
        if components.learner.roles[role].head == "scalar":
            config_extras["pad_token_id"] = tokenizer.pad_token_id
        if words := (await worker.on_all(lambda rank: rank.save(str(path), config_extras)))[0]:  # noqa: B023
            display.note(f"{role}: {words}")
        save_tokenizer(tokenizer, path)
        if stage.lora_of(role, components.learner.roles[role]).rank:
            adapter = folder.path / ("adapter" if role == "actor" else f"{role}_adapter")
            await worker.on_all(lambda rank: rank.export_adapter(str(adapter)))  # noqa: B023
    if components.learner.config.ema_decay:
        await components.workers["actor"].on_all(lambda rank: rank.save_average(str(folder.model_ema)))
        save_tokenizer(tokenizer, folder.model_ema)


def run_info(config: RunConfig, stage: StageConfig, folder: RunFolder, step: int) -> RunInfo:
    """The description of a stage for trackers; `step` is the step that it resumes from, else 0."""
    name = str(config.name)
    run_settings = config.model_dump(mode="json", exclude={"stages"})
    return RunInfo(
        id=run_id(folder.path),
        name=name if len(config.stages) == 1 else f"{name}/{folder.path.name}",
        group=name,
        project=config.project,
        folder=folder.path,
        config={**stage.model_dump(mode="json"), **run_settings},
        step=step,
    )


def checkpoint_message(config: RunConfig, folder: RunFolder) -> str:
    """The message that names the last checkpoint and the command that resumes from it."""
    run = Path(config.runs_dir, config.name or "")
    return f"checkpoint {folder.last_checkpoint()} is saved; resume with: envgym train --resume {run}"


def _summary(config: RunConfig, state: _StageState, status: str) -> dict[str, Any]:
    """The content of `summary.json`: of the trainer or, before it is restored, of the checkpoint."""
    trainer, start_time = state.trainer, state.start_time
    if trainer is not None:
        progress, buffer, start_time = trainer.progress, trainer.groups.buffer.state(), trainer.checkpoints.start_time
    else:
        saved = state.controller_state or {"progress": {}}
        values = saved["progress"]
        progress = Progress(**{field.name: values[field.name] for field in fields(Progress) if field.name in values})
        buffer = saved.get("buffer", {})
        start_time -= progress.seconds.get("total", 0.0)
    seconds = {phase: progress.seconds.get(phase, 0.0) for phase in PHASES}
    services = state.context.services if state.context is not None else None
    return {
        "status": status,
        "seed": config.seed,
        "steps": progress.step,
        "eval": progress.evals,
        "seconds": {"total": time.monotonic() - start_time, **seconds},
        "tokens": progress.tokens,
        "mismatch": {"max_abs_logprob": progress.max_mismatch},
        "failures": buffer.get("failures", {}),
        "played_again": buffer.get("played_again", 0),
        "refills": buffer.get("refills", 0),
        "dropped_groups": buffer.get("dropped_groups", 0),
        "filtered_groups": buffer.get("filtered", {}),
        "alarms": dict(trainer.recorder.alarms.counts) if trainer else {},
        **({"best": progress.best} if progress.best else {}),
        **({} if state.has_held_out else {"held_out_tasks": 0}),
        **({} if state.gives_rewards else {"gives_rewards": False}),
        **({} if trainer is None or trainer.stage.epochs is None else {"epochs": trainer.stage.epochs}),
        **({} if trainer is None else {"head": trainer.components.learner.roles["actor"].head}),
        **({"services": dict(services.counters)} if services is not None and services.names else {}),
    }
