"""The flags of an OpenRLHF command, and the command of envgym that they are translated to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envgym.config.words import parse_overrides
from envgym.errors import ConfigError

from .table import UNCHANGED, Flag, flags_of


@dataclass(slots=True)
class Translation:
    """The command of envgym that a command of OpenRLHF becomes, and the work before and after it."""

    command: str = "train"
    words: list[str] = field(default_factory=list)
    """Words and options before the settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command."""
    notes: list[str] = field(default_factory=list)
    """Notes on flags that are ignored or differ in meaning."""
    save_path: Path | None = None
    """Folder that the trained model, or its adapter, is copied to at the end."""
    result: str = "model"
    """Name of the folder in the run's folder that is copied to `save_path`."""
    copies: dict[str, Path] = field(default_factory=dict)
    """Further folders in the run's folder, by name, with their destinations."""
    run: Path = Path()
    """The run's folder."""
    resumes: bool = False
    """True to resume an existing run of that name."""
    finish: Callable[[], str] | None = None
    """Function to call after the command. It returns a message for the user."""

    @property
    def arguments(self) -> list[str]:
        """The command line after `envgym`."""
        return [self.command, *self.words, *(_word(key, value) for key, value in self.settings.items())]


def _word(key: str, value: Any) -> str:
    """`key=value`, quoted if it would be parsed differently otherwise."""
    plain, quoted = f"{key}={value}", f"{key}={json.dumps(value)}"
    return plain if isinstance(value, str) and parse_overrides([plain]) == parse_overrides([quoted]) else quoted


class Flags:
    """The flags of a command by name: the values that it gives (`options`), else OpenRLHF's defaults.

    `world_size` is the number of ranks that a launcher has started, None without a launcher. `dotted` is true for a
    command with the dotted names of later versions, whose defaults it then gets.
    """

    def __init__(
        self, program: str, options: Mapping[str, Any], world_size: int | None = None, *, dotted: bool = False
    ) -> None:
        self.program = program
        self.dotted = dotted
        self.options = options
        self.world_size = world_size
        self.table = flags_of(program)

    def __getitem__(self, name: str) -> Any:
        flag = self.table[name]
        changed = self.dotted and flag.dotted_default is not UNCHANGED
        return self.options.get(name, flag.dotted_default if changed else flag.default)

    def holds(self, condition: str | None) -> bool:
        """Evaluate a flag's condition, `if` in `flags.yaml`; without a condition it is true."""
        if condition is None:
            return True
        if condition.startswith("!"):
            return not self.holds(condition[1:])
        return any(self._is_met(*alternative.partition("=")) for alternative in condition.split("|"))

    def _is_met(self, name: str, equals: str, expected: str) -> bool:
        value = self[name] if name in self.table else True
        return str(value) == expected if equals else value > 0 if isinstance(value, int | float) else bool(value)


def apply_flag(flag: Flag, flags: Flags, translation: Translation) -> None:
    """Translate one flag by its entry in the table, into `translation`. Raises `ConfigError` for a flag that envgym
    does not support, that excludes another one of the command, or whose value is missing or unknown."""
    value, is_set = flags[flag.name], flag.name in flags.options
    if is_set and (conflicts := [name for name in flag.excludes if flags.options.get(name)]):
        raise ConfigError(f"{flags.program}: --{flag.name} and --{conflicts[0]} exclude each other: leave one out")
    if value is None and flag.question:
        raise ConfigError(f"{flags.program}: {flag.question}? Give --{flag.name}")
    if is_set and flag.unsupported is not None and value != flag.unless:
        option = f"--{flag.name}" if value is True else f"--{flag.name} {value}"
        raise ConfigError(f"{flags.program}: {option}: {flag.unsupported}")
    if is_set and flag.ignored is not None:
        translation.notes.append(f"--{flag.name} is ignored: {flag.ignored}")
    if is_set and flag.differs is not None:
        translation.notes.append(f"--{flag.name}: {flag.differs}")
    if value is None or value == "" or (value is False and not is_set) or not flags.holds(flag.condition):
        return
    if flag.environ is not None:
        translation.environ[flag.environ] = str(value)
    if flag.setting is not None:
        if flag.values and str(value) not in flag.values and "*" not in flag.values:
            raise ConfigError(f"{flags.program}: --{flag.name} is one of {', '.join(flag.values)}, not {value}")
        value = flag.value if flag.value is not None else flag.values.get(str(value), value)
        keys = [flag.setting] if isinstance(flag.setting, str) else flag.setting
        values = value if flag.kind == "pair" and len(keys) == 2 else [value] * len(keys)
        translation.settings |= dict(zip(keys, values, strict=True))


# ---------------------------------------------------------------------------------------------------------
# Rules of several programs


