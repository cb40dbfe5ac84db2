"""A command of OpenRLHF as one of envgym: flags by the table, and those that belong together by rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, did_you_mean

from .rows import post_processor, write_rows
from .table import PROGRAMS, parse
from .translation import Flags, Translation, apply, sources, template, trained


def translate(program: str, arguments: Sequence[str], *, world_size: int | None = None) -> Translation:
    """`world_size`: ranks that a launcher has started. Raises `ConfigError` for what has no place here."""
    if program not in PROGRAMS:
        raise ConfigError(
            f"there is no program {program!r}.{did_you_mean(program, PROGRAMS)} Known: {', '.join(PROGRAMS)}"
        )
    given, notes = parse(program, arguments)
    return translated(Flags(program, given, world_size), notes)


def translated(flags: Flags, notes: Sequence[str]) -> Translation:
    """The translation of flags that have been read. `notes`: what is to be said of how."""
    made = Translation(notes=list(notes))
    for flag in flags.known.values():
        apply(flag, flags, made)
    RULES.get(flags.program, _learn)(flags, made)
    return made


# ---------------------------------------------------------------------------------------------------------
# Learning from recorded data


def _learn(flags: Flags, made: Translation) -> None:
    """Fill in what is said by several flags together."""
    settings = made.settings
    is_text = flags.program == "train_sft" and bool(flags["pretrain_mode"])
    made.words = ["--recipe", "distill" if flags.program == "train_kd" else flags.program.removeprefix("train_")]
    settings["workers.ranks"] = flags.world_size or 1
    if flags.program in ("train_sft", "train_kd"):  # the recipes of the others name theirs
        settings["env.form"] = "text" if is_text else "demonstration"
    trained(flags, made, int(flags["max_len"]))
    settings |= sources(flags, "dataset", "dataset_probs")
    if flags.program == "train_prm" or is_text:
        settings["render"] = "raw"
    else:
        template(flags, made, "env.template")
    settings |= {f"env.fields.{name}": str(of) for name, of in _fields(flags, made).items()}
    if flags.program == "train_sft":
        settings.setdefault("env.teach", "last")


def _fields(flags: Flags, made: Translation) -> dict[str, Any]:
    """Names of the fields of demonstrations, by what they hold."""
    if "output_key" not in flags.known:
        return {}
    if flags.program == "train_sft" and flags["pretrain_mode"]:
        return {"text": flags["input_key"]}
    if flags["output_key"] is None and flags["apply_chat_template"]:
        return {"messages": flags["input_key"]}
    if flags["output_key"] is None:
        made.notes.append("--output_key is not given: the answers are read from the field output")
    return {"prompt": flags["input_key"], "answer": flags["output_key"] or "output"}


# ---------------------------------------------------------------------------------------------------------
# Reinforcement learning


def _ppo(flags: Flags, made: Translation) -> None:
    """Fill in what is said by several flags together."""
    settings, estimator = made.settings, flags["advantage_estimator"]
    if flags["n_samples_per_prompt"] < 2 and estimator not in ("gae", "reinforce"):
        raise ConfigError(
            f"train_ppo_ray: {estimator} compares the answers to one prompt. How many? Give --n_samples_per_prompt"
        )
    made.words = ["--recipe", settings.pop("recipe")]
    length = int(flags["max_len"] or flags["prompt_max_len"] + flags["generate_max_len"])
    settings["engine.max_model_len"] = length
    trained(flags, made, length)
    settings |= sources(flags, "prompt_data", "prompt_data_probs")
    template(flags, made, "data.template")
    _reward(flags, made)
    _loss(flags, made)
    _places(flags, made)


def _reward(flags: Flags, made: Translation) -> None:
    """Translate who judges: an agent's file, a reward function's, a server, or models."""
    settings = made.settings
    value = str(flags["agent_func_path"] or flags["remote_rm_url"] or flags["reward_pretrain"] or "")
    if not value:
        raise ConfigError(
            "train_ppo_ray: who rewards? Give --reward_pretrain MODEL, --remote_rm_url URL or FILE.py, or "
            "--agent_func_path FILE.py"
        )
    if not flags["reward_pretrain"] and value.endswith(".py"):
        made.words += ["--env", value]
        settings["env.chat"] = settings["render"] == "chat"
        if flags["normalize_reward"]:
            made.notes.append("--normalize_reward is left out: what a file pays is as it says")
        return
    made.words += ["--env", "reward_model"]
    if flags["remote_rm_url"]:
        settings["env.endpoints"] = [{"urls": value.split(",")}]
        return
    own: dict[str, Any] = {"normalise": True} if flags["normalize_reward"] else {}
    own |= {"render": "raw"} if settings["render"] == "raw" else {}
    own |= {"offload": True} if flags["ref_reward_offload"] else {}
    settings["env.models"] = [{"model": model, **own} for model in value.split(",")]


def _loss(flags: Flags, made: Translation) -> None:
    """The loss, and how a rollout is dealt to optimizer steps."""
    settings = made.settings
    if flags["overlong_buffer_len"]:
        settings["learner.shaping.overlong_length"] = flags["generate_max_len"]
    if flags["no_advantage_std_norm"] and flags["advantage_estimator"] in ("rloo", "group_norm", "dr_grpo"):
        made.notes.append("--no_advantage_std_norm is left out: with this estimator it does nothing in OpenRLHF either")
        settings.pop("learner.advantage_norm")
    if flags["init_kl_coef"] > 0:
        settings.setdefault("learner.kl.applied_to", "reward")
    if flags["async_train"] and "learner.correction.kind" not in settings:
        settings["learner.correction.kind"] = "tis"
        made.notes.append(
            "--async_train comes with --enable_vllm_is_correction: samples of older policies are weighted"
        )
    if flags["pretrain_data"]:
        settings |= sources(flags, "pretrain_data", "pretrain_data_probs", "pretrain")
    episodes, batch = flags["rollout_batch_size"] * flags["n_samples_per_prompt"], flags["train_batch_size"]
    if episodes % batch:
        made.notes.append(
            f"--train_batch_size {batch} does not divide the {episodes} episodes of a rollout: its optimizer steps "
            "share them evenly"
        )
    settings["learner.minibatches"] = max(1, round(episodes / batch))


def _places(flags: Flags, made: Translation) -> None:
    """Ranks and machines of each model, and which share GPUs."""
    settings = made.settings
    roles = {"actor": "actor"}
    if flags["advantage_estimator"] == "gae":
        roles["critic"] = "critic"
    if flags["init_kl_coef"] > 0:
        roles["ref"] = "reference"
    for theirs, ours in roles.items():
        nodes = flags[f"{theirs}_num_nodes"]
        ranks = nodes * flags[f"{theirs}_num_gpus_per_node"]
        if ours == "actor":
            settings["workers.ranks"] = ranks
        elif ranks not in (0, settings["workers.ranks"]):  # 0: it shares the actor's
            settings[f"roles.{ours}.workers.ranks"] = ranks
        if nodes > 1:
            settings[f"placement.{ours}.nodes"] = nodes
    if settings.get("engine.count") == 0:
        settings |= {"engine.count": 1, "engine.kind": "transformers"}
    judges = "reward_model" in made.words and bool(flags["reward_pretrain"])
    if flags["colocate_all_models"]:
        settings["colocate"] = "all"
        if flags["async_train"]:
            made.notes.append("--colocate_all_models beside --async_train: models share GPUs, engines have their own")
            settings["colocate"] = [[*roles.values(), *(["reward"] if judges else [])]]
        return
    pairs = [["actor", "reference"]] if flags["colocate_actor_ref"] and "ref" in roles else []
    pairs += [["critic", "reward"]] if flags["colocate_critic_reward"] and "critic" in roles and judges else []
    if pairs:
        settings["colocate"] = pairs


# ---------------------------------------------------------------------------------------------------------
# Programs that do not train


def _batch_inference(flags: Flags, made: Translation) -> None:
    """Play or judge, and write what came of it in OpenRLHF's form."""
    task, out = flags["eval_task"], Path(flags["output_path"])
    if task not in ("generate_vllm", "generate", "rm"):
        raise ConfigError(f"batch_inference: --eval_task is generate_vllm, generate or rm, not {task}")
    made.settings["data.test_fraction"] = 0.0
    episodes = Path(f"{out}.episodes.jsonl")
    (_judge if task == "rm" else _generate)(flags, made)
    made.words += ["--out", str(episodes), "--overwrite"]
    processor = None if flags["post_processor"] in ("null", "None") else flags["post_processor"]
    process = post_processor(processor, flags["reward_template"], normalise=bool(flags["normalize_reward"]))
    chat, model = bool(flags["apply_chat_template"]), str(flags["pretrain"])
    made.finish = lambda: f"{write_rows(episodes, out, model, process, chat=chat)} rows in {out}"


