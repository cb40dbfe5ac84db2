"""`envgym score`: judge saved episodes again by another environment or reward model, without sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import ENV, Parser, resolve_options

if TYPE_CHECKING:
    from envgym.evaluation.rescore import Change
    from envgym.evaluation.statistics import Mean


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    # What the files are called is no key=value word, so that it is taken off before those are looked at.
    parser = Parser(
        "score",
        "FILE (--env E | --config FILE) --out FILE [key=value …]",
        "Judge the episodes in FILE (.jsonl, .parquet, a folder of them, an evaluation) again, by an environment;\n"
        "or the answers of recorded data, whose fields are named by data.prompt=… and data.answer=….\n"
        "It is reset on each saved task and given the recorded turns; nothing is sampled.\n"
        "What was stopped or killed goes on where it was when the same command is given again.",
        "envgym score best.jsonl --env my_reward.py --out scored.parquet",
    )
    parser.add_argument("--env", **ENV)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--out", metavar="FILE", help="where the judged episodes go: a .jsonl or .parquet file")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace that file, and what was kept of other settings"
    )
    source, rest = _take_source(arguments)
    options, words = parser.parse_with_words(rest)
    if source is None:
        raise ConfigError("which episodes? Give a file or a folder of them. See: envgym score --help")
    if options.out is None:
        raise ConfigError("envgym score needs --out, where the judged episodes go. See: envgym score --help")
    if options.env is None and options.config is None:
        raise ConfigError("envgym score needs --env, what is to judge. See: envgym score --help")
    keys = {word.partition("=")[0] for word in words}
    if "data.path" not in keys and any(key.startswith("data.") for key in keys):
        words.append(f"data.path={source}")  # names of the file's fields: it is recorded data
    config = resolve_options(options, words, invocation)

    from envgym.evaluation.rescore import rescore
    from envgym.monitoring.report import aligned
    from envgym.monitoring.terminal import open_display

    with open_display() as display:
        result = rescore(config, Path(source), Path(options.out), display, overwrite=options.overwrite)
    print(aligned(_lines(result, options.out)))
    return 0


def _take_source(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file that is named, wherever it stands, and the other arguments."""
    rest = list(arguments)
    for place, word in enumerate(rest):
        after_option = place > 0 and rest[place - 1] in ("--env", "--config", "--out")
        if not after_option and not word.startswith("-") and "=" not in word:
            return word, rest[:place] + rest[place + 1 :]
    return None, rest


def _lines(result: Mapping[str, Any], out: str) -> list[tuple[str, str]]:
    from envgym.monitoring.report import counts, duration

    skipped = f"; {sum(result['skipped'].values())} that had failed are as they were" if result["skipped"] else ""
    lines = [("env", result["env"]), ("judged", f"{result['judged']} of {result['episodes']} episodes{skipped}")]
    shown = [what for what in ("score", "reward") if result[what].before or result[what].after]
    for what in shown:
        lines.append((what, f"{_change(result[what])}   95% intervals{_both(result[what], result['judged'])}"))
        if what == shown[0]:
            lines += [(f"  {name}", _change(part[what])) for name, part in result["parts"].items()]
    lines.append(("changed", f"{result['changed']} episodes"))
    if result["short"]:
        lines.append(("truncated", f"{result['short']} for which the environment wants more turns than were recorded"))
    if result["unused"]:
        lines.append(("ended early", f"{result['unused']} before their last recorded turn"))
    return [*lines, ("failed", counts(result["failures"]) or "0"), ("time", duration(result["seconds"])), ("file", out)]


def _change(change: Change) -> str:
    return f"{_mean(change.before)}  ->  {_mean(change.after)}"


def _both(change: Change, judged: int) -> str:
    return f", of the {change.episodes} episodes that have both" if 0 < change.episodes < judged else ""


def _mean(mean: Mean | None) -> str:
    return "none" if mean is None else f"{mean.score:.3f} [{mean.low:.3f}, {mean.high:.3f}]"
