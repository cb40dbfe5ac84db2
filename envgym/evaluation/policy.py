"""Evaluating a policy on environments' tasks, by the runner that trains."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.schema import Component, RunConfig
from envgym.env import EnvSpec
from envgym.errors import ConfigError, EnvgymError, RunError, WorkerError, did_you_mean
from envgym.hashing import first_change, task_hash, text_hash
from envgym.isolation import event_loop
from envgym.models.resolve import fetch_model
from envgym.rollout.runner import Play, group_ids
from envgym.training.launch import Place, make_agent, make_runner, running, set_up, start_sampling
from envgym.training.run_folder import RunFolder
from envgym.types import Episode, Group, Task

from .exports import write_exports
from .folder import EvalFolder, find_folder
from .model_fingerprint import model_fingerprint
from .plan import Part, parts_of_env, parts_of_suite
from .result import mean_score, result_of
from .statistics import suite_mean
from .suite import Suite, find_suite

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is evaluated: parts of one model, the name of their suite if they have one, and the folder it is kept in.

    Episodes that `folder` holds are not played again; `retry_failed` plays those that failed. `fresh`: the folder was
    made for this.
    """

    parts: Sequence[Part]
    folder: EvalFolder
    suite: str | None = None
    retry_failed: bool = False
    fresh: bool = False

    @property
    def config(self) -> RunConfig:
        return self.parts[0].config


def new_evaluation(
    settings: Mapping[str, Any], *, suite: str | Suite | None = None, file: str | Path | None = None
) -> Evaluation:
    """An evaluation on a suite or, without one, on the environment that `settings` name, with a folder of its own.

    `suite` is a `Suite`, or `NAME`, `NAME:SIZE` or a YAML file. Raises `EnvgymError` where it cannot be made.
    """
    label = None
    if suite is None:
        parts = parts_of_env(settings, file=file)
        label = Path(parts[0].name.partition(":")[0]).stem or "remote"
    else:
        name, found, size = ("suite", suite, None) if isinstance(suite, Suite) else find_suite(suite)
        label = suite if isinstance(suite, str) else name
        parts = parts_of_suite(found, size, settings, file=file)
    config = parts[0].config
    model = Path(parts[0].stage.model).name
    own_name = "-".join([Path(label).name.replace(":", "-"), model, time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())])
    folder = EvalFolder(Path(config.evals_dir) / (config.name or own_name))
    number = 1
    while config.name is None and folder.path.exists():  # another one of this process and second
        number += 1
        folder = EvalFolder(Path(config.evals_dir) / f"{own_name}-{number}")
    suite_name = None if suite is None else label
    folder.create(parts, {"suite": suite_name})
    return Evaluation(parts, folder, suite_name, fresh=True)


def resumed_evaluation(name: str, evals_dir: str, *, retry_failed: bool = False) -> Evaluation:
    """An evaluation that goes on, by its name or folder. Raises `RunError` where there is none."""
    folder = find_folder(name, evals_dir)
    return Evaluation(folder.parts(), folder, folder.read_config()["suite"], retry_failed)


def run_evaluation(evaluation: Evaluation, display: Display) -> dict[str, Any]:
    """Play what is not played yet and return what `result.json` then holds.

    Keys: status (`running`, `completed`), suite, model, engine, seed, began, ended, seconds, fingerprints (of the
    model, and envgym's version); the suite's score, ci95, stderr and n_tasks, by the weights; n_episodes, failures,
    unscored, truncated and tokens of all parts; and `envs`: each part's `result_of`, its env, agent, weight, samples,
    sampling and fingerprints.
    Raises `EnvgymError` where it cannot go on and `KeyboardInterrupt` at Ctrl-C; what ended is kept.
    """
    folder = evaluation.folder
    with folder.held():
        done = folder.read_result()
        if done is not None and done["status"] == "completed" and not evaluation.retry_failed:
            return done
        try:
            return event_loop.run(_run(evaluation, display))
        except KeyboardInterrupt:
            if evaluation.fresh and folder.remove_stillborn():
                raise KeyboardInterrupt("no episode had ended") from None
            raise KeyboardInterrupt(f"what ended is kept; {folder.how_to_go_on}") from None
        except EnvgymError as error:
            if evaluation.fresh and folder.remove_stillborn():
                raise
            if isinstance(error, WorkerError):  # whatever the worker died of, it was in the middle
                raise type(error)(f"{error}; what ended is kept; {folder.how_to_go_on}") from None
            raise
        except OSError as error:
            raise RunError(
                f"{folder.path} cannot be written: {error.strerror or error}; what ended is kept; {folder.how_to_go_on}"
            ) from None


