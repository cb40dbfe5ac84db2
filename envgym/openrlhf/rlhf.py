"""The entry points `train_dpo.py`, `train_ppo.py` and `train_grpo.py` with their `rlhf.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, did_you_mean
from envgym.yaml_files import read_yaml

from .translate import translated
from .translation import Flags, Translation

FILE = Path(__file__).with_name("rlhf.yaml")


def entry_point(program: str) -> str | None:
    """The entry point that `rlhf:NAME` or a path to NAME.py names; None where it is none."""
    name = program.removeprefix("rlhf:") if program.startswith("rlhf:") else Path(program).stem
    return name if name in read_yaml(FILE)["programs"] and name != program else None


def translate_file(name: str, arguments: Sequence[str], *, world_size: int | None = None) -> Translation:
    """Translate an entry point's settings. Raises `ConfigError` for what is not known, or has no place here."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if "--config" not in options or options.keys() - {"--config", "--deepspeed"}:
        raise ConfigError(f"{name}: which settings? Give --config FILE, and --deepspeed FILE where there is one")
    file, table = options["--config"], read_yaml(FILE)
    entry = table["programs"][name]
    program = entry["program"]
    fates = {key: fate for section in entry["of"] for key, fate in table[section].items()}
    of_others = {**table["dpo"], **table["ppo"]}.keys() - fates.keys()  # one file has the settings of all three
    given: dict[str, Any] = {**table["defaults"][program], **entry.get("given", {})}
    notes: list[str] = []
    for key, value in _flat(read_yaml(Path(file))):
        if value is None or key in of_others:
            continue
        if key not in fates:
            raise ConfigError(f"{file}: unknown key {key!r}.{did_you_mean(key, fates)}")
        fate = fates[key]
        match _of_value(fate, value, f"{file}: {key}") if isinstance(fate, Mapping) else fate:
            case ["refused", reason]:
                raise ConfigError(f"{file}: {key}: {value}: {reason}")
            case ["ignored", reason]:
                notes.append(f"{key} is left out: {reason}")
            case str() as flag:
                given[flag] = value
            case implied:
                given |= implied
    settings = {key[1:]: given.pop(key) for key in list(given) if key.startswith("=")}
    if program == "train_dpo":
        given["train_batch_size"] = given["micro_train_batch_size"] * settings.pop("accumulation") * (world_size or 1)
    else:
        # VERL counts prompts, and its models share all GPUs.
        given["train_batch_size"] = settings.pop("mini_batch") * given.get("n_samples_per_prompt", 1)
        for number in ("num_nodes", "num_gpus_per_node"):
            given |= {f"{role}_{number}": given.get(f"actor_{number}", 1) for role in ("actor", "critic", "ref")}
        if not settings.pop("kl_in_reward", False) and not given.get("use_kl_loss"):
            given["init_kl_coef"] = 0.0
            settings.pop("roles.reference.model", None)
    if "--deepspeed" in options:
        given["zero_stage"] = read_yaml(Path(options["--deepspeed"])).get("zero_optimization", {}).get("stage", 0)
        notes.append("--deepspeed: its ZeRO stage is taken; more goes into workers.deepspeed")
    flags = {key: value for key, value in given.items() if value is not False}
    made = translated(Flags(program, flags, world_size), notes)
    made.settings |= settings
    return made


def _of_value(fates: Mapping[Any, Any], value: Any, where: str) -> Any:
    """The fate of a setting by its value; of several values that of the first that does anything."""
    by_name = {str(name).lower(): fate for name, fate in fates.items()}
    values = [str(item).lower() for item in (value if isinstance(value, list) else [value])]
    if unknown := [item for item in values if item not in by_name]:
        raise ConfigError(f"{where} is one of {', '.join(by_name)}, not {unknown[0]}")
    return next((by_name[item] for item in values if by_name[item]), {})


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
