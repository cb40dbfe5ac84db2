"""`envgym eval`: a model's score on held-out tasks, with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from envgym.errors import ConfigError

from .failures import Invocation
from .parser import Parser, resolve_options


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "eval",
        "--env E --model M [key=value …]",
        "Measure a model on an environment's held-out tasks: mean score with a 95% interval, and what failed.",
        "envgym eval --env math_verify --model runs/first/model eval.tasks=512",
    )
    parser.add_argument("--env", metavar="E", help="environment: id, file.py[:Name], import path or URL")
    parser.add_argument("--model", metavar="M", help="Hugging Face folder or hub id, or a recipe that makes a model")
    options, words = parser.parse_with_words(arguments)
    for option in ("env", "model"):
        if getattr(options, option) is None and not any(word.startswith(f"{option}=") for word in words):
            raise ConfigError(f"envgym eval needs --{option}. See: envgym eval --help")
    config = resolve_options(options, words)
    invocation.debug |= config.debug

    from envgym.display import open_display
    from envgym.evaluate import evaluate_policy
    from envgym.report import evaluation_lines

    display = open_display()
    try:
        result = evaluate_policy(config, display)
    finally:
        display.close()
    print("\n".join(evaluation_lines(result)))
    return 0
