"""Components that both training and evaluation start: an environment with its services, engines, agents, runners, and
the ranks of a role."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from envgym.agent import Agent
from envgym.config.schema import API_SETTINGS, Component, RunConfig, StageConfig
from envgym.engine import ChatEngine, Engine
from envgym.engines import choose_engine
from envgym.engines.pool import EngineClient, EnginePool
from envgym.engines.spec import EngineSpec
from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.images import ImageFolder
from envgym.placement.plan import ENGINE_SHARES, SHARD, PlacedRuntime, placed_runtime
from envgym.processes.local import LocalRuntime
from envgym.processes.ray import RayRuntime
from envgym.processes.runtime import InlineRuntime, Runtime, WorkerHandle
from envgym.render import NoRenderer, load_renderer
from envgym.rollout.attempts import LocalAttempts
from envgym.rollout.shard import RolloutShard, ShardSpec
from envgym.rollout.shards import Shards
from envgym.run_folder import RunFolder
from envgym.services import Chat, Services, start_services
from envgym.services.policy import PolicyEngine
from envgym.services.start import refuse_policies
from envgym.types import ToolSpec
from envgym.workers.config import ImageConfig, WorkerSpec
from envgym.workers.group import WorkerGroup

if TYPE_CHECKING:
    from envgym.engines.openai import OpenAIEngine
    from envgym.monitoring.display import Display


@dataclass(frozen=True, slots=True)
class StageContext:
    """A stage's environment, set up, with clients of its services, and its workers' runtime."""

    spec: EnvSpec
    services: Services
    runtime: Runtime
    closing: AsyncExitStack
    """Resources to close before the runtime."""


@asynccontextmanager
async def open_runtime(config: RunConfig, folder: RunFolder) -> AsyncIterator[Runtime]:
    """The runtime of the run's workers: processes on this machine, Ray, or with `debug` the controller's own process.
    Its workers end with the context. Raises `ConfigError` for `debug` with several ranks or `rollout.processes`."""
    if config.debug and any(stage.workers.ranks > 1 for stage in config.stages):
        raise ConfigError("debug=true runs every worker inside the controller, as one rank: set workers.ranks=1")
    if config.debug and any(stage.rollout.processes for stage in config.stages):
        raise ConfigError("debug=true runs everything inside the controller: set rollout.processes=0")
    runtime: Runtime
    if config.debug:
        runtime = InlineRuntime()
    elif config.runtime == "ray":
        runtime = RayRuntime(folder.logs)
    else:
        runtime = LocalRuntime(folder.logs, deterministic=config.deterministic)
    try:
        yield runtime
    finally:
        await runtime.close()


@asynccontextmanager
async def stage_context_in(config: RunConfig, runtime: Runtime, spec: EnvSpec) -> AsyncIterator[StageContext]:
    """The context of a stage in a runtime, with the environment `spec`, which is closed on every exit."""
    async with (
        start_services(spec, runtime, deterministic=config.deterministic, eager=False) as services,
        AsyncExitStack() as closing,
    ):
        yield StageContext(spec, services, runtime, closing)


@asynccontextmanager
async def stage_context(config: RunConfig, stage: StageConfig, folder: RunFolder) -> AsyncIterator[StageContext]:
    """The context of a stage in a new runtime. Invalid data raises an error before anything slow starts."""
    async with open_runtime(config, folder) as runtime:
        spec = stage.make_spec()
        spec.store_images(folder.images)
        async with stage_context_in(config, placed_runtime(stage, [spec], runtime), spec) as context:
            yield context


async def start_role(
    config: RunConfig,
    stage: StageConfig,
    role: str,
    model: str,
    runtime: Runtime,
    *,
    images: ImageFolder | None,
    load_after: asyncio.Future[Any] | None = None,
) -> WorkerGroup:
    """Start the ranks of one of the learner's roles, with the role's own model or else `model`. `images`: the folder of
    those in rows. `load_after`: see `WorkerGroup.start`."""
    learner_class, learner_config = stage.learner_config()
    role_spec = learner_class(learner_config).roles[role]
    spec = WorkerSpec(
        role,
        stage.role(role).model or model,
        role_spec,
        learner=stage.learner_config_of(role).model_dump(),
        settings=stage.workers_of(role),
        lora=stage.lora_of(role, role_spec),
        seed=config.seed,
        deterministic=config.deterministic,
        images=image_config(stage, images),
    )
    return await WorkerGroup.start(runtime, spec, load_after=load_after)


def image_config(stage: StageConfig, images: ImageFolder | None) -> ImageConfig | None:
    """The images of a stage's rows, in a folder; None if its models take texts alone."""
    if images is None or not stage.takes_images:
        return None
    return ImageConfig(str(images.path.absolute()), stage.render.image_size)


