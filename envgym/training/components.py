"""The components that the loop drives: the learner, a group of workers per role, and engines with their weight sync."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import RunConfig, StageConfig
from envgym.engine import ChatEngine, Engine, SamplingParams
from envgym.engines.pool import EnginePool
from envgym.errors import ConfigError
from envgym.jobs.components import (
    StageContext,
    attempt_settings,
    make_agent,
    make_shards,
    start_role,
    start_sampling,
)
from envgym.jobs.models import base_of_model
from envgym.jobs.prompts import announce, survey
from envgym.learner import Learner
from envgym.models.export import rounding_in_words
from envgym.monitoring.laws import Laws
from envgym.placement.memory import MemoryNeeds, with_micro_batches
from envgym.placement.plan import ENGINE, PlacedRuntime
from envgym.render import Renderer, load_tokenizer
from envgym.rollout.buffer import can_drop
from envgym.rollout.runner import Runner
from envgym.services.start import local_models
from envgym.workers.group import WorkerGroup

from .pretraining import Pretraining
from .probe import picture_probe, text_probe
from .weight_sync import FileTransfer, GpuTimeshare, WeightSync, make_transfer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display
    from envgym.services.teacher import ApiTeacher


@dataclass(slots=True)
class Components:
    """The components that the loop drives. `engine` and `sync` are None if the agent replays, `pretraining` if no text
    is mixed in. Each of the learner's roles has a group of ranks in `workers`, or a remote service in `apis`."""

    learner: Learner
    runner: Runner
    workers: dict[str, WorkerGroup]
    sampling: SamplingParams
    engine: Engine | None = None
    sync: WeightSync | None = None
    timeshare: GpuTimeshare = field(default_factory=lambda: GpuTimeshare(None, {}, keeps_weights=False))
    pretraining: Pretraining | None = None
    apis: Mapping[str, ApiTeacher] = field(default_factory=dict)
    laws: Laws | None = None

    @property
    def trained_roles(self) -> list[str]:
        return [role for role, spec in self.learner.roles.items() if spec.trained]


async def start_components(
    config: RunConfig, stage: StageConfig, context: StageContext, model: str, display: Display
) -> Components:
    """Start a stage's components, which run until its context ends. `model` is a folder or hub id."""
    learner_class, learner_config = stage.learner_config()
    learner = learner_class(learner_config)
    adapters = {role: stage.lora_of(role, role_spec) for role, role_spec in learner.roles.items()}
    for lora in adapters.values():
        lora.check_installed()
    agent = make_agent(stage, model)
    summary = await survey(context.spec, "train", agent.renderer)
    apis = _make_apis(stage, learner, agent.renderer, context)
    pretraining = Pretraining(stage.pretrain, agent.renderer, config.seed) if stage.pretrain.paths else None
    stage_of_roles, cache_bytes, waiting, timeshared = _plan_loading(config, stage, context, learner)
    sampling = None
    if agent.uses_policy:
        rank = adapters["actor"].rank
        starting = start_sampling(
            config, stage, [context], agent, model, display, lora_rank=rank, sleeps=bool(timeshared),
            cache_bytes=cache_bytes,
        )  # fmt: skip
        sampling = asyncio.create_task(starting)
    (engine, max_model_len), workers = await _load_in_parallel(
        config, stage_of_roles, learner, model, context, display, sampling, api_roles=apis, waiting=waiting
    )
    for api in apis.values():
        api.vocabulary = workers["actor"].info.vocabulary
    assert isinstance(engine, EnginePool | None), "a run that trains is given engines with tokens"
    roles_in_turns = {role: workers[role] for role in timeshared}
    timeshare = GpuTimeshare(engine, roles_in_turns, keeps_weights=adapters["actor"].rank > 0)
    sync = None
    if engine is not None:
        actor, quantized = workers["actor"], adapters["actor"].quantize != "none"
        info, probes = await engine.info(), [text_probe(agent.renderer, max_model_len or 2**31)]
        if info.takes_images and context.spec.images is not None:
            store = context.spec.images.store
            pictured = await asyncio.to_thread(picture_probe, agent.renderer, max_model_len or 2**31, store)
            probes += [pictured] if pictured is not None else []
        precision = "float32" if {actor.info.dtype, stage.engine.dtype} <= {"float32", "auto"} else "16 bit"
        shared, bucket_bytes = Path(config.runs_dir, config.name or "", "transfer"), stage.sync.bucket_megabytes * 2**20
        files = FileTransfer(actor, shared, bucket_bytes, checkpoint=info.checkpoint_names)
        transfer = make_transfer(stage.sync, actor, files, workers_per_engine=stage.engine.tensor_parallel)
        sync = WeightSync(
            engine, actor, tuple(probes), stage.sync.tolerance, precision, transfer, files, timeshare, quantized,
            from_checkpoint=stage.from_checkpoint is not None,
        )  # fmt: skip
    shards = make_shards(config, stage, context, agent, model, engine, max_model_len, display)
    settings = attempt_settings(config, max_model_len)
    runner = Runner(context.spec, agent, engine, stage.rollout, **settings, attempts=shards)
    await runner.attempts.start()
    if agent.uses_policy:
        runner.first_answers.note = display.note
    announce(stage, agent.renderer, summary, max_model_len, display.note)
    params = stage.rollout.sampling(agent.renderer.stop_token_ids)
    filter = stage.rollout.filter if agent.uses_policy and can_drop(stage.rollout.filter) else None
    laws = Laws(learner, agent.renderer, model, filter, context.spec.scores_groups, agent.uses_policy)
    return Components(learner, runner, workers, params, engine, sync, timeshare, pretraining, apis, laws)


