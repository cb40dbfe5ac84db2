"""Evaluating a policy on environments' tasks, by the runner that trains."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.config.missing import refusal
from envgym.disk import write_atomically
from envgym.env import EnvSpec
from envgym.errors import ConfigError, NameNotFound, did_you_mean
from envgym.hashing import task_hash, text_hash
from envgym.launch.memory import check_room
from envgym.launch.models import MakeModel, made_before
from envgym.processes import event_loop
from envgym.tasks.cursor import tasks_at
from envgym.types import Group, Task

from .folder import EvalFolder
from .inspect_log import write_inspect_logs
from .plan import Part, parts_of_env, parts_of_suite
from .play import ready_parts
from .result import doubt_of, mean_score, result_of
from .statistics import suite_mean
from .suite import Suite, find_suite, parts_of
from .table import csv_table

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


def new_evaluation(
    settings: Mapping[str, Any], *, suite: str | Suite | None = None, file: str | Path | None = None
) -> EvalFolder:
    """An evaluation on a suite or, without one, on the environment that `settings` name, with a folder of its own.

    `suite` is a `Suite`, or `NAME`, `NAME:SIZE` or a YAML file. Raises `EnvgymError` where it cannot be made.
    """
    if suite is None:
        parts = parts_of_env(settings, file=file)
        label = Path(parts[0].name.partition(":")[0]).stem or "remote"
    else:
        name, found, size = ("suite", suite, None) if isinstance(suite, Suite) else find_suite(suite)
        label = suite if isinstance(suite, str) else name
        try:
            parts = parts_of_suite(found, size, settings, file=file)
        except NameNotFound as error:
            raise refusal(f"suite {label}", parts_of(found, size), error) from None
    config, model = parts[0].config, Path(parts[0].stage.model).name
    own_name = "-".join([Path(label).name.replace(":", "-"), model, time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())])
    folder = EvalFolder(Path(config.evals_dir) / (config.name or own_name))
    number = 1
    while config.name is None and folder.path.exists():  # another one of this process and second
        number += 1
        folder = EvalFolder(Path(config.evals_dir) / f"{own_name}-{number}")
    folder.create(parts, None if suite is None else label)
    return folder


def run_evaluation(
    folder: EvalFolder, display: Display, *, retry_failed: bool = False, make_model: MakeModel = made_before
) -> dict[str, Any]:
    """Play what is not played yet, with `retry_failed` also what failed, and return what `result.json` then holds.

    Keys: status (`running`, `completed`), suite, model, engine, seed, began, ended, seconds, fingerprints (of the
    model, and envgym's version); the suite's score, ci95, stderr and n_tasks, by the weights; n_episodes, failures,
    unscored, truncated and tokens of all parts; and `envs`: each part's `result_of`, its env, agent, weight, samples,
    sampling and fingerprints.
    Raises `EnvgymError` where it cannot go on and `KeyboardInterrupt` at Ctrl-C; what ended is kept.
    """
    parts = folder.parts  # one that cannot be read is reported also where all is done
    stage = parts[0].stage
    display.begin(folder.config.name, f"{folder.suite or stage.env.name}, {stage.model}")
    with folder.locked():
        done = folder.read_result()
        if done is not None and done["status"] == "completed" and not retry_failed:
            return done
        with folder.playing():
            return event_loop.run(_run(folder, parts, retry_failed, display, make_model))


async def _run(
    folder: EvalFolder, parts: Sequence[Part], retry_failed: bool, display: Display, make_model: MakeModel
) -> dict[str, Any]:
    stage = parts[0].stage
    began = time.monotonic()
    folder.journal.open()
    folder.kept = folder.journal.played()
    if retry_failed:
        judged = folder.journal.judged()
        folder.kept = {key: episode for key, episode in folder.kept.items() if not judged[key].failed}
    result = folder.read_result() or {"began": _now(), "seconds": 0.0}
    groups: dict[str, list[Group]] = {}
    fingerprints: dict[str, dict[str, str]] = {}
    async with ready_parts(parts, tasks_of, folder, display, make_model) as ready:
        # Only now, as an engine or an API that does not start must not undo what there is.
        result |= {"status": "running", "model": stage.model, "seed": folder.config.seed, "suite": folder.suite}
        result["engine"] = {"kind": stage.engine.kind, "base_url": stage.engine.base_url}
        result["fingerprints"] = {"model": folder.model_hash, "envgym": version("envgym")}
        folder.write_result(result)
        if retry_failed:
            folder.write_journal(folder.kept.values())
        try:
            for number, each in enumerate(ready, 1):
                name, count = each.part.name, f" ({number} of {len(parts)})" if len(parts) > 1 else ""
                display.phase(f"evaluating {name}{count}")
                groups[name] = await each.play(folder, display)
                if doubt := doubt_of(each.spec, groups[name]):
                    display.note(doubt)
                tasks = text_hash(" ".join(map(task_hash, each.tasks)))
                fingerprints[name] = {**each.spec.fingerprint(), "tasks": tasks}
        finally:
            result["seconds"] += time.monotonic() - began
            result["ended"] = _now()
            folder.write_result(result)
    envs = {
        part.name: _part_result(part, groups[part.name]) | {"fingerprints": fingerprints[part.name]} for part in parts
    }
    result |= {"status": "completed", **_totals(parts, groups, envs), "envs": envs}
    write_atomically(folder.csv_file, csv_table(result))
    write_inspect_logs(folder.inspect, result, groups)
    folder.write_result(result)
    return result


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


async def tasks_of(part: Part, spec: EnvSpec) -> list[Task]:
    """The tasks a part plays: the first of its split. Raises `ConfigError` where there are none, or no end to them."""
    tasks, wanted = spec.tasks(part.env.split), part.env.tasks
    if wanted is None and tasks.size is None:
        raise ConfigError(f"{part.name} has tasks without end: say how many in the suite (tasks), or eval.tasks=N")
    count = min(size for size in (wanted, tasks.size) if size is not None)
    if not count:
        raise ConfigError(f"{part.name} has no tasks in the split {part.env.split!r}")
    check_room(f"{part.name}: an evaluation", count, part.samples)
    found = await tasks_at(tasks, range(count))
    field = part.env.cluster
    if field is not None and not any(field in task.fields for task in found):
        known = dict.fromkeys(name for task in found for name in task.fields)
        has = f"their fields are {', '.join(known)}" if known else "they have none"
        raise ConfigError(
            f"{part.name}: no task has a field {field!r} to cluster by; {has}.{did_you_mean(field, known)}"
        )
    return found


def _part_result(part: Part, groups: Sequence[Group]) -> dict[str, Any]:
    """Result of a part, and how it was played."""
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
