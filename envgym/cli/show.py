"""`envgym show`: episodes as people read them, of a run's step, an evaluation, or a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.errors import ConfigError, DataError, did_you_mean, printable

from .errors import Invocation
from .parser import Parser, find_path

if TYPE_CHECKING:
    from rich.console import Console

    from envgym.types import Episode, Message

COUNT = 4
"""Episodes that are shown unless told otherwise."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "show",
        "RUN [--step N] [--task KEY] [--count N]",
        "Print episodes as people read them. RUN is a run (its name or folder), an evaluation, or a file of episodes.\n"
        "Of a run those of its last step are shown, if no other is named.",
        "envgym show first --step 3",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run, an evaluation, or a file of episodes")
    parser.add_argument("--step", metavar="N", help="the step of the run (default: the last)")
    parser.add_argument("--task", metavar="KEY", help="every episode of this task")
    parser.add_argument("--count", metavar="N", help=f"episodes (default: {COUNT}, or all of --task)")
    options = parser.parse_without_words(arguments, "envgym show has no settings")
    if options.run is None:
        parser.error("envgym show is followed by a run")
    step = None if options.step is None else _number("--step", options.step)
    count = None if options.count is None else _number("--count", options.count)

    from rich.console import Console

    path, where = _find(options.run, step)
    episodes, note = _choose(path, where, options.task, count)
    console = Console()
    for episode in episodes:
        _show(console, episode)
    console.out(note, style="dim", highlight=False)
    return 0


def _number(option: str, given: str) -> int:
    if not given.isascii() or not given.isdigit():
        raise ConfigError(f"{option} is followed by a number, not {given!r}")
    return int(given)


# -- which ------------------------------------------------------------------------------------------------


def _find(given: str, step: int | None) -> tuple[Path, str]:
    """The file or folder that the episodes are in, and what it is, for people."""
    path = find_path(given)
    numbered = [stage for stage in path.glob("[0-9]*-*/") if stage.name.partition("-")[0].isdecimal()]
    stages = [path, *sorted(numbered, key=lambda stage: int(stage.name.partition("-")[0]), reverse=True)]
    files = next((steps for stage in stages if (steps := _steps(stage))), {})
    if files:
        step = max(files) if step is None else step
        if step not in files:
            raise ConfigError(f"{path} has no episodes of step {step}: there are those of {_span(sorted(files))}")
        return files[step], f"step {step}"
    if step is not None:
        raise ConfigError(f"{path} has no steps with episodes: leave out --step")
    if (path / "checkpoints").is_dir():
        raise ConfigError(f"{path} holds no episodes: it has taken no step, or learned from recorded data only")
    return path, str(path)


def _steps(stage: Path) -> dict[int, Path]:
    """The files of a stage's rollouts, by step."""
    from envgym.run_folder import files_by_step

    return files_by_step(stage / "rollouts", ".parquet")


def _span(steps: Sequence[int]) -> str:
    whole = steps[-1] - steps[0] == len(steps) - 1
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]} to {steps[-1]}" if whole else f"steps {', '.join(map(str, steps))}"


def _choose(path: Path, where: str, task: str | None, count: int | None) -> tuple[list[Episode], str]:
    """The episodes to show, and a line about the others."""
    from envgym.episodes.files import read_episodes

    every = read_episodes(path)
    keys = list(dict.fromkeys(episode.task.key for episode in every))
    if task is not None:
        episodes = [episode for episode in every if task in (episode.task.key, episode.task.id)]
        if not episodes:
            raise DataError(f"{where} has no episode of task {task!r}.{did_you_mean(task, keys)} {_some(keys)}")
        return episodes[:count], f"{len(episodes[:count])} of {len(episodes)} episodes of task {task} in {where}"
    shown = every[: COUNT if count is None else count]
    return shown, f"{len(shown)} of {len(every)} episodes of {where}; others with --task KEY, --count N. {_some(keys)}"


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"Its tasks: {', '.join(map(printable, keys[:8]))}{more}"


# -- how --------------------------------------------------------------------------------------------------


def _show(console: Console, episode: Episode) -> None:
    def out(text: str, style: str | None = None) -> None:
        console.out(printable(text), style=style, highlight=False)

    out(f"--- task {episode.task.key}, episode {episode.id}", "dim")
    for message in episode.messages:
        out(f"{_who(message)}:", "bold cyan")
        if message.text:
            out(message.text)
        for call in message.tool_calls:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
            out(f"a call that cannot be read: {call.error}" if call.error else f"calls {call.name}({arguments})")
    out(f"{_end(episode)}\n", "bold")


def _who(message: Message) -> str:
    return f"{message.role} {message.name}".strip()


def _end(episode: Episode) -> str:
    """The end of an episode: `reward 1, score 1; read as '46', wanted '46'; completed, 12 tokens in 1 turn`."""
    numbers = {"reward": episode.reward, "score": episode.score} | episode.metrics
    parts = [", ".join(f"{name} {value:g}" for name, value in numbers.items() if value is not None) or "no reward"]
    answers = [f"read as {episode.answer!r}"] if episode.answer is not None else []
    answers += [f"wanted {str(episode.task.answer)!r}"] if episode.task.answer is not None else []
    parts += [", ".join(answers)] if answers else []
    outcome = episode.outcome
    how = f"{outcome.status.value} ({outcome.reason})" if outcome.reason else outcome.status.value
    how += f": {outcome.message}" if outcome.message else ""
    turns = sum(len(row.turns) for row in episode.rows)
    tokens = sum(row.n_action_tokens for row in episode.rows)
    sampled = f", {tokens} tokens in {turns} turn{'' if turns == 1 else 's'}" if episode.rows else ""
    return "; ".join([*parts, f"{how}{sampled}"])
