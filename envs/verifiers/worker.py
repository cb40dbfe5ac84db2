"""verifiers' side of the bridge: its tasks as rows, and one episode by its own engine.

The interpreter of a virtual environment with verifiers 0.4 runs this file; nothing of envgym imports it. It does for an
episode what `vf-eval` does: the environment is loaded once, and the client of each episode has that episode's URL.
"""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1 import runtimes
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import subprocess as subprocess_runtime
from verifiers.v1.utils import loaders

KINDS = {
    "ProviderError": ("policy_unreachable", True),
    "InterceptionError": ("agent", True),
    "ToolsetError": ("sandbox", True),
    "SandboxError": ("sandbox", True),
    "TaskError": ("verifier", False),
    "TimeoutError": ("agent", True),
}
"""The kind of a failure by the class of its error, and whether another attempt may succeed. Others are `agent`."""
STAGES = {"setup_timeout": "sandbox", "finalize_timeout": "verifier", "scoring_timeout": "verifier"}
"""Stages that leave an episode without its reward when their time is over."""

_env: vf.Env
_seat = ""
"""The agent that the policy plays."""


def load(settings: dict[str, Any]) -> dict[str, Any]:
    """Load the environment `target`, with a row for each of its tasks.

    `args` has the settings of its taskset; `options` all others, as after `--env.` in `vf-eval`; `limit` is the maximum
    number of tasks. Raises `LookupError`, `ValueError` or `ImportError`, with one line.
    """
    global _env, _seat
    name = settings["target"]
    try:
        config = _config(name, settings.get("args") or {}, settings.get("options") or {})
        _env = loaders.load_environment(config)
        seats = [seat for seat, agent in agent_config_fields(config).items() if agent.client is None]
        if len(seats) != 1:
            raise ValueError(
                f"{name} has {len(agent_config_fields(config))} agents ({', '.join(agent_config_fields(config))}), and "
                "the policy plays one: give the others a model by env.options.AGENT.model and "
                "env.options.AGENT.client.base_url"
            )
        _seat = seats[0]
        rows = _rows(name, settings.get("limit"))
        version = f"verifiers {metadata.version('verifiers')} {_source_hash(name)}"
        description = (type(_env.taskset).__doc__ or f"{name}, of verifiers").strip().partition("\n")[0]
        return {"rows": rows, "version": version, "description": description}
    except ModuleNotFoundError as error:
        module = getattr(error.__cause__, "name", error.name)
        raise ImportError(f"{name} needs the module {module}, and it is not installed beside verifiers") from None
    except ValidationError as error:
        raise ValueError(f"{name} does not take these settings: {_problems(error)}") from None
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from None


def _config(name: str, args: Mapping[str, Any], options: Mapping[str, Any]) -> vf.EnvConfig:
    """The environment's settings. By default an agent without a harness in its package only chats and calls the task's
    tools, and all of its programs are processes of this machine."""
    data = {**options, "taskset": {**(options.get("taskset") or {}), **args, "id": name}}
    packaged = loaders.default_harness_id(name)
    harness = {"id": "null" if packaged == "bash" else packaged}
    for seat, default in agent_config_fields(loaders.env_config_type(name, options.get("id", ""))()).items():
        data[seat] = {"runtime": {"type": "subprocess"}, **(data.get(seat) or {})}
        if default.harness is None:
            data[seat].setdefault("harness", harness)
        if "client" in data[seat]:
            data[seat]["client"] = {"type": "eval", **data[seat]["client"]}
    return loaders.resolve_env_config(data)


def _rows(name: str, limit: int | None) -> list[dict[str, Any]]:
    taskset = _env.taskset
    data_type = type(taskset).task_type().data_type()
    if hidden := [field for field, info in data_type.model_fields.items() if info.exclude]:
        raise ValueError(f"the tasks of {name} are not whole as JSON: they exclude {', '.join(hidden)}")
    if limit is None and not taskset.bounded:
        raise ValueError(f"the tasks of {name} have no end: set env.limit to the number to take")
    return [
        {
            "id": f"{data.idx}/{data.id}" if data.id else str(data.idx),
            "prompt": data.prompt_text,
            "task_data": data.model_dump(mode="json", exclude_defaults=True),
        }
        for data in (task.data for task in (taskset if limit is None else taskset.take(limit)))
    ]


