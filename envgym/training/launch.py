"""Starting what a stage needs: the environment, the engine and a group of workers for every role."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envgym.agent import Agent
from envgym.config.schema import Component, RoleConfig, RunConfig, StageConfig
from envgym.engines import choose_engine
from envgym.engines.base import ChatEngine, Engine, SamplingParams
from envgym.engines.client import EngineClient
from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.render import NoRenderer, load_tokenizer, make_renderer
from envgym.rollout.runner import Runner
from envgym.services import Services, start_services
from envgym.workers.group import WorkerGroup
from envgym.workers.runtime import Runtime

from .pretraining import Pretraining
from .run_folder import RunFolder
from .trainer import Parts
from .weight_sync import WeightSync

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


def make_runtime(config: RunConfig, folder: RunFolder) -> Runtime:
    """Where the run's workers live: processes of this machine, Ray, or the controller itself with `debug`."""
    if config.debug:
        if any(stage.workers.ranks > 1 for stage in config.stages):
            raise ConfigError("debug=true runs every worker inside the controller, one rank: set workers.ranks=1")
        from envgym.workers.inline import InlineRuntime

        return InlineRuntime()
    if config.runtime == "ray":
        from envgym.workers.ray import RayRuntime

        return RayRuntime(folder.logs)
    from envgym.workers.local import LocalRuntime

    return LocalRuntime(folder.logs, deterministic=config.deterministic)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage runs: its environment, set up, with clients of its services; and what starts workers."""

    spec: EnvSpec
    services: Services
    runtime: Runtime
    closing: AsyncExitStack
    """Where what must be closed before the runtime registers itself."""


@asynccontextmanager
async def running(config: RunConfig, folder: RunFolder) -> AsyncIterator[Runtime]:
    """The run's runtime; what runs in it ends with it."""
    runtime = make_runtime(config, folder)
    try:
        yield runtime
    finally:
        await runtime.close()


@asynccontextmanager
async def set_up(config: RunConfig, stage: StageConfig, runtime: Runtime) -> AsyncIterator[Place]:
    """The place of a stage in a runtime: its environment is closed again on every way out."""
    spec = stage.make_spec()
    async with (
        start_services(spec, runtime, deterministic=config.deterministic, now=False) as services,
        AsyncExitStack() as closing,
    ):
        yield Place(spec, services, runtime, closing)


@asynccontextmanager
async def prepared(config: RunConfig, stage: StageConfig, folder: RunFolder) -> AsyncIterator[Place]:
    """The place of a stage, in a runtime of its own. A bad data file is told here, before anything long begins."""
    async with running(config, folder) as runtime, set_up(config, stage, runtime) as place:
        yield place


async def start_parts(config: RunConfig, stage: StageConfig, place: Place, model: str, display: Display) -> Parts:
    """The parts of a stage, running until its place is left. `model` is a folder or hub id."""
    learner_class, learner_config = stage.learner_config()
    learner = learner_class(learner_config)
    adapters = {role: stage.lora_of(role, role_spec) for role, role_spec in learner.roles.items()}
    for lora in adapters.values():
        lora.check_installed()
    agent = make_agent(stage, model)
    renderer = agent.renderer
    pretraining = Pretraining(stage.pretrain, renderer, config.seed) if stage.pretrain.path else None
    bases = [role for role in learner.roles if stage.is_base(role, learner.roles)]
    sampling: asyncio.Task[tuple[Engine | ChatEngine, int]] | None = None
    if agent.samples:
        lora_rank = adapters["actor"].rank
        sampling = asyncio.create_task(
            start_sampling(config, stage, [place], agent, model, display, lora_rank=lora_rank)
        )

    async def started(role: str) -> WorkerGroup:
        if config.debug and sampling is not None:  # in one process vLLM comes first: DeepSpeed joins its process group
            await asyncio.wait({sampling})
        display.phase(f"loading the {role}")
        return await start_role(config, stage, role, model, place.runtime, after=sampling)

    # Side by side: most of what each takes is imports. Whose mistake is told first does not depend on who is faster.
    loading = {role: asyncio.create_task(started(role)) for role in learner.roles if role not in bases}
    try:
        engine, context = (None, None) if sampling is None else await sampling
        workers = {role: await task for role, task in loading.items()}
    except BaseException:
        tasks = [task for task in (sampling, *loading.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    workers |= {role: workers["actor"].without_adapter(role) for role in bases}
    sync = None
    if engine is not None:
        assert not isinstance(engine, ChatEngine), "a run that trains is given an engine with tokens"
        is_float32 = workers["actor"].info["dtype"] == "float32"
        tolerance = stage.sync.tolerance or (1e-3 if is_float32 else 0.5)
        sync = WeightSync(engine, workers["actor"], renderer, tolerance, adapters["actor"].quantize != "none")
    runner = make_runner(config, stage, place.spec, agent, engine, context)
    return Parts(learner, runner, workers, sampling_of(stage, renderer.stop_token_ids), engine, sync, pretraining)


async def start_role(
    config: RunConfig,
    stage: StageConfig,
    role: str,
    model: str,
    runtime: Runtime,
    *,
    after: asyncio.Future[Any] | None = None,
) -> WorkerGroup:
    """The ranks of one of the learner's roles, loaded; from `model` where the role names none of its own. `after`: see
    `WorkerGroup.start`."""
    learner_class, learner_config = stage.learner_config()
    spec = learner_class(learner_config).roles[role]
    return await WorkerGroup.start(
        runtime,
        role=role,
        model=stage.roles.get(role, RoleConfig()).model or model,
        learner=stage.learner.name,
        learner_config=learner_config.model_dump(),
        settings=stage.workers_of(role),
        lora=stage.lora_of(role, spec),
        trained=spec.trained,
        head=spec.head,
        seed=config.seed,
        deterministic=config.deterministic,
        after=after,
    )


async def start_sampling(
    config: RunConfig,
    stage: StageConfig,
    places: Sequence[Place],
    agent: Agent,
    model: str,
    display: Display,
    *,
    lora_rank: int = 0,
) -> tuple[Engine | ChatEngine, int]:
    """What episodes need: the services of the environments that are played, all in one runtime, and the stage's
    engine, with its context length in tokens (0 where only the API knows it). `lora_rank`: that of the adapters the
    engine will be given."""
    api = await start_api(config, stage, places, model, display) if stage.engine.kind == "openai" else None
    for place in places:
        if place.services.names:
            display.phase(f"starting {', '.join(place.services.names)}")
            await place.services.start()
    if api is not None:
        return api, 0
    engine, context = await start_engine(config, stage, model, places[0].runtime, display, lora_rank)
    for place in places:
        place.services.bind_policy(
            agent.renderer, engine, context, deterministic=config.deterministic, seed=config.seed
        )
    return engine, context


async def start_engine(
    config: RunConfig, stage: StageConfig, model: str, runtime: Runtime, display: Display, lora_rank: int = 0
) -> tuple[EngineClient, int]:
    """The stage's engine, ready to sample, and its context length in tokens."""
    target, note = choose_engine(stage.engine.kind)
    if note:
        display.note(note)
    display.phase("starting the engine")
    arguments: dict[str, Any] = {
        "model": model,
        # Sampler and trainer must be the same policy, so the engine follows the workers unless told otherwise.
        "dtype": stage.engine.dtype if stage.engine.dtype != "auto" else stage.workers.dtype,
        "max_model_len": stage.engine.max_model_len,
        "seed": config.seed,
        "deterministic": config.deterministic,
        "concurrency": episodes_at_once(stage),
        "lora_rank": lora_rank,
        "engine_args": stage.engine.args,
    }
    # Sampling and learning alternate, so each may use every core.
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))}
    engine = await EngineClient.start(runtime, target, arguments, environ)
    return engine, (await engine.info()).max_model_len


