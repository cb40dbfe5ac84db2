"""Default learning rates by kind of learning, by the model's size and by what is trained.

A rate of 1e-6 is that of published runs with models of 7 billion parameters (DeepSeekMath, 2024, section 4.1; DAPO,
2025), and TRL's default. In an hour a model of 0.1 billion learns nothing with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from envgym.errors import ConfigError
from envgym.models.sizes import count_parameters
from envgym.run_folder import policy_of_run


class DefaultRate(NamedTuple):
    """A row of the table: the default for models of up to `billions` parameters."""

    billions: float
    all_weights: float
    lora: float


TOY = 0.01
"""Billions of parameters below which there is no default: such models have a recipe of their own."""
RATES = {
    "policy_gradient": (
        # SmolLM2-135M-Instruct in docs/get_started/pretrained.md: three seeds with LoRA, single runs of all weights.
        DefaultRate(0.3, 5e-5, 1e-3),
        # Published runs of 0.5 to 1.5 billion lie between 1e-6 (verl's quickstart) and 2e-5 (open-r1's demonstration
        # with Qwen2.5-1.5B).
        DefaultRate(2.0, 5e-6, 5e-5),
        DefaultRate(float("inf"), 1e-6, 1e-5),
    ),
    "imitation": (
        # Single runs with SmolLM2-135M-Instruct on 100 rows; from its base model, with half a million rows,
        # alignment-handbook has 1e-3 (smollm2/sft/config_smol.yaml).
        DefaultRate(0.3, 5e-5, 1e-3),
        # TRL's default, and its LoRA example with Qwen2-0.5B.
        DefaultRate(2.0, 2e-5, 2e-4),
        # OpenRLHF's train_sft.sh; LoRA: alignment-handbook (zephyr-7b-beta/sft/config_qlora.yaml).
        DefaultRate(float("inf"), 5e-6, 2e-4),
    ),
    "preferences": (
        # Single runs with SmolLM2-135M-Instruct on 40 pairs; alignment-handbook has 1e-6 with 60,000 pairs and a
        # beta of 0.5 (smollm2/dpo/config_smol.yaml).
        DefaultRate(0.3, 2e-6, 2e-5),
        # TRL's default.
        DefaultRate(2.0, 1e-6, 1e-5),
        # OpenRLHF's train_dpo_llama.sh; LoRA: alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
        DefaultRate(float("inf"), 5e-7, 5e-6),
    ),
}
"""Default rates by kind of learning, which a recipe names (`rates`). An adapter's best rate is ten times that of all
weights, whatever its rank (J. Schulman et al., "LoRA Without Regret", 2025; TRL's reproduction has 1e-5 and 1e-6)."""
POLICY_GRADIENT = "policy_gradient"


def size_of(model: str | Path) -> float:
    """Billions of parameters of the model in a folder, or of a run's; 0 if it cannot be read there, or is a toy."""
    try:
        billions = count_parameters(policy_of_run(Path(str(model)))) / 1e9
    except (ConfigError, OSError, ValueError):  # whoever loads the model reports it
        return 0.0
    return billions if billions >= TOY else 0.0


def default_rate(billions: float, *, lora: bool, kind: str = POLICY_GRADIENT) -> float:
    """The default peak learning rate for a model of this size, with an adapter or with all weights trained."""
    row = next(row for row in RATES[kind] if billions <= row.billions)
    return row.lora if lora else row.all_weights


def rate_in_words(lr: float, billions: float, *, lora: bool, kind: str = POLICY_GRADIENT) -> str | None:
    """The line about the learning rate at the start of a run: it is the default, or much smaller. None otherwise."""
    if not billions or not lr:
        return None
    default = default_rate(billions, lora=lora, kind=kind)
    subject = f"{billions:.2g} billion parameters, {'LoRA' if lora else 'all weights'}"
    if lr == default:
        return f"learner.lr={lr:g}: the default for {subject}"
    return f"learner.lr={lr:g} is small for {subject}: the default is {default:g}" if lr < default / 3 else None
