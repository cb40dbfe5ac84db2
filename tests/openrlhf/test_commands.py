"""Commands of OpenRLHF's programs, and those of the documents that the project was created from where they are at hand:
each becomes settings that resolve, and one of each kind the ones worked out by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from envgym.cli import train
from envgym.cli.errors import Invocation
from envgym.cli.parser import Parser, add_run_options, resolve_options
from envgym.config.schema import Component
from envgym.errors import ConfigError
from envgym.openrlhf.translate import translate

sys.path.insert(0, str(Path(__file__).parent))
from seeds import VARIABLE, Command, blocks, commands, documents

LACKING = {
    "--dataset": "data/rows", "--prompt_data": "data/rows", "--pretrain": "org/model", "--reward_pretrain": "org/judge",
    "--n_samples_per_prompt": "4",
}  # fmt: skip
"""What commands lack that nobody can guess, and what stands for it here."""

# Worked out by hand from OpenRLHF's parsers and trainers (`docs/reference/openrlhf_commands.md` has the table); not
# printed by the translator. What a command does not say is there with OpenRLHF's own default where that matters.
BY_HAND = {
    "sft-train_sft": {
        "recipe": "sft", "model": "org/small-base", "env.fields": {"prompt": "question", "answer": "response"},
        "render": "raw", "env.template": "Q: {}\nA: ", "data.limit": 3000, "agent.max_tokens": 1024, "epochs": 2.0,
        # Four rows of the greatest length at a time.
        "rollout.tasks_per_step": 64, "workers.tokens_per_microbatch": 4096, "workers.zero_stage": 2,
        "learner.lr": 1e-5,
        "workers.gradient_checkpointing": True, "env.teach": "last", "checkpoint.every": 0, "seed": 42,
    },
    "rm-train_rm": {
        "recipe": "rm", "learner.lr": 7e-6, "agent.max_tokens": 4096, "workers.tokens_per_microbatch": 16384,
        "env.form": "preference", "env.fields": {"chosen": "chosen", "rejected": "rejected"}, "render": "chat",
        "workers.attention": "auto", "workers.zero_stage": 3, "report_to": ["wandb"], "project": "openrlhf_train_rm",
    },
    "prm-train_prm": {
        "recipe": "prm", "env.fields": {"steps": "solution", "step_labels": "marks"}, "env.separator": "ки",
        "agent.max_tokens": 2048, "rollout.tasks_per_step": 32, "learner.lr": 2e-6,
    },
    "dpo-train_dpo": {
        "recipe": "dpo", "learner.beta": 0.2, "learner.lr": 4e-7, "learner.betas": (0.9, 0.98),
        "rollout.tasks_per_step": 64,
        "agent.max_tokens": 2048, "workers.tokens_per_microbatch": 8192, "env.form": "preference", "render": "chat",
        "learner.loss": "sigmoid", "learner.warmup_ratio": 0.03, "learner.lr_schedule": "cosine",
    },
    "kto-train_kto": {
        "recipe": "kto", "learner.beta": 0.3, "env.form": "labelled", "learner.desirable": 1.0,
        "env.fields": {"prompt": "instruction", "answer": "response", "label": "score"}, "env.template": "Q: {}\nA: ",
    },
    "kd-train_kd": {
        "recipe": "distill", "learner.kd_coef": 0.7, "roles.teacher.model": "org/large-chat", "epochs": 3.0,
        "workers.zero_stage": 3, "env.template": "User: {}\nAssistant: ",  # the program's own default
    },
    "ppo-train_ppo_ray": {
        "recipe": "ppo", "env.name": "reward_model", "env.models": [("saved/rm", True)], "learner.lr": 4e-7,
        "roles.critic.learner.lr": 8e-6, "learner.kl.coef": 0.02, "learner.kl.applied_to": "reward",
        "learner.kl.estimator": "k1",
        # 512 prompts, one answer each, 64 an optimizer step, twice over the prompts.
        "rollout.tasks_per_step": 512, "rollout.group_size": 1, "learner.minibatches": 8, "learner.update_epochs": 1,
        "epochs": 2.0,
        "engine.max_model_len": 1024, "rollout.max_tokens": 768, "engine.count": 2, "engine.tensor_parallel": 2,
        "colocate": "all", "workers.ranks": 4, "learner.gae_lambda": 1.0, "learner.value_clip": 0.5, "render": "chat",
    },
    "grpo-train_ppo_ray": {
        "recipe": "grpo", "rollout.group_size": 8, "rollout.tasks_per_step": 256, "learner.minibatches": 8,
        "learner.kl.applied_to": "loss", "learner.kl.estimator": "k3", "learner.kl.coef": 0.005, "render": "raw",
        "learner.lr": 6e-7,
    },
    "function-train_ppo_ray": {
        "recipe": "reinforce++_baseline", "rollout.group_size": 4, "rollout.tasks_per_step": 128,
        "learner.minibatches": 8,
        "data.answer": ("label",), "data.prompt": ("prompt",), "env.chat": False, "rollout.temperature": 0.9,
        "learner.clip_low": 0.2, "learner.clip_high": 0.28, "learner.entropy_coef": 0.001, "learner.kl.coef": 0.01,
    },
    "agent-train_ppo_ray": {
        "recipe": "reinforce++_baseline", "rollout.max_staleness": 1, "learner.correction.kind": "tis",
        "rollout.filter.min_score": 0.1, "rollout.filter.max_score": 0.9, "learner.lr": 1e-6,
    },
    "rejection-train_sft": {
        "recipe": "sft", "render": "raw", "env.template": "User: {}\nAssistant: ", "learner.lr": 3e-6,
        "env.fields": {"prompt": "input", "answer": "output"}, "rollout.tasks_per_step": 64, "agent.max_tokens": 1024,
    },
    "000:51-train_ppo_ray": {
        "recipe": "ppo", "env.name": "reward_model", "model": "./checkpoint/llama3-8b-sft",
        "env.models": [("./checkpoint/llama3-8b-rm", True)], "learner.lr": 5e-7, "roles.critic.learner.lr": 9e-6,
        "learner.kl.coef": 0.01, "learner.kl.applied_to": "reward", "learner.kl.estimator": "k1",
        # 1,024 prompts, one answer each, 128 an optimizer step.
        "rollout.tasks_per_step": 1024, "rollout.group_size": 1, "learner.minibatches": 8, "learner.update_epochs": 1,
        "engine.max_model_len": 2048, "engine.count": 4, "engine.tensor_parallel": 2, "colocate": "all",
        "workers.ranks": 8, "workers.zero_stage": 3, "workers.dtype": "bfloat16", "learner.gae_lambda": 1.0,
        "learner.clip_low": 0.2, "learner.clip_high": 0.2, "learner.value_clip": 0.5, "render": "chat",
        "checkpoint.every": 0, "epochs": 1.0, "seed": 42, "workers.gradient_checkpointing": True,
    },
}  # fmt: skip


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """A working directory that has the files that commands name without saying what is in them."""
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoint/llama-3-8b-iter-dpo/rm.jsonl", "checkpoint/llama-2-8b-csft/rm.jsonl", "gsm8k",
                 "checkpoint/llama-3-8b-rejection/rm.jsonl", "your_dataset", "your_prompt_dataset",
                 "code-generation-dataset"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def with_files(command: Command, folder: Path) -> list[str]:
    """The flags, with files that are there in place of `/path/to/agent_func.py` and the like."""
    flags = []
    for flag in command.flags:
        if flag.endswith(".py"):
            file = folder / Path(flag).name
            is_agent = "agent" in flag
            file.write_text(
                "class AgentExecutor: ...\n" if is_agent else "def reward_func(queries, prompts, labels): 0\n"
            )
            flag = str(file)
        flags.append(flag)
    return flags


def resolved(arguments):
    parser = Parser("train", train.main)
    add_run_options(parser)
    return resolve_options(*parser.parse_with_words(arguments), Invocation())


def completed(program, flags):
    """The translation, with what a command lacks given once it is asked for."""
    for _ in LACKING:
        try:
            return translate(program, flags)
        except ConfigError as error:
            if not (lacking := re.search(r"\? Give (--\w+)", str(error))):
                raise
            flags = [*flags, lacking[1], LACKING[lacking[1]]]
    return translate(program, flags)


def value_of(config, key):
    """The value of a dotted key in a resolved configuration, components' settings included."""
    first, *rest = key.split(".")
    value = getattr(config if first in type(config).model_fields else config.stages[-1], first)
    for part in rest:
        value = value.settings if isinstance(value, Component) and part != "name" else value
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    if key == "render":
        return value.kind
    return value


@pytest.fixture
def documents_at_hand():
    """Skips where there are none."""
    if not documents():
        pytest.skip(f"{VARIABLE} names no folder")


@pytest.mark.usefixtures("documents_at_hand")
def test_the_documents_have_as_many_commands():
    assert len([place for place in blocks() if ":" in place]) == 40


@pytest.mark.parametrize("place", [place for place in blocks() if place != "yaml" and not place.startswith("002")])
def test_every_command_becomes_settings_that_resolve(place, paths, recwarn):
    found = commands(place, paths)
    assert found, "the block calls no program"
    for command in found:
        flags = with_files(command, paths)
        made = completed(command.program, flags)
        assert made.command in ("train", "rollout", "score", "model", "serve-reward-model")
        if made.command == "train":
            config = resolved(made.arguments[1:])
            for key, expected in BY_HAND.get(str(command), {}).items():
                found_value = value_of(config, key)
                if key == "env.models":
                    found_value = [(model["model"], model.get("normalise", False)) for model in found_value]
                if isinstance(expected, tuple):
                    found_value = tuple([found_value] if isinstance(found_value, str) else found_value)
                assert found_value == expected, f"{command}: {key}"
