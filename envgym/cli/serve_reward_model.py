"""`envgym serve-reward-model`: a reward model over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import Parser


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Serve a reward model over HTTP until Ctrl-C: POST /get_reward. Clients need the token, by default a new one in a
    file that only this user can read. Settings: batch_size, max_length, too_long, render, dtype, offload, normalise,
    timeout.

    usage: --model M [--host H] [--port P] [--token-file F | --no-token] [key=value …]
    example: envgym serve-reward-model --model path/to/reward_model too_long=cut
    """
    parser = Parser("serve-reward-model", main)
    parser.add_argument("--model", metavar="M", help="folder or hub id, or a run that trained one")
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=5000, help="port; 0 for a free one (5000)")
    parser.add_argument("--token-file", metavar="F", type=Path, help="lines NAME TOKEN, or one token")
    parser.add_argument("--no-token", action="store_true", help="serve every client; on loopback only")
    options, words = parser.parse_with_words(arguments)
    if options.no_token and options.token_file is not None:
        raise ConfigError("--no-token and --token-file contradict each other")

    from envgym.config.words import parse_overrides
    from envgym.services import RewardModel
    from envgym.services.reward_server import serve_model
    from envgym.settings import validate_settings

    settings = {"model": options.model, **parse_overrides(words)}
    settings.pop("debug", None)
    if settings["model"] is None:
        raise ConfigError("envgym serve-reward-model needs --model. See: envgym serve-reward-model --help")
    declared = validate_settings(RewardModel, settings)

    def on_ready(url: str, token_file: Path | None) -> None:
        token = f"with the token in {token_file}" if token_file else "without a token"
        print(f"serving {declared.model} at {url} {token} (Ctrl-C ends it)", flush=True)

    host, port, file = options.host, options.port, options.token_file
    asyncio.run(serve_model(declared, host, port, token_file=file, open_to_all=options.no_token, on_ready=on_ready))
    return 0