def set_training(flags: Flags, translation: Translation, max_len: int) -> None:
    """Set the run's folder, the copy of its result, the trackers, the evaluation and the size of micro-batches.
    `max_len` is the maximum tokens of a sequence. Raises `ConfigError` for what envgym does not support."""
    settings, folder = translation.settings, Path(flags["ckpt_path"])
    settings |= {"runs_dir": str(folder.parent), "name": folder.name}
    translation.save_path, translation.resumes = Path(flags["save_path"]), bool(flags["load_checkpoint"])
    averages = "enable_ema" in flags.table and flags["enable_ema"]
    translation.result = "adapter" if flags["lora_rank"] else "model_ema" if averages else "model"
    per_row = 2 if flags.program in ("train_rm", "train_dpo") else 1  # a row is a pair
    settings.setdefault("workers.tokens_per_microbatch", per_row * flags["micro_train_batch_size"] * max_len)
    packs = "packing_samples" in flags.table and flags["packing_samples"]
    if packs and "flash" not in settings.get("workers.attention", "flash"):
        settings["workers.attention"] = "auto"  # OpenRLHF packs with flash attention alone
    settings |= schedule_settings(str(flags["lr_scheduler"]), flags, "min_lr_ratio")
    if settings.get("learner.lr_schedule") == "constant" and flags["lr_scheduler"] == "constant":
        settings["learner.warmup_ratio"] = 0.0
    if (folder_of_logs := flags["use_tensorboard"]) is not None and not flags["use_wandb"]:
        settings["report_to"] = ["tensorboard"]
        if folder_of_logs is not True:
            settings["tensorboard_dir"] = str(folder_of_logs)
    if flags["load_in_4bit"] and not flags["lora_rank"]:
        raise ConfigError(f"{flags.program}: --load_in_4bit: weights of 4 bits are not trained: give --lora_rank too")
    if token := flags["use_wandb"]:
        settings["report_to"] = ["wandb"]
        translation.environ |= {} if str(token).lower() in ("true", "1") else {"WANDB_API_KEY": str(token)}
    if (held_out := flags["eval_dataset"]) is None:
        settings |= {"eval.every": 0, "data.test_fraction": 0.0}
        return
    if "," in str(held_out):
        raise ConfigError(f"{flags.program}: --eval_dataset names several data sets: join them in one file or folder")
    without_steps = 0 if flags.program == "train_ppo_ray" else "epoch"
    settings["eval.every"] = flags["eval_steps"] if flags["eval_steps"] > 0 else without_steps
    settings["eval.tasks"] = 10**8  # all
    names_split = flags["eval_split"] is not None or Path(str(held_out)).suffix
    if not names_split and flags.program in ("train_dpo", "train_kto", "train_kd", "train_prm"):
        settings["data.test_split"] = "test"


SCHEDULES = {
    "cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant",
    "constant_with_warmup": "constant",
}  # fmt: skip
"""OpenRLHF's schedules (those of transformers) by envgym's. Of the decaying ones only `cosine_with_min_lr` has a floor;
`constant` has no warm-up."""


def schedule_settings(name: str, flags: Flags, floor_flag: str, prefix: str = "learner") -> dict[str, Any]:
    """The settings of OpenRLHF's schedule `name`. The flag `floor_flag` holds the floor of the learning rate, `prefix`
    begins the settings. Raises `ConfigError` for an unknown schedule."""
    if name not in SCHEDULES:
        raise ConfigError(f"{flags.program}: --lr_scheduler is one of {', '.join(SCHEDULES)}, not {name}")
    floor = flags[floor_flag] if floor_flag in flags.table else 0.1
    settings: dict[str, Any] = {f"{prefix}.lr_schedule": SCHEDULES[name]}
    if SCHEDULES[name] != "constant":
        settings[f"{prefix}.lr_min_ratio"] = floor if name == "cosine_with_min_lr" else 0.0
    return settings


def source_settings(flags: Flags, paths_flag: str, weights_flag: str, key: str = "data") -> dict[str, Any]:
    """The settings under `key` of the data in a flag: one path, or several with their weights. Without weights the
    sources follow each other. Raises `ConfigError` for a script, for a folder on the hub, for another number of weights
    than paths, and for weights that are no numbers."""
    paths = [path.strip() for path in str(flags[paths_flag]).split(",")]
    if scripts := [path for path in paths if path.endswith(".py")]:
        raise ConfigError(
            f"{flags.program}: --{paths_flag} {scripts[0]}: scripts of data sets are not run: save its rows"
        )
    if folders := [path for path in paths if "@" in path and not Path(path).exists()]:
        raise ConfigError(f"{flags.program}: --{paths_flag} {folders[0]}: give the folder of the data set as a path")
    if len(paths) == 1:
        return {f"{key}.path": paths[0]}
    settings = {f"{key}.sources.s{number}.path": path for number, path in enumerate(paths, 1)}
    if flags[weights_flag] is None:
        return settings
    weights = str(flags[weights_flag]).split(",")
    if len(weights) != len(paths):
        raise ConfigError(
            f"{flags.program}: --{paths_flag} names {len(paths)} sources, --{weights_flag} {len(weights)}"
        )
    try:
        return settings | {f"{key}.sources.s{number}.weight": float(weight) for number, weight in enumerate(weights, 1)}
    except ValueError:
        raise ConfigError(
            f"{flags.program}: --{weights_flag} takes a number for each source, not {flags[weights_flag]}"
        ) from None


def set_template(flags: Flags, translation: Translation, key: str, suffix: str = "") -> None:
    """Set the rendering, and at the setting `key` the template of prompts, which ends with `suffix`."""
    text = "" if flags["apply_chat_template"] else flags["input_template"] or ""
    if text and "{}" not in text:
        translation.notes.append("--input_template is ignored: it has no {} for the prompt")
        text = ""
    translation.settings["render"] = "chat" if flags["apply_chat_template"] else "raw"
    if "\\n" in text:
        translation.notes.append("--input_template: \\n is read as a line break")
    if text or suffix:
        translation.settings[key] = (text or "{}").replace("\\n", "\n") + suffix
