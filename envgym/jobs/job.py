"""A job: episodes of sets of tasks in a resumable folder, for `envgym eval`, `envgym rollout` and `envgym score`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from envgym.agent import Agent
from envgym.config.schema import Component
from envgym.disk import write_atomically
from envgym.env import CheckedEnv, EnvSpec, TaskList
from envgym.env.data import DataEnvSpec
from envgym.episodes.files import episode_line
from envgym.evaluation.result import mean_score, result_of, score_warning
from envgym.evaluation.statistics import suite_mean
from envgym.hashing import task_hash, text_hash
from envgym.monitoring.metrics import failure_line
from envgym.placement.plan import placed_runtime
from envgym.rollout.episode import run_episode
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.run_folder import RunFolder
from envgym.services.start import refuse_policies
from envgym.transcript import EMPTY_ANSWERS
from envgym.types import Group, Outcome, Task, ToolSpec

from .components import (
    StageContext,
    attempt_settings,
    check_api,
    make_agent,
    make_shards,
    open_runtime,
    stage_context_in,
    start_environment_services,
    start_sampling,
)
from .folder import JobFolder
from .models import MakeModel, fetch_model, with_own_format
from .parts import Part
from .prompts import PromptSummary, announce, survey

if TYPE_CHECKING:
    from envgym.engines.openai import OpenAIEngine
    from envgym.monitoring.display import Display


@dataclass(frozen=True, slots=True)
class Script:
    """The agent that replays recorded answers in place of a policy, and the tasks that it has answers to."""

    agent: Agent
    tasks: list[Task]
    restore: Callable[[Runner, list[Group]], Awaitable[list[Group]]]
    """The groups of the recorded answers with the rewards of their replays, of which each is a group by itself."""

    def prepare(self, spec: EnvSpec) -> None:
        """Set the tasks of environments that take theirs from data. Raises `ConfigError` for an environment that asks
        the policy."""
        refuse_policies(spec, "which is not sampled here: name another model for it")
        tasks_by_spec: dict[int, tuple[EnvSpec, list[Task]]] = {}
        for task in self.tasks:
            member = spec.spec_for(task)  # a mixture raises an error for a task of none of its members
            tasks_by_spec.setdefault(id(member), (member, []))[1].append(task)
        for member, tasks in tasks_by_spec.values():
            if isinstance(member, DataEnvSpec):
                member.fixed_tasks = TaskList(tasks)


@dataclass(frozen=True, slots=True)
class PartRun:
    """A part whose environment is set up and whose policy can be sampled."""

    part: Part
    tasks: list[Task]
    runner: Runner
    folder: JobFolder
    display: Display

    @property
    def spec(self) -> EnvSpec:
        return self.runner.spec

    async def run_episodes(self) -> list[Group]:
        """Run the episodes that the folder does not have, and return the groups of all tasks."""
        sampling = self.part.sampling(self.runner.agent.renderer.stop_token_ids)
        part, rollout = self.part, self.part.stage.rollout
        seed_scope = rollout.scope_in_evaluation(part.samples)
        plan = SamplingPlan(part.name, sampling, part.samples, seed_scope, part.branches, rollout.branch_at)
        folder, note = self.folder, self.display.note
        if n_saved := sum(episode.purpose == self.part.name for episode in folder.saved.values()):
            note(f"{n_saved} saved episodes are reused")
        self.runner.first_answers.note = note
        groups = await self.runner.roll_out(
            self.tasks, plan, self.display.rollout, completed=folder.saved, on_episode=folder.write
        )
        self.runner.first_answers.conclude()
        episodes = [episode for group in groups for episode in group.episodes]
        if failed := [episode for episode in episodes if episode.failed]:
            note(failure_line(failed, len(episodes)))
        if n_empty := int(sum(episode.metrics.get(EMPTY_ANSWERS, 0) for episode in episodes)):
            note(f"{n_empty} answers of the API were empty, without a tool call, and not cut by a limit")
        return groups

    async def first_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the first task's first observation offers the policy; none if that cannot be known."""
        offered: list[ToolSpec] = []

        async def look(env: CheckedEnv) -> Outcome:
            observation, _ = await env.reset(seed=0, options={"task": self.tasks[0]})
            offered.extend(observation.tools)
            return Outcome.finish()

        if self.tasks and getattr(self.runner.agent.config, "tools", False):
            await run_episode(
                self.spec.spec_for(self.tasks[0]), self.tasks[0], look, self.part.stage.rollout.episode_timeout
            )
        return tuple(offered)


