"""Environments of other frameworks whose own programs run the episodes, in their own interpreters.

A framework has a folder beside this one, with a `worker.py` that its interpreter runs (see `fork_server`) and an
`EnvSpec` class. The program's model is an endpoint of ours, so that the tokens are exact and nothing of the framework
is imported or written again. The agent (`agent`) records an episode as training needs it. Without that agent, each
request of the program is an observation and the action is its answer, so that checks and people can take steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from envgym.agents.external.conversation import Answering, PolicyAnswer
from envgym.agents.external.endpoint import Endpoint
from envgym.engine import Generation
from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import ConfigError, InvalidOutcome
from envgym.tasks import Form, TaskSet
from envgym.tasks.config import DataConfig
from envgym.types import Action, Message, Observation, Task, ToolSpec, float_array, int_array

from .interpreter import ForeignInterpreter

FAILURES = ("agent", "no_reward", "policy_unreachable", "sandbox", "verifier")
"""Kinds of failures that a worker may report."""


class ForeignConfig(DataEnvConfig):
    """Settings of the framework's interpreter and of its tasks. `data` has rows in place of the framework's own."""

    concurrency: int | None = Field(8, ge=1)
    """Maximum concurrent episodes of this environment, each of which starts programs; null: the rollout's."""
    python: Path | None = None
    """The Python interpreter of a virtual environment with the framework."""
    environ: tuple[str, ...] = ()
    """Names of additional environment variables to pass to it, such as those of API keys."""
    test_fraction: float | None = Field(None, ge=0, le=1)
    """Fraction of the tasks that is held out; 1: all. Unset: 0.1, or 0 if there is only one task."""


