"""Harbor: its tasks in envgym (`harbor:PATH`), run by its own trials in an interpreter of its own.

An episode is one trial: any of Harbor's agents, in any of its environments or in the local one (`place`), with the
policy as its model, and then Harbor's verifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from envgym.envs.foreign import ForeignConfig, ForeignSpec
from envgym.envs.foreign.agent import ForeignAgent, ForeignAgentConfig
from envgym.errors import ConfigError
from envgym.types import Message, Task, ToolCall


class HarborConfig(ForeignConfig):
    """Settings of Harbor's tasks."""

    place: str = ""
    """Environment in which the tasks run: one of Harbor's (`docker`, `podman`, `daytona`, …), the class of another
    (`MODULE:CLASS`), or `local`: this machine's system in namespaces, for tasks whose image is a plain system. Unset:
    `docker` if it runs here, else `local`."""
    offline: bool = False
    """Tasks that ask for the internet run in the local place, which has none. Otherwise they are refused there."""
    reward: str = "reward"
    """Name of the reward. The others are metrics."""


class HarborSpec(ForeignSpec):
    """Tasks of Harbor, by the path of a task's folder or of a folder of them."""

    Config = HarborConfig
    config: HarborConfig
    agent = "harbor"
    address = "PATH"
    framework = "Harbor"
    package = "harbor==0.25"
    worker = Path(__file__).with_name("worker.py")

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """For each step the script of the solution as a command. Raises `ConfigError` if a script needs other files."""
        scripts = task.fields.get("solutions")
        if not scripts:
            raise ConfigError(f"environment {self.id}: the solution of {task.key} is no single script for a shell")
        calls = [Message("assistant", "", (ToolCall("call_0", "bash", {"command": text}),)) for text in scripts]
        return [turn for call in calls for turn in (call, "done")]

    def forgery(self, task: Task) -> str:
        return str(task.fields.get("forgery", ""))


class HarborAgentConfig(ForeignAgentConfig):
    """Settings of the agent of a trial."""

    program: str = ""
    """One of Harbor's agents, such as `terminus-2`, or the class of another (`MODULE:CLASS`). Unset: a plain agent
    whose policy has a shell as its tool."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the agent's class: `agent.arguments.max_turns=20`, say."""

    @field_validator("program")
    @classmethod
    def _uses_the_policy(cls, program: str) -> str:
        if program in ("oracle", "nop"):
            plays = "What oracle runs are the demonstrations: `envgym envs check` plays them"
            raise ValueError(f"{program} never asks the policy. {plays}")
        return program


class HarborAgent(ForeignAgent):
    """Has Harbor run each episode as a trial."""

    Config = HarborAgentConfig
    config: HarborAgentConfig
