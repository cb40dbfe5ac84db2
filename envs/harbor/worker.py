"""Harbor's part of the bridge: Harbor's interpreter runs this, and it imports nothing of envgym (see `foreign`).

An episode is one trial by Harbor's own program, whose agent asks the policy at the URL of the call.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm downloads a list of prices
os.environ["HARBOR_TELEMETRY"] = "off"

import harbor
from harbor.agents.nop import NopAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import VerifierEnvironmentMode
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.error_policy import FailureCause, policy_for
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial
from openai import AsyncOpenAI, BadRequestError

sys.path.append(str(Path(__file__).parent))
place = importlib.import_module("place")  # Harbor imports it by this name
for _module in ("agents.terminus_2.terminus_2", "llms.litellm_config", "trial.multi_step", "trial.single_step"):
    importlib.import_module(f"harbor.{_module}")  # seconds, which otherwise each episode would take
_settings: dict[str, Any] = {}
_FAILURES = {
    FailureCause.SANDBOX_FAILED: "sandbox",
    FailureCause.VERIFIER_FAILED: "verifier",
    FailureCause.MODEL_PROVIDER_FAILED: "policy_unreachable",
}
"""Kinds of failures; the others are the agent's."""
_PLANTED = "the tests run where the policy worked: files that it leaves (conftest.py, ~/.local) may run in them"
_REWRITTEN = f"{_PLANTED}, and a process that it leaves can write /logs/verifier/reward.json"
_REMEDY = 'environment_mode = "separate" in [verifier] prevents it'
_NOT_ALONE = re.compile(r"\A#!(?!.*sh\n)|/solution|\$0|BASH_SOURCE")
"""In a script that is for another program than a shell, or that needs files beside it."""
_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the task's machine. Files stay from one call to the next.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def load(settings: dict[str, Any]) -> dict[str, Any]:
    """Read the tasks at the path `settings["target"]`, the folder of a task or of tasks: a row for each.

    `place`: a type of Harbor's environments, `MODULE:CLASS`, `local`, or empty: `docker` where it runs, else `local`.
    `offline`: tasks that ask for the internet may run without it. `reward`: the name of the reward. Raises
    `LookupError`, `ValueError` or `OSError` with one line.
    """
    path = Path(settings["target"]).expanduser().absolute()
    folders = [path] if (path / "task.toml").exists() else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise LookupError(f"{path} is no task of Harbor (a folder with a task.toml) and no folder of tasks")
    name = settings["place"] or ("docker" if _has_docker() else "local")
    if name != "local" and ":" not in name and name not in list(EnvironmentType):
        raise ValueError(f"Harbor has no place {name!r}: set env.place to local, {', '.join(sorted(EnvironmentType))}")
    if name == "local":
        asyncio.run(place.check_box())
    _settings.update(settings, place=name)
    place.Local.offline = settings["offline"]
    rows = [_read_task(folder, name == "local") for folder in folders]
    description = f"Tasks of Harbor at {path}, played in the place {name}"
    return {"rows": rows, "version": f"harbor {harbor.__version__}, {name}", "description": description}


def _has_docker() -> bool:
    return bool(shutil.which("docker")) and subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def _read_task(folder: Path, is_local: bool) -> dict[str, Any]:
    """A task's row. Raises `ValueError` for a folder that is none, or that the local place cannot play."""
    try:
        task = Task(folder)
        if is_local:
            _check_local(task)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder.name}: {str(error).splitlines()[0]}") from None
    config, steps = task.config, task.config.steps or []
    modes = [resolve_step_verifier_mode(config, step) for step in steps] or [resolve_task_verifier_mode(config)]
    forgery = f"{_PLANTED if is_local else _REWRITTEN}; {_REMEDY}" if VerifierEnvironmentMode.SHARED in modes else ""
    texts = [task.step_instruction(step.name) for step in steps] or [task.instruction]
    scripts = [task.paths.step_solve_path_for(step.name, None) for step in steps] or [task.paths.solve_path]
    solutions = [script.read_text(encoding="utf-8") for script in scripts if script.is_file()]
    if len(solutions) < len(scripts) or any(map(_NOT_ALONE.search, solutions)):
        solutions = []
    row = {"id": folder.name, "prompt": "\n\n".join(texts), "path": str(folder), "forgery": forgery}
    return row | {"solutions": solutions}


