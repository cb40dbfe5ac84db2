"""Evaluations of a policy, for `envgym eval`: jobs with tables and logs of their results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.disk import unused_folder, write_atomically
from envgym.errors import RunError, needs
from envgym.evaluation.suite import Suite, find_suite
from envgym.evaluation.table import csv_table
from envgym.loading import short_name
from envgym.processes import event_loop

from .folder import JobFolder
from .job import run_job
from .models import MakeModel
from .parts import parts_of_env, parts_of_suite

if TYPE_CHECKING:
    from envgym.monitoring.display import Display


def new_evaluation(
    settings: Mapping[str, Any], *, suite: str | Suite | None = None, file: str | Path | None = None
) -> JobFolder:
    """A new evaluation, with its folder, on a suite or, without one, on the environment in `settings`.

    `suite` is a `Suite`, or `NAME`, `NAME:SIZE` or a YAML file. Raises `EnvgymError` if it cannot be created.
    """
    if suite is None:
        parts = parts_of_env(settings, file=file)
        label = short_name(parts[0].name) or "remote"
    else:
        name, definition, size = ("suite", suite, None) if isinstance(suite, Suite) else find_suite(suite)
        label = suite if isinstance(suite, str) else name
        parts = parts_of_suite(definition, size, settings, file=file)
    config, model = parts[0].config, Path(parts[0].stage.model).name
    parent = Path(config.evals_dir)
    path = parent / config.name if config.name else unused_folder(parent, Path(label).name.replace(":", "-"), model)
    if path.exists():
        raise RunError(f"evaluation folder {path} exists: choose another --name, or resume with --resume {path.name}")
    folder = JobFolder(path)
    folder.create(parts, None if suite is None else label)
    return folder


def run_evaluation(
    folder: JobFolder, display: Display, make_model: MakeModel, *, retry_failed: bool = False
) -> dict[str, Any]:
    """Run the missing episodes, with `retry_failed` also the failed ones, and return the content of `result.json`.

    Keys: status (`running`, `completed`), suite, model, engine, seed, began, ended, seconds, fingerprints (of the
    model, and envgym's version); the suite's weighted score, ci95, stderr and n_tasks; n_episodes, failures, unscored,
    truncated and tokens of all parts; and `envs`: each part's `result_of`, env, agent, weight, samples, sampling,
    settings (the environment's, its data included) and fingerprints. Raises `EnvgymError` if it cannot continue and
    `KeyboardInterrupt` on Ctrl-C; finished episodes stay in the folder.
    """
    stage = folder.config.stages[-1]  # read first, so that a damaged file is reported even if it is complete
    display.begin(folder.config.name, f"{folder.suite or stage.env.name}, {stage.model}")
    result = folder.read_result()
    if result is not None and result["status"] == "completed" and not retry_failed:
        return result
    with folder.open():
        if stage.eval.inspect_logs:
            with needs("inspect_ai", "inspect", "eval.inspect_logs"):
                from envgym.evaluation.inspect_log import write_inspect_logs
        result, groups = event_loop.run(run_job(folder, display, make_model, retry_failed=retry_failed))
        write_atomically(folder.path / "result.csv", csv_table(result))
        folder.write_result(result)
        if stage.eval.inspect_logs:
            event_loop.run(write_inspect_logs(folder.path / "inspect", result, groups))
    return result
