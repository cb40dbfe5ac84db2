"""`envgym stop`: stop a run in another terminal or on another machine, as Ctrl-C there would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import Parser

LOOK_SECONDS = 0.5


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Stop a run after the work of its step, as Ctrl-C in its terminal would, and wait until it has stopped. It saves a
    checkpoint for envgym train --resume RUN.

    usage: RUN [runs_dir=FOLDER]
    example: envgym stop first
    """
    parser = Parser("stop", main)
    parser.add_argument("run", metavar="RUN", help="name of the run, or its folder")
    options, runs_dir = parser.parse_with_folder(arguments, "runs_dir")

    from envgym.disk import lock_holder
    from envgym.run_folder import STOP

    path = Path(options.run)
    folder = path if (path / "config.yaml").is_file() else Path(runs_dir) / options.run
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"there is no run {options.run!r} in {runs_dir}/ (see: envgym runs)")
    process = lock_holder(folder)
    if process is None:
        raise ConfigError(f"run {folder} is not running")
    (folder / STOP).touch()
    print(f"asked {folder}, {process}, to stop", flush=True)
    while lock_holder(folder) is not None:
        time.sleep(LOOK_SECONDS)
    print(f"it has stopped; resume it with: envgym train --resume {folder}")
    return 0