async def start_environment_services(contexts: Sequence[StageContext], display: Display) -> None:
    for context in contexts:
        if context.services.names:
            display.phase(f"starting {', '.join(context.services.names)}")
            await context.services.start()


async def start_sampling(
    config: RunConfig,
    stage: StageConfig,
    contexts: Sequence[StageContext],
    agent: Agent,
    model: str,
    display: Display,
    **options: Any,
) -> tuple[Engine | ChatEngine, int]:
    """Start the services of the environments, all in one runtime, and the stage's engine. Returns the engine and its
    context length in tokens (0 if only the API knows it). `options` are fields of `EngineSpec` that depend on the
    training: `lora_rank`, `cache_bytes`, and `sleeps`, with which the models come first on its devices."""
    api = await start_api(config, stage, contexts, model, display) if stage.engine.kind == "openai" else None
    await start_environment_services(contexts, display)
    if api is not None:
        return api, 0
    engine, max_model_len = await start_engine(config, stage, model, contexts[0].runtime, display, **options)
    if options.get("sleeps"):
        await engine.sleep(1)
    for context in contexts:
        policy = PolicyEngine(agent.renderer, engine, max_model_len, config.deterministic, config.seed)
        context.services.bind_policy(policy)
    return engine, max_model_len


async def start_engine(
    config: RunConfig, stage: StageConfig, model: str, runtime: Runtime, display: Display, **options: Any
) -> tuple[EnginePool, int]:
    """Start the stage's engines; `options` are further fields of `EngineSpec`. Returns the pool and its context length
    in tokens."""
    target, note = choose_engine(stage.engine.kind)
    if note:
        display.note(note)
    display.phase("starting the engine")
    spec = EngineSpec(
        model,
        # By default the workers' format, since engine and trainer must compute the same policy.
        dtype=stage.engine.dtype if stage.engine.dtype != "auto" else stage.workers.dtype,
        max_model_len=stage.engine.max_model_len,
        seed=config.seed,
        deterministic=config.deterministic,
        concurrency=max_concurrency(stage),
        in_flight=stage.rollout.max_staleness > 0,
        gpu_share=runtime.plan.engine_share() if isinstance(runtime, PlacedRuntime) else ENGINE_SHARES["shared"],
        tensor_parallel=stage.engine.tensor_parallel,
        image_size=stage.render.image_size,
        transfer=stage.sync.transfer,
        engine_args=stage.engine.args,
        **options,
    )
    # Sampling and training alternate, so each may use every core.
    cores = max(1, len(os.sched_getaffinity(0)) // stage.engine.count)
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}

    arguments = {"target": target, "spec": spec}

    async def start(number: int) -> EngineClient:
        name = "engine" if stage.engine.count == 1 else f"engine-{number}"
        return EngineClient(await runtime.start("envgym.engines:make_engine", arguments, name=name, environ=environ))

    pool = await EnginePool.start(start, stage.engine.count, round_robin=config.deterministic, note=display.note)
    return pool, (await pool.info()).max_model_len


def max_concurrency(stage: StageConfig) -> int:
    """The maximum number of a stage's concurrent episodes, each with one request at a time."""
    step_size = stage.rollout.tasks_per_step * stage.rollout.group_size
    return min(stage.rollout.concurrency, max(step_size, stage.eval.tasks * stage.eval.samples))


