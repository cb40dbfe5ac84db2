"""`envgym eval`: a model's score on held-out tasks, with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from envgym.errors import ConfigError

from .failures import Invocation
from .parser import Parser, resolve_options


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "eval",
        "(--env E | --config FILE) --model M [key=value …]",
        "Measure a model on an environment's held-out tasks: mean score with a 95% interval, and what failed.",
        "envgym eval --env math_verify --model runs/first eval.tasks=512",
    )
    parser.add_argument("--env", metavar="E", help="environment: id, file.py[:Name], import path or URL")
    parser.add_argument("--model", metavar="M", help="Hugging Face folder or hub id, or a recipe that makes a model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml")
    options, words = parser.parse_with_words(arguments)
    if options.model is None:
        raise ConfigError("envgym eval needs --model, what is to be measured. See: envgym eval --help")
    config = resolve_options(options, words)
    invocation.debug |= config.debug

    from envgym.display import open_display
    from envgym.evaluation import evaluate_policy
    from envgym.report import aligned, evaluation_lines

    display = open_display(config)
    try:
        result = evaluate_policy(config, display)
    finally:
        display.close()
    print(aligned(evaluation_lines(result)))
    return 0
