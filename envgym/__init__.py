"""Train and evaluate language-model agents, environments first.

The names below are imported when they are first used, so that `import envgym` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import registry
    from .agent import Agent
    from .api import EvalResult, TrainResult, evaluate, train
    from .env import Env, EnvConfig, EnvSpec, SeededTasks, StepInfo, TaskList, TaskSet
    from .env.data import DataEnvConfig, DataEnvSpec
    from .env.rewards import reward
    from .env.tools import ToolEnv, ToolEnvConfig
    from .errors import EnvgymError, InvalidOutcome
    from .learner import Learner
    from .registry import list_ids, make, register, spec
    from .tools import McpServer, Tool
    from .types import Action, Episode, Message, Observation, Outcome, Reward, StopReason, Task, ToolCall

    __version__: str

_NAMES = {
    "agent": ("Agent",),
    "api": ("EvalResult", "TrainResult", "evaluate", "train"),
    "env": ("Env", "EnvConfig", "EnvSpec", "SeededTasks", "StepInfo", "TaskList", "TaskSet"),
    "env.data": ("DataEnvConfig", "DataEnvSpec"),
    "env.rewards": ("reward",),
    "env.tools": ("ToolEnv", "ToolEnvConfig"),
    "errors": ("EnvgymError", "InvalidOutcome"),
    "learner": ("Learner",),
    "registry": ("list_ids", "make", "register", "spec"),
    "tools": ("McpServer", "Tool"),
    "types": ("Action", "Episode", "Message", "Observation", "Outcome", "Reward", "StopReason", "Task", "ToolCall"),
}
"""The public names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Action", "Agent", "DataEnvConfig", "DataEnvSpec", "Env", "EnvConfig", "EnvSpec", "EnvgymError", "Episode",
    "EvalResult", "InvalidOutcome", "Learner", "McpServer", "Message", "Observation", "Outcome", "Reward",
    "SeededTasks", "StepInfo", "StopReason", "Task", "TaskList", "TaskSet", "Tool", "ToolCall", "ToolEnv",
    "ToolEnvConfig", "TrainResult", "__version__", "evaluate", "list_ids", "make", "register", "registry", "reward",
    "spec", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "registry":
        return importlib.import_module(".registry", __name__)
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