def _check_local(task: Task) -> None:
    """Raise `NeedsContainer` if a task needs more than the local place has."""
    place.read_image(task.paths.environment_dir, task.config.environment)
    for level in (task.config, *(task.config.steps or ())):
        for phase in (level.agent, level.verifier):
            if phase.user not in (None, "root", 0):
                raise place.NeedsContainer(f"the user {phase.user}")
            place.check_network(phase.network_mode)


async def run(call: dict[str, Any]) -> dict[str, Any]:
    """Play the task of a row by one trial. A failure of the place, policy, agent or verifier has no reward."""
    name, settings, url = _settings["place"], call["settings"], call["url"]
    agent, arguments = settings.get("program") or f"{__name__}:Shell", settings.get("arguments") or {}
    # Any key will do: the session is in the URL.
    os.environ |= {"OPENAI_API_KEY": "session", "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url}
    os.environ |= {"ANTHROPIC_API_KEY": "session", "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
    if agent == "terminus-2":
        arguments = {"record_terminal_session": False, **arguments}  # else it installs asciinema
    config = {
        "task": {"path": call["row"]["path"]},
        "trials_dir": tempfile.mkdtemp(),
        "agent": {**_by_name(agent, "name"), "model_name": f"openai/{call['model']}", "kwargs": arguments},
        "environment": _by_name("place:Local" if name == "local" else name, "type"),
        "verifier": {"import_path": "place:Guard"} if name == "local" else {},
    }
    return _outcome(await (await Trial.create(TrialConfig.model_validate(config))).run())


def _by_name(name: str, key: str) -> dict[str, str]:
    return {"import_path" if ":" in name else key: name}


def _outcome(result: TrialResult) -> dict[str, Any]:
    """The outcome of a trial. Harbor's own mean counts one with an exception as 0; here it has no reward."""
    steps, name = result.step_results or [], _settings["reward"]
    parts = (result, *steps)
    is_truncated = any((part.agent_result.metadata or {}).get("truncated") for part in parts if part.agent_result)
    for error in [part.exception_info for part in parts if part.exception_info]:
        policy = policy_for(error.exception_type)
        if policy.cause is not FailureCause.AGENT_EXHAUSTED_BUDGET:
            kind = _FAILURES.get(policy.cause, "agent")
            return _failure(kind, f"{error.exception_type}: {error.exception_message}", policy.retry)
        is_truncated = True
    if any(part.verifier_result is None for part in parts):
        return _failure("verifier", "a verifier gave no result", True)
    rewards = result.verifier_result.rewards or {}
    if name not in rewards:
        return _failure(
            "no_reward", f"no reward {name!r} (rewards: {', '.join(rewards) or 'none'}); set env.reward", False
        )
    metrics = {
        f"{step.step_name}/{key}": value for step in steps for key, value in step.verifier_result.rewards.items()
    }
    return {"reward": rewards[name], "rewards": rewards, "metrics": metrics, "truncated": is_truncated}


def _failure(kind: str, message: str, retryable: bool) -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": message, "retryable": retryable}}


class Shell(NopAgent):  # type: ignore[misc]
    """The default agent: the policy has the instruction and a shell, until it calls no more."""

    def __init__(self, *args: Any, max_turns: int = 50, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_turns = max_turns

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        client, messages = AsyncOpenAI(timeout=None, max_retries=0), [{"role": "user", "content": instruction}]
        context.metadata = {"truncated": True}
        for _ in range(self._max_turns):
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])
            except BadRequestError:  # the policy may sample no more
                return
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                text = await _execute(environment, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                context.metadata = {}
                return


async def _execute(environment: BaseEnvironment, function: Any) -> str:
    """Run the command of a call of the tool: its output, as the policy sees it."""
    command = json.loads(function.arguments).get("command")
    if function.name != "bash" or not isinstance(command, str):
        return 'Error: call bash with {"command": TEXT}'
    try:
        result = await environment.exec(command, timeout_sec=120)
    except RuntimeError as error:
        return f"Error: {error}"
    status = f"\n[exit status {result.return_code}]" if result.return_code else ""
    return f"{result.stdout or ''}{result.stderr or ''}{status}".strip() or "(no output)"
