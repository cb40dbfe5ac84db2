"""Translation of OpenRLHF's programs that do not train: generating and scoring, merging an adapter, serving rewards."""

from __future__ import annotations

from pathlib import Path

from envgym.errors import ConfigError

from .rows import post_processor, write_rows
from .translation import Flags, Translation, set_template, source_settings


def set_inference(flags: Flags, translation: Translation) -> None:
    """Translate `batch_inference`: generate or score episodes, then write them as OpenRLHF's rows. Raises `ConfigError`
    for an unknown task or post-processor."""
    task, file = flags["eval_task"], Path(flags["output_path"])
    if task not in ("generate_vllm", "generate", "rm"):
        raise ConfigError(f"batch_inference: --eval_task is generate_vllm, generate or rm, not {task}")
    translation.settings["data.test_fraction"] = 0.0
    episodes = Path(f"{file}.episodes.jsonl")
    (_set_scoring if task == "rm" else _set_generation)(flags, translation)
    translation.words += ["--out", str(episodes), "--overwrite"]
    processor = None if flags["post_processor"] in ("null", "None") else flags["post_processor"]
    if processor is not None and task != "rm":
        translation.notes.append("--post_processor is ignored: it needs rewards, which --eval_task rm gives")
        processor = None
    process = post_processor(processor, flags["reward_template"], normalize=bool(flags["normalize_reward"]))
    chat, model = bool(flags["apply_chat_template"]), str(flags["pretrain"])

    def finish() -> str:
        n_rows, n_left_out = write_rows(episodes, file, model, process, chat=chat)
        left_out = f"; {n_left_out} failed or empty completions are left out" if n_left_out else ""
        return f"{n_rows} rows in {file}{left_out}"

    translation.finish = finish


def _set_generation(flags: Flags, translation: Translation) -> None:
    size, number = int(flags["rollout_batch_size"]), flags["iter"]
    tasks = "0:" if number is None else f"{number * size}:{(number + 1) * size}"
    translation.command, settings = "rollout", translation.settings
    translation.words = ["--env", "recorded", "--model", str(flags["pretrain"]), "--tasks", tasks]
    translation.words += ["--samples", str(flags["best_of_n"])]
    settings |= {"env.form": "prompt", "env.fields.prompt": str(flags["input_key"])}
    settings |= source_settings(flags, "dataset", "dataset_probs")
    settings["engine.max_model_len"] = flags["prompt_max_len"] + flags["max_new_tokens"]
    if flags["eval_task"] == "generate":
        settings["engine.kind"] = "transformers"
        settings |= {"rollout.top_k": 1} if flags["greedy_sampling"] else {}
    set_template(flags, translation, "env.template", f"{flags['csft_prompt'].strip()} " if flags["enable_csft"] else "")


def _set_scoring(flags: Flags, translation: Translation) -> None:
    translation.command, settings = "score", translation.settings
    translation.words = [str(flags["dataset"]), "--env", "reward_model"]
    if "," in translation.words[0]:
        raise ConfigError("batch_inference: --eval_task rm scores one file: call it for each")
    set_template(flags, translation, "data.template")
    render = {"render": "raw"} if settings.pop("render") == "raw" else {}
    dtype = {"fp16": "float16"}.get(str(flags["param_dtype"]), "bfloat16")
    model = {"model": flags["pretrain"], "too_long": "cut", "max_length": flags["max_len"], "dtype": dtype}
    if not flags["normalize_reward"]:
        translation.notes.append(
            "rewards are not normalised; OpenRLHF divides by the std in the model's config, if it has one"
        )
    settings |= {"env.models": [{**model, **render}], "data.prompt": str(flags["input_key"])}
    settings["data.answer"] = str(flags["output_key"])


def set_merge(flags: Flags, translation: Translation) -> None:
    """Translate `lora_combiner`: merge an adapter into its base."""
    translation.command = "model"
    translation.words = ["merge", *(str(flags[name]) for name in ("lora_path", "output_path")), "--base"]
    translation.words.append(str(flags["model_path"]))


def set_serving(flags: Flags, translation: Translation) -> None:
    """Translate `serve_rm`: serve a reward model. OpenRLHF's clients send no token, so a server that listens on this
    machine alone asks for none."""
    translation.command, translation.settings["too_long"] = "serve-reward-model", "cut"
    host = str(flags.options.get("host", "127.0.0.1"))
    translation.words = ["--model", str(flags["reward_pretrain"]), "--host", host, "--port", str(flags["port"])]
    if host in ("127.0.0.1", "localhost", "::1"):
        translation.words.append("--no-token")
        translation.notes.append(
            "the server listens on this machine alone, without a token; with --host HOST other machines need the token"
        )
