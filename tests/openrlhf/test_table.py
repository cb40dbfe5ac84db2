"""The table has every flag, each with exactly one thing that becomes of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from envgym.config.known_settings import known_keys
from envgym.errors import ConfigError
from envgym.openrlhf.table import PROGRAMS, TRAINING, entries, flags_of, help_of, parse

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from seeds import blocks, documents  # noqa: E402

TRANSLATIONS = ("setting", "derive", "environ", "ignored", "unsupported")
"""Kinds of translations; every flag has exactly one."""

OTHERS = {"address", "runtime", "module", "nproc_per_node", "num_gpus", "node", "num", "head", "nodes", "ntasks",
          "gpus", "job", "config", "deepspeed", "iteration", "port", "working"}  # fmt: skip
"""Flags of launchers, of Ray and of Slurm in the same documents."""


def test_every_flag_in_the_commands_is_known():
    text = "\n".join(blocks().values())
    known = {spelling for name, entry in entries().items() for spelling in (name, *entry.get("aliases", ()))}
    named = set(re.findall(r"(?<![\w-])--([a-z]\w+)", text)) - OTHERS
    assert len(named) > (90 if documents() else 70)
    assert named <= known


@pytest.mark.parametrize("program", PROGRAMS)
def test_exactly_one_thing_becomes_of_a_flag(program):
    for flag in flags_of(program).values():
        assert sum(getattr(flag, kind) is not None for kind in TRANSLATIONS) == 1, flag.name
        reason = flag.ignored or flag.unsupported
        assert reason is None or len(reason) > 15, flag.name
        assert f"--{flag.name} " in help_of(program)


def test_what_flags_are_mapped_to_are_settings():
    learners = ("ppo", "sft", "dpo", "kto", "distill", "reward_model")
    keys = {key for learner in learners for key in known_keys({"learner": learner, "env": "recorded"})}
    for name, entry in entries().items():
        to = entry.get("setting", [])
        for key in [to] if isinstance(to, str) else to:
            is_open = key.startswith(("roles.", "env.", "engine.args.", "workers.deepspeed.", "agent."))
            is_served = entry["programs"] == ("serve_rm",)
            assert is_open or is_served or key in keys, f"--{name} -> {key}"


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("train_dpo", ["--betta", "0.1"], "train_dpo has no flag --betta. Did you mean 'beta'?"),
        ("train_dpo", ["--kd_coef", "0.1"], "train_dpo has no flag --kd_coef. It is a flag of train_kd."),
        ("train_sft", ["--max_len"], "train_sft: --max_len takes a value"),
        ("train_sft", ["--max_len", "--bf16"], "train_sft: --max_len takes a value"),
        ("train_sft", ["--max_len", "long"], "train_sft: --max_len is a number, not 'long'"),
        ("train_ppo_ray", ["--max_len", "abc"], "train_ppo_ray: --max_len is a number, not 'abc'"),
        ("train_ppo_ray", ["--generate_max_len", "abc"], "train_ppo_ray: --generate_max_len is a number, not 'abc'"),
        ("train_ppo_ray", ["--eps_clip_low_high", "0.2", "x"],
         "train_ppo_ray: --eps_clip_low_high is a number, not 'x'"),
        ("batch_inference", ["--iter", "x"], "batch_inference: --iter is a number, not 'x'"),
        ("train_sft", ["--adam_betas", "0.9"], "train_sft: --adam_betas takes two numbers"),
        ("train_sft", ["model"], "train_sft: 'model' is neither a flag nor the value of a flag"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(program, words, said):
    with pytest.raises(ConfigError) as error:
        parse(program, words)
    assert str(error.value) == said


def test_values_are_read_as_argparse_would():
    given, notes = parse(
        "train_sft",
        ["--learning-rate=5e-6", "--target_modules", "q_proj,v_proj", "k_proj", "--adam_betas", "0.9", "0.95",
         "--input_template", '""', "--data.max_len", "128", "--bf16", "..."],
    )  # fmt: skip
    assert given == {
        "learning_rate": 5e-6, "target_modules": ["q_proj", "v_proj", "k_proj"], "adam_betas": [0.9, 0.95],
        "input_template": "", "max_len": 128, "bf16": True,
    }  # fmt: skip
    assert notes == ["... is ignored: it stands for flags that are missing"]


def test_the_page_says_what_the_table_says():
    page = (HERE.parents[1] / "docs" / "reference" / "openrlhf_commands.md").read_text()
    rows = re.findall(r"^\| `--(\w+)` \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) > 30
    for name, becomes in rows:
        own = [different for of, different in entries()[name].get("overrides", {}).items() if of in TRAINING]
        keys = [entry.get("setting") for entry in (entries()[name], *own)]
        for key in [key for to in keys if to for key in ([to] if isinstance(to, str) else to)]:
            assert f"`{key}`" in becomes, f"--{name} -> {key}"
