"""`envgym openrlhf`: run a command of OpenRLHF."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envgym.errors import ConfigError

from . import load_command
from .errors import Invocation
from .parser import Parser

if TYPE_CHECKING:
    from envgym.openrlhf.translation import Translation

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that launchers set for their ranks, and that the ranks of a run must not inherit."""


def main(arguments: Sequence[str], invocation: Invocation) -> int:
    """Translate a command of OpenRLHF, print the translation, and run it; with --dry-run only print it. PROGRAM is
    one of {programs},
    whose flags envgym openrlhf PROGRAM --help explains; or rlhf:NAME, or a path to NAME.py (train_dpo,
    train_ppo, train_grpo) with --config rlhf.yaml.

    usage: PROGRAM [--dry-run] flags…
    example: envgym openrlhf train_dpo --pretrain M --dataset preferences.jsonl --apply_chat_template --dry-run
    """
    from envgym.openrlhf.rlhf import entry_point, translate_file
    from envgym.openrlhf.table import PROGRAMS, help_of
    from envgym.openrlhf.translate import translate

    parser = Parser("openrlhf", main, programs=", ".join(PROGRAMS))
    if arguments[:1] in ([], ["--help"], ["-h"]):
        parser.print_help()
        return 0 if arguments else 2
    program, *flags = arguments
    if "--help" in flags and program in PROGRAMS:
        print(help_of(program))
        return 0
    is_dry = "--dry-run" in flags
    flags = [flag for flag in flags if flag != "--dry-run"]
    rank, size = _launcher_rank()
    if rank:
        return 0  # the first process starts all ranks itself
    point = entry_point(program)
    translation = translate_file(point, flags, world_size=size) if point else translate(program, flags, world_size=size)
    _fit_to_machine(translation)
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    print(_printed_command(translation), flush=True)
    return 0 if is_dry else _run(translation, invocation)


def _launcher_rank() -> tuple[int, int | None]:
    """This process's rank in a launcher, and the launcher's number of ranks (None without a launcher)."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and "SLURM_STEP_ID" in os.environ:
        rank, size = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_NTASKS")
    if rank is None or size is None:
        return 0, None
    variables = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_TASKS_PER_NODE")
    local_size = next((text for name in variables if (text := os.environ.get(name))), "")
    if local_size.isdecimal() and int(local_size) < int(size):
        raise ConfigError(
            "launchers are supported on one node; for several nodes start Ray on them and run the translated command "
            "(--dry-run) with --runtime ray, as examples/slurm.sh does"
        )
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    return int(rank), int(size)


def _fit_to_machine(translation: Translation) -> None:
    """Set what depends on the machine: the Ray cluster, and existing runs of the same name."""
    if translation.command != "train":
        return
    if "RAY_ADDRESS" in os.environ:
        translation.words += ["--runtime", "ray"]
    folder = Path(translation.settings["runs_dir"], translation.settings["name"])
    runs = [folder]
    while runs[-1].exists():
        runs.append(folder.with_name(f"{folder.name}-{len(runs) + 1}"))
    if translation.resumes and len(runs) > 1 and (runs[-2] / "config.yaml").is_file():
        translation.words, translation.settings = ["--resume", str(runs[-2])], {}
        translation.run = runs[-2]
        return
    translation.settings["name"], translation.run = runs[-1].name, runs[-1]


def _printed_command(translation: Translation) -> str:
    """The command to paste into a shell, without secrets."""
    words: list[str] = []
    for word in translation.arguments:
        is_value = words and words[-1].startswith("--") and " " not in words[-1] and "=" not in word
        words[-1:] = [f"{words[-1]} {shlex.quote(word)}"] if is_value else [*words[-1:], shlex.quote(word)]
    environ = translation.environ.items()
    variables = "".join(f"{name}={'…' if 'KEY' in name else shlex.quote(text)} " for name, text in environ)
    line = f"{variables}envgym " + " \\\n  ".join(words)
    for name, path in _copies(translation).items():
        source, target = f"{translation.run / name}/.", f"{path}/"
        line += f"\n{shlex.join(['mkdir', '-p', target])} && {shlex.join(['cp', '-r', source, target])}"
    return line if translation.finish is None else f"{line}\n# then the file is converted to OpenRLHF's rows"


def _copies(translation: Translation) -> dict[str, Path]:
    """The folders of the run that are copied at its end, and where to."""
    result = {} if translation.save_path is None else {translation.result: translation.save_path}
    return {**result, **translation.copies}


def _run(translation: Translation, invocation: Invocation) -> int:
    os.environ.update(translation.environ)
    status: int = load_command(translation.command).main(translation.arguments[1:], invocation)
    for name, path in _copies(translation).items() if status == 0 else ():
        shutil.copytree(translation.run / name, path, dirs_exist_ok=True)
    if status == 0 and translation.finish is not None:
        print(translation.finish())
    return status