def _plan_loading(
    config: RunConfig, stage: StageConfig, context: StageContext, learner: Learner
) -> tuple[StageConfig, int | None, set[str], list[str]]:
    """By the plan's memory: the stage with its micro-batches, the size of the engine's cache (see
    `MemoryNeeds.engine_cache`), the roles that load only when the engine is up, and those whose models timeshare GPUs
    with it."""
    if not isinstance(context.runtime, PlacedRuntime):
        return stage, None, set(), []
    plan, models = context.runtime.plan, local_models(context.spec)
    stage = with_micro_batches(stage, plan, models, config.stages_by_name)
    cache_bytes = MemoryNeeds(stage, plan, models, config.stages_by_name).engine_cache()
    gpus = set(plan.gpus_of(ENGINE))
    waiting = {role for role in learner.roles if cache_bytes is None and not gpus.isdisjoint(plan.gpus_of(role))}
    return stage, cache_bytes, waiting, [part.name for part in plan.parts if part.in_turns]


def _make_apis(
    stage: StageConfig, learner: Learner, renderer: Renderer, context: StageContext
) -> dict[str, ApiTeacher]:
    """Clients of the roles behind an API, which are closed with the context.

    Raises `ConfigError` for a model that must return its most likely tokens and has another vocabulary than the policy.
    """
    apis: dict[str, ApiTeacher] = {}
    for role, role_spec in learner.roles.items():
        settings = stage.role(role)
        model = settings.model
        if settings.base_url is not None:
            from envgym.services.teacher import ApiTeacher

            apis[role] = ApiTeacher(settings.base_url, str(model), settings.api_key_env, role_spec.top_k)
            context.closing.push_async_callback(apis[role].close)
        elif role_spec.top_k and model and load_tokenizer(model).get_vocab() != renderer.tokenizer.get_vocab():
            raise ConfigError(f"roles.{role}.model: {model} has another vocabulary than the policy, token by token")
    return apis


async def _load_in_parallel(
    config: RunConfig,
    stage: StageConfig,
    learner: Learner,
    model: str,
    context: StageContext,
    display: Display,
    sampling: asyncio.Task[tuple[Engine | ChatEngine, int]] | None,
    *,
    api_roles: Collection[str],
    waiting: Collection[str],
) -> tuple[tuple[Engine | ChatEngine | None, int | None], dict[str, WorkerGroup]]:
    """Load the learner's roles, but for `api_roles`, while `sampling` starts the engine: most of the time goes into
    imports. The `waiting` roles load after it. If one fails, all are ended. Returns the engine with its context length,
    and the roles' workers.

    A role that is the actor's base is not loaded: it is the actor without its adapter.
    """
    bases = [role for role in learner.roles if stage.is_base(role, learner.roles)]

    async def load(role: str) -> WorkerGroup:
        # In one process vLLM comes first: DeepSpeed joins its process group.
        if config.debug and sampling is not None:
            await asyncio.wait({sampling})
        display.phase(f"loading the {role}")
        load_after = sampling if role in waiting else None
        images = context.spec.images
        worker = await start_role(config, stage, role, model, context.runtime, images=images, load_after=load_after)
        folder = Path(stage.role(role).model or model)
        if words := (base := base_of_model(folder)) and rounding_in_words(folder, worker.info.dtype, base):
            display.note(f"{role}: {words}; workers.dtype=float32 keeps all of it")
        for note in worker.info.notes:
            display.note(f"{role}: {note}")
        if worker.info.not_shared and worker.settings.share_prefixes:
            display.note(f"{role}: sequences share no prefixes, since {worker.info.not_shared}")
        return worker

    loading = {role: asyncio.create_task(load(role)) for role in learner.roles if role not in (*bases, *api_roles)}
    parts: dict[str, asyncio.Task[Any]] = loading if sampling is None else {"engine": sampling, **loading}

    def name_pending(ready: asyncio.Task[Any]) -> None:
        pending = [f"the {name}" for name, part in parts.items() if not part.done()]
        if pending and not ready.cancelled() and ready.exception() is None:
            display.phase(f"waiting for {' and '.join(pending)}")

    for part in parts.values():
        part.add_done_callback(name_pending)
    try:
        # Awaited in a fixed order, so that the first error reported is always the same one.
        engine = (None, None) if sampling is None else await sampling
        workers = {role: await task for role, task in loading.items()}
    except BaseException:
        for task in parts.values():
            task.cancel()
        await asyncio.gather(*parts.values(), return_exceptions=True)
        raise
    return engine, workers | {role: workers["actor"].without_adapter(role) for role in bases}
