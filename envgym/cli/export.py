"""`envgym export`: a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import Parser
from .view import found


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
    path = found(options.run)
    out = Path(options.out or f"{path.resolve().name.partition('.')[0]}.html")
    is_named = options.out is not None
    if not is_named and out.exists() and "envgym" not in out.read_text(encoding="utf-8", errors="replace")[:4096]:
        raise ConfigError(f"{out} is there and no export: name another file with --out")

    from envgym.view.export import export

    size, kept, whole = export(path, out, episodes=options.episodes, megabytes=options.megabytes)
    print(f"{out}: {size / 2**20:.1f} MiB, {kept} of {whole} episodes with their tokens")
    return 0
