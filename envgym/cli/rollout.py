"""`envgym rollout`: play tasks of an environment with a model and write the episodes to a file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, Parser, given_settings, resolve_options

if TYPE_CHECKING:
    from envgym.evaluation.generate import Selection

OF_TRAINING = {"tasks": "--tasks FIRST:LAST", "group_size": "--samples N"}
"""Settings that say how a step of training plays, and what says it here."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "rollout",
        "(--env E | --config FILE) --model M --out FILE [options] [key=value …]",
        "Play tasks of an environment with a model and write the episodes to FILE (.jsonl or .parquet).\n"
        "A rollout that was stopped or killed goes on where it was when the same command is given again.",
        "envgym rollout --env math_verify --model starter --tasks 0:100 --best-of 4 --out best.jsonl",
    )
    parser.add_argument("--env", **ENV)
    parser.add_argument("--model", metavar="M", help="Hugging Face folder or hub id, or a recipe that makes a model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml")
    parser.add_argument("--out", metavar="FILE", help="where the episodes go: a .jsonl or .parquet file")
    parser.add_argument("--split", metavar="train|test", default="train", help="which tasks (default: train)")
    parser.add_argument("--tasks", metavar="FIRST:LAST", help="tasks FIRST to before LAST (default: the first 512)")
    parser.add_argument("--task", metavar="KEY", help="this task alone, by its key")
    parser.add_argument("--samples", metavar="N", help="episodes of each task (default: 1)")
    parser.add_argument("--best-of", metavar="N", help="play N episodes of each task and keep the best")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE, and what was kept of other settings")
    options, words = parser.parse_with_words(arguments)
    for name in ("model", "out"):
        if getattr(options, name) is None:
            raise ConfigError(f"envgym rollout needs --{name}. See: envgym rollout --help")
    for name, instead in OF_TRAINING.items():
        if any(word.startswith(f"rollout.{name}=") for word in words):
            raise ConfigError(f"rollout.{name} is a setting of training: envgym rollout takes {instead}")
    selection = _selection(options)
    config = resolve_options(options, words, invocation)

    from envgym.config.resolve import set_sampled_model
    from envgym.evaluation.generate import collect
    from envgym.monitoring.report import aligned
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    set_sampled_model(config, given_settings(options, words))
    with open_display() as display:
        display.begin(config.name, f"{config.stages[-1].env.name}, {config.stages[-1].model}")
        result = collect(
            config, selection, Path(options.out), display, overwrite=options.overwrite, make_model=make_model
        )
    print(aligned(_lines(result, selection, options.out)))
    return 0


def _selection(options: argparse.Namespace) -> Selection:
    from envgym.evaluation.generate import Selection

    if options.split not in ("train", "test"):
        raise ConfigError(f"--split is train or test, not {options.split!r}")
    if options.samples is not None and options.best_of is not None:
        raise ConfigError("--best-of N plays N episodes of each task and keeps one: leave out --samples")
    first, last = None, None
    if options.tasks is not None and options.task is not None:
        raise ConfigError("--task KEY plays one task: leave out --tasks")
    if options.tasks is not None:
        slice_ = re.fullmatch(r"(\d*):(\d*)", options.tasks)
        if slice_ is None:
            raise ConfigError(f"--tasks is FIRST:LAST, such as 0:100, not {options.tasks!r}")
        first, last = int(slice_[1] or 0), int(slice_[2]) if slice_[2] else None
        if last is not None and last <= first:
            raise ConfigError(f"--tasks {options.tasks} holds no task: LAST is the first that is not played")
    name = "--samples" if options.best_of is None else "--best-of"
    number = options.samples if options.best_of is None else options.best_of
    if number is not None and not re.fullmatch(r"0*[1-9]\d*", number):
        raise ConfigError(f"{name} is a number of episodes, 1 or more, not {number!r}")
    return Selection(options.split, first, last, int(number or 1), options.best_of is not None, options.task)


def _lines(result: Mapping[str, Any], selection: Selection, out: str) -> list[tuple[str, str]]:
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
        none = f"; {result['empty']} tasks have none that did not fail" if result["empty"] else ""
        lines.append(("kept", f"{result['written']} episodes, the best of {selection.samples}{none}"))
    time = f"{duration(result['seconds'])}, {result['tokens']:,} tokens sampled"
    return [*lines, ("time", time), ("file", out)]
