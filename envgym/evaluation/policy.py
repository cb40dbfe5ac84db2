"""Evaluation of a policy on environments' tasks, with the runner of training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.missing import missing_part_error
from envgym.disk import unused_folder, write_atomically
from envgym.env import EnvSpec
from envgym.episodes.journal import episode_line
from envgym.errors import ConfigError, NameNotFound, did_you_mean, needs
from envgym.hashing import task_hash, text_hash
from envgym.launch.memory import check_episode_memory
from envgym.launch.models import MakeModel, cached_recipe_model
from envgym.loading import short_name
from envgym.processes import event_loop
from envgym.tasks.cursor import tasks_at
from envgym.types import Group, Task

from .folder import EvalFolder
from .plan import Part, parts_of_env, parts_of_suite
from .play import running_parts
from .result import mean_score, result_of, score_warning
from .statistics import suite_mean
from .suite import Suite, find_suite, parts_of
from .table import csv_table

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


def new_evaluation(
    settings: Mapping[str, Any], *, suite: str | Suite | None = None, file: str | Path | None = None
) -> EvalFolder:
    """A new evaluation, with its folder, on a suite or, without one, on the environment in `settings`.

    `suite` is a `Suite`, or `NAME`, `NAME:SIZE` or a YAML file. Raises `EnvgymError` if it cannot be created.
    """
    if suite is None:
        parts = parts_of_env(settings, file=file)
        label = short_name(parts[0].name) or "remote"
    else:
        name, definition, size = ("suite", suite, None) if isinstance(suite, Suite) else find_suite(suite)
        label = suite if isinstance(suite, str) else name
        try:
            parts = parts_of_suite(definition, size, settings, file=file)
        except NameNotFound as error:
            raise missing_part_error(f"suite {label}", parts_of(definition, size), error) from None
    config, model = parts[0].config, Path(parts[0].stage.model).name
    if parts[0].stage.eval.inspect_logs:
        with needs("inspect_ai", "inspect", "eval.inspect_logs"):
            import envgym.evaluation.inspect_log  # noqa: F401
    parent = Path(config.evals_dir)
    path = parent / config.name if config.name else unused_folder(parent, Path(label).name.replace(":", "-"), model)
    folder = EvalFolder(path)
    folder.create(parts, None if suite is None else label)
    return folder


def run_evaluation(
    folder: EvalFolder, display: Display, *, retry_failed: bool = False, make_model: MakeModel = cached_recipe_model
) -> dict[str, Any]:
    """Run the missing episodes, with `retry_failed` also the failed ones, and return the content of `result.json`.

    Keys: status (`running`, `completed`), suite, model, engine, seed, began, ended, seconds, fingerprints (of the
    model, and envgym's version); the suite's weighted score, ci95, stderr and n_tasks; n_episodes, failures, unscored,
    truncated and tokens of all parts; and `envs`: each part's `result_of`, env, agent, weight, samples, sampling,
    settings (the environment's, its data included) and fingerprints. Raises `EnvgymError` if it cannot continue and
    `KeyboardInterrupt` on Ctrl-C; finished episodes stay in the folder.
    """
    parts = folder.parts  # read first, so that a damaged file is reported even if the evaluation is complete
    stage = parts[0].stage
    display.begin(folder.config.name, f"{folder.suite or stage.env.name}, {stage.model}")
    with folder.lock():
        result = folder.read_result()
        if result is not None and result["status"] == "completed" and not retry_failed:
            return result
        with folder.recover():
            return event_loop.run(_run(folder, parts, retry_failed, display, make_model))


async def _run(
    folder: EvalFolder, parts: Sequence[Part], retry_failed: bool, display: Display, make_model: MakeModel
) -> dict[str, Any]:
    """Run the missing episodes of all parts and write the results. An interrupted run leaves a result of status
    `running`."""
    stage = parts[0].stage
    start = time.monotonic()
    folder.journal.open()
    folder.saved = folder.journal.originals()
    if retry_failed:
        episodes = folder.journal.latest()
        folder.saved = {key: episode for key, episode in folder.saved.items() if not episodes[key].failed}
    result = folder.read_result() or {"began": _timestamp(), "seconds": 0.0}
    groups: dict[str, list[Group]] = {}
    described: dict[str, dict[str, Any]] = {}
    async with running_parts(parts, tasks_of, folder, display, make_model) as runs:
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
                display.phase(f"evaluating {name}{count}")
                groups[name] = await run.run_episodes(folder, display)
                if run.part.env.weight and (warning := score_warning(run.spec, groups[name])):
                    display.note(warning)
                tasks = text_hash(" ".join(map(task_hash, run.tasks)))
                settings = run.spec.config.model_dump(mode="json", exclude_unset=True)
                described[name] = {"settings": settings, "fingerprints": {**run.spec.fingerprint(), "tasks": tasks}}
        finally:
            result["seconds"] += time.monotonic() - start
            result["ended"] = _timestamp()
            folder.write_result(result)
    envs = {part.name: _part_result(part, groups[part.name]) | described[part.name] for part in parts}
    result |= {"status": "completed", **_totals(parts, groups, envs), "envs": envs}
    write_atomically(folder.csv_file, csv_table(result))
    folder.write_result(result)
    if stage.eval.inspect_logs:
        with needs("inspect_ai", "inspect", "eval.inspect_logs"):
            from .inspect_log import write_inspect_logs
        await write_inspect_logs(folder.inspect_folder, result, groups)
    return result


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


async def tasks_of(part: Part, spec: EnvSpec) -> list[Task]:
    """The first tasks of a part's split. Raises `ConfigError` if there are none, or no end to them."""
    tasks, limit = spec.tasks(part.env.split), part.env.tasks
    if limit is None and tasks.size is None:
        raise ConfigError(f"{part.name} has tasks without end: give their number in the suite (tasks), or eval.tasks=N")
    count = min(size for size in (limit, tasks.size) if size is not None)
    if not count:
        raise ConfigError(f"{part.name} has no tasks in the split {part.env.split!r}")
    check_episode_memory(f"{part.name}: an evaluation", count, part.samples)
    first_tasks = await tasks_at(tasks, range(count))
    field = part.env.cluster
    if field is not None and not any(field in task.fields for task in first_tasks):
        fields = dict.fromkeys(name for task in first_tasks for name in task.fields)
        hint = f"their fields are {', '.join(fields)}" if fields else "they have none"
        raise ConfigError(
            f"{part.name}: no task has a field {field!r} to cluster by; {hint}.{did_you_mean(field, fields)}"
        )
    return first_tasks


def _part_result(part: Part, groups: Sequence[Group]) -> dict[str, Any]:
    """Result of a part, with its settings."""
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
    """The suite's score, and counts over all parts."""
    weighed = [part for part in parts if part.env.weight]
    means = [mean_score(groups[part.name], part.env.cluster) for part in weighed]
    mean = means[0] if len(means) == 1 else suite_mean(means, [part.env.weight for part in weighed])
    counts = ("n_episodes", "unscored", "truncated", "played_again", "tokens")
    failures = sum((Counter(env["failures"]) for env in envs.values()), Counter[str]())
    totals = {name: sum(env[name] for env in envs.values()) for name in counts}
    return {**mean.as_dict(), **totals, "failures": dict(failures)}
