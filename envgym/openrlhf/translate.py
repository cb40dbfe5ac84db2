"""Translation of OpenRLHF's commands: single flags by the table, combinations of flags by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, did_you_mean

from .inference import set_inference, set_merge, set_serving
from .table import PROGRAMS, is_dotted, parse
from .translation import (
    Flags,
    Translation,
    apply_flag,
    schedule_settings,
    set_template,
    set_training,
    source_settings,
)


def translate(program: str, arguments: Sequence[str], *, world_size: int | None = None) -> Translation:
    """Translate a command line of OpenRLHF. `world_size` is the number of ranks that a launcher has started, None
    without a launcher. Raises `ConfigError` for an unknown program and for an unknown, missing or unsupported flag."""
    if program in FORMER_PROGRAMS:
        raise ConfigError(f"{program} is not translated: {FORMER_PROGRAMS[program]}")
    if program not in PROGRAMS:
        raise ConfigError(
            f"there is no program {program!r}.{did_you_mean(program, PROGRAMS)} Known: {', '.join(PROGRAMS)}"
        )
    options, notes = parse(program, arguments)
    return translate_flags(Flags(program, options, world_size, dotted=is_dotted(arguments)), notes)


FORMER_PROGRAMS = {
    "train_ppo": "train_ppo_ray is its successor, with the same flags for models and data",
    "interactive_chat": "serve the model's folder with vLLM, and talk to that",
}
"""Programs of earlier versions, each with advice for the error."""


def translate_flags(flags: Flags, notes: Sequence[str]) -> Translation:
    """Translate the parsed flags of a command: each by its entry in the table, then by the rules of the program.
    `notes` are the parser's. Raises `ConfigError` like `translate`."""
    translation = Translation(notes=list(notes))
    for flag in flags.table.values():
        apply_flag(flag, flags, translation)
    RULES.get(flags.program, _set_offline)(flags, translation)
    return translation


# ---------------------------------------------------------------------------------------------------------
# Training on recorded data


def _set_offline(flags: Flags, translation: Translation) -> None:
    """Set what depends on several flags."""
    settings = translation.settings
    is_text = flags.program in ("train_sft", "train_kd") and bool(flags["pretrain_mode"])
    translation.words = ["--recipe", "distill" if flags.program == "train_kd" else flags.program.removeprefix("train_")]
    settings["workers.ranks"] = flags.world_size or 1
    if flags.program in ("train_sft", "train_kd"):  # other programs' recipes set it
        settings["env.form"] = "text" if is_text else "demonstration"
    set_training(flags, translation, int(flags["max_len"]))
    settings |= source_settings(flags, "dataset", "dataset_probs")
    if flags.program == "train_prm" or is_text:
        settings["render"] = "raw"
    else:
        set_template(flags, translation, "env.template")
    settings |= {f"env.fields.{name}": str(field) for name, field in _fields(flags, translation).items()}
    if flags.program == "train_sft" and flags["multiturn"] and not flags["apply_chat_template"]:
        raise ConfigError("train_sft: --multiturn needs --apply_chat_template, which separates the turns")
    if flags.program in ("train_sft", "train_kto", "train_kd") and not is_text:
        settings.setdefault("env.teach", "last")
    if flags.program == "train_rm" and flags["loss"] != "sigmoid":
        settings["learner.margin"] = False  # the logistic loss in another notation, without margins
    if flags.program == "train_rm" and flags["eval_dataset"] is None:
        translation.notes.append(
            "without --eval_dataset the mean and std of rewards in the model's config are those of the last training "
            "step; OpenRLHF takes the first hundredth of the rows"
        )


def _fields(flags: Flags, translation: Translation) -> dict[str, Any]:
    """The fields of demonstrations: names in the data by envgym's names."""
    if "output_key" not in flags.table:
        return {}
    if flags.program in ("train_sft", "train_kd") and flags["pretrain_mode"]:
        return {"text": flags["input_key"]}
    if flags["output_key"] is None and flags["apply_chat_template"]:
        return {"messages": flags["input_key"]}
    if flags["output_key"] is None:
        translation.notes.append("--output_key is missing: completions are read from the field output")
    return {"prompt": flags["input_key"], "answer": flags["output_key"] or "output"}


