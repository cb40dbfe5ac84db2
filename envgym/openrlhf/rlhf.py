"""Translation of `rlhf.yaml`, the settings of the entry points `train_dpo.py`, `train_ppo.py` and `train_grpo.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.config.words import dotted_keys
from envgym.errors import ConfigError, did_you_mean
from envgym.yaml_files import read_yaml

from .translate import translate_flags
from .translation import Flags, Translation

FILE = Path(__file__).with_name("rlhf.yaml")


def entry_point(program: str) -> str | None:
    """The name of the entry point that `program` means, `rlhf:NAME` or a path to NAME.py; None if it means none."""
    name = program.removeprefix("rlhf:") if program.startswith("rlhf:") else Path(program).stem
    return name if name in read_yaml(FILE)["programs"] and name != program else None


def translate_file(name: str, arguments: Sequence[str], *, world_size: int | None = None) -> Translation:
    """Translate the settings of the entry point `name`, in the file after `--config`: to flags of OpenRLHF, then as a
    command with these. Raises `ConfigError` for an unknown or unsupported setting, which it calls by the file's key."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if "--config" not in options or options.keys() - {"--config", "--deepspeed"}:
        raise ConfigError(f"{name}: which settings? Give --config FILE, and --deepspeed FILE if there is one")
    file, table = options["--config"], read_yaml(FILE)
    entry = table["programs"][name]
    program = entry["program"]
    rules = {key: rule for section in entry["sections"] for key, rule in table[section].items()}
    unused = {**table["dpo"], **table["ppo"]}.keys() - rules.keys()  # one file has the settings of all entry points
    values: dict[str, Any] = {**table["defaults"][program], **entry.get("flags", {})}
    notes: list[str] = []
    for key, value in dotted_keys(read_yaml(Path(file))):
        if value is None or key in unused:
            continue
        if key not in rules:
            raise ConfigError(f"{file}: unknown key {key!r}.{did_you_mean(key, rules)}")
        rule = rules[key]
        match _rule_for(value, rule, f"{file}: {key}") if isinstance(rule, Mapping) else rule:
            case ["unsupported", reason]:
                raise ConfigError(f"{file}: {key}: {value}: {reason}")
            case ["ignored", reason]:
                notes.append(f"{key} is ignored: {reason}")
            case str() as flag:
                values[flag] = value
            case flags:
                values |= flags
    settings = {key[1:]: values.pop(key) for key in list(values) if key.startswith("=")}
    if settings.pop("no_adapter", False):
        values["lora_rank"] = 0  # whatever peft.r says, before or after it
    if program == "train_dpo":
        for name in ("prompt_key", "chosen_key", "rejected_key"):  # TRL's rows have fields of several names
            values.setdefault(name, None)
        betas = [settings.pop(f"beta{n}", default) for n, default in enumerate(values["adam_betas"], 1)]
        values["adam_betas"] = betas
        values["train_batch_size"] = values["micro_train_batch_size"] * settings.pop("accumulation") * (world_size or 1)
    else:
        # VERL counts prompts, and its models share all GPUs.
        values["train_batch_size"] = settings.pop("mini_batch") * values.get("n_samples_per_prompt", 1)
        for number in ("num_nodes", "num_gpus_per_node"):
            values |= {
                f"{role}_{number}": values.get(f"actor_{number}", 1) for role in ("actor", "critic", "ref", "reward")
            }
        values.setdefault("critic_pretrain", values.get("pretrain"))  # VERL's critic starts from the policy
        in_reward = settings.pop("kl_in_reward", False)
        if in_reward and values.get("use_kl_loss"):
            raise ConfigError(
                f"{file}: use_kl_in_reward and use_kl_loss: the KL is in the reward or in the loss: set one"
            )
        if in_reward:
            values |= {"init_kl_coef": 0.001, "kl_estimator": "k1"}  # VERL's own; kl_loss_coef is the loss's
        if name == "train_grpo":
            settings["learner.advantage_eps"] = 1e-6
        if not in_reward and not values.get("use_kl_loss"):
            values["init_kl_coef"] = 0.0
            settings.pop("roles.reference.model", None)
    if "--deepspeed" in options:
        values["zero_stage"] = read_yaml(Path(options["--deepspeed"])).get("zero_optimization", {}).get("stage", 0)
        notes.append("--deepspeed: only its ZeRO stage is used; set more in workers.deepspeed")
    options = {key: value for key, value in values.items() if value is not False}
    keys = {rule: key for key, rule in rules.items() if isinstance(rule, str)}

    def in_keys(text: str) -> str:
        """A sentence about flags, with the file's keys in their place."""
        text = re.sub(r"--([\w.]+)", lambda match: keys.get(match[1], match[0]), text)
        return text.replace(f"{program}: ", f"{file}: ")

    try:
        translation = translate_flags(Flags(program, options, world_size), notes)
    except ConfigError as error:
        raise ConfigError(in_keys(str(error))) from None
    translation.notes = [in_keys(note) for note in translation.notes]
    translation.settings |= settings
    return translation


def _rule_for(value: Any, rules: Mapping[Any, Any], context: str) -> Any:
    """The rule of a setting for its value; for a list of values the first rule that is not empty."""
    by_name = {str(name).lower(): rule for name, rule in rules.items()}
    values = [str(item).lower() for item in (value if isinstance(value, list) else [value])]
    if unknown := [item for item in values if item not in by_name]:
        raise ConfigError(f"{context} is one of {', '.join(by_name)}, not {unknown[0]}")
    return next((by_name[item] for item in values if by_name[item]), {})
