"""The environment protocol: asynchronous, Gymnasium's five-tuple.

    obs, info = await env.reset(seed=0)
    obs, reward, terminated, truncated, info = await env.step(action)
    await env.close()

An environment has two halves. `Env` plays one episode at a time and is cheap to make. `EnvSpec` holds what is
heavy and shared (tasks, indexes, process pools) and is set up once; it is also the environment's
JSON-serialisable description, from which an equal one can be rebuilt.
"""

from __future__ import annotations

from envgym.types import Action, Message, Observation, Task

from .checked import CheckedEnv
from .protocol import Env, EnvConfig, Info, Recording, SeededTasks, StepResult, TaskList, TaskSet
from .spec import EnvSpec

__all__ = [
    "Action", "CheckedEnv", "Env", "EnvConfig", "EnvSpec", "Info", "Message", "Observation",
    "Recording", "SeededTasks", "StepResult", "Task", "TaskList", "TaskSet",
]  # fmt: skip
