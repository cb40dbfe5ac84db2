"""`envgym export`: a run as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser, find_path
from envgym.errors import ConfigError, printable_line

SUMMARY = "write a run as one HTML file to look at"


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "export",
        "RUN [--out FILE] [--episodes N] [--megabytes M]",
        "Write a run, an evaluation or a file of episodes as one HTML file that opens from the disk: the page of\n"
        "envgym view with its curves and lists, and N episodes: failed ones, best, worst and most surprising first.",
        "envgym export first --episodes 20",
    )
    parser.add_argument("run", metavar="RUN", help="run, evaluation, or file of episodes")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: RUN.html in this folder)")
    parser.add_argument("--episodes", metavar="N", type=int, default=100, help="episodes with their tokens (100)")
    parser.add_argument("--megabytes", metavar="M", type=float, default=10.0, help="size it stays below (10)")
    options = parser.parse_without_words(arguments, "an export has no settings")
    if options.episodes < 0:
        raise ConfigError(f"--episodes is a number of episodes, 0 or more, not {options.episodes}")
    if not 0 < options.megabytes < math.inf:
        raise ConfigError(f"--megabytes is a size above 0, not {options.megabytes:g}")
    path = find_path(options.run)
    out = Path(options.out or f"{path.resolve().name.partition('.')[0]}.html")

    from envgym.view.export import export, is_export

    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"{out} cannot be written: its folder is not there, or it is one itself; give --out FILE")
    if options.out is None and out.exists() and not is_export(out):
        raise ConfigError(f"{out} is there and no export: name another file with --out")
    held = export(path, out, episodes=options.episodes, megabytes=options.megabytes)
    lists = "" if held.steps == held.of_steps else f", the lists of {held.steps} of {held.of_steps} steps"
    episodes = f"{held.episodes} of {held.of_episodes} episodes with their tokens"
    unread = f"; what cannot be read says why, of {', '.join(held.unread)}" if held.unread else ""
    print(printable_line(f"{out}: {held.bytes / 2**20:.1f} MiB, {episodes}{lists}{unread}"))
    return 0