# ---------------------------------------------------------------------------------------------------------
# Reinforcement learning


CONTEXT, COMPLETION = 2048, 1024
"""Default tokens of a sequence in later versions, and of a completion in earlier ones."""


def _set_ppo(flags: Flags, translation: Translation) -> None:
    """Set what depends on several flags."""
    settings, estimator = translation.settings, flags["advantage_estimator"]
    comparing = "--dynamic_filtering" if flags["dynamic_filtering"] else estimator
    if flags["n_samples_per_prompt"] < 2 and comparing not in ("gae", "reinforce"):
        raise ConfigError(
            f"train_ppo_ray: {comparing} compares the completions of a prompt. How many? Give --n_samples_per_prompt"
        )
    translation.words = ["--recipe", settings.pop("recipe")]
    length = _set_lengths(flags, translation)
    set_training(flags, translation, length)
    settings |= source_settings(flags, "prompt_data", "prompt_data_probs")
    if flags["train.partial_rollout_enable"] and not flags["async_train"]:
        raise ConfigError(
            "train_ppo_ray: --partial_rollout continues episodes with new weights: give --async_train too"
        )
    if "vllm_num_engines" not in flags.options:
        translation.notes.append("--vllm_num_engines is not given: vLLM samples where it is installed")
    set_template(flags, translation, "data.template")
    _set_reward(flags, translation)
    _set_loss(flags, translation)
    if estimator == "gae":
        _set_critic(flags, translation)
    _set_evaluation(flags, translation)
    _set_placement(flags, translation)


def _set_lengths(flags: Flags, translation: Translation) -> int:
    """Set the context and the length of completions, and return the context. Up to 0.9.7 a completion has 1,024 tokens
    and the context is the sum with the prompt's; later a completion may have what the prompt leaves of `max_len`. So
    may each turn of an agent in all versions."""
    longest, max_len = flags["generate_max_len"] or flags["max_new_tokens"], flags["max_len"]
    if flags.dotted or flags["max_new_tokens"] is not None:
        max_len = max_len or CONTEXT
    length = int(max_len or flags["prompt_max_len"] + (longest or COMPLETION))
    translation.settings["engine.max_model_len"] = length
    if longest is None or flags["agent_func_path"]:
        longest = length if max_len or flags["agent_func_path"] else COMPLETION
    translation.settings["rollout.max_tokens"] = longest
    if longest == COMPLETION and not {"generate_max_len", "max_new_tokens"} & flags.options.keys():
        translation.notes.append(
            f"completions have up to {COMPLETION:,} tokens, as up to 0.9.7; later versions give them what the prompt "
            "leaves of --max_len"
        )
    return length


def _set_reward(flags: Flags, translation: Translation) -> None:
    """Set the source of rewards: an agent's or reward function's file, servers, or models."""
    settings = translation.settings
    value = str(flags["agent_func_path"] or flags["remote_rm_url"] or flags["reward_pretrain"] or "")
    files = value.split(",")
    if len(files) > 1 and files[0].endswith(".py"):
        translation.notes.append(f"--remote_rm_url: rewards come from {files[0]} alone, as in OpenRLHF")
        value = files[0]
    if not value:
        raise ConfigError(
            "train_ppo_ray: which reward? Give --reward_pretrain MODEL, --remote_rm_url URL or FILE.py, or "
            "--agent_func_path FILE.py"
        )
    if flags["normalize_reward"] and (flags["agent_func_path"] or flags["remote_rm_url"]):
        translation.notes.append("--normalize_reward is ignored: the rewards of a file or server are not normalised")
    if not flags["reward_pretrain"] and value.endswith(".py"):
        translation.words += ["--env", value]
        settings["env.chat"] = settings["render"] == "chat"
        return
    translation.words += ["--env", "reward_model"]
    if flags["remote_rm_url"]:
        settings["env.endpoints"] = [{"urls": value.split(",")}]
        return
    options: dict[str, Any] = {"normalise": True} if flags["normalize_reward"] else {}
    options |= {"render": "raw"} if settings["render"] == "raw" else {}
    options |= {"offload": True} if flags["ref_reward_offload"] or flags["reward.offload"] else {}
    nodes = flags["reward_num_nodes"]
    if (ranks := nodes * flags["reward_num_gpus_per_node"]) > 1:
        options["ranks"] = ranks
    models = value.split(",")
    settings["env.models"] = [{"model": model, **options} for model in models]
    if nodes > 1 and len(models) == 1:
        settings["placement.reward.nodes"] = nodes


