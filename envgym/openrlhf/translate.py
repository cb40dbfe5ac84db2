"""A command of OpenRLHF as one of envgym: every flag by the table, and those that belong together by the rules here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError

from .table import PROGRAMS, parse, table

ESTIMATORS = {
    "gae": "ppo", "reinforce": "reinforce++", "rloo": "rloo", "reinforce_baseline": "reinforce++_baseline",
    "group_norm": "grpo", "dr_grpo": "dr_grpo",
}  # fmt: skip
"""Recipes by the names that they have as advantage estimators."""
OFFLINE = {
    "train_sft": ("sft", "demonstration"), "train_rm": ("rm", "preference"), "train_prm": ("prm", "steps"),
    "train_dpo": ("dpo", "preference"), "train_kto": ("kto", "labelled"), "train_kd": ("distill", "demonstration"),
}  # fmt: skip
"""Recipe, and form of the data, by program."""


@dataclass(slots=True)
class Translation:
    """A command of envgym: its name, its options, its settings, variables of its environment, what is to be said of
    flags that are left out, and where the model is to be in the end."""

    command: str
    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    save_path: str | None = None
    resumes: bool = False


def translate(program: str, arguments: Sequence[str], *, world_size: int | None = None) -> Translation:
    """`world_size`: ranks that a launcher would have started. Raises `ConfigError` for what has no place here."""
    if program not in PROGRAMS:
        raise ConfigError(f"there is no program {program!r}: it is one of {', '.join(PROGRAMS)}")
    given = parse(program, arguments)
    made = Translation("train")
    flags = Flags(program, given, world_size)
    for flag in table().values():
        if program not in flag.programs:
            continue
        value = flags[flag.name]
        if flag.name in given and flag.refused is not None and value != flag.unless:
            raise ConfigError(
                f"{program}: --{flag.name} {value if value is not True else ''}".rstrip() + f": {flag.refused}"
            )
        if flag.name in given and flag.ignored is not None:
            made.notes.append(f"--{flag.name} is left out: {flag.ignored}")
        if flag.environ is not None and value is not None:
            made.environ[flag.environ] = str(value)
        if flag.to is not None and value not in (None, False):
            if flag.values and str(value) not in flag.values:
                known = ", ".join(flag.values)
                raise ConfigError(f"{program}: --{flag.name} is one of {known}, not {value}")
            made.settings[flag.to] = flag.value if flag.value is not None else flag.values.get(str(value), value)
    RULES.get(program, _offline)(flags, made)
    return made


class Flags:
    """The flags of a command: what is given, else theirs."""

    def __init__(self, program: str, given: Mapping[str, Any], world_size: int | None) -> None:
        self.program = program
        self.given = given
        self.world_size = world_size

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, table()[name].default_of(self.program))

    def one_of(self, *names: str) -> str | None:
        """Which of these is given. Raises `ConfigError` where two are."""
        found = [name for name in names if self.given.get(name)]
        if len(found) > 1:
            raise ConfigError(f"{self.program}: --{found[0]} and --{found[1]} exclude each other: leave one out")
        return found[0] if found else None


# ---------------------------------------------------------------------------------------------------------
# What all training programs share


def _shared(flags: Flags, made: Translation, max_len: int) -> None:
    settings = made.settings
    ckpt = Path(flags["ckpt_path"])
    settings |= {"runs_dir": str(ckpt.parent), "name": ckpt.name}
    made.save_path, made.resumes = flags["save_path"], bool(flags["load_checkpoint"])
    settings["checkpoint.every"] = max(0, flags["save_steps"])
    if flags.given.get("packing_samples"):
        settings["workers.packing"] = "auto"
    micro = flags["micro_train_batch_size"]
    settings["workers.tokens_per_microbatch"] = micro * max_len
    if flags["lora_rank"]:
        targets = flags["target_modules"]
        settings["lora.targets"] = targets if targets == "all-linear" else [str(target) for target in targets]
    else:
        for key in [key for key in settings if key.startswith("lora.") and key != "lora.rank"]:
            del settings[key]
    trackers = [name for name in ("wandb", "tensorboard") if flags[f"use_{name}"]]
    if trackers:
        settings["report_to"] = trackers
    token = flags["use_wandb"]
    if token and str(token).lower() not in ("true", "1"):
        made.environ["WANDB_API_KEY"] = str(token)
    if "wandb" not in trackers:
        settings.pop("project", None)
        for name in ("WANDB_ENTITY", "WANDB_RUN_GROUP"):
            made.environ.pop(name, None)
    if flags.given.get("wandb_run_name"):
        made.environ["WANDB_NAME"] = str(flags["wandb_run_name"])


def _sources(flags: Flags, settings: dict[str, Any], paths: str, probabilities: str) -> None:
    """One path, or several with weights."""
    given = str(flags[paths]).split(",")
    if len(given) == 1:
        settings["data.path"] = given[0]
        return
    weights = str(flags[probabilities]).split(",") if flags[probabilities] is not None else ["1"] * len(given)
    if len(weights) != len(given):
        raise ConfigError(f"{flags.program}: --{paths} names {len(given)} sources, --{probabilities} {len(weights)}")
    for number, (path, weight) in enumerate(zip(given, weights, strict=True), 1):
        settings[f"data.sources.s{number}.path"] = path
        settings[f"data.sources.s{number}.weight"] = float(weight)


def _template(flags: Flags, made: Translation, key: str) -> None:
    """The chat template, or text around what is asked."""
    if flags.given.get("apply_chat_template"):
        if flags.given.get("input_template"):
            raise ConfigError(f"{flags.program}: --apply_chat_template and --input_template exclude each other")
        made.settings["render"] = "chat"
        return
    made.settings["render"] = "text"
    template = flags["input_template"]
    if template:
        if "\\n" in template:
            made.notes.append("--input_template: \\n is read as a new line")
        made.settings[key] = template.replace("\\n", "\n")


def _limit(flags: Flags, settings: dict[str, Any]) -> None:
    if "max_samples" in flags.given:
        settings["data.limit"] = int(flags["max_samples"])


def _evaluation(flags: Flags, settings: dict[str, Any]) -> None:
    """Held-out data are evaluated as often as is said; without data or steps never."""
    if flags["eval_dataset"] is None:
        settings |= {"eval.every": 0, "data.test_fraction": 0.0}
        settings.pop("eval.samples", None)
        return
    settings["data.test_path"] = flags["eval_dataset"]
    if "eval_split" in flags.given:
        settings["data.test_split"] = flags["eval_split"]
    settings["eval.every"] = flags["eval_steps"] if flags["eval_steps"] > 0 else 20


# ---------------------------------------------------------------------------------------------------------
# Learning from recorded data


def _offline(flags: Flags, made: Translation) -> None:
    settings = made.settings
    recipe, form = OFFLINE[flags.program]
    made.options = {"--recipe": recipe}
    if flags["dataset"] is None:
        raise ConfigError(f"{flags.program}: which data? Give them with --dataset")
    if flags["pretrain"] is None:
        raise ConfigError(f"{flags.program}: which model? Give it with --pretrain")
    max_len = int(flags["max_len"])
    settings |= {"env.form": form, "agent.max_tokens": max_len, "epochs": flags["max_epochs"]}
    settings["rollout.tasks"] = flags["train_batch_size"]
    settings["workers.ranks"] = flags.world_size or 1
    _shared(flags, made, max_len)
    _sources(flags, settings, "dataset", "dataset_probs")
    _limit(flags, settings)
    _evaluation(flags, settings)
    _template(flags, made, "env.template")
    if flags.program == "train_sft":
        settings.setdefault("env.teach", "last")
        if flags["pretrain_mode"]:
            settings |= {"env.form": "text", "env.fields.text": flags["input_key"]}
            settings.pop("env.teach")
            settings.pop("env.template", None)
    names = {"input_key": "prompt", "output_key": "response", "prompt_key": "prompt", "label_key": "label"}
    for flag, name in names.items():
        known = flags.program in table()[flag].programs
        if (
            known
            and flags[flag] is not None
            and flags["pretrain_mode" if flags.program == "train_sft" else "seed"] is not True
        ):
            settings[f"env.fields.{name}"] = flags[flag]
    if flags.program == "train_dpo" and flags["ref_pretrain"] is None:
        settings.pop("roles.reference.model", None)
    if flags.program == "train_prm":
        _steps_of_prm(flags, made)


def _steps_of_prm(flags: Flags, made: Translation) -> None:
    """Steps end at a placeholder token there; here at a text."""
    if flags["placeholder_token"] is None:
        raise ConfigError("train_prm: give --placeholder_token, the text at which a step ends")
    made.settings["env.separator"] = flags["placeholder_token"]
    if flags["reward_tokens"]:
        made.notes.append(
            "--reward_tokens is left out: a step's label is read as it stands, + and -, true and false, or a number"
        )


# ---------------------------------------------------------------------------------------------------------
# Reinforcement learning


def _ppo(flags: Flags, made: Translation) -> None:
    settings = made.settings
    estimator = flags["advantage_estimator"]
    if estimator not in ESTIMATORS:
        raise ConfigError(f"train_ppo_ray: --advantage_estimator is one of {', '.join(ESTIMATORS)}, not {estimator}")
    made.options = {"--recipe": ESTIMATORS[estimator]}
    if flags["prompt_data"] is None:
        raise ConfigError("train_ppo_ray: which prompts? Give them with --prompt_data")
    if flags["pretrain"] is None:
        raise ConfigError("train_ppo_ray: which model? Give it with --pretrain")
    length = int(flags["max_len"] or flags["prompt_max_len"] + flags["generate_max_len"])
    settings["engine.max_model_len"] = length
    _shared(flags, made, length)
    _sources(flags, settings, "prompt_data", "prompt_data_probs")
    _limit(flags, settings)
    _evaluation(flags, settings)
    _template(flags, made, "data.template")
    settings["data.prompt"] = flags["input_key"]
    if flags["label_key"] is not None:
        settings["data.answer"] = flags["label_key"]
    for rule in (_reward, _loss, _kl, _corrections, _batches, _places):
        rule(flags, made)
    if estimator != "gae":
        for key in [
            key
            for key in settings
            if key.startswith("roles.critic.") or key in ("learner.gae_lambda", "learner.value_clip")
        ]:
            del settings[key]


def _reward(flags: Flags, made: Translation) -> None:
    """Who judges: an agent's file, a reward function's, a server, or models."""
    source, settings = flags.one_of("agent_func_path", "remote_rm_url", "reward_pretrain"), made.settings
    if source is None:
        raise ConfigError(
            "train_ppo_ray: who rewards? Give --reward_pretrain MODEL, --remote_rm_url URL or FILE.py, or "
            "--agent_func_path FILE.py"
        )
    value = str(flags[source])
    if source == "reward_pretrain" or not value.endswith(".py"):
        made.options["--env"] = "reward_model"
        entries = value.split(",")
        key = "models" if source == "reward_pretrain" else "endpoints"
        settings[f"env.{key}"] = entries if len(entries) > 1 else entries[0]
        if flags["normalize_reward"] and key == "models":
            settings["env.models"] = [{"model": entry, "normalise": True} for entry in entries]
    else:
        made.options["--env"] = value
        if flags["normalize_reward"]:
            made.notes.append("--normalize_reward is left out: what a file pays is as it says")
        if settings.get("render") == "text":
            settings["env.chat"] = False


def _loss(flags: Flags, made: Translation) -> None:
    settings = made.settings
    low_high = flags["eps_clip_low_high"]
    low = flags["clip_eps_low"] or (low_high[0] if low_high else flags["eps_clip"])
    high = flags["clip_eps_high"] or (low_high[1] if low_high else flags["eps_clip"])
    settings |= {"learner.clip_low": low, "learner.clip_high": high, "learner.epochs": flags["max_epochs"]}
    if flags["enable_ema"]:
        settings["learner.ema_decay"] = flags["ema_beta"]
    if flags["overlong_buffer_len"]:
        settings |= {
            "learner.shaping.overlong_length": flags["generate_max_len"],
            "learner.shaping.overlong_buffer": int(flags["overlong_buffer_len"]),
            "learner.shaping.overlong_factor": flags["overlong_penalty_factor"],
        }
    if flags["freezing_actor_steps"] > 0:
        settings["learner.critic_warmup_steps"] = flags["freezing_actor_steps"]
    if flags["no_advantage_std_norm"]:
        raise ConfigError(
            "train_ppo_ray: --no_advantage_std_norm takes the mean of advantages off and leaves their spread, which no "
            "learner here does: leave it out, or set learner.advantage_norm=none with envgym train"
        )
    if not flags["pretrain_data"]:
        settings.pop("learner.pretrain_coef", None)
        return
    for number, path in enumerate(str(flags["pretrain_data"]).split(","), 1):
        settings[f"pretrain.sources.s{number}.path"] = path


def _kl(flags: Flags, made: Translation) -> None:
    settings = made.settings
    if not flags["init_kl_coef"] > 0:
        for key in [key for key in settings if key.startswith("learner.kl.")]:
            del settings[key]
        settings["learner.kl.coef"] = 0.0
        return
    settings["learner.kl.place"] = "loss" if flags["use_kl_loss"] else "reward"
    if flags["kl_target"] is not None:
        settings["learner.kl.horizon"] = flags["kl_horizon"]


def _corrections(flags: Flags, made: Translation) -> None:
    settings = made.settings
    kind = "icepop" if flags["use_icepop"] else flags["vllm_is_correction_type"]
    if flags["enable_vllm_is_correction"] or flags["use_icepop"]:
        threshold = flags["vllm_is_truncated_threshold"]
        low, high = threshold if isinstance(threshold, list) else (0.5, float(threshold))
        settings |= {
            "learner.correction.kind": kind.replace("-", "_"), "learner.correction.low": low,
            "learner.correction.high": high,
        }  # fmt: skip
    if flags["dynamic_filtering"]:
        low, high = flags["dynamic_filtering_reward_range"]
        settings |= {"rollout.filter.min_score": low, "rollout.filter.max_score": high}
    if flags["async_train"]:
        settings["rollout.max_staleness"] = min(4, max(1, int(flags["async_queue_size"])))


def _batches(flags: Flags, made: Translation) -> None:
    """Optimizer steps of a rollout, and tokens that go through a rank at once."""
    episodes = flags["rollout_batch_size"] * flags["n_samples_per_prompt"]
    if episodes % flags["train_batch_size"]:
        made.notes.append(
            f"--train_batch_size {flags['train_batch_size']} does not divide the {episodes} episodes of a rollout: its "
            "optimizer steps share them evenly"
        )
    made.settings["learner.minibatches"] = max(1, round(episodes / flags["train_batch_size"]))
    if flags["use_dynamic_batch"]:
        made.settings["workers.tokens_per_microbatch"] = flags["train_max_tokens_per_gpu"]


def _places(flags: Flags, made: Translation) -> None:
    settings = made.settings
    ranks = {
        role: flags[f"{role}_num_nodes"] * flags[f"{role}_num_gpus_per_node"] for role in ("actor", "critic", "ref")
    }
    roles = {"actor": "actor"}
    if flags["advantage_estimator"] == "gae":
        roles["critic"] = "critic"
    if flags["init_kl_coef"] > 0:
        roles["ref"] = "reference"
    settings["workers.ranks"] = ranks["actor"]
    for theirs, ours in roles.items():
        if ranks[theirs] != ranks["actor"]:
            settings[f"roles.{ours}.workers.ranks"] = ranks[theirs]
        if flags[f"{theirs}_num_nodes"] > 1:
            settings[f"placement.{ours}.nodes"] = flags[f"{theirs}_num_nodes"]
    if flags["vllm_num_engines"] == 0:
        raise ConfigError("train_ppo_ray: --vllm_num_engines 0: the policy is sampled by engines here: give at least 1")
    if flags["colocate_all_models"] and not flags["async_train"]:
        settings["colocate"] = "all"
        return
    if flags["colocate_all_models"]:
        made.notes.append("--colocate_all_models beside --async_train: models share GPUs, engines have their own")
        settings["colocate"] = [list(roles.values())]
        return
    pairs = []
    if flags["colocate_actor_ref"] and "ref" in roles:
        pairs.append(["actor", "reference"])
    if flags["colocate_critic_reward"] and "critic" in roles and made.options["--env"] == "reward_model":
        pairs.append(["critic", "reward"])
    if pairs:
        settings["colocate"] = pairs


RULES: dict[str, Callable[[Flags, Translation], None]] = {"train_ppo_ray": _ppo}
