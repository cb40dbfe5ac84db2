"""`envgym rollout`: roll out a model on tasks of an environment and write the episodes to a file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, MODEL, Parser, cli_settings, resolve_options

OF_TRAINING = {"tasks": "--tasks FIRST:LAST", "tasks_per_step": "--tasks FIRST:LAST", "group_size": "--samples N"}
"""Settings of a training step's rollout, and the options that replace them here."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Roll out a model on tasks of an environment and write the episodes to FILE (.jsonl or .parquet).
    To resume a rollout that was stopped or killed, repeat the command.

    usage: (--env E | --config FILE) --model M --out FILE [options] [key=value …]
    example: envgym rollout --env math_verify --model starter --tasks 0:100 --best-of 4 --out best.jsonl
    """
    parser = Parser("rollout", main)
    parser.add_argument("--env", **ENV)
    parser.add_argument("--model", **MODEL)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml")
    parser.add_argument("--out", metavar="FILE", help="file for the episodes, .jsonl or .parquet")
    parser.add_argument(
        "--split", choices=("train", "test"), default="train", help="split of the tasks (default: train)"
    )
    tasks, samples = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    tasks.add_argument("--tasks", type=_slice, metavar="FIRST:LAST", help="tasks FIRST to LAST - 1 (default: 0:512)")
    tasks.add_argument("--task", metavar="KEY", help="only this task, by its key")
    samples.add_argument("--samples", type=_count, metavar="N", default=1, help="episodes per task (default: 1)")
    samples.add_argument("--best-of", type=_count, metavar="N", help="sample N episodes per task and write the best")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE, also one of other settings")
    options, words = parser.parse_with_words(arguments)
    settings = cli_settings(options, words)
    if "model" not in settings or options.out is None:
        option = "out" if "model" in settings else "model"
        raise ConfigError(f"envgym rollout needs --{option}. See: envgym rollout --help")
    for name, option in OF_TRAINING.items():
        if any(word.startswith(f"rollout.{name}=") for word in words):
            raise ConfigError(f"rollout.{name} is a setting of training: envgym rollout takes {option}")
    config = resolve_options(options, words, invocation, samples_only=True)

    from envgym.evaluation.table import evaluation_text
    from envgym.jobs.parts import part_of_rollout
    from envgym.jobs.rollout import roll_out_to_file
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    samples, best, path = options.best_of or options.samples, options.best_of is not None, Path(options.out)
    part = part_of_rollout(config, options.split, **options.tasks or {}, key=options.task, samples=samples)
    with open_display() as display:
        display.begin(config.name, f"{part.stage.env.name}, {part.stage.model}")
        result, saved = roll_out_to_file(part, path, display, make_model, best=best, overwrite=options.overwrite)
    print(evaluation_text(result, path))
    n_empty = result["n_episodes"] // samples - len(saved) if best else 0
    suffix = f"; {n_empty} tasks have only failed ones" if n_empty else ""
    print(f"saved  {len(saved)} episodes{f', the best of {samples}' if best else ''}{suffix}")
    return 0


def _slice(text: str) -> dict[str, int | None]:
    """The first task and the number of tasks of FIRST:LAST."""
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"FIRST:LAST is expected, such as 0:100, not {text!r}")
    first, last = int(match[1] or 0), int(match[2]) if match[2] else None
    if last is not None and last <= first:
        raise argparse.ArgumentTypeError(f"{text} holds no task: LAST is not included")
    return {"first": first, "tasks": None if last is None else last - first}


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"a number of episodes is 1 or more, not {text!r}")
    return int(text)
