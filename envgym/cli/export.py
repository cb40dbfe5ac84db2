"""`envgym export`: a run as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError, printable_line

from .errors import Invocation
from .parser import Parser, find_path


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Write a run, an evaluation or a file of episodes as one HTML file without other files: the page of
    envgym view with its curves and lists, and N episodes: failed ones, best, worst and most surprising first.

    usage: RUN [--out FILE] [--episodes N] [--megabytes M]
    example: envgym export first --episodes 20
    """
    parser = Parser("export", main)
    parser.add_argument("run", metavar="RUN", help="run, evaluation, or file of episodes")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: RUN.html in this folder)")
    parser.add_argument("--episodes", metavar="N", type=int, default=100, help="episodes with their tokens (100)")
    parser.add_argument("--megabytes", metavar="M", type=float, default=10.0, help="maximum size (10)")
    options = parser.parse_without_words(arguments, "an export has no settings")
    if options.episodes < 0:
        raise ConfigError(f"--episodes is a number of episodes, 0 or more, not {options.episodes}")
    if not 0 < options.megabytes < math.inf:
        raise ConfigError(f"--megabytes is a size above 0, not {options.megabytes:g}")
    source = find_path(options.run)
    path = Path(options.out or f"{source.resolve().name.partition('.')[0]}.html")

    from envgym.view.export import export, is_export

    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"{path} cannot be written: its folder does not exist, or it is a folder; give --out FILE")
    if options.out is None and path.exists() and not is_export(path):
        raise ConfigError(f"{path} exists and is not an export: choose another file with --out")
    result = export(source, path, episodes=options.episodes, megabytes=options.megabytes)
    lists = "" if result.steps == result.all_steps else f", the lists of {result.steps} of {result.all_steps} steps"
    episodes = f"{result.episodes} of {result.all_episodes} episodes with their tokens"
    unread = f"; unreadable parts in {', '.join(result.unread)}" if result.unread else ""
    print(printable_line(f"{path}: {result.bytes / 2**20:.1f} MiB, {episodes}{lists}{unread}"))
    return 0
