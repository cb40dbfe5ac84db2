"""Serves the environment of `environment.json` by OpenEnv's protocol."""

import argparse
import os
from pathlib import Path

from envgym.envs.openenv import serve
from envgym.processes import event_loop
from envgym.registry import spec_from_json


def main() -> None:
    """Serve it until SIGINT or SIGTERM, with the options of `envgym serve --dialect openenv`."""
    parser = argparse.ArgumentParser(description=__doc__)
    serve.add_options(parser)
    options = parser.parse_args()
    options.token_file = options.token_file and options.token_file.absolute()
    os.chdir(Path(__file__).parents[1])  # where the environment's own file is
    spec = spec_from_json(Path("environment.json").read_text(encoding="utf-8"))
    event_loop.run(serve.serve({"NAME": spec}, options))


if __name__ == "__main__":
    main()