def episodes_at_once(stage: StageConfig) -> int:
    """How many episodes of a stage, which each ask for one turn at a time, are in play at once at most."""
    of_step = stage.rollout.tasks * stage.rollout.group_size
    return min(stage.rollout.concurrency, max(of_step, stage.eval.tasks * stage.eval.samples))


async def start_api(
    config: RunConfig, stage: StageConfig, places: Sequence[Place], model: str, display: Display
) -> ChatEngine:
    """The API as the engine, once it has answered: who gave a wrong key or name is told before anything else starts.
    It is closed with the first place."""
    for place in places:
        if names := place.services.of_policy:
            raise ConfigError(
                f"environment {place.spec.id} asks the policy itself ({', '.join(names)}), which engine.kind=openai "
                "cannot be: give that service a model of its own (base_url and model)"
            )
    from envgym.engines.openai import OpenAIEngine

    settings = stage.engine
    assert settings.base_url is not None, "the configuration was checked"
    engine = OpenAIEngine(
        model,
        settings.base_url,
        api_key_env=settings.api_key_env,
        timeout=settings.timeout,
        tries=settings.tries,
        concurrency=stage.rollout.concurrency,
        requests_per_minute=settings.requests_per_minute,
        extra=settings.extra,
    )
    places[0].closing.push_async_callback(engine.close)
    display.phase(f"asking {settings.base_url} for {model}")
    sampling = sampling_of(stage, ())
    if problem := await engine.check(replace(sampling, seed=config.seed) if config.deterministic else sampling):
        display.note(f"{problem}; going on, for that may pass")
    return engine


def make_agent(stage: StageConfig, model: str) -> Agent:
    """The stage's agent, rendering for `model`; for an API, the one that plays the same way by messages."""
    agent_class, agent_config = stage.agent_config()
    if stage.engine.kind != "openai":
        if agent_class.speaks == "messages":
            raise ConfigError(f"agent {stage.agent.name} speaks messages, which only engine.kind=openai understands")
        return agent_class(make_renderer(stage.render, load_tokenizer(model)), agent_config)
    if agent_class.speaks != "messages":
        same = vars(agent_class).get("by_messages")
        if same is None:
            raise ConfigError(
                f"environment {stage.env.name} is played by the agent {stage.agent.name}, which works on tokens: "
                "engine.kind=openai gives none"
            )
        stage = stage.model_copy(update={"agent": Component(**{**agent_config.model_dump(), **same})})
        agent_class, agent_config = stage.agent_config()
    return agent_class(NoRenderer(), agent_config)


def make_runner(
    config: RunConfig,
    stage: StageConfig,
    spec: EnvSpec,
    agent: Agent,
    engine: Engine | ChatEngine | None,
    context: int | None,
) -> Runner:
    """What plays the stage's episodes; `context` is the engine's context length in tokens."""
    return Runner(
        spec,
        agent,
        engine,
        stage.rollout,
        max_model_len=context or 0,
        seed=config.seed,
        deterministic=config.deterministic,
    )


def sampling_of(stage: StageConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The stage's sampling parameters for one turn."""
    return SamplingParams(
        max_tokens=stage.rollout.max_tokens,
        temperature=stage.rollout.temperature,
        top_p=stage.rollout.top_p,
        top_k=stage.rollout.top_k,
        stop_token_ids=stop_token_ids,
    )
