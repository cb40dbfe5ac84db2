"""The components that the loop drives: the learner, a group of workers a role, the engines with the way for weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.config.schema import RoleConfig, RunConfig, StageConfig
from envgym.engine import ChatEngine, Engine, SamplingParams
from envgym.engines import TARGETS, choose_engine
from envgym.engines.pool import EnginePool
from envgym.errors import ConfigError
from envgym.launch.components import StageContext, make_agent, make_runner, start_role, start_sampling
from envgym.launch.placement import PlacedRuntime
from envgym.learner import Learner
from envgym.render import load_tokenizer
from envgym.rollout.runner import Runner
from envgym.workers.group import WorkerGroup

from .pretraining import Pretraining
from .turns import Turns
from .weight_sync import WeightSync
from .weight_transfer import FileTransfer, make_transfer

if TYPE_CHECKING:
    from envgym.monitoring.display import Display
    from envgym.services.teacher import ApiTeacher


@dataclass(slots=True)
class Components:
    """The components that the loop drives. `engine` and `sync` are None where the agent replays, `pretraining` where no
    text is mixed in; `workers` holds a group of ranks for each of the learner's roles, but for those that are asked
    behind an API, in `apis`."""

    learner: Learner
    runner: Runner
    workers: dict[str, WorkerGroup]
    sampling: SamplingParams
    engine: Engine | None = None
    sync: WeightSync | None = None
    pretraining: Pretraining | None = None
    apis: Mapping[str, ApiTeacher] = field(default_factory=dict)

    async def engines_awake(self) -> None:
        """Give the engines the memory that they share with models in turns."""
        if self.sync is not None:
            await self.sync.turns.engines()

    async def models_awake(self, *, for_new_weights: bool = False) -> None:
        """Give the models the memory that they share with engines; see `Turns.models`."""
        if self.sync is not None:
            await self.sync.turns.models(for_new_weights=for_new_weights)

    @property
    def trained_roles(self) -> list[str]:
        return [role for role, spec in self.learner.roles.items() if spec.trained]


async def start_components(
    config: RunConfig, stage: StageConfig, context: StageContext, model: str, display: Display
) -> Components:
    """The components of a stage, running until its context is left. `model` is a folder or hub id."""
    learner_class, learner_config = stage.learner_config()
    learner = learner_class(learner_config)
    adapters = {role: stage.lora_of(role, role_spec) for role, role_spec in learner.roles.items()}
    for lora in adapters.values():
        lora.check_installed()
    agent = make_agent(stage, model)
    renderer = agent.renderer
    apis: dict[str, ApiTeacher] = {}
    for role, role_spec in learner.roles.items():
        settings = stage.roles.get(role, RoleConfig())
        own = settings.model
        if settings.base_url is not None:
            from envgym.services.teacher import ApiTeacher

            apis[role] = ApiTeacher(settings.base_url, str(own), settings.api_key_env, role_spec.top_k)
            context.closing.push_async_callback(apis[role].close)
        elif role_spec.top_k and own is not None and load_tokenizer(own).get_vocab() != renderer.tokenizer.get_vocab():
            raise ConfigError(f"roles.{role}.model: {own} has another vocabulary than the policy, token by token")
    pretraining = Pretraining(stage.pretrain, renderer, config.seed) if stage.pretrain.paths else None
    bases = [role for role in learner.roles if stage.is_base(role, learner.roles)]
    sampling: asyncio.Task[tuple[Engine | ChatEngine, int]] | None = None
    plan = context.runtime.plan if isinstance(context.runtime, PlacedRuntime) else None
    sharing = [part.name for part in plan.parts if part.in_turns] if plan else []
    if agent.uses_policy:
        sampling = asyncio.create_task(
            start_sampling(
                config, stage, [context], agent, model, display, lora_rank=adapters["actor"].rank, sleeps=bool(sharing)
            )
        )

    async def started(role: str) -> WorkerGroup:
        if config.debug and sampling is not None:  # in one process vLLM comes first: DeepSpeed joins its process group
            await asyncio.wait({sampling})
        display.phase(f"loading the {role}")
        return await start_role(config, stage, role, model, context.runtime, after=sampling)

    # Side by side: most of what each takes is imports. Whose mistake is told first does not depend on who is faster.
    loading = {role: asyncio.create_task(started(role)) for role in learner.roles if role not in (*bases, *apis)}
    try:
        engine, max_model_len = (None, None) if sampling is None else await sampling
        workers = {role: await task for role, task in loading.items()}
    except BaseException:
        tasks = [task for task in (sampling, *loading.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    for api in apis.values():
        api.vocabulary = workers["actor"].info["vocabulary"]
    workers |= {role: workers["actor"].without_adapter(role) for role in bases}
    sync = None
    if engine is not None:
        assert isinstance(engine, EnginePool), "a run that trains is given engines with tokens"
        is_float32 = workers["actor"].info["dtype"] == "float32"
        tolerance = stage.sync.tolerance or (1e-3 if is_float32 else 0.5)
        shared = Path(config.runs_dir, config.name or "", "transfer")
        bucket, by_vllm = stage.sync.bucket_megabytes * 2**20, choose_engine(stage.engine.kind)[0] == TARGETS["vllm"]
        files = FileTransfer(workers["actor"], shared, bucket, checkpoint=by_vllm)
        transfer = make_transfer(stage.sync, workers["actor"], files, workers_per_engine=stage.engine.tensor_parallel)
        quantized = adapters["actor"].quantize != "none"
        in_turns = {role: workers[role] for role in sharing}
        turns = Turns(engine, in_turns, keeps_weights=adapters["actor"].rank > 0)
        sync = WeightSync(engine, workers["actor"], renderer, tolerance, transfer, files, turns, quantized)
    runner = make_runner(config, stage, context.spec, agent, engine, max_model_len)
    params = stage.rollout.sampling(renderer.stop_token_ids)
    return Components(learner, runner, workers, params, engine, sync, pretraining, apis)
