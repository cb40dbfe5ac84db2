"""`envgym train`: run a recipe on an environment, or resume a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import Invocation
from .parser import Parser, add_run_options, cli_settings, default_of, resolve_options

if TYPE_CHECKING:
    from envgym.config.schema import RunConfig


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Train a policy. Settings are key=value words, dotted for nested ones; envgym config prints them all.

    usage: [--env E] [--model M] [options] [key=value …]
    example: envgym train --env math_verify steps=50 learner.lr=1e-4
      envgym train --resume runs/first
    """
    parser = Parser("train", main)
    add_run_options(parser)
    parser.add_argument("--resume", metavar="RUN", help="resume this run with its saved settings; steps=N extends it")
    parser.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN",
        help="begin a new run with the weights, optimizers and settings of this run, or of one of its checkpoints",
    )
    options, words = parser.parse_with_words(arguments)
    resumes = options.resume is not None
    read = _resumed_config if resumes else _derived_config if options.from_run else resolve_options
    config = read(options, words, invocation)

    from envgym.monitoring.terminal import open_display
    from envgym.training.run import train

    try:
        with open_display() as display:
            train(config, resume=resumes, display=display)
    finally:
        if config.name is not None:
            invocation.folder = Path(config.runs_dir, config.name)
    return 0


def _resumed_config(options: argparse.Namespace, words: Sequence[str], invocation: Invocation) -> RunConfig:
    """The saved settings, with the changes that are allowed."""
    from envgym.training.resume import check_changes, resume_config

    names = [
        f"--{name.removesuffix('_run')}"
        for name, value in vars(options).items()
        if value is not None and name != "resume"
    ]
    check_changes([*names, *dict.fromkeys(word.partition("=")[0] for word in words)])
    changes = cli_settings(options, words)
    debug, runs_dir = changes.pop("debug", False), str(changes.pop("runs_dir", default_of("runs_dir")))
    config = resume_config(options.resume, runs_dir, changes)
    invocation.debug |= config.debug or debug is True
    return config.model_copy(update={"debug": invocation.debug})


def _derived_config(options: argparse.Namespace, words: Sequence[str], invocation: Invocation) -> RunConfig:
    """The settings of another run, with any changes."""
    from envgym.errors import ConfigError
    from envgym.training.resume import derived_config

    if layers := [f"--{name}" for name in ("recipe", "config") if getattr(options, name) is not None]:
        raise ConfigError(f"--from has the settings of its run: leave out {' and '.join(layers)}")
    changes = cli_settings(options, words)
    config = derived_config(options.from_run, str(changes.get("runs_dir", default_of("runs_dir"))), changes)
    invocation.debug |= config.debug
    return config
