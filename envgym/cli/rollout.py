"""`envgym rollout`: roll out a model on tasks of an environment and write the episodes to a file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, MODEL, Parser, cli_settings, resolve_options

if TYPE_CHECKING:
    from envgym.evaluation.generate import Selection

OF_TRAINING = {"tasks": "--tasks FIRST:LAST", "tasks_per_step": "--tasks FIRST:LAST", "group_size": "--samples N"}
"""Settings of a training step's rollout, and the options that replace them here."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Roll out a model on tasks of an environment and write the episodes to FILE (.jsonl or .parquet).
    To resume a rollout that was stopped or killed, repeat the command.

    usage: (--env E | --config FILE) --model M --out FILE [options] [key=value …]
    example: envgym rollout --env math_verify --model starter --tasks 0:100 --best-of 4 --out best.jsonl
    """
    parser = Parser.from_docstring("rollout", main)
    parser.add_argument("--env", **ENV)
    parser.add_argument("--model", **MODEL)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml")
    parser.add_argument("--out", metavar="FILE", help="file for the episodes, .jsonl or .parquet")
    parser.add_argument("--split", metavar="train|test", default="train", help="split of the tasks (default: train)")
    parser.add_argument("--tasks", metavar="FIRST:LAST", help="tasks FIRST to LAST - 1 (default: 0:512)")
    parser.add_argument("--task", metavar="KEY", help="only this task, by its key")
    parser.add_argument("--samples", metavar="N", help="episodes per task (default: 1)")
    parser.add_argument("--best-of", metavar="N", help="sample N episodes per task and write the best")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE, also one of other settings")
    options, words = parser.parse_with_words(arguments)
    for name in ("model", "out"):
        if getattr(options, name) is None and (name == "out" or "model" not in cli_settings(options, words)):
            raise ConfigError(f"envgym rollout needs --{name}. See: envgym rollout --help")
    for name, option in OF_TRAINING.items():
        if any(word.startswith(f"rollout.{name}=") for word in words):
            raise ConfigError(f"rollout.{name} is a setting of training: envgym rollout takes {option}")
    selection = _selection(options)
    config = resolve_options(options, words, invocation, samples_only=True)

    from envgym.config.resolve import set_sampled_model
    from envgym.evaluation.generate import collect
    from envgym.monitoring.report import aligned
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    set_sampled_model(config, cli_settings(options, words))
    with open_display() as display:
        display.begin(config.name, f"{config.stages[-1].env.name}, {config.stages[-1].model}")
        path, overwrite = Path(options.out), options.overwrite
        result = collect(config, selection, path, display, overwrite=overwrite, make_model=make_model)
    print(aligned(_lines(result, selection, options.out)))
    return 0


def _selection(options: argparse.Namespace) -> Selection:
    from envgym.evaluation.generate import Selection

    if options.split not in ("train", "test"):
        raise ConfigError(f"--split is train or test, not {options.split!r}")
    if options.samples is not None and options.best_of is not None:
        raise ConfigError("--best-of N samples N episodes per task and writes one: leave out --samples")
    first, last = None, None
    if options.tasks is not None and options.task is not None:
        raise ConfigError("--task KEY selects one task: leave out --tasks")
    if options.tasks is not None:
        slice_ = re.fullmatch(r"(\d*):(\d*)", options.tasks)
        if slice_ is None:
            raise ConfigError(f"--tasks is FIRST:LAST, such as 0:100, not {options.tasks!r}")
        first, last = int(slice_[1] or 0), int(slice_[2]) if slice_[2] else None
        if last is not None and last <= first:
            raise ConfigError(f"--tasks {options.tasks} holds no task: LAST is not included")
    name = "--samples" if options.best_of is None else "--best-of"
    number = options.samples if options.best_of is None else options.best_of
    if number is not None and not re.fullmatch(r"0*[1-9]\d*", number):
        raise ConfigError(f"{name} is a number of episodes, 1 or more, not {number!r}")
    return Selection(options.split, first, last, int(number or 1), options.best_of is not None, options.task)


def _lines(result: Mapping[str, Any], selection: Selection, file: str) -> list[tuple[str, str]]:
    from envgym.monitoring.report import counts, duration, score

    interval = "   95% interval" if result["score"] is not None else ""
    tasks = f"{result['tasks']} of {result['split']}, {result['episodes']} episodes"
    lines = [
        ("env", result["env"]),
        ("model", result["model"]),
        ("tasks", tasks),
        ("score", f"{score(result)}{interval}"),
        ("truncated", str(result["truncated"])),
        ("failed", counts(result["failures"]) or "0"),
    ]
    if selection.best:
        suffix = f"; {result['empty']} tasks have only failed ones" if result["empty"] else ""
        lines.append(("kept", f"{result['written']} episodes, the best of {selection.samples}{suffix}"))
    time = f"{duration(result['seconds'])}, {result['tokens']:,} tokens sampled"
    return [*lines, ("time", time), ("file", file)]
