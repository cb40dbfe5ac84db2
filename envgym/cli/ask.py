"""`envgym ask`: a model's answer to one question."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from envgym.env.rewards import reward
from envgym.errors import ConfigError, RunError, WorkerError, printable, reported_as

from .errors import Invocation
from .parser import MODEL, Parser, cli_settings, resolve_options
from .show import content_of


@reward
def question(completion: str) -> None:
    """One question, whose answer gets no reward."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Ask a model one question and print its answer. Everything else is printed to standard error.

    usage: QUESTION --model M [--config FILE] [key=value …]
    example: envgym ask "What is 3 + 4?" --model runs/first rollout.temperature=0
    """
    parser = Parser("ask", main)
    parser.add_argument("question", metavar="QUESTION", help="the question; - reads it from standard input")
    parser.add_argument("--model", **MODEL)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, such as a run's config.yaml")
    options, words = parser.parse_words_anywhere(arguments)
    if "model" not in cli_settings(options, words):
        raise ConfigError("envgym ask needs --model. See: envgym ask --help")
    with reported_as(ConfigError, "the question is not text in UTF-8", cause=UnicodeError):
        text = sys.stdin.read().removesuffix("\n") if options.question == "-" else options.question
        text.encode()
    if not text.strip():
        raise ConfigError("the question is empty")

    from envgym.jobs.parts import part_of_rollout
    from envgym.jobs.rollout import roll_out_to_file
    from envgym.monitoring.terminal import open_display
    from envgym.training.new_model import make_model

    folder = Path(tempfile.mkdtemp(prefix="envgym-ask-"))
    try:
        (folder / "question.jsonl").write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
        words = [f"env={__name__}:question", *words, "data.path=null", f"data.test_path={folder / 'question.jsonl'}"]
        config = resolve_options(options, words, invocation, samples_only=True)
        with redirect_stdout(sys.stderr), open_display() as display:
            part = part_of_rollout(config, "test")
            _, [episode] = roll_out_to_file(part, folder / "answer.jsonl", display, make_model)
    finally:
        if not isinstance(sys.exception(), WorkerError):  # it names a log file in the folder
            shutil.rmtree(folder, ignore_errors=True)
    if episode.failed:
        raise RunError(f"no answer: {episode.outcome.reason}: {episode.outcome.message}")
    print(printable("\n".join(content_of(episode.messages[-1]))))
    if episode.outcome.reason:
        print(f"envgym: the answer is {episode.outcome.status.value} ({episode.outcome.reason})", file=sys.stderr)
    return 0