async def run_job(
    folder: JobFolder, display: Display, source: MakeModel | Script, *, retry_failed: bool = False
) -> tuple[dict[str, Any], dict[str, list[Group]]]:
    """Run the episodes of all parts that the folder, which is open, does not have; with `retry_failed` also the failed
    ones. `source` makes the model of a recipe; with a script the only part answers from that, and no model is loaded.

    Returns the completed result (see `run_evaluation`) and the groups by part. An interrupted job leaves a result of
    status `running` in the folder.
    """
    parts, stage, start = folder.parts, folder.config.stages[-1], time.monotonic()
    script = source if isinstance(source, Script) else None
    result = (folder.read_result() if folder.saved else None) or {"began": _timestamp(), "seconds": 0.0}
    if retry_failed:
        episodes = folder.journal.latest()
        folder.saved = {key: episode for key, episode in folder.saved.items() if not episodes[key].failed}
    groups: dict[str, list[Group]] = {}
    envs: dict[str, dict[str, Any]] = {}
    async with _started_parts(folder, display, source) as runs:
        # Written only now, so that an engine that fails to start leaves the earlier result as it was.
        result |= {"status": "running", "model": stage.model, "seed": folder.config.seed, "suite": folder.suite}
        result["engine"] = {"kind": stage.engine.kind, "base_url": stage.engine.base_url}
        result["fingerprints"] = {"model": folder.model_hash, "envgym": version("envgym")}
        folder.write_result(result)
        if retry_failed:
            write_atomically(folder.journal.path, "".join(map(episode_line, folder.saved.values())))
        try:
            for number, run in enumerate(runs, 1):
                name, count = run.part.name, f" ({number} of {len(parts)})" if len(parts) > 1 else ""
                label = name if len(parts) > 1 else run.part.stage.env.name
                display.phase("scoring" if script is not None else f"rolling out {label}{count}")
                groups[name] = await run.run_episodes()
                await run.runner.attempts.close()
                if script is not None:
                    groups[name] = await script.restore(run.runner, groups[name])
                if run.part.env.weight and (warning := score_warning(run.spec, groups[name])):
                    display.note(warning)
                envs[name] = _part_result(run, groups[name])
        finally:
            result["seconds"] += time.monotonic() - start
            result["ended"] = _timestamp()
            folder.write_result(result)
    return {**result, "status": "completed", **_totals(parts, groups, envs), "envs": envs}, groups


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _part_result(run: PartRun, groups: Sequence[Group]) -> dict[str, Any]:
    """Result of a part, with its settings and those of its environment."""
    part, sampling = run.part, run.part.sampling(())
    tasks = text_hash(" ".join(map(task_hash, run.tasks)))
    return {
        **result_of(groups, success=part.env.success, cluster=part.env.cluster),
        "env": part.stage.env.model_dump(mode="json"),
        "agent": part.stage.agent.model_dump(mode="json"),
        "split": part.env.split,
        "weight": part.env.weight,
        "cluster": part.env.cluster,
        "samples": part.samples,
        "sampling": {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "max_tokens")},
        "settings": run.spec.config.model_dump(mode="json", exclude_unset=True),
        "fingerprints": {**run.spec.fingerprint(), "tasks": tasks},
    }


def _totals(
    parts: Sequence[Part], groups: Mapping[str, Sequence[Group]], envs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The suite's score, and counts over all parts."""
    weighed = [part for part in parts if part.env.weight]
    means = [mean_score(groups[part.name], part.env.cluster) for part in weighed]
    mean = means[0] if len(means) == 1 else suite_mean(means, [part.env.weight for part in weighed])
    counts = ("n_episodes", "unscored", "truncated", "played_again", "tokens")
    failures = sum((Counter(env["failures"]) for env in envs.values()), Counter[str]())
    totals = {name: sum(env[name] for env in envs.values()) for name in counts}
    return {**mean.as_dict(), **totals, "failures": dict(failures)}


@asynccontextmanager
async def _started_parts(
    folder: JobFolder, display: Display, source: MakeModel | Script
) -> AsyncIterator[list[PartRun]]:
    """Set up the parts, sampled from the model of the first one, or with answers from a script.

    Environments are set up first, so that a bad data file is reported before the model is loaded. Raises `EnvgymError`,
    also if the episodes in `folder` are of other tasks, code or weights.
    """
    parts, config, stage = folder.parts, folder.config, folder.config.stages[-1]
    specs: dict[EnvSpec, EnvSpec] = {}  # equal ones are one
    spec_of = [specs.setdefault(spec, spec) for spec in (part.stage.make_spec() for part in parts)]
    for spec in specs:
        spec.store_images(folder.images)
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(open_runtime(config, RunFolder(folder.path)))
        if isinstance(source, Script):
            source.prepare(*specs)
        else:
            runtime = placed_runtime(stage, list(specs), runtime, trains=False)
        contexts: dict[EnvSpec, StageContext] = {}
        with_tasks = []
        for part, spec in zip(parts, spec_of, strict=True):
            if spec not in contexts:
                display.phase(f"setting up {part.stage.env.name}")
                contexts[spec] = await stack.enter_async_context(stage_context_in(part.config, runtime, spec))
            tasks = source.tasks if isinstance(source, Script) else await part.tasks(spec)
            folder.check_tasks(part.name, tasks, spec)
            with_tasks.append((part, spec, tasks))
        if isinstance(source, Script):
            await start_environment_services(list(contexts.values()), display)
            [spec] = specs
            runner = Runner(spec, source.agent, None, stage.rollout, **attempt_settings(config, None))
            yield [PartRun(parts[0], source.tasks, runner, folder, display)]
            return
        model = await fetch_model(stage.model, config, display, source)
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
        engine, length = await start_sampling(config, stage, list(contexts.values()), agents[0], model, display)
        runs = []
        for (part, spec, tasks), agent in zip(with_tasks, agents, strict=True):
            shards = make_shards(part.config, part.stage, contexts[spec], agent, model, engine, length, display)
            settings = attempt_settings(part.config, length)
            runner = Runner(spec, agent, engine, part.stage.rollout, **settings, attempts=shards)
            runs.append(PartRun(part, tasks, runner, folder, display))
        first = {run.spec: run for run in runs[::-1]}
        for run in runs:  # the sampled and the greedy part of one environment say everything once
            run.runner.first_answers = first[run.spec].runner.first_answers
        for run in first.values():
            summary = summaries[run.spec, run.part.env.split]
            announce(run.part.stage, run.runner.agent.renderer, summary, length, display.note)
            if stage.engine.kind == "openai" and (tools := await run.first_tools()):
                await check_api(cast("OpenAIEngine", engine), config, run.part.stage, display, tools)
        yield runs
