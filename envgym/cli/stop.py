"""`envgym stop`: ask a run of another terminal or machine to stop, as Ctrl-C there would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from envgym.errors import ConfigError

from .errors import Invocation
from .parser import Parser

LOOK_SECONDS = 0.5


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    parser = Parser(
        "stop",
        "RUN [runs_dir=FOLDER]",
        "Stop a run after the work of its step, as Ctrl-C in its terminal would, and wait until it has. It keeps a "
        "checkpoint, from which envgym train --resume RUN goes on.",
        "envgym stop first",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run, or its folder")
    options, runs_dir = parser.parse_with_folder(arguments, "runs_dir")

    from envgym.disk import holder
    from envgym.run_folder import STOP

    named = Path(options.run)
    folder = named if (named / "config.yaml").is_file() else Path(runs_dir) / options.run
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"there is no run {options.run!r} in {runs_dir}/ (see: envgym runs)")
    where = holder(folder)
    if where is None:
        raise ConfigError(f"run {folder} is not running")
    (folder / STOP).touch()
    print(f"asked {folder}, {where}, to stop", flush=True)
    while holder(folder) is not None:
        time.sleep(LOOK_SECONDS)
    print(f"it has stopped; go on with: envgym train --resume {folder}")
    return 0
