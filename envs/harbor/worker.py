"""Harbor's part of the bridge: Harbor's interpreter runs this, and it imports nothing of envgym (see `foreign`).

An episode is one trial by Harbor's own program, whose agent asks the policy at the URL of the call.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm downloads a list of prices
os.environ["HARBOR_TELEMETRY"] = "off"

import harbor
import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import VerifierEnvironmentMode
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.error_policy import FailureCause, policy_for
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

_PLACE, _PLACE_FILE = "envgym_harbor_place", Path(__file__).with_name("place.py")
_settings: dict[str, Any] = {}
_FAILURES = {
    FailureCause.SANDBOX_FAILED: "sandbox",
    FailureCause.VERIFIER_FAILED: "verifier",
    FailureCause.MODEL_PROVIDER_FAILED: "policy_unreachable",
}
"""Kinds of failures; the others are `harness`."""
_PLANTED = "the tests run where the policy worked: files that it left there (conftest.py, ~/.local) may run in them"
_REWRITTEN = f"{_PLANTED}, and a process that it left running can write /logs/verifier/reward.json"
_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the task's machine. Files stay from one call to the next.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def load(settings: dict[str, Any]) -> dict[str, Any]:
    """Read the tasks below `settings["path"]`, a task's folder or a folder of them.

    `place`: a type of Harbor's environments, `local`, or empty: `docker` where one runs, else `local`. `reward`: the
    name of the reward. Raises `LookupError` or `ValueError` for a mistake of the user.
    """
    path = Path(settings["path"]).expanduser().resolve()
    is_task = (path / "task.toml").exists()
    folders = [path] if is_task else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise LookupError(f"{path} is no task of Harbor (a folder with a task.toml) and no folder of tasks")
    place = settings.get("place") or ("docker" if _has_docker() else "local")
    if place != "local" and ":" not in place and place not in list(EnvironmentType):
        raise ValueError(f"Harbor has no place {place!r}: set env.place to local, {', '.join(sorted(EnvironmentType))}")
    _settings.update(settings, place=place)
    rows = [_read_task(folder, place) for folder in folders]
    file = Path(tempfile.mkdtemp()) / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "rows": str(file),
        "version": harbor.__version__,
        "place": place,
        "description": f"{len(rows)} tasks in {place}",
    }


def _has_docker() -> bool:
    return bool(shutil.which("docker")) and subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def _read_task(folder: Path, place: str) -> dict[str, Any]:
    """A task's row. Raises `ValueError` for a folder that is not one, or that does not run in the place."""
    try:
        task = Task(folder)
        if place == "local":
            _check_local(task)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder.name}: {str(error).splitlines()[0]}") from None
    config, steps = task.config, task.config.steps or []
    modes = [resolve_step_verifier_mode(config, step) for step in steps] or [resolve_task_verifier_mode(config)]
    is_shared = VerifierEnvironmentMode.SHARED in modes
    texts = [task.step_instruction(step.name) for step in steps] or [task.instruction]
    return {
        "task": folder.name,
        "path": str(folder),
        "instruction": "\n\n".join(texts),
        "steps": len(texts),
        "forging": (_PLANTED if place == "local" else _REWRITTEN) if is_shared else "",
    }


def _place() -> ModuleType:
    """The module `place`, which Harbor then imports by its name."""
    if _PLACE not in sys.modules:
        spec = importlib.util.spec_from_file_location(_PLACE, _PLACE_FILE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_PLACE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_PLACE])
    return sys.modules[_PLACE]


def _check_local(task: Task) -> None:
    """Raise `ValueError` if a task needs more than the local place has."""
    config, steps, place = task.config, task.config.steps or [], _place()
    try:
        place.read_image(task.paths.environment_dir, config.environment)
        for user in [part.user for phase in (config, *steps) for part in (phase.agent, phase.verifier)]:
            if user not in (None, "root", 0):
                raise place.NeedsContainer(f"the user {user}")
        for network in [part.network_mode for phase in (config, *steps) for part in (phase.agent, phase.verifier)]:
            if network not in (None, "no-network"):
                raise place.NeedsContainer(f"a network (network_mode = {network.value!r})")
        if config.environment.gpus:
            raise place.NeedsContainer("GPUs")
    except place.NeedsContainer as error:
        raise ValueError(f"it needs {error}: a container engine (env.place=docker or podman)") from None


async def run(call: dict[str, Any]) -> dict[str, Any]:
    """Play the task of a row by one trial. A failure of the place, policy, agent or verifier has no reward."""
    folder = Path(tempfile.mkdtemp())
    config = TrialConfig(
        task=TaskConfig(path=Path(call["row"]["path"])), trials_dir=folder, agent=_agent(call), **_environment()
    )
    trial = await Trial.create(config)
    return _outcome(await trial.run(), _settings.get("reward") or "reward")


