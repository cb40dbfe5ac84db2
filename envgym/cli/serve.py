"""`envgym serve`: an environment over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .failures import Invocation
from .parser import Parser, make_spec


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "serve",
        "E [--host H] [--port P] [key=value …]",
        "Serve an environment over HTTP until Ctrl-C. Its address then stands wherever an environment does.",
        "envgym serve math_verify --port 8000\n  envgym train --env http://127.0.0.1:8000",
    )
    parser.add_argument("env", metavar="E", help="environment: id, file.py[:Name] or import path")
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8000, help="port; 0 takes a free one (8000)")
    options, words = parser.parse_with_words(arguments)
    spec = make_spec(options.env, words)

    from envgym.remote.server import serve

    def on_ready(url: str) -> None:
        print(f"serving {spec.id} at {url} (Ctrl-C ends it)", flush=True)

    asyncio.run(serve(spec, options.host, options.port, on_ready=on_ready))
    return 0