async def _run(evaluation: Evaluation, display: Display) -> dict[str, Any]:
    folder, config, parts = evaluation.folder, evaluation.config, evaluation.parts
    stage = parts[0].stage
    began = time.monotonic()
    logs = RunFolder(folder.path)
    logs.logs.mkdir(exist_ok=True)
    folder.journal.open()
    kept = folder.journal.played()
    failed = {place for place, episode in folder.journal.judged().items() if episode.failed}
    if evaluation.retry_failed:
        kept = {place: episode for place, episode in kept.items() if place not in failed}
    result = folder.read_result() or {"began": _now(), "seconds": 0.0}
    groups: dict[str, list[Group]] = {}
    fingerprints: dict[str, dict[str, str]] = {}
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(running(config, logs))
        places: dict[str, Place] = {}  # what is played in several ways is set up once
        tasks: list[list[Task]] = []
        keys = [part.stage.make_spec().to_json() for part in parts]
        for part, key in zip(parts, keys, strict=True):
            if key not in places:
                display.phase(f"setting up {part.name}")
                places[key] = await stack.enter_async_context(set_up(part.config, part.stage, runtime))
            spec = places[key].spec
            tasks.append(await tasks_of(part, spec.tasks(part.env.split)))
            _check_kept(part, tasks[-1], spec, kept)
        model = await fetch_model(stage.model, config, display)
        agents = []
        for part, key in zip(parts, keys, strict=True):
            if not part.stage.agent_config()[0].samples:  # it plays what is recorded, which says nothing of the policy
                part.stage.agent = Component(name=places[key].spec.agent)
            agents.append(make_agent(part.stage, model))
        engine, context = await start_sampling(config, stage, list(places.values()), agents[0], model, display)
        # Only now, as an engine or an API that does not start must not undo what there is.
        result |= {"status": "running", "model": stage.model, "seed": config.seed, "suite": evaluation.suite}
        result["engine"] = {"kind": stage.engine.kind, "base_url": stage.engine.base_url}
        result["fingerprints"] = _same_model(result, model)
        folder.write_result(result)
        if evaluation.retry_failed:
            folder.write_journal(kept.values())
        try:
            for number, (part, agent) in enumerate(zip(parts, agents, strict=True), 1):
                spec = places[keys[number - 1]].spec
                count = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
                display.phase(f"evaluating {part.name}{count}")
                runner = make_runner(part.config, part.stage, spec, agent, engine, context)
                stop = agent.renderer.stop_token_ids if agent.renderer is not None else ()
                groups[part.name] = await runner.play(
                    tasks[number - 1],
                    Play(part.name, part.sampling(stop), part.samples),
                    display.rollout,
                    kept=kept,
                    on_episode=folder.journal.write,
                )
                fingerprints[part.name] = {**spec.fingerprint(), "tasks": _tasks_hash(tasks[number - 1])}
        finally:
            result["seconds"] += time.monotonic() - began
            result["ended"] = _now()
            folder.write_result(result)
    envs = {part.name: _said_of(part, groups[part.name]) | {"fingerprints": fingerprints[part.name]} for part in parts}
    result |= {"status": "completed", **_totals(parts, groups, envs), "envs": envs}
    write_exports(folder, result, groups)
    folder.write_result(result)
    return result


def _check_kept(part: Part, tasks: Sequence[Task], spec: EnvSpec, kept: Mapping[tuple[str, int], Episode]) -> None:
    """Mix no episodes of an environment or of data that have changed since. Raises `ConfigError` where they have."""
    own = [episode for episode in kept.values() if episode.purpose == part.name]
    if change := first_change(own, group_ids(part.name, tasks), spec):
        raise ConfigError(
            f"{part.name}: its tasks, code or settings are not what they were when this evaluation began (task "
            f"{change[0].task.key}): start a new one"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _same_model(result: Mapping[str, Any], model: str) -> dict[str, str | None]:
    """The fingerprints of this evaluation. Raises `ConfigError` where it began with another model."""
    found = {"model": model_fingerprint(model), "envgym": version("envgym")}
    before = result.get("fingerprints", found)
    if before["model"] != found["model"]:
        raise ConfigError(f"the model {model} is not what it was when this evaluation began: start a new one")
    return found


async def tasks_of(part: Part, tasks: Any) -> list[Task]:
    """The tasks a part plays: the first of its split. Raises `ConfigError` where there are none, or no end to them."""
    wanted = part.env.tasks
    if wanted is None and tasks.size is None:
        raise ConfigError(f"{part.name} has tasks without end: say how many in the suite (tasks), or eval.tasks=N")
    count = min(size for size in (wanted, tasks.size) if size is not None)
    if not count:
        raise ConfigError(f"{part.name} has no tasks in the split {part.env.split!r}")
    found = [await tasks.get(index) for index in range(count)]
    field = part.env.cluster
    if field is not None and not any(field in task.fields for task in found):
        known = dict.fromkeys(name for task in found for name in task.fields)
        has = f"their fields are {', '.join(known)}" if known else "they have none"
        raise ConfigError(
            f"{part.name}: no task has a field {field!r} to cluster by; {has}.{did_you_mean(field, known)}"
        )
    return found


def _said_of(part: Part, groups: Sequence[Group]) -> dict[str, Any]:
    """What came of a part, and how it was played."""
    sampling = part.sampling(())
    return {
        **result_of(groups, success=part.env.success, cluster=part.env.cluster),
        "env": part.stage.env.model_dump(mode="json"),
        "agent": part.stage.agent.model_dump(mode="json"),
        "split": part.env.split,
        "weight": part.env.weight,
        "cluster": part.env.cluster,
        "samples": part.samples,
        "sampling": {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "max_tokens")},
    }


def _totals(
    parts: Sequence[Part], groups: Mapping[str, Sequence[Group]], envs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The suite's score, and counts over all of it."""
    weighed = [part for part in parts if part.env.weight]
    means = [mean_score(groups[part.name], part.env.cluster) for part in weighed]
    mean = means[0] if len(means) == 1 else suite_mean(means, [part.env.weight for part in weighed])
    counts = ("n_episodes", "unscored", "truncated", "played_again", "tokens")
    failures = sum((Counter(env["failures"]) for env in envs.values()), Counter[str]())
    totals = {name: sum(env[name] for env in envs.values()) for name in counts}
    return {**mean.as_dict(), **totals, "failures": dict(failures)}


def _tasks_hash(tasks: Sequence[Task]) -> str:
    return text_hash(" ".join(map(task_hash, tasks)))
