"""`envgym view`: a page that shows runs, evaluations and episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import Parser, find_path, run_folders


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Serve a page that shows runs (live ones too), evaluations and files of episodes, until Ctrl-C.
    Default: all of runs/ and evals/. It only reads.

    usage: [RUN …] [--port P] [--host H --token-file F]
    example: envgym view first --port 8080
    """
    parser = Parser("view", main)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run, evaluation, file of episodes, or a folder of them")
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8765, help="port; 0 takes a free one (8765)")
    parser.add_argument("--token-file", metavar="F", type=Path, help="file with the token that viewers must give")
    options = parser.parse_without_words(arguments, "a page has no settings")
    paths = [find_path(run) for run in options.runs] or [path for path in run_folders() if path.is_dir()]
    if not paths:
        raise ConfigError("there is no folder runs/ or evals/ here: name a run, an evaluation or a file of episodes")

    import asyncio

    from envgym.net.tokens import read_token
    from envgym.view.server import serve_view

    token = None if options.token_file is None else read_token(options.token_file)

    def print_url(url: str) -> None:
        print(f"{url}{'?token=…' if token else ''} (Ctrl-C ends it)", flush=True)

    asyncio.run(serve_view(paths, options.host, options.port, token, print_url))
    return 0
