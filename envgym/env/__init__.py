"""The interface of environments: Gymnasium's `reset` and `step`, asynchronous.

    obs, info = await env.reset(seed=0)
    obs, reward, terminated, truncated, info = await env.step(action)
    await env.close()

An environment has two parts. An `Env` runs one episode at a time and is cheap to make. Its `EnvSpec` owns the shared
resources (tasks, indexes, process pools), which are set up once; it is also the environment's description as JSON, from
which an equal spec can be built.
"""

from __future__ import annotations

from envgym.tasks import GeneratedTasks, SeededTasks, TaskList, TaskSet
from envgym.types import Action, Message, Observation, Task

from .protocol import (
    CheckedEnv,
    Env,
    EnvConfig,
    Info,
    Recording,
    StepInfo,
    StepResult,
)
from .spec import EnvSpec

__all__ = [
    "Action", "CheckedEnv", "Env", "EnvConfig", "EnvSpec", "GeneratedTasks", "Info", "Message", "Observation",
    "Recording", "SeededTasks", "StepInfo", "StepResult", "Task", "TaskList", "TaskSet",
]  # fmt: skip
