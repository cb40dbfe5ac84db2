"""`envgym envs new`: a working file to start from."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from envgym.cli.parser import Parser
from envgym.errors import ConfigError, did_you_mean, reported_as

FOLDER = Path(__file__).with_name("templates")
KINDS = {
    "reward": "a function that scores one completion",
    "multi-turn": "reset and step, several turns",
    "tools": "typed functions the policy may call",
}
CLASS, FILE = "NewEnvironment", "new_environment"
"""The names of the class (or function) and of the file in templates."""


def new_main(arguments: Sequence[str]) -> int:
    """Write NAME.py, a working environment to start from ({kinds}).

    usage: NAME [--kind {names}]
    example: envgym envs new my_env
      envgym envs new my_env --kind tools
    """
    kinds = "; ".join(f"{kind}: {summary}" for kind, summary in KINDS.items())
    parser = Parser("envs new", new_main, kinds=kinds, names="|".join(KINDS))
    parser.add_argument("name", metavar="NAME", help="name of the file, with or without a folder")
    parser.add_argument("--kind", metavar="K", default="reward", help=f"{', '.join(KINDS)} (reward)")
    options = parser.parse_without_words(arguments, "a new file has no settings yet")
    if options.kind not in KINDS:
        hint = did_you_mean(options.kind, KINDS) or f" There is {', '.join(KINDS)}."
        raise ConfigError(f"there is no kind {options.kind!r} of new environment.{hint}")
    path = write(Path(options.name), options.kind)
    print(f"wrote {path}. Next:")
    for command in (f"envs check {path}", f"envs try {path}", f"train --env {path} --name {path.stem}"):
        print(f"  envgym {command}")
    return 0


def write(name: Path, kind: str) -> Path:
    """Write the file. Raises `ConfigError` for an invalid name, or if the file exists."""
    path = name.with_name(name.name.removesuffix(".py") + ".py")
    stem = path.stem
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise ConfigError(f"{stem!r} cannot be the name of a Python file: use letters, digits and _")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}")
    text = (FOLDER / f"{kind.replace('-', '_')}.py").read_text(encoding="utf-8")
    text = text.replace(CLASS, "".join(word[:1].upper() + word[1:] for word in re.split("_+", stem)) or stem)
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name")
    with reported_as(ConfigError, f"{path} cannot be written"), path.open("x", encoding="utf-8") as file:
        file.write(text.replace(FILE, stem))
    return path
