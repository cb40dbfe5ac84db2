"""A command of OpenRLHF that is being translated: its flags, and the command of envgym that it becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envgym.config.words import parse_overrides
from envgym.errors import ConfigError

from .table import Flag, flags_of


@dataclass(slots=True)
class Translation:
    """A command of envgym."""

    command: str = "train"
    words: list[str] = field(default_factory=list)
    """Words and options that stand before the settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    """Variables of its environment."""
    notes: list[str] = field(default_factory=list)
    """Sentences on flags that are left out or read in another way."""
    save_path: Path | None = None
    """Folder that the model is copied to in the end, or its adapter."""
    kept: str = "model"
    """The folder of the run that is copied."""
    run: Path = Path()
    """The run's folder."""
    resumes: bool = False
    """Go on with the run of that name where there is one."""
    finish: Callable[[], str] | None = None
    """Work after the command; returns a sentence on what it did."""

    @property
    def arguments(self) -> list[str]:
        """The command line after `envgym`."""
        return [self.command, *self.words, *(_word(key, value) for key, value in self.settings.items())]


def _word(key: str, value: Any) -> str:
    """`key=value`, written so that it is read back as it is."""
    plain, quoted = f"{key}={value}", f"{key}={json.dumps(value)}"
    return plain if isinstance(value, str) and parse_overrides([plain]) == parse_overrides([quoted]) else quoted


class Flags:
    """The flags of a command: what is given, else theirs. `world_size`: ranks that a launcher has started."""

    def __init__(self, program: str, given: Mapping[str, Any], world_size: int | None = None) -> None:
        self.program = program
        self.given = given
        self.world_size = world_size
        self.known = flags_of(program)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.known[name].default)

    def hold(self, condition: str | None) -> bool:
        """True if a flag's condition holds: a flag is given or positive, or has a value; after `!` it must not."""
        if condition is None:
            return True
        if condition.startswith("!"):
            return not self.hold(condition[1:])
        return any(self._holds(*alternative.partition("=")) for alternative in condition.split("|"))

    def _holds(self, name: str, equals: str, wanted: str) -> bool:
        value = self[name] if name in self.known else True
        return str(value) == wanted if equals else value > 0 if isinstance(value, int | float) else bool(value)


def apply(flag: Flag, flags: Flags, made: Translation) -> None:
    """Translate one flag by itself."""
    value, is_given = flags[flag.name], flag.name in flags.given
    if is_given and (others := [name for name in flag.excludes if flags.given.get(name)]):
        raise ConfigError(f"{flags.program}: --{flag.name} and --{others[0]} exclude each other: leave one out")
    if value is None and flag.needed:
        raise ConfigError(f"{flags.program}: {flag.needed}? Give --{flag.name}")
    if is_given and flag.refused is not None and value != flag.unless:
        given = f"--{flag.name}" if value is True else f"--{flag.name} {value}"
        raise ConfigError(f"{flags.program}: {given}: {flag.refused}")
    if is_given and flag.ignored is not None:
        made.notes.append(f"--{flag.name} is left out: {flag.ignored}")
    if (value in (None, False) and not is_given) or not flags.hold(flag.condition):
        return
    if flag.environ is not None:
        made.environ[flag.environ] = str(value)
    if flag.to is not None:
        if flag.values and str(value) not in flag.values and "*" not in flag.values:
            raise ConfigError(f"{flags.program}: --{flag.name} is one of {', '.join(flag.values)}, not {value}")
        value = flag.value if flag.value is not None else flag.values.get(str(value), value)
        keys = [flag.to] if isinstance(flag.to, str) else flag.to
        values = value if flag.kind == "pair" and len(keys) == 2 else [value] * len(keys)
        made.settings |= dict(zip(keys, values, strict=True))


# ---------------------------------------------------------------------------------------------------------
# What programs share


def trained(flags: Flags, made: Translation, max_len: int) -> None:
    """Translate where a run is kept, reported and saved, and the size of its micro-batches."""
    settings, folder = made.settings, Path(flags["ckpt_path"])
    settings |= {"runs_dir": str(folder.parent), "name": folder.name}
    made.save_path, made.resumes = Path(flags["save_path"]), bool(flags["load_checkpoint"])
    made.kept = "adapter" if flags["lora_rank"] else "model"
    settings.setdefault("workers.tokens_per_microbatch", flags["micro_train_batch_size"] * max_len)
    if token := flags["use_wandb"]:
        settings["report_to"] = ["wandb", *settings.get("report_to", ())]
        made.environ |= {} if str(token).lower() in ("true", "1") else {"WANDB_API_KEY": str(token)}
    if flags["eval_dataset"] is None:
        settings |= {"eval.every": 0, "data.test_fraction": 0.0}
    else:
        settings["eval.every"] = flags["eval_steps"] if flags["eval_steps"] > 0 else 20


def sources(flags: Flags, paths: str, probabilities: str, key: str = "data") -> dict[str, Any]:
    """One path, or several with their weights."""
    given = str(flags[paths]).split(",")
    if len(given) == 1:
        return {f"{key}.path": given[0]}
    weights = str(flags[probabilities]).split(",") if flags[probabilities] is not None else ["1"] * len(given)
    if len(weights) != len(given):
        raise ConfigError(f"{flags.program}: --{paths} names {len(given)} sources, --{probabilities} {len(weights)}")
    found: dict[str, Any] = {}
    for number, (path, weight) in enumerate(zip(given, weights, strict=True), 1):
        found |= {f"{key}.sources.s{number}.path": path, f"{key}.sources.s{number}.weight": float(weight)}
    return found


def template(flags: Flags, made: Translation, key: str, after: str = "") -> None:
    """The chat template, or text around what is asked. `after`: text behind it in either case."""
    text = "" if flags["apply_chat_template"] else flags["input_template"] or ""
    made.settings["render"] = "chat" if flags["apply_chat_template"] else "raw"
    if "\\n" in text:
        made.notes.append("--input_template: \\n is read as a new line")
    if text or after:
        made.settings[key] = (text or "{}").replace("\\n", "\n") + after
