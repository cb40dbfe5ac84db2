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
    known = {key: what for section in entry["of"] for key, what in table[section].items()}
    elsewhere = {**table["dpo"], **table["ppo"]}.keys() - known.keys()  # one file has the settings of all three
    given: dict[str, Any] = {**table["defaults"][entry["program"]], **entry.get("given", {})}
    notes: list[str] = []
    for key, value in _flat(read_yaml(Path(file))):
        if value is None or key in elsewhere:
            continue
        if key not in known:
            raise ConfigError(f"{file}: unknown key {key!r}.{did_you_mean(key, known)}")
        what = known[key]
        if isinstance(what, Mapping):
            values = {str(name).lower(): flags for name, flags in what.items()}
            of_value = [str(one).lower() for one in (value if isinstance(value, list) else [value])]
            if unknown := [one for one in of_value if one not in values]:
                raise ConfigError(f"{file}: {key} is one of {', '.join(values)}, not {unknown[0]}")
            what = next((values[one] for one in of_value if values[one]), {})
        if isinstance(what, list) and what[0] == "refused":
            raise ConfigError(f"{file}: {key}: {value}: {what[1]}")
        if isinstance(what, list):
            notes.append(f"{key} is left out: {what[1]}")
        else:
            given |= what if isinstance(what, Mapping) else {what: value}
    if entry["program"] == "train_dpo":
        given["train_batch_size"] = given["micro_train_batch_size"] * given.pop("=accumulation") * (world_size or 1)
    else:
        given["train_batch_size"] = given.pop("=mini_batch") * given.get(
            "n_samples_per_prompt", 1
        )  # VERL counts prompts
        for what in ("nodes", "gpus_per_node"):  # VERL's models share them all
            given |= {f"{role}_num_{what}": given.get(f"actor_num_{what}", 1) for role in ("actor", "critic", "ref")}
        if not given.pop("=kl_in_reward", False) and not given.get("use_kl_loss"):
            given |= {"init_kl_coef": 0.0, "=roles.reference.model": None}
    if "--deepspeed" in options:
        given["zero_stage"] = read_yaml(Path(options["--deepspeed"])).get("zero_optimization", {}).get("stage", 0)
        notes.append("--deepspeed: its ZeRO stage is taken; more goes into workers.deepspeed")
    flags = {key: value for key, value in given.items() if not key.startswith("=") and value is not False}
    made = translated(Flags(entry["program"], flags, world_size), notes)
    made.settings |= {key[1:]: value for key, value in given.items() if key.startswith("=") and value is not None}
    return made


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