class Requests(Answering):
    """In place of an endpoint's `Conversation`: requests that wait for the environment's steps to answer them."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[Observation, asyncio.Future[Action]] | None] = asyncio.Queue()

    async def answer(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], max_tokens: int | None, stop: tuple[str, ...]
    ) -> PolicyAnswer:
        """The action as an answer. The observation has the messages after the last answer."""
        start = 1 + max((n for n, message in enumerate(messages) if message.role == "assistant"), default=-1)
        answering: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((Observation(messages[start:], tools=tools), answering))
        action = await answering
        calls = () if any(call.error for call in action.tool_calls) else action.tool_calls
        text = action.content if calls else action.text  # a malformed call has no form but its text
        ids, logprobs = int_array(action.token_ids), float_array([0.0] * len(action.token_ids))
        generation = Generation(ids, logprobs, action.stop_reason, ())
        return PolicyAnswer(Message("assistant", text or "", calls), generation, [], None)

    def count(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> int:
        """A number of tokens that an estimate would give: four characters each."""
        return sum(len(message.text) for message in messages) // 4


class ForeignEnv(Env):
    """One episode of the framework's program."""

    spec: ForeignSpec

    _requests: Requests
    _result: asyncio.Task[dict[str, Any]] | None = None
    _answering: asyncio.Future[Action]
    """The last request, which the next action answers."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await self.close()
        requests = self._requests = Requests()
        self._result = asyncio.create_task(self._run(seed or 0))
        self._result.add_done_callback(lambda _: requests.waiting.put_nowait(None))
        if (request := await requests.waiting.get()) is None:
            self._result.result()  # raises what went wrong
            raise InvalidOutcome("agent", f"{self.spec.framework} made no call to the policy")
        observation, self._answering = request
        return observation, {}

    async def step(self, action: Action) -> StepResult:
        assert self._result is not None, "reset comes before step"
        if not self._answering.done():  # else the program has ended meanwhile
            self._answering.set_result(action)
        while (request := await self._requests.waiting.get()) is not None:
            observation, self._answering = request
            if not self._answering.done():
                return observation, None, False, False, {}
        reward, truncated, info = verdict(self._result.result())
        return [], reward, not truncated, truncated, info

    async def close(self) -> None:
        task, self._result = self._result, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, InvalidOutcome):
                await task

    async def _run(self, seed: int) -> dict[str, Any]:
        async with Endpoint().session(self._requests) as access:
            return await self.spec.run(self.task, {}, access.session_url, seed)


class ForeignSpec(DataEnvSpec):
    """The framework's interpreter, its tasks and its episodes. A subclass names the framework and its worker."""

    env_class = ForeignEnv
    Config = ForeignConfig
    config: ForeignConfig
    answer_required = False
    starts_programs = True
    framework: ClassVar[str]
    """The framework's name, for messages."""
    package: ClassVar[str]
    """Its package and the version that the worker is written for, of which the last numbers may be missing:
    `harbor==0.25`."""
    worker: ClassVar[Path]
    """The file that its interpreter runs (see `fork_server`). `load` takes the settings that not every framework has,
    and `target`, the name without its scheme. It returns `rows`, each with an `id`, a `prompt` and the worker's fields;
    `version`, which identifies the environment; and a `description`."""

    interpreter: ForeignInterpreter
    _loaded: dict[str, Any] | None = None

    async def setup(self) -> None:
        config, name = self.config, self.framework
        if config.python is None:
            hint = f"set env.python=VENV/bin/python, of a virtual environment with {name}"
            raise ConfigError(f"environment {self.id}: {hint}")
        python = config.python.expanduser().absolute()  # a virtual environment's is a link, which is not to be followed
        settings = config.model_dump(mode="json", exclude=set(ForeignConfig.model_fields))
        settings["target"] = self.id.partition(":")[2]
        self.interpreter = ForeignInterpreter(name, self.package, python, self.worker, settings, config.environ)
        self.closing.push_async_callback(self.interpreter.close)
        self._loaded = await self.interpreter.start()
        rows, fraction = self._loaded.pop("rows"), config.test_fraction
        await super().setup()
        if config.data is None:
            fraction = (0.1 if len(rows) > 1 else 0.0) if fraction is None else fraction
            data: Any = {"test_path": rows} if fraction == 1 else {"path": rows, "test_fraction": fraction}
            await self._load(DataConfig(id="id", **data))

    def form(self) -> Form:
        return lambda row, context: {"prompt": "", **row}  # so that the whole rows are the tasks' fields

    def default_tasks(self, split: str) -> TaskSet:
        if self._splits is None:
            raise ConfigError(f"environment {self.id}: its tasks are known after its set-up")
        return self._splits.train if split == "train" else self._splits.test

    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), **({"grader": str(self._loaded["version"])} if self._loaded else {})}

    @property
    def summary(self) -> str:
        return str((self._loaded or {}).get("description") or super().summary)

    async def run(
        self, task: Task, settings: Mapping[str, Any], url: str, seed: int, seconds: float | None = None
    ) -> dict[str, Any]:
        """The worker's result of one episode, with the policy at `url`, in at most `seconds`, if given. Raises
        `InvalidOutcome` if it failed."""
        call = {"settings": dict(settings), "row": dict(task.fields), "seed": seed, "url": url, "model": "policy"}
        result = await self.interpreter.run(call, seconds)
        if failure := result.get("failure"):
            message = f"{self.framework}: {' '.join(failure['message'].split()):.500}"
            kind = failure["kind"] if failure["kind"] in FAILURES else "agent"
            raise InvalidOutcome(kind, message, retryable=failure.get("retryable", False))
        return result


def verdict(result: Mapping[str, Any]) -> tuple[float, bool, Info]:
    """(Reward, truncated, info) of a worker's result. Raises `InvalidOutcome` without a finite reward."""
    reward = result.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise InvalidOutcome("no_reward", f"the episode has the reward {reward!r:.60}")
    metrics = {f"reward_{name}": number for name, number in result.get("rewards", {}).items()}
    return float(reward), bool(result.get("truncated")), {"metrics": {**metrics, **result.get("metrics", {})}}
