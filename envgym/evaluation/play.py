"""Playing sets of tasks with one model, into a folder that can be gone on from: under `envgym eval` and
`envgym rollout`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envgym.config.schema import Component
from envgym.env import EnvSpec
from envgym.launch.components import StageContext, make_agent, make_runner, running, set_up, start_sampling
from envgym.launch.models import MakeModel, fetch_model
from envgym.launch.placement import placed
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.run_folder import RunFolder
from envgym.types import Group, Task

from .plan import Part
from .resumable import ResumableFolder

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


@dataclass(frozen=True, slots=True)
class ReadyPart:
    """A part whose environment is set up and whose policy can be sampled."""

    part: Part
    tasks: list[Task]
    runner: Runner

    @property
    def spec(self) -> EnvSpec:
        return self.runner.spec

    async def play(self, folder: ResumableFolder, display: Display) -> list[Group]:
        """The groups of all its tasks; those episodes are played that `folder` does not hold."""
        sampling = self.part.sampling(self.runner.agent.renderer.stop_token_ids)
        play = SamplingPlan(self.part.name, sampling, self.part.samples)
        return await self.runner.play(self.tasks, play, display.rollout, kept=folder.kept, on_episode=folder.write)


@asynccontextmanager
async def ready_parts(
    parts: Sequence[Part],
    choose: Callable[[Part, EnvSpec], Awaitable[list[Task]]],
    folder: ResumableFolder,
    display: Display,
    make_model: MakeModel,
) -> AsyncIterator[list[ReadyPart]]:
    """The parts, ready to be played by the model of the first; `choose` gives the tasks of each.

    Environments come first: a bad data file is reported before anything long begins. Raises `EnvgymError`, also where
    what `folder` keeps was played with other tasks, code or weights.
    """
    config, stage = parts[0].config, parts[0].stage
    async with AsyncExitStack() as stack:
        specs = {spec.to_json(): spec for spec in (part.stage.make_spec() for part in parts)}
        started = await stack.enter_async_context(running(config, RunFolder(folder.path)))
        runtime = placed(stage, list(specs.values()), started, trains=False)
        places: dict[str, StageContext] = {}  # what is played in several ways is set up once
        prepared = []
        for part in parts:
            key = part.stage.make_spec().to_json()
            if key not in places:
                display.phase(f"setting up {part.stage.env.name}")
                places[key] = await stack.enter_async_context(set_up(part.config, part.stage, runtime))
            spec = places[key].spec
            tasks = await choose(part, spec)
            folder.check_tasks(part.name, tasks, spec)
            prepared.append((part, spec, tasks))
        model = await fetch_model(stage.model, config, display, make_model)
        folder.check_model(model)
        agents = []
        for part, spec, _ in prepared:
            if not part.stage.agent_config()[0].uses_policy:  # it plays what is recorded, not the policy
                part.stage.agent = Component(name=spec.agent)
            agents.append(make_agent(part.stage, model))
        engine, context = await start_sampling(config, stage, list(places.values()), agents[0], model, display)
        yield [
            ReadyPart(part, tasks, make_runner(part.config, part.stage, spec, agent, engine, context))
            for (part, spec, tasks), agent in zip(prepared, agents, strict=True)
        ]
