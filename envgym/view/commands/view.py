"""`envgym view`: a page on which to look at runs, evaluations and episodes."""

from __future__ import annotations

from collections.abc import Sequence

from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser, find_path, run_folders
from envgym.errors import ConfigError

SUMMARY = "look at runs, evaluations and episodes in a browser"


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "view",
        "[RUN …] [--port P] [--host H --token-file F]",
        "Serve a page on which to look at runs, evaluations and files of episodes, live ones too, until Ctrl-C.\n"
        "Without RUN all of runs/ and evals/ are there. It reads, and changes nothing.",
        "envgym view first --port 8080",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run, evaluation, file of episodes, or a folder of them")
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8765, help="port; 0 takes a free one (8765)")
    parser.add_argument("--token-file", metavar="F", help="file that holds the token viewers must give")
    options = parser.parse_without_words(arguments, "a page has no settings")
    given = [find_path(run) for run in options.runs] or [path for path in run_folders() if path.is_dir()]
    if not given:
        raise ConfigError("there is no folder runs/ or evals/ here: name a run, an evaluation or a file of episodes")

    import asyncio

    from envgym.net.tokens import read_secret
    from envgym.view.server import serve_view

    token = None if options.token_file is None else read_secret(options.token_file)

    def ready(url: str) -> None:
        print(f"{url}{'?token=…' if token else ''} (Ctrl-C ends it)", flush=True)

    asyncio.run(serve_view(given, options.host, options.port, token, ready))
    return 0
