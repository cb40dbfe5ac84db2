"""Default learning rates by kind of learning, by the model's size and by what is trained (`learning_rates.yaml`).

A rate of 1e-6 is that of published runs with models of 7 billion parameters (DeepSeekMath, 2024, section 4.1; DAPO,
2025), and TRL's default. In an hour a model of 0.1 billion learns nothing with it.
"""

from __future__ import annotations

from pathlib import Path

from envgym.errors import ConfigError
from envgym.models.sizes import count_parameters
from envgym.run_folder import policy_of_run
from envgym.yaml_files import read_yaml

TOY = 0.01
"""Billions of parameters below which there is no default: such models have a recipe of their own."""
POLICY_GRADIENT = "policy_gradient"
"""The kind of learning of learners that sample; a recipe of others names its kind (`rates`)."""


def size_of(model: str | Path) -> float:
    """Billions of parameters of the model in a folder, or of a run's; 0 if it cannot be read there, or is a toy."""
    try:
        billions = count_parameters(policy_of_run(Path(str(model)))) / 1e9
    except (ConfigError, OSError, ValueError):  # whoever loads the model reports it
        return 0.0
    return billions if billions >= TOY else 0.0


def default_rate(billions: float, *, lora: bool, kind: str = POLICY_GRADIENT) -> float:
    """The default peak learning rate for a model of this size, with an adapter or with all weights trained."""
    rates = read_yaml(Path(__file__).with_name("learning_rates.yaml"))[kind]
    row = next(row for row in rates if billions <= row["billions"])
    return float(row["lora" if lora else "all_weights"])


def rate_in_words(lr: float, billions: float, *, lora: bool, kind: str = POLICY_GRADIENT) -> str | None:
    """The line about the learning rate at the start of a run: it is the default, or much smaller. None otherwise."""
    if not billions or not lr:
        return None
    default = default_rate(billions, lora=lora, kind=kind)
    subject = f"{billions:.2g} billion parameters, {'LoRA' if lora else 'all weights'}"
    if lr == default:
        return f"learner.lr={lr:g}: the default for {subject}"
    return f"learner.lr={lr:g} is small for {subject}: the default is {default:g}" if lr < default / 3 else None
