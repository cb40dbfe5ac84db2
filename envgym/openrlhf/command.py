"""`envgym openrlhf`: run a command of OpenRLHF."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.cli import load_command
from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser
from envgym.errors import ConfigError

if TYPE_CHECKING:
    from .translation import Translation

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which launchers tell ranks apart. Ours start their own."""

SUMMARY = "run a command line of OpenRLHF"


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    from .rlhf import entry_point, translate_file
    from .table import PROGRAMS, help_of
    from .translate import translate

    parser = Parser(
        "openrlhf",
        "PROGRAM [--dry-run] flags…",
        "Run a command of OpenRLHF: say what it is here, and do that. With --dry-run only say it. PROGRAM is one of\n"
        f"{', '.join(PROGRAMS)},\nwhose flags envgym openrlhf PROGRAM --help explains; or rlhf:NAME, or a path to "
        "NAME.py (train_dpo, train_ppo,\ntrain_grpo) with --config rlhf.yaml.",
        "envgym openrlhf train_dpo --pretrain M --dataset preferences.jsonl --apply_chat_template --dry-run",
    )
    if arguments[:1] in ([], ["--help"], ["-h"]):
        parser.print_help()
        return 0 if arguments else 2
    program, *flags = arguments
    if "--help" in flags and program in PROGRAMS:
        print(help_of(program))
        return 0
    is_dry = "--dry-run" in flags
    flags = [flag for flag in flags if flag != "--dry-run"]
    rank, size = _launched()
    if rank:
        return 0  # the first of them starts the others anew
    point = entry_point(program)
    made = translate_file(point, flags, world_size=size) if point else translate(program, flags, world_size=size)
    _settle(made)
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    print(_shown(made), flush=True)
    return 0 if is_dry else _run(made, invocation)


def _launched() -> tuple[int, int | None]:
    """This process's rank among those that a launcher has started, and how many they are; None: there is none."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and "SLURM_STEP_ID" in os.environ:
        rank, size = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_NTASKS")
    if rank is None or size is None:
        return 0, None
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if here is not None and here.isdecimal() and int(here) < int(size):
        raise ConfigError(
            "launchers start the ranks of one machine here; over several: start Ray on them and give the translated "
            "command (--dry-run) --runtime ray, as examples/slurm.sh does"
        )
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    return int(rank), int(size)


def _settle(made: Translation) -> None:
    """Fill in what depends on where the command is run: a cluster, and runs that are there already."""
    if made.command != "train":
        return
    if "RAY_ADDRESS" in os.environ:
        made.words += ["--runtime", "ray"]
    first = Path(made.settings["runs_dir"], made.settings["name"])
    runs = [first]
    while runs[-1].exists():
        runs.append(first.with_name(f"{first.name}-{len(runs) + 1}"))
    if made.resumes and len(runs) > 1:
        made.words, made.settings = ["--resume", str(runs[-2])], {}
        made.run = runs[-2]
        return
    made.settings["name"], made.run = runs[-1].name, runs[-1]


def _shown(made: Translation) -> str:
    """The command as one can paste it. Secrets are not shown."""
    words: list[str] = []
    for word in made.arguments:
        is_value = words and words[-1].startswith("--") and " " not in words[-1] and "=" not in word
        words[-1:] = [f"{words[-1]} {shlex.quote(word)}"] if is_value else [*words[-1:], shlex.quote(word)]
    variables = "".join(f"{name}={'…' if 'KEY' in name else shlex.quote(text)} " for name, text in made.environ.items())
    line = f"{variables}envgym " + " \\\n  ".join(words)
    if made.save_path is not None:
        line += f"\ncp -r {shlex.quote(str(made.run / made.kept))} {shlex.quote(str(made.save_path))}"
    return line if made.finish is None else f"{line}\n# and rows in OpenRLHF's form are made of that file"


def _run(made: Translation, invocation: Invocation) -> int:
    os.environ.update(made.environ)
    status: int = load_command(made.command).main(made.arguments[1:], invocation)
    if status == 0 and made.save_path is not None:
        shutil.copytree(made.run / made.kept, made.save_path, dirs_exist_ok=True)
    if status == 0 and made.finish is not None:
        print(made.finish())
    return status