def _set_loss(flags: Flags, translation: Translation) -> None:
    """Set the loss and the number of optimizer steps per rollout. Raises `ConfigError` for an empty batch."""
    settings = translation.settings
    if flags["overlong_buffer_len"]:
        settings["learner.shaping.overlong_length"] = settings["rollout.max_tokens"]
    estimator = flags["advantage_estimator"]
    settings["learner.aggregation"] = "token"  # for every estimator, whatever its paper says
    settings["learner.old_logprobs"] = "recompute"
    if estimator not in ("gae", "reinforce"):
        settings["learner.gamma"] = 1
    if estimator == "group_norm":
        settings["learner.advantage_eps"] = 1e-9
    if flags["agent_func_path"] and estimator in ("gae", "reinforce"):
        settings["learner.credit"] = "episode"
    if flags["policy_loss_type"] == "gspo":
        settings["learner.aggregation"] = "sequence"
        if settings.pop("learner.correction.kind", None):
            for key in [key for key in settings if key.startswith("learner.correction.")]:
                del settings[key]
            translation.notes.append(
                "--enable_vllm_is_correction is ignored with gspo, as in OpenRLHF; there the sequence's ratio is to "
                "the sampler's log-probabilities, here to the trainer's"
            )
    if flags["no_advantage_std_norm"] and estimator in ("rloo", "group_norm", "dr_grpo"):
        translation.notes.append("--no_advantage_std_norm is ignored: OpenRLHF ignores it too with this estimator")
        settings.pop("learner.advantage_norm")
    if flags["init_kl_coef"] > 0:
        settings.setdefault("learner.kl.applied_to", "reward")
        if flags["use_kl_estimator_k3"]:
            settings["learner.kl.estimator"] = "k3"
    if flags["async_train"] and "learner.correction.kind" not in settings:
        settings["learner.correction.kind"] = "tis"
    if flags["pretrain_data"]:
        settings |= source_settings(flags, "pretrain_data", "pretrain_data_probs", "pretrain")
    episodes, batch = flags["rollout_batch_size"] * flags["n_samples_per_prompt"], flags["train_batch_size"]
    if batch <= 0:
        raise ConfigError(f"train_ppo_ray: --train_batch_size is 1 or more, not {batch}")
    settings["learner.minibatches"] = max(1, round(episodes / batch))


CRITIC_SETTINGS = {
    "lr_warmup_ratio": ("lr_warmup_ratio", "warmup_ratio"), "adam.weight_decay": ("l2", "weight_decay"),
    "adam.betas": ("adam_betas", "betas"), "adam.eps": ("adam.eps", "eps"), "max_norm": ("max_norm", "max_grad_norm"),
    "optim": ("optim", "optimizer"),
}  # fmt: skip
"""Dotted flags of the critic's optimizer -> the policy's flag, and the setting of the role."""


def _set_critic(flags: Flags, translation: Translation) -> None:
    """Set the critic's start (the first reward model, else the policy) and its optimizer. Flat flags are those of both
    models; with dotted names each has its own, with its own defaults."""
    settings = translation.settings
    if flags["save_value_network"]:
        translation.copies["critic"] = Path(f"{flags['save_path']}_critic")
    if flags["freezing_actor_steps"] >= 0:  # steps are counted from 0, and trained above this one
        settings["learner.critic_warmup_steps"] = flags["freezing_actor_steps"] + 1
    if flags["critic_pretrain"] is None and flags["reward_pretrain"]:
        settings["roles.critic.model"] = str(flags["reward_pretrain"]).split(",")[0]
    if not flags.dotted:
        return
    for name, (actor, setting) in CRITIC_SETTINGS.items():
        if (value := flags[f"critic.{name}"]) != flags[actor]:
            settings[f"roles.critic.learner.{setting}"] = {"adam": "adamw"}.get(str(value), value)
    if flags["critic.optim"] == "muon":
        settings |= {f"roles.critic.learner.muon_{name}": flags[f"critic.muon.{name}"] for name in ("lr", "momentum")}
    schedule = str(flags["critic.lr_scheduler"])
    critic = schedule_settings(schedule, flags, "critic.min_lr_ratio", "roles.critic.learner")
    if critic != schedule_settings(str(flags["lr_scheduler"]), flags, "min_lr_ratio", "roles.critic.learner"):
        settings |= critic
    if schedule == "constant":
        settings["roles.critic.learner.warmup_ratio"] = 0.0
    elif flags["lr_scheduler"] == "constant":
        settings["roles.critic.learner.warmup_ratio"] = flags["critic.lr_warmup_ratio"]


