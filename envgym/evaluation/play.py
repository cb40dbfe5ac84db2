"""Episodes of sets of tasks with one model, into a resumable folder: the common part of `envgym eval` and
`envgym rollout`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from envgym.config.schema import Component
from envgym.env import CheckedEnv, EnvSpec
from envgym.launch.components import (
    StageContext,
    check_api,
    make_agent,
    make_runner,
    open_runtime,
    stage_context_in,
    start_sampling,
)
from envgym.launch.models import MakeModel, fetch_model, with_own_format
from envgym.launch.placement import placed_runtime
from envgym.launch.prompts import PromptSummary, announce, survey
from envgym.monitoring.metrics import failure_line
from envgym.rollout.runner import Runner, SamplingPlan, run_episode
from envgym.rollout.transcript import EMPTY_ANSWERS
from envgym.run_folder import RunFolder
from envgym.types import Group, Outcome, Task, ToolSpec

from .plan import Part
from .resumable import ResumableFolder

if TYPE_CHECKING:
    from envgym.engines.openai import OpenAIEngine
    from envgym.monitoring.display import Display


@dataclass(frozen=True, slots=True)
class PartRun:
    """A part whose environment is set up and whose policy can be sampled."""

    part: Part
    tasks: list[Task]
    runner: Runner

    @property
    def spec(self) -> EnvSpec:
        return self.runner.spec

    async def run_episodes(self, folder: ResumableFolder, display: Display) -> list[Group]:
        """Run the episodes that `folder` does not have, and return the groups of all tasks."""
        sampling = self.part.sampling(self.runner.agent.renderer.stop_token_ids)
        seed_scope = self.part.stage.rollout.scope_in_evaluation(self.part.samples)
        plan = SamplingPlan(self.part.name, sampling, self.part.samples, seed_scope)
        self.runner.first_answers.note = display.note
        groups = await self.runner.roll_out(
            self.tasks, plan, display.rollout, completed=folder.saved, on_episode=folder.write
        )
        self.runner.first_answers.conclude()
        episodes = [episode for group in groups for episode in group.episodes]
        if failed := [episode for episode in episodes if episode.failed]:
            display.note(failure_line(failed, len(episodes)))
        if n_empty := int(sum(episode.metrics.get(EMPTY_ANSWERS, 0) for episode in episodes)):
            display.note(f"{n_empty} answers of the API were empty, without a tool call, and not cut by a limit")
        return groups

    async def first_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the first task's first observation offers the policy; none if that cannot be known."""
        offered: list[ToolSpec] = []

        async def look(env: CheckedEnv) -> Outcome:
            observation, _ = await env.reset(seed=0, options={"task": self.tasks[0]})
            offered.extend(observation.tools)
            return Outcome.finish()

        if self.tasks and getattr(self.runner.agent.config, "tools", False):
            await run_episode(self.spec.spec_for(self.tasks[0]), self.tasks[0], look, self.part.stage.rollout.episode_timeout)
        return tuple(offered)


@asynccontextmanager
async def running_parts(
    parts: Sequence[Part],
    choose: Callable[[Part, EnvSpec], Awaitable[list[Task]]],
    folder: ResumableFolder,
    display: Display,
    make_model: MakeModel,
) -> AsyncIterator[list[PartRun]]:
    """Set up the parts, sampled from the model of the first one; `choose` returns a part's tasks.

    Environments are set up first, so that a bad data file is reported before the model is loaded. Raises `EnvgymError`,
    also if the episodes in `folder` are of other tasks, code or weights.
    """
    config, stage = parts[0].config, parts[0].stage
    async with AsyncExitStack() as stack:
        specs = {spec.to_json(): spec for spec in (part.stage.make_spec() for part in parts)}
        bare_runtime = await stack.enter_async_context(open_runtime(config, RunFolder(folder.path)))
        runtime = placed_runtime(stage, list(specs.values()), bare_runtime, trains=False)
        contexts: dict[str, StageContext] = {}  # an environment of several parts is set up once
        with_tasks = []
        for part in parts:
            key = part.stage.make_spec().to_json()
            if key not in contexts:
                display.phase(f"setting up {part.stage.env.name}")
                contexts[key] = await stack.enter_async_context(stage_context_in(part.config, part.stage, runtime))
            spec = contexts[key].spec
            tasks = await choose(part, spec)
            folder.check_tasks(part.name, tasks, spec)
            with_tasks.append((part, spec, tasks))
        model = await fetch_model(stage.model, config, display, make_model)
        folder.check_model(model)
        agents = []
        summaries: dict[tuple[EnvSpec, str], PromptSummary] = {}
        for part, spec, _ in with_tasks:
            if not part.stage.agent_config()[0].uses_policy:  # it replays recordings instead of the policy
                part.stage.agent = Component(name=spec.agent)
            agents.append(make_agent(part.stage, model))
            if (spec, part.env.split) not in summaries:
                summaries[spec, part.env.split] = await survey(spec, part.env.split, agents[-1].renderer)
        stage = with_own_format(stage, model, display.note)
        engine, context = await start_sampling(config, stage, list(contexts.values()), agents[0], model, display)
        runs = [
            PartRun(part, tasks, make_runner(part.config, part.stage, spec, agent, engine, context))
            for (part, spec, tasks), agent in zip(with_tasks, agents, strict=True)
        ]
        first = {run.spec: run for run in runs[::-1]}
        for run in runs:  # the sampled and the greedy part of one environment say everything once
            run.runner.first_answers = first[run.spec].runner.first_answers
        for run in first.values():
            summary = summaries[run.spec, run.part.env.split]
            announce(run.part.stage, run.runner.agent.renderer, summary, context, display.note)
            if stage.engine.kind == "openai" and (tools := await run.first_tools()):
                await check_api(cast("OpenAIEngine", engine), config, run.part.stage, display, tools)
        yield runs
