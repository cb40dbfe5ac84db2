"""The table of OpenRLHF's flags, and a parser of command lines with them."""

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
MAX_VALUES = {"flag": 0, "one": 1, "number": 1, "pair": 2, "many": 1000}


UNCHANGED = object()


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of one program: its names, its values and its translation. The fields are those of `flags.yaml`, which
    describes them."""

    name: str
    aliases: Sequence[str] = ()
    kind: str = "one"
    default: Any = None
    dotted_default: Any = UNCHANGED
    """Default in commands with dotted names; `UNCHANGED` if it is the same as in the others."""
    setting: str | Sequence[str] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None
    derive: str | None = None
    environ: str | None = None
    ignored: str | None = None
    unsupported: str | None = None
    unless: Any = None
    condition: str | None = None
    question: str | None = None
    excludes: Sequence[str] = ()
    differs: str | None = None


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The entries of `flags.yaml` by flag, each with the names of all programs that have it."""
    table: dict[str, dict[str, Any]] = read_yaml(FILE)
    return {
        name: {**entry, "programs": TRAINING if entry["programs"] == "training" else tuple(entry["programs"])}
        for name, entry in table.items()
    }


@cache
def flags_of(program: str) -> dict[str, Flag]:
    """A program's flags by their flat names."""
    flags = {}
    for name, entry in entries().items():
        if program not in entry["programs"]:
            continue
        fields = {key: value for key, value in entry.items() if key not in ("programs", "overrides", "if")}
        condition = entry.get("if")
        if overrides := entry.get("overrides", {}).get(program):
            inherited = ("aliases", "kind", "default", "dotted_default", "question")
            fields = {key: value for key, value in fields.items() if key in inherited}
            fields |= {key: value for key, value in overrides.items() if key != "if"}
            condition = overrides.get("if")
        if isinstance(fields.get("default"), Mapping):
            fields["default"] = fields["default"]["by_program"].get(program)
        if isinstance(fields.get("dotted_default"), Mapping):
            fields["dotted_default"] = fields["dotted_default"]["by_program"].get(program, UNCHANGED)
        flags[name] = Flag(name, condition=condition, **fields)
    return flags


def parse(program: str, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse a command line. Returns the values of its flags by their flat names (True, a text, a number, or a list of
    these), and notes for the user. Raises `ConfigError` for an unknown flag, a missing value and text for a number."""
    spellings = {name: flag for flag in flags_of(program).values() for name in (flag.name, *flag.aliases)}
    options: dict[str, Any] = {}
    notes = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word in ("...", "…"):
            notes.append(f"{word} is ignored: it stands for flags that are missing")
            continue
        if not word.startswith("--"):
            raise ConfigError(f"{program}: {word!r} is neither a flag nor the value of a flag")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        flag = spellings.get(name)
        if flag is None:
            hint = _programs_hint(name) or did_you_mean(name, list(spellings))
            raise ConfigError(f"{program} has no flag --{name}.{hint}")
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--") and len(values) < MAX_VALUES[flag.kind]:
            values.append("" if words[0] in ('""', "''") else words[0])  # a here-document keeps quotes
            del words[0]
        options[flag.name] = _value(program, flag, values)
    return options, notes


def is_dotted(arguments: Sequence[str]) -> bool:
    """True for a command with the dotted names of later versions."""
    return any(word.startswith("--") and "." in word.partition("=")[0] for word in arguments)


def help_of(program: str) -> str:
    """A line for each flag of a program with its translation."""
    lines = [f"{program}: its flags and their translation"]
    for flag in flags_of(program).values():
        text = flag.setting if isinstance(flag.setting, str | None) else ", ".join(flag.setting)
        text = text or flag.environ or (flag.unsupported and f"not supported: {flag.unsupported}")
        text = text or (flag.ignored and f"ignored: {flag.ignored}") or "(combined with other flags)"
        lines.append(f"  --{flag.name:<32} {text}")
    return "\n".join(lines)


def _programs_hint(name: str) -> str:
    """A sentence that names the programs with a flag; empty if there are none."""
    programs = [entry["programs"] for key, entry in entries().items() if name in (key, *entry.get("aliases", ()))]
    return f" It is a flag of {', '.join(programs[0])}." if programs else ""


def _value(program: str, flag: Flag, values: Sequence[str]) -> Any:
    if flag.kind == "flag":
        return True
    if flag.kind == "pair" and len(values) != 2:
        raise ConfigError(f"{program}: --{flag.name} takes two numbers")
    if not values:
        raise ConfigError(f"{program}: --{flag.name} takes a value")
    if flag.kind == "many":  # separated by spaces or commas
        values = [part for value in values for part in value.split(",")]
        return values[0] if len(values) == 1 else values
    parsed = [_parse_number(value) for value in values]
    is_number = flag.kind in ("number", "pair") or isinstance(flag.default, int | float)
    if is_number and (texts := [value for value in parsed if isinstance(value, str)]):
        raise ConfigError(f"{program}: --{flag.name} is a number, not {texts[0]!r}")
    return parsed if flag.kind == "pair" else parsed[0]


def _parse_number(text: str) -> Any:
    """The text as a number, if it is one."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