def _environment() -> dict[str, Any]:
    place = _settings["place"]
    if place == "local":
        return {
            "environment": EnvironmentConfig(import_path=f"{_place().__name__}:Local"),
            "verifier": VerifierConfig(import_path=f"{_PLACE}:Guard"),
        }
    key = "import_path" if ":" in place else "type"
    return {"environment": EnvironmentConfig.model_validate({key: place})}


def _agent(call: dict[str, Any]) -> AgentConfig:
    settings, url = call["settings"], call["url"]
    name, arguments = settings.get("name") or f"{__name__}:Shell", dict(settings.get("arguments") or {})
    # For agents that read them; any key will do, the session is in the URL.
    os.environ |= {"OPENAI_API_KEY": "session", "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url}
    os.environ |= {"ANTHROPIC_API_KEY": "session", "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
    if name.endswith(":Shell"):
        arguments |= {"url": url}
    elif name == "terminus-2":
        arguments.setdefault("record_terminal_session", False)  # else it installs asciinema
    key = "import_path" if ":" in name else "name"
    model = call["model"] if name.endswith(":Shell") else f"openai/{call['model']}"
    return AgentConfig.model_validate({key: name, "model_name": model, "kwargs": arguments})


def _outcome(result: TrialResult, name: str) -> dict[str, Any]:
    """The outcome of a trial. Harbor counts a trial with an exception as 0; here it has no reward."""
    parts = [result, *(result.step_results or [])]
    errors = [part.exception_info for part in parts if part.exception_info is not None]
    causes = [policy_for(error.exception_type) for error in errors]
    is_exhausted = [cause.cause is FailureCause.AGENT_EXHAUSTED_BUDGET for cause in causes]
    contexts = [part.agent_result.metadata or {} for part in parts if part.agent_result is not None]
    outcome: dict[str, Any] = {
        "reward": None, "rewards": {}, "metrics": {}, "failure": None,
        "truncated": any(is_exhausted) or any(context.get("truncated") for context in contexts),
    }  # fmt: skip
    for error, cause, exhausted in zip(errors, causes, is_exhausted, strict=True):
        if not exhausted:
            kind = _FAILURES.get(cause.cause, "harness")
            return outcome | {
                "failure": _failure(kind, f"{error.exception_type}: {error.exception_message}", cause.retry)
            }
    if any(part.verifier_result is None for part in parts):
        return outcome | {"failure": _failure("verifier", "; ".join(e.exception_message for e in errors), True)}
    for step in result.step_results or []:
        assert step.verifier_result is not None
        outcome["metrics"] |= {f"{step.step_name}/{key}": value for key, value in step.verifier_result.rewards.items()}
    assert result.verifier_result is not None
    rewards = outcome["rewards"] = dict(result.verifier_result.rewards or {})
    if name not in rewards or not math.isfinite(rewards[name]):
        names = ", ".join(sorted(rewards)) or "none"
        return outcome | {
            "failure": _failure("no_reward", f"no reward {name!r} (rewards: {names}); set env.reward", False)
        }
    return outcome | {"reward": float(rewards[name])}


def _failure(kind: str, message: str, retryable: bool) -> dict[str, Any]:
    return {"kind": kind, "message": " ".join(message.split())[:500] or kind, "retryable": retryable}


class ApiConnectionError(Exception):
    """The policy was not reachable. Harbor knows the cause by this name."""


class Shell(BaseAgent):  # type: ignore[misc]
    """The default agent: the policy has the instruction and a shell, until it calls no more."""

    def __init__(self, *args: Any, url: str, max_turns: int = 50, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._url = url
        self._max_turns = max_turns

    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
        context.metadata = {"truncated": True}
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": "Bearer session"}) as client:
            for _ in range(self._max_turns):
                message = await self._ask(client, messages)
                if message is None:
                    return
                messages.append(message)
                if not message.get("tool_calls"):
                    context.metadata = {}
                    return
                for tool_call in message["tool_calls"]:
                    text = await self._call(environment, tool_call["function"])
                    messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": text})

    async def _ask(self, client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The policy's message; None if it may sample no more."""
        body = {"model": self.model_name, "messages": messages, "tools": [_TOOL]}
        try:
            response = await client.post(f"{self._url}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise ApiConnectionError(f"{type(error).__name__}: {error}") from None
        if response.status_code == 400:
            return None
        if response.status_code != 200:
            raise ApiConnectionError(f"status {response.status_code}: {response.text[:200]}")
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def _call(self, environment: BaseEnvironment, function: dict[str, str]) -> str:
        try:
            command = json.loads(function["arguments"])["command"]
            if function["name"] != "bash" or not isinstance(command, str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            return 'Error: call bash with {"command": TEXT}'
        try:
            result = await environment.exec(command, timeout_sec=120)
        except RuntimeError as error:
            return f"Error: {error}"
        status = f"\n[exit status {result.return_code}]" if result.return_code else ""
        return f"{result.stdout or ''}{result.stderr or ''}{status}".strip() or "(no output)"
