"""`envgym show`: readable transcripts of episodes of a run's step, an evaluation, or a file."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.errors import ConfigError, DataError, did_you_mean, printable

from .errors import Invocation, open_console
from .parser import Parser, find_path

if TYPE_CHECKING:
    from rich.console import Console

    from envgym.types import Episode, Message

COUNT = 4
"""Default number of episodes."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Print readable transcripts of episodes. RUN is a run (its name or folder), an evaluation, or a file of
    episodes. The default step of a run is its last.

    usage: RUN [--eval] [--step N] [--task KEY] [--count N] [--prompt]
    example: envgym show first --step 3
    """
    parser = Parser("show", main)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run, an evaluation, or a file of episodes")
    parser.add_argument("--eval", action="store_true", help="episodes of its evaluations on held-out tasks")
    parser.add_argument("--step", type=_number, metavar="N", help="step of the run (default: the last)")
    parser.add_argument("--task", metavar="KEY", help="all episodes of this task")
    parser.add_argument(
        "--count", type=_number, metavar="N", help=f"number of episodes (default: {COUNT}, or all of --task)"
    )
    parser.add_argument("--prompt", action="store_true", help="also print each prompt as the model got it, as text")
    options = parser.parse_without_words(arguments, "envgym show has no settings")
    if options.run is None:
        parser.error("envgym show is followed by a run")

    path, label = _find(options.run, options.step, "held_out" if options.eval else "rollouts")
    episodes, note = _choose(path, label, options.task, options.count)
    if path.parent.name == "rollouts":
        step = int(path.stem.removeprefix("step_"))
        note += f"\nrun their actions again with: envgym replay {options.run} --step {step}"
    console = open_console()
    decode = _decoder(path) if options.prompt else None
    for episode in episodes:
        _show(console, episode, decode)
    console.out(note, style="dim", highlight=False)
    return 0


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"a number is expected, not {text!r}")
    return int(text)


# -- selection --------------------------------------------------------------------------------------------


def _find(name: str, step: int | None, folder: str) -> tuple[Path, str]:
    """The file or folder of the episodes, and a label for it."""
    from envgym.run_folder import files_by_step, stage_number

    path = find_path(name)
    numbered = [stage for stage in path.glob("*-*/") if stage_number(stage.name)]
    stages = [path, *sorted(numbered, key=lambda stage: stage_number(stage.name), reverse=True)]
    files = next((steps for stage in stages if (steps := files_by_step(stage / folder, ".parquet"))), {})
    if files:
        step = max(files) if step is None else step
        if step not in files:
            span = f"{len(files)} steps from {min(files)} to {max(files)}"
            raise ConfigError(f"{path} has no episodes of step {step}, but of {span}")
        return files[step], f"the evaluation at step {step}" if folder == "held_out" else f"step {step}"
    if folder == "held_out":
        raise ConfigError(f"{path} holds no episodes of held-out tasks: leave out --eval")
    if step is not None:
        raise ConfigError(f"{path} has no steps with episodes: leave out --step")
    if (path / "checkpoints").is_dir():
        raise ConfigError(f"{path} holds no episodes: it has taken no step, or trained on recorded data only")
    return path, str(path)


def _choose(path: Path, label: str, task: str | None, count: int | None) -> tuple[list[Episode], str]:
    """The episodes to show, and a line about the others."""
    from envgym.episodes.files import read_episodes

    episodes = read_episodes(path)
    keys = list(dict.fromkeys(episode.task.key for episode in episodes))
    if task is not None:
        episodes = [episode for episode in episodes if task in (episode.task.key, episode.task.id)]
        if not episodes:
            raise DataError(f"{label} has no episode of task {task!r}.{did_you_mean(task, keys)} {_task_list(keys)}")
        return episodes[:count], f"{len(episodes[:count])} of {len(episodes)} episodes of task {task} in {label}"
    by_member = sorted(episodes, key=lambda episode: episode.member)  # the first of each group before their second
    first = by_member[: COUNT if count is None else count]
    note = f"{len(first)} of {len(episodes)} episodes of {label}; others with --task KEY, --count N. {_task_list(keys)}"
    return first, note


def _task_list(keys: Sequence[str]) -> str:
    ellipsis = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"Its tasks: {', '.join(map(printable, keys[:8]))}{ellipsis}"


# -- output -----------------------------------------------------------------------------------------------


def _decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """The text of token ids, by the tokenizer saved with a run or with the model of an evaluation. Raises `ConfigError`
    if there is none."""
    from tokenizers import Tokenizer

    from envgym.render.renderer import check_tokenizer

    folders = [path, *path.parents[:2]]
    with contextlib.suppress(OSError, ValueError, KeyError):
        folders.append(Path(json.loads((path / "result.json").read_bytes())["model"]))
    for file in (folder / "tokenizer.json" for folder in folders):
        if file.is_file():
            check_tokenizer(file)
            return partial(Tokenizer.from_file(str(file)).decode, skip_special_tokens=False)
    raise ConfigError(f"{path}: --prompt needs the tokenizer, and neither a run's folder nor the model's has one here")


def _show(console: Console, episode: Episode, decode: Callable[[Sequence[int]], str] | None) -> None:
    def write(text: str, style: str | None = None) -> None:
        console.out(printable(text), style=style, highlight=False)

    branch = f", a branch of {episode.parent} after turn {episode.parent_turn}" if episode.parent else ""
    write(f"--- task {episode.task.key}, episode {episode.id}{branch}", "dim")
    if decode is not None:
        for row in episode.rows:
            write("prompt, as the model got it:", "bold cyan")
            write(decode(list(row.segments[0].token_ids)))
    for message in episode.messages:
        speaker = f"{message.role} {message.name}".strip()
        write(f"{speaker}:", "bold cyan")
        for part in content_of(message):
            write(part)
    write(f"{_end(episode)}\n", "bold")


def content_of(message: Message) -> list[str]:
    """The text of a message, if it has any, and a line for each of its calls."""
    parts = [message.printed] if message.printed else []
    for call in message.tool_calls:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
        parts.append(f"a call that cannot be read: {call.error}" if call.error else f"calls {call.name}({arguments})")
    return parts


def _end(episode: Episode) -> str:
    """The end of an episode: `reward 1, score 1; read as '46', wanted '46'; completed, 12 tokens in 1 turn`."""
    numbers = {"reward": episode.reward, "score": episode.score} | episode.metrics
    parts = [", ".join(f"{name} {value:g}" for name, value in numbers.items() if value is not None) or "no reward"]
    answers = [f"read as {episode.answer!r}"] if episode.answer is not None else []
    answers += [f"wanted {str(episode.task.answer)!r}"] if episode.task.answer is not None else []
    parts += [", ".join(answers)] if answers else []
    outcome = episode.outcome
    ending = f"{outcome.status.value} ({outcome.reason})" if outcome.reason else outcome.status.value
    ending += f": {outcome.message}" if outcome.message else ""
    turns = sum(len(row.turns) for row in episode.rows)
    tokens = episode.n_action_tokens
    sampled = f", {tokens} tokens in {turns} turn{'' if turns == 1 else 's'}" if episode.rows else ""
    sampled += f", {tokens - episode.n_new_tokens} of them its parent's" if episode.parent else ""
    return "; ".join([*parts, f"{ending}{sampled}"])