def _generate(flags: Flags, made: Translation) -> None:
    size, number = int(flags["rollout_batch_size"]), flags["iter"]
    tasks = "0:" if number is None else f"{number * size}:{(number + 1) * size}"
    made.command, settings = "rollout", made.settings
    made.words = ["--env", "recorded", "--model", str(flags["pretrain"]), "--tasks", tasks]
    made.words += ["--samples", str(flags["best_of_n"])]
    settings |= {"env.form": "prompt", "env.fields.prompt": str(flags["input_key"])}
    settings |= sources(flags, "dataset", "dataset_probs")
    settings["engine.max_model_len"] = flags["prompt_max_len"] + flags["max_new_tokens"]
    if flags["greedy_sampling"]:
        settings["rollout.temperature"] = 0.0
    template(flags, made, "env.template", f"{flags['csft_prompt'].strip()} " if flags["enable_csft"] else "")


def _judge(flags: Flags, made: Translation) -> None:
    made.command, settings = "score", made.settings
    made.words = [str(flags["dataset"]), "--env", "reward_model"]
    if "," in made.words[0]:
        raise ConfigError("batch_inference: --eval_task rm judges one file: call it for each")
    template(flags, made, "data.template")
    render = {"render": "raw"} if settings.pop("render") == "raw" else {}
    judge = {"model": flags["pretrain"], "too_long": "cut", "max_length": flags["max_len"]}
    settings |= {"env.models": [{**judge, **render}], "data.prompt": str(flags["input_key"])}
    if "output_key" in flags.given or render:  # else the answer ends a conversation
        settings["data.answer"] = str(flags["output_key"])


def _combine(flags: Flags, made: Translation) -> None:
    """Merge an adapter."""
    made.command = "model"
    made.words = ["merge", *(str(flags[name]) for name in ("lora_path", "output_path")), "--base"]
    made.words.append(str(flags["model_path"]))


def _serve(flags: Flags, made: Translation) -> None:
    """Serve a reward model. Without a token only on this machine: OpenRLHF's clients send none."""
    made.command, made.settings["too_long"] = "serve-reward-model", "cut"
    host = str(flags.given.get("host", "127.0.0.1"))
    made.words = ["--model", str(flags["reward_pretrain"]), "--host", host, "--port", str(flags["port"])]
    if host in ("127.0.0.1", "localhost", "::1"):
        made.words.append("--no-token")
        made.notes.append(
            "it listens on this machine alone, without a token: with --host others are let in who have the token"
        )


RULES: dict[str, Callable[[Flags, Translation], None]] = {
    "train_ppo_ray": _ppo, "batch_inference": _batch_inference, "lora_combiner": _combine, "serve_rm": _serve
}  # fmt: skip
"""The rules of programs other than those that learn from recorded data."""
