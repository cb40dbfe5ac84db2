"""`envgym score`: re-score saved episodes with another environment or reward model, without sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, OF_RUN, Parser, cli_settings, resolve_options

if TYPE_CHECKING:
    from envgym.evaluation.generations import GoldTasks
    from envgym.evaluation.rescore import Change
    from envgym.evaluation.statistics import Mean


VALUED = ("--config", "--out", "--prompt", "--reference", "--completion", *(f"--{name}" for name in OF_RUN))
"""Options with a value."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Re-score the episodes in FILE (.jsonl, .parquet, a folder of them, an evaluation) with an environment;
    or score generations of any program: rows with a completion, a prompt and a reference, or the id of a task;
    or score the answers of recorded data, with its fields named by data.prompt=… and data.answer=….
    The environment is reset on each saved task and gets the recorded turns; nothing is sampled.
    To resume a command that was stopped or killed, repeat it.

    usage: FILE (--env E | --config FILE) [--out FILE] [key=value …]
    example: envgym score best.jsonl --env my_reward.py --out scored.parquet
    """
    # FILE is no key=value word, so it is removed before the words are parsed.
    parser = Parser.from_docstring("score", main)
    parser.add_argument("--env", **ENV)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--out", metavar="FILE", help="file for the scored episodes; default: FILE.scored.jsonl")
    for name in ("prompt", "reference", "completion"):
        parser.add_argument(f"--{name}", metavar="FIELD", help=f"field of the {name} in rows of generations")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE, also one of other settings")
    source, arguments = _take_source(arguments)
    options, words = parser.parse_with_words(arguments)

    from envgym.config.words import component_mapping
    from envgym.registry import task_set_of

    if source is None:
        raise ConfigError("which episodes? Give a file or a folder of them. See: envgym score --help")
    env = component_mapping(cli_settings(options, words).get("env", {})).get("name")
    if env is None and options.config is None:
        raise ConfigError("envgym score needs --env, the environment that scores. See: envgym score --help")
    keys = {word.partition("=")[0] for word in words}
    task_set = task_set_of(env) if env else None
    if task_set is not None:
        if not any(key.startswith("data.") for key in keys):
            files = task_set.files(Path(source).parent)
            if files and str(Path(source)) not in files.values():
                words.append(f"data.folder={Path(source).parent}")  # the file lies beside them
            elif task_set.hub is None:
                words.append(f"data.test_path={source}")  # its rows are nowhere else
    elif "data.path" not in keys and any(key.startswith("data.") for key in keys):
        words.append(f"data.path={source}")  # settings of its fields: FILE is recorded data
    config = resolve_options(options, words, invocation, samples_only=True)
    target = options.out or f"{source}.scored.jsonl"

    from envgym.evaluation.generations import GenerationFields
    from envgym.evaluation.rescore import rescore
    from envgym.monitoring.report import aligned
    from envgym.monitoring.terminal import open_display

    with open_display() as display:
        fields = GenerationFields(options.prompt, options.reference, options.completion)
        result = rescore(config, Path(source), Path(target), display, overwrite=options.overwrite, fields=fields)
    print(aligned(_lines(result, target)))
    return 0 if result["judged"] or not result["episodes"] else 1


def _take_source(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """FILE, wherever it stands among the arguments, and the other arguments."""
    words = list(arguments)
    for index, word in enumerate(words):
        is_value = index > 0 and words[index - 1] in VALUED
        if not is_value and not word.startswith("-") and "=" not in word:
            return word, words[:index] + words[index + 1 :]
    return None, words


def _lines(result: Mapping[str, Any], file: str) -> list[tuple[str, str]]:
    from envgym.monitoring.report import counts, duration

    skipped = f"; {sum(result['skipped'].values())} failed earlier and are unchanged" if result["skipped"] else ""
    lines = [("env", result["env"]), ("judged", f"{result['judged']} of {result['episodes']} episodes{skipped}")]
    lines += _lines_of_references(result["gold"], result["env"])
    numbers = [number for number in ("score", "reward") if result[number].earlier or result[number].new]
    for number in numbers:
        change = result[number]
        is_partial = 0 < change.episodes < result["judged"]
        coverage = f", of the {change.episodes} episodes that have both" if is_partial else ""
        lines.append((number, f"{_change(change)}   95% intervals{coverage}"))
        if number == numbers[0]:
            lines += [(f"  {name}", _change(part[number])) for name, part in result["parts"].items()]
    if any(result[number].earlier for number in ("score", "reward")):
        lines.append(("changed", f"{result['changed']} episodes"))
    if result["short"]:
        lines.append(("truncated", f"{result['short']} for which the environment wants more turns than were recorded"))
    if result["unused"]:
        lines.append(("ended early", f"{result['unused']} before their last recorded turn"))
    lines += [("failed", counts(result["failures"]) or "0"), ("time", duration(result["seconds"])), ("file", file)]
    return lines


def _lines_of_references(gold: GoldTasks | None, env: str) -> list[tuple[str, str]]:
    """Whose references graded the answers to a named task set; no lines for any other environment."""
    from envgym.registry import task_set_of

    if task_set_of(env) is None:
        return []
    if gold is None:
        return [("references", f"the file's own, not compared with {env}: data.folder=DIR holds the files of {env}")]
    lines = [("coverage", f"{gold.covered} of {len(gold.tasks['test']):,} held-out tasks of {env}")]
    if gold.differing or gold.unmatched:
        differing = f"{gold.differing} rows have another reference than {env}, whose own was used"
        lines.append(("references", f"{differing}; {gold.unmatched} rows are none of its tasks, theirs was used"))
    return lines


def _change(change: Change) -> str:
    return _mean(change.new) if change.earlier is None else f"{_mean(change.earlier)}  ->  {_mean(change.new)}"


def _mean(mean: Mean | None) -> str:
    return "none" if mean is None else f"{mean.score:.3f} [{mean.low:.3f}, {mean.high:.3f}]"
