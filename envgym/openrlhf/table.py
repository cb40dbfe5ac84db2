"""The table of OpenRLHF's flags, and reading a command line by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from envgym.config.recipes import read_yaml
from envgym.errors import ConfigError, did_you_mean

FILE = Path(__file__).with_name("flags.yaml")
TRAINING = ("train_sft", "train_rm", "train_prm", "train_dpo", "train_kto", "train_kd", "train_ppo_ray")
PROGRAMS = (*TRAINING, "batch_inference", "lora_combiner", "serve_rm")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: who knows it, what it takes, and what becomes of it."""

    name: str
    programs: tuple[str, ...]
    also: tuple[str, ...] = ()
    kind: str = "one"
    default: Any = None
    to: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None
    derive: str | None = None
    environ: str | None = None
    ignored: str | None = None
    refused: str | None = None
    unless: Any = None

    def default_of(self, program: str) -> Any:
        """Theirs, where the flag is absent."""
        if isinstance(self.default, Mapping):
            return self.default["by_program"].get(program)
        return self.default


@cache
def table() -> dict[str, Flag]:
    """All flags by their flat names."""
    found = {}
    for name, entry in read_yaml(FILE).items():
        programs = TRAINING if entry["programs"] == "training" else tuple(entry["programs"])
        rest = {key: value for key, value in entry.items() if key not in ("programs", "also")}
        found[name] = Flag(name, programs, tuple(entry.get("also", ())), **rest)
    return found


def parse(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The flags that are given, by their flat names, with their values: True, text, or a list of texts.

    Raises `ConfigError` for one that the program does not know, and for one without its value.
    """
    spelled = {name: flag for flag in table().values() for name in (flag.name, *flag.also)}
    own = [name for name, flag in spelled.items() if program in flag.programs]
    given: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{program}: {word!r} is neither a flag nor the value of one")
        name, equals, value = word[2:].replace("-", "_").partition("=")
        flag = spelled.get(name)
        if flag is None or program not in flag.programs:
            whose = f" It is a flag of {', '.join(flag.programs)}." if flag else did_you_mean(name, own)
            raise ConfigError(f"{program} has no flag --{name}.{whose}")
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--") and len(values) < _most(flag):
            values.append(words.pop(0))
        given[flag.name] = _value(program, flag, values)
    return given


def _most(flag: Flag) -> int:
    return {"flag": 0, "one": 1, "pair": 2}.get(flag.kind, 1000)


def _value(program: str, flag: Flag, values: Sequence[str]) -> Any:
    if flag.kind == "flag":
        return True
    if flag.kind == "pair" and len(values) != 2:
        raise ConfigError(f"{program}: --{flag.name} takes two numbers")
    if flag.kind in ("pair", "many"):
        return [_read(value) for value in values]
    if not values:
        raise ConfigError(f"{program}: --{flag.name} takes a value")
    return _read(values[0])


def _read(text: str) -> Any:
    """A value as YAML reads it where that is a number; else the text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # 1e-6, which is text for YAML
        except ValueError:
            return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text
