"""`envgym eval`: a model's scores on a suite of environments or on one, with their intervals."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, MODEL, Parser, cli_settings, default_of

if TYPE_CHECKING:
    from envgym.jobs.folder import JobFolder


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Measure a model on a suite of environments, or on one: mean scores with 95% intervals, and failures.

    usage: (--suite S | --env E | --config FILE) --model M [key=value …]
    example: envgym eval --suite smoke --model runs/first
    """
    parser = Parser("eval", main)
    parser.add_argument("--suite", metavar="S", help="suite: a name or a YAML file, with :SIZE if it has sizes")
    parser.add_argument("--env", **ENV)
    parser.add_argument("--model", **MODEL)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml")
    parser.add_argument("--name", metavar="NAME", help="name of the evaluation's folder")
    parser.add_argument("--resume", metavar="NAME", help="resume an interrupted evaluation")
    parser.add_argument("--retry-failed", action="store_true", help="with --resume: rerun failed episodes")
    options, words = parser.parse_with_words(arguments)

    from envgym.evaluation.table import evaluation_text
    from envgym.jobs.evaluation import run_evaluation
    from envgym.monitoring.report import tasks_behind
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    evaluation = _resumed_folder(options, words) if options.resume else _new_folder(options, words)
    invocation.debug |= evaluation.config.debug
    invocation.folder = evaluation.path
    with open_display() as display:
        result = run_evaluation(evaluation, display, make_model, retry_failed=options.retry_failed)
    print(evaluation_text(result, evaluation.path))
    if result["score"] is None and not any(tasks_behind(env) for env in result["envs"].values()):
        raise ConfigError(f"no episode was scored; why each failed is in {evaluation.journal.path}")
    return 0


def _new_folder(options: argparse.Namespace, words: Sequence[str]) -> JobFolder:
    if options.retry_failed:
        raise ConfigError("--retry-failed goes with --resume NAME")
    settings = cli_settings(options, words)
    if "model" not in settings:
        raise ConfigError("envgym eval needs --model, the model to measure. See: envgym eval --help")
    if options.suite and "env" in settings:
        raise ConfigError("a suite names its environments: give either --suite or --env")
    from envgym.jobs.evaluation import new_evaluation

    return new_evaluation(settings, suite=options.suite, file=options.config)


def _resumed_folder(options: argparse.Namespace, words: Sequence[str]) -> JobFolder:
    from envgym.config.words import parse_overrides
    from envgym.jobs.folder import find_folder

    if any((options.suite, options.env, options.model, options.config, options.name)):
        raise ConfigError("a resumed evaluation uses its saved settings: --resume NAME takes no other option")
    settings = parse_overrides(words)
    evals_dir = settings.pop("evals_dir", default_of("evals_dir"))
    if settings:
        raise ConfigError(f"a resumed evaluation uses its saved settings: {next(iter(settings))!r} cannot change")
    return find_folder(options.resume, evals_dir)