async def start_api(
    config: RunConfig, stage: StageConfig, contexts: Sequence[StageContext], model: str, display: Display
) -> OpenAIEngine:
    """The API as the engine, after a test request: a wrong key or model name raises an error before anything else
    starts. The engine is closed with the first context."""
    for context in contexts:
        reason = "which engine.kind=openai cannot be: give that service a separate model (base_url and model)"
        refuse_policies(context.spec, reason)
    from envgym.engines.openai import OpenAIEngine

    settings = stage.engine
    api = settings.model_dump(include=API_SETTINGS)
    engine = OpenAIEngine(Chat(model=model, concurrency=stage.rollout.concurrency, **api))
    contexts[0].closing.push_async_callback(engine.close)
    display.phase(f"asking {settings.base_url} for {model}")
    await check_api(engine, config, stage, display)
    return engine


async def check_api(
    engine: OpenAIEngine, config: RunConfig, stage: StageConfig, display: Display, tools: tuple[ToolSpec, ...] = ()
) -> None:
    """Send the test request with the stage's settings, and an environment's tools. Raises `ConfigError`; a transient
    failure is noted."""
    sampling = stage.rollout.sampling(())
    sampling = replace(sampling, seed=config.seed) if config.deterministic else sampling
    if problem := await engine.check(sampling, tools):
        display.note(f"{problem}; continuing, since this may be transient")


def make_agent(stage: StageConfig, model: str) -> Agent:
    """The stage's agent, with the renderer of `model`; for an API, the equivalent agent that uses messages."""
    agent_class, agent_config = stage.agent_config()
    if stage.engine.kind != "openai":
        if agent_class.interface == "messages":
            raise ConfigError(f"agent {stage.agent.name} uses messages, which needs engine.kind=openai")
        renderer = load_renderer(model, stage.render)
        if agent_class.uses_policy and renderer.has_channels:
            raise ConfigError(
                f"model {model} writes in channels (analysis, commentary, final), as GPT-OSS does, and envgym does not "
                "read them: choose another model; recordings can be trained on"
            )
        return agent_class(renderer, agent_config)
    if agent_class.interface != "messages":
        chat_agent = vars(agent_class).get("chat_agent")
        if chat_agent is None:
            raise ConfigError(
                f"environment {stage.env.name} is run by the agent {stage.agent.name}, which needs tokens: "
                "engine.kind=openai returns none"
            )
        stage = stage.model_copy(update={"agent": Component(name=chat_agent, **agent_config.model_dump())})
        agent_class, agent_config = stage.agent_config()
    return agent_class(NoRenderer(), agent_config)


def attempt_settings(config: RunConfig, max_model_len: int | None) -> dict[str, Any]:
    """The settings of a run's attempts, and of their `Runner`; `max_model_len` is the engine's context length in
    tokens."""
    return {"max_model_len": max_model_len or 0, "seed": config.seed, "deterministic": config.deterministic}


def make_shards(
    config: RunConfig,
    stage: StageConfig,
    context: StageContext,
    agent: Agent,
    model: str,
    engine: Engine | ChatEngine | None,
    max_model_len: int | None,
    display: Display,
) -> Shards | None:
    """The processes of the stage's episodes (`rollout.processes`), which are closed with the context; None if this one
    runs them. They make the environment and the `agent` again, by their settings."""
    if not stage.rollout.processes:
        return None
    spec, settings = context.spec, attempt_settings(config, max_model_len)
    shard = ShardSpec(
        partial(type(spec).from_json, spec.to_json()),
        partial(make_agent, stage, model),
        stage.rollout,
        images=None if spec.images is None else spec.images.path.absolute(),
        **settings,
    )

    async def start(number: int, shard: ShardSpec) -> WorkerHandle[RolloutShard]:
        arguments = {"number": number, "shard": shard}
        name = SHARD.format(number)
        return await context.runtime.start("envgym.rollout.shard:RolloutShard", arguments, name=name)

    local = LocalAttempts(spec, agent, None, stage.rollout, **settings)
    shards = Shards(start, stage.rollout.processes, shard, local, engine, display.note)
    context.closing.push_async_callback(shards.close)
    return shards
