"""verifiers: its environments in envgym (`verifiers:NAME`), run by its own engine in an interpreter of its own, and
envgym's environments as packages for it (`export`).

The rows are those of the environment's taskset. An episode is one of `vf-eval`'s: with the environment's harness, tools
and rewards, and with the policy as its model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from envgym.envs.foreign import ForeignConfig, ForeignSpec
from envgym.envs.foreign.agent import ForeignAgent


class VerifiersConfig(ForeignConfig):
    """Settings of an environment of verifiers. The rows of `data` are tasks in the form of its `TaskData`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of its taskset, as after `--env.taskset.` in `vf-eval`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its other settings, as after `--env.` in `vf-eval`: `env.options.agent.harness.id=bash`, say. Unset: an agent
    without a harness in its package only chats and calls tools (`null`), and programs run on this machine
    (`subprocess`)."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of tasks; needed for a taskset without end."""


class VerifiersSpec(ForeignSpec):
    """An environment of verifiers, by the name of its package."""

    Config = VerifiersConfig
    config: VerifiersConfig
    agent = "verifiers"
    address = "NAME"
    framework = "verifiers"
    package = "verifiers==0.4"
    worker = Path(__file__).with_name("worker.py")


class VerifiersAgent(ForeignAgent):
    """Has the engine of verifiers run each episode, as `vf-eval` does."""
