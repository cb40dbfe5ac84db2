"""Train and evaluate language-model agents, environments first.

The names below are imported when they are first used, so that `import envgym` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import registry
    from .api import evaluate, train
    from .env import Env, EnvConfig, EnvSpec, TaskList, TaskSet
    from .registry import make, register, spec
    from .rewards import Reward, reward
    from .tools import McpServer, Tool, ToolEnv, ToolEnvConfig
    from .types import Action, Episode, Message, Observation, Task

_HOME = {
    "Action": "types", "Episode": "types", "Message": "types", "Observation": "types", "Task": "types",
    "Env": "env", "EnvConfig": "env", "EnvSpec": "env", "TaskList": "env", "TaskSet": "env",
    "make": "registry", "register": "registry", "spec": "registry",
    "reward": "rewards", "Reward": "rewards",
    "McpServer": "tools", "Tool": "tools", "ToolEnv": "tools", "ToolEnvConfig": "tools",
    "train": "api", "evaluate": "api",
}  # fmt: skip

__all__ = [
    "Action", "Env", "EnvConfig", "EnvSpec", "Episode", "McpServer", "Message", "Observation", "Reward", "Task",
    "TaskList", "TaskSet", "Tool", "ToolEnv", "ToolEnvConfig", "evaluate", "make", "register", "registry", "reward",
    "spec", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "registry":
        return importlib.import_module(".registry", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
