"""`envgym score`: re-score saved episodes with another environment or reward model, without sampling."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, Parser, cli_settings, resolve_options

if TYPE_CHECKING:
    from envgym.jobs.generations import GoldTasks


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Re-score the episodes in FILE (.jsonl, .parquet, a folder of them, an evaluation) with an environment;
    or score generations of any program: rows with a completion, a prompt and a reference, or the id of a task;
    or score the answers of recorded data, with its fields named by data.prompt=… and data.answer=….
    The environment is reset on each saved task and gets the recorded turns; nothing is sampled.
    To resume a command that was stopped or killed, repeat it.

    usage: FILE (--env E | --config FILE) [--out FILE] [key=value …]
    example: envgym score best.jsonl --env my_reward.py --out scored.parquet
    """
    parser = Parser("score", main)
    parser.add_argument("source", metavar="FILE", nargs="?", help="episodes, generations or recorded data")
    parser.add_argument("--env", **ENV)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--out", metavar="FILE", help="file for the scored episodes; default: FILE.scored.jsonl")
    for name in ("prompt", "reference", "completion"):
        parser.add_argument(f"--{name}", metavar="FIELD", help=f"field of the {name} in rows of generations")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE, also one of other settings")
    options, words = parser.parse_words_anywhere(arguments)
    source = options.source

    from envgym.config.words import component_mapping
    from envgym.registry import task_set_of
    from envgym.tasks.named_sets import PLACES

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
            elif task_set.data.keys().isdisjoint(PLACES):
                words.append(f"data.test_path={source}")  # its rows are nowhere else
    elif "data.path" not in keys and any(key.startswith("data.") for key in keys):
        words.append(f"data.path={source}")  # settings of its fields: FILE is recorded data
    config = resolve_options(options, words, invocation, samples_only=True)
    target = options.out or f"{source}.scored.jsonl"

    from envgym.evaluation.changes import changes_of
    from envgym.jobs.generations import GenerationFields
    from envgym.jobs.score import score_to_file
    from envgym.monitoring.report import aligned, duration
    from envgym.monitoring.terminal import open_display

    start, env = time.monotonic(), config.stages[-1].env.name
    with open_display() as display:
        fields = GenerationFields(options.prompt, options.reference, options.completion)
        earlier, new, gold = score_to_file(
            config, Path(source), Path(target), display, overwrite=options.overwrite, fields=fields
        )
    result = changes_of(earlier, new)
    lines = [("env", env), *_lines(result, _lines_of_references(gold, env))]
    print(aligned([*lines, ("time", duration(time.monotonic() - start)), ("file", target)]))
    return 0 if result["judged"] or not result["episodes"] else 1


def _lines(result: Mapping[str, Any], references: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    from envgym.monitoring.report import counts

    skipped = f"; {sum(result['skipped'].values())} failed earlier and are unchanged" if result["skipped"] else ""
    lines = [("judged", f"{result['judged']} of {result['episodes']} episodes{skipped}"), *references]
    for field in ("score", "reward"):
        earlier, new = (
            {name: _mean(part, field) for name, part in result[side].items()} for side in ("earlier", "new")
        )
        if earlier["all"] or new["all"]:
            changes = {name: "  ->  ".join(filter(None, (earlier[name], new[name] or "none"))) for name in new}
            is_partial = result["compared"] < result["judged"]
            coverage = f", of the {result['compared']} episodes that have both" if is_partial else ""
            lines.append((field, f"{changes.pop('all')}   95% intervals{coverage}"))
            lines += [(f"  {name}", change) for name, change in changes.items() if len(changes) > 1]
    if any(part["score"] is not None or "reward" in part for part in result["earlier"].values()):
        lines.append(("changed", f"{result['changed']} episodes"))
    if result["short"]:
        lines.append(("truncated", f"{result['short']} for which the environment wants more turns than were recorded"))
    if result["unused"]:
        lines.append(("ended early", f"{result['unused']} before their last recorded turn"))
    return [*lines, ("failed", counts(result["failures"]) or "0")]


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


def _mean(result: Mapping[str, Any], field: str) -> str | None:
    """The mean with its interval; None if there is none, or if rewards are the scores."""
    from envgym.monitoring.report import with_interval

    mean = result if field == "score" else result.get("reward", {"score": None})
    return None if mean["score"] is None else with_interval(mean)