def _set_evaluation(flags: Flags, translation: Translation) -> None:
    """Set the rows and the sampling of evaluations, and the metric of the best checkpoint: by default pass@1, which is
    the score."""
    name, settings = str(flags["ckpt.best_metric_key"]), translation.settings
    if flags["eval_dataset"] is None:
        return
    if flags["eval_split"] is None and not Path(str(flags["eval_dataset"])).suffix:
        settings["data.test_split"] = "train"
        translation.notes.append("--eval_split is not given: the split `train` of --eval_dataset is evaluated")
    settings |= {"eval.tasks": int(flags["max_samples"] or 10**8), "eval.greedy": flags["eval_temperature"] == 0}
    if flags["eval_temperature"] > 0:
        settings["eval.temperature"] = flags["eval_temperature"]
    if name == "none" or not settings["eval.every"]:
        return
    attempts = re.fullmatch(r"(?:eval_(.*)_pass(\d+))?", name)
    if attempts is None or int(attempts[2] or 1) not in (1, flags["eval_n_samples_per_prompt"]):
        translation.notes.append(
            f"--ckpt.best_metric_key {name}: only eval_…_passN are known: no best checkpoint is kept"
        )
    else:
        samples = int(attempts[2] or 1)
        if attempts[1] not in (None, "default"):
            translation.notes.append(
                f"--ckpt.best_metric_key {name}: the metric is that of all held-out tasks together"
            )
        settings["checkpoint.best"] = "eval/score" if samples == 1 else f"eval/pass@{samples}"


def _set_placement(flags: Flags, translation: Translation) -> None:
    """Set the ranks and nodes of each model, and the parts that share GPUs."""
    settings = translation.settings
    roles = {"actor": "actor"}
    if flags["advantage_estimator"] == "gae":
        roles["critic"] = "critic"
    if flags["init_kl_coef"] > 0:
        roles["ref"] = "reference"
    for prefix, role in roles.items():
        nodes = flags[f"{prefix}_num_nodes"]
        ranks = nodes * flags[f"{prefix}_num_gpus_per_node"]
        if role == "actor":
            settings["workers.ranks"] = ranks
        elif ranks not in (0, settings["workers.ranks"]):  # 0: as many as the actor
            settings[f"roles.{role}.workers.ranks"] = ranks
        if nodes > 1:
            settings[f"placement.{role}.nodes"] = nodes
    if settings.get("engine.count") == 0:
        settings |= {"engine.count": 1, "engine.kind": "transformers"}
    has_reward_model = "reward_model" in translation.words and bool(flags["reward_pretrain"])
    if flags["colocate_all_models"]:
        settings["colocate"] = "all"
        if flags["async_train"]:
            settings["colocate"] = [[*roles.values(), *(["reward"] if has_reward_model else [])]]
        return
    pairs = [["actor", "reference"]] if flags["colocate_actor_ref"] and "ref" in roles else []
    pairs += (
        [["critic", "reward"]] if flags["colocate_critic_reward"] and "critic" in roles and has_reward_model else []
    )
    if pairs:
        settings["colocate"] = pairs


RULES: dict[str, Callable[[Flags, Translation], None]] = {
    "train_ppo_ray": _set_ppo, "batch_inference": set_inference, "lora_combiner": set_merge, "serve_rm": set_serving
}  # fmt: skip
"""The function with a program's rules for several flags. The programs that train on recorded data share
`_set_offline`."""
