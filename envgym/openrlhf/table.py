"""The table of OpenRLHF's flags, and reading a command line by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, did_you_mean
from envgym.yaml_files import read_yaml

FILE = Path(__file__).with_name("flags.yaml")
TRAINING = ("train_sft", "train_rm", "train_prm", "train_dpo", "train_kto", "train_kd", "train_ppo_ray")
PROGRAMS = (*TRAINING, "batch_inference", "lora_combiner", "serve_rm")
MOST_VALUES = {"flag": 0, "one": 1, "pair": 2, "many": 1000}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of one program: what it takes, and what becomes of it. The fields are those of `flags.yaml`."""

    name: str
    also: Sequence[str] = ()
    kind: str = "one"
    default: Any = None
    to: str | Sequence[str] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None
    derive: str | None = None
    environ: str | None = None
    ignored: str | None = None
    refused: str | None = None
    unless: Any = None
    condition: str | None = None
    needed: str | None = None
    excludes: Sequence[str] = ()


CLASSES = ("to", "derive", "environ", "ignored", "refused")
"""Fates of a flag, of which it has exactly one."""


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The table as it is written, with the names of all programs that know a flag."""
    found: dict[str, dict[str, Any]] = read_yaml(FILE)
    return {
        name: {**entry, "programs": TRAINING if entry["programs"] == "training" else tuple(entry["programs"])}
        for name, entry in found.items()
    }


@cache
def flags_of(program: str) -> dict[str, Flag]:
    """A program's flags by their flat names."""
    found = {}
    for name, entry in entries().items():
        if program not in entry["programs"]:
            continue
        own = {key: value for key, value in entry.items() if key not in ("programs", "own", "if")}
        condition = entry.get("if")
        if different := entry.get("own", {}).get(program):
            own = {key: value for key, value in own.items() if key in ("also", "kind", "default", "needed")}
            own |= {key: value for key, value in different.items() if key != "if"}
            condition = different.get("if")
        if isinstance(own.get("default"), Mapping):
            own["default"] = own["default"]["by_program"].get(program)
        found[name] = Flag(name, condition=condition, **own)
    return found


def parse(program: str, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags that are given, by their flat names, with their values: True, a text or number, or a list of them; and
    what is to be said of how they were read.

    Raises `ConfigError` for one that the program does not know, and for one without its value.
    """
    spelled = {name: flag for flag in flags_of(program).values() for name in (flag.name, *flag.also)}
    given: dict[str, Any] = {}
    notes = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word in ("...", "…"):
            notes.append(f"{word} is left out: it stands for flags that are not here")
            continue
        if not word.startswith("--"):
            raise ConfigError(f"{program}: {word!r} is neither a flag nor the value of one")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        flag = spelled.get(name)
        if flag is None:
            raise ConfigError(f"{program} has no flag --{name}.{_whose(name) or did_you_mean(name, list(spelled))}")
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--") and len(values) < MOST_VALUES[flag.kind]:
            values.append("" if words[0] in ('""', "''") else words[0])  # quotes that a here-document has kept
            del words[0]
        given[flag.name] = _value(program, flag, values)
    return given, notes


def help_of(program: str) -> str:
    """A line for each flag of a program: what becomes of it."""
    lines = [f"{program}: its flags, and what becomes of them"]
    for flag in flags_of(program).values():
        to = flag.to if isinstance(flag.to, str | None) else ", ".join(flag.to)
        what = to or flag.environ or (flag.refused and f"refused: {flag.refused}") or flag.ignored or "(with others)"
        lines.append(f"  --{flag.name:<32} {f'left out: {what}' if what == flag.ignored else what}")
    return "\n".join(lines)


def _whose(name: str) -> str:
    """The programs that know a flag, in a sentence."""
    programs = [entry["programs"] for own, entry in entries().items() if name in (own, *entry.get("also", ()))]
    return f" It is a flag of {', '.join(programs[0])}." if programs else ""


def _value(program: str, flag: Flag, values: Sequence[str]) -> Any:
    if flag.kind == "flag":
        return True
    if flag.kind == "pair" and len(values) != 2:
        raise ConfigError(f"{program}: --{flag.name} takes two numbers")
    if not values:
        raise ConfigError(f"{program}: --{flag.name} takes a value")
    if flag.kind == "many":  # scripts part them by spaces, and some by commas
        values = [part for value in values for part in value.split(",")]
        return values[0] if len(values) == 1 else values
    read = [_read(value) for value in values]
    if isinstance(flag.default, int | float) and (wrong := [one for one in read if isinstance(one, str)]):
        raise ConfigError(f"{program}: --{flag.name} is a number, not {wrong[0]!r}")
    return read if flag.kind == "pair" else read[0]


def _read(text: str) -> Any:
    """A number where the text is one; else the text."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