def _source_hash(name: str) -> str:
    """A hash of the files of the environment's package: an installed one may be edited."""
    module = Path(str(loaders.import_taskset(name).__file__))
    files = sorted(module.parent.rglob("*.py")) if module.name == "__init__.py" else [module]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


async def run(call: dict[str, Any]) -> dict[str, Any]:
    """Play one episode of the task `row`, with the policy `model` at `url`."""
    subprocess_runtime.CACHE_DIR = Path(tempfile.gettempdir())
    task_type, row = type(_env.taskset).task_type(), call["row"]
    try:
        data = task_type.data_type().model_validate(row.get("task_data", row))  # the user's rows have it bare
    except ValidationError as error:
        return _failed("agent", f"the row is no task of {_env.config.env_id}: {_problems(error)}")
    client = vf.EvalClientConfig(base_url=call["url"], api_key_var="ENVGYM_NO_KEY")
    (slot,) = _env.slots(task_type(data, _env.config.taskset.task))
    async with _env.serving():
        context = vf.ModelContext(client=client, model=call["model"], sampling=vf.SamplingConfig())
        return _verdict(await _env.run_slot(slot, context))


def _verdict(episode: vf.Episode) -> dict[str, Any]:
    """The result of an episode. Theirs counts a reward of 0 for each that failed."""
    failed = [record for record in (*episode.traces, episode) if not record.ok]
    # An agent's error comes first: it is the cause of its episode's.
    if errors := [error for record in failed for error in record.errors[-1:]]:
        kind, is_retryable = KINDS.get(errors[0].type, ("agent", False))
        return _failed(kind, f"{errors[0].type}: {errors[0].message}", is_retryable)
    traces = [trace for trace in episode.traces if trace.agent.name == _seat]
    if failed or len(traces) != 1:
        return _failed("agent", f"{_seat} has played {len(traces)} times, and the episode is ok: {not failed}")
    [trace] = traces
    if (stop := trace.stop_condition) in STAGES:
        return _failed(STAGES[stop], f"the time is over ({stop})", True)
    scores = {name: reward for name, reward in trace.rewards.items() if reward and math.isfinite(reward.value)}
    if not scores or len(scores) < len(trace.rewards):
        values = {name: reward and reward.score for name, reward in trace.rewards.items()}
        return _failed("no_reward", f"{values} has a value that is missing or not finite" if values else "no rewards")
    return {
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in scores.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)},
        "truncated": trace.is_truncated or stop == "agent_timeout",
    }


def _failed(kind: str, message: str, retryable: bool = False) -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": message, "retryable": retryable}}


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())


def _relocate(path: str) -> str:
    return path.replace("/tmp/vf-port-", f"{tempfile.gettempdir()}/vf-port-")


class EpisodeRuntime(subprocess_runtime.SubprocessRuntime):  # type: ignore[misc]
    """Programs of this machine. The files that tool servers write to `/tmp` are with the other temporary files. The
    chat program runs in this interpreter, which has its packages: uv would make a virtual environment."""

    async def _read(self, path: str, max_bytes: int | None = None) -> Any:
        return await super()._read(_relocate(path), max_bytes)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await super().run_background(argv, {name: _relocate(value) for name, value in env.items()}, log)

    async def prepare_uv_script(self, script: str | bytes, env: dict[str, str] | None = None, **options: bool) -> Any:
        if script != CHAT_PROGRAM_SOURCE:
            return await super().prepare_uv_script(script, env, **options)
        file = Path(tempfile.gettempdir()) / "chat.py"  # apart from the files of the policy's commands
        file.write_text(CHAT_PROGRAM_SOURCE, encoding="utf-8")
        return [sys.executable, str(file)]


runtimes.SubprocessRuntime = EpisodeRuntime
