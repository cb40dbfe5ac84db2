"""Environments from unmodified files written for OpenRLHF: reward functions and agents.

Files are recognised by their definitions, without importing them: they may import torch and load a model. Such a file
runs in separate processes (`host`). `package` substitutes the file's imports from `openrlhf` if that is not installed.
"""

from __future__ import annotations

import ast
import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from envgym.env import Env, EnvSpec, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.env.rewards import GroupRewardEnv, last_action, seed_of
from envgym.errors import InvalidStep
from envgym.hashing import text_hash
from envgym.processes.pool import Processes, ProcessSession
from envgym.registry import spec_from_json
from envgym.rewards import Reward, prompt_text
from envgym.types import Action, Episode, Message, Observation, Task, as_messages, refuse_images

if TYPE_CHECKING:
    from .host import AgentHost, RewardHost


class OpenRLHFFileConfig(DataEnvConfig):
    """Settings of both kinds of file."""

    processes: int = Field(1, ge=1)
    """Processes that run the file. A blocking call holds up everything else in its process."""
    logs: str | None = None
    """Folder for the file's output. Unset: a temporary one, deleted unless something went wrong."""


class OpenRLHFFile(DataEnvSpec):
    """The environment of a file; `for_file` makes a subclass per file."""

    Config = OpenRLHFFileConfig
    config: OpenRLHFFileConfig
    answer_required = False
    path: ClassVar[Path]
    name: ClassVar[str]
    host: ClassVar[str]
    """Import path of the class that runs in the processes."""

    processes: Processes[Any]

    @classmethod
    def for_file(cls, path: Path, name: str, summary: str | None) -> type[Self]:
        """The environment of the function or class `name` in the file at `path`."""
        summary = summary or f"{name} of {path.name}, written for OpenRLHF."
        return type(path.stem, (cls,), {"path": path, "name": name, "__doc__": summary})

    def __reduce__(self) -> Any:
        return spec_from_json, (self.to_json(),)

    def fingerprint(self) -> dict[str, str]:
        return super().fingerprint() | {"code": text_hash(self.path.read_text(encoding="utf-8", errors="replace"))}

    async def setup(self) -> None:
        await super().setup()
        self.tasks("train")  # raises an error before anything starts, if there are none
        target = {"target": f"{self.path}:{self.name}"}
        settings = self.config
        self.processes = Processes(self.host, target, count=settings.processes, name=self.path.stem, logs=settings.logs)
        await self.processes.start()
        self.closing.push_async_callback(self.processes.close)


# -- reward functions -------------------------------------------------------------------------------------


class RewardFileConfig(OpenRLHFFileConfig):
    """Settings of a reward function from a file for OpenRLHF."""

    chat: bool = True
    """Send prompts as chat messages, through the model's template; false: as raw text, for base models."""


class RewardFile(OpenRLHFFile):
    """Tasks whose rewards come from one call of `reward_func(queries, prompts, labels)` per group.

    Each query is the prompt and the completion as one text. `prompts` are the tasks' own, without the chat template;
    `labels` are the tasks' reference answers. A call has `call_timeout` seconds; then its process is killed and the
    group fails.
    """

    env_class = GroupRewardEnv
    Config = RewardFileConfig
    config: RewardFileConfig
    processes: Processes[RewardHost]
    host = "envgym.envs.openrlhf.host:RewardHost"

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Reward | InvalidStep]:
        prompt = prompt_text(task)
        queries = [prompt + last_action(episode).text for episode in episodes]
        columns = queries, [prompt] * len(queries), [task.answer] * len(queries)
        return await self.processes.call(
            lambda host: host.group(*columns, seed_of(episodes)), timeout=self.config.call_timeout
        )


# -- agents -----------------------------------------------------------------------------------------------

Sample = Callable[[list[int], Mapping[str, Any]], Awaitable[Mapping[str, Any] | None]]
"""Samples after the given tokens, with overrides of the sampling parameters. Returns token ids, log-probabilities and
finish reason, or None if the context or the budget is used up."""
DEFAULT_SAMPLING = {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": (), "seed": None}
"""The sampling parameters that an agent sees if the run's are unknown."""


@dataclass(frozen=True, slots=True)
class PolicyView:
    """An agent file's view of the policy: its tokenizer, sampling parameters, context length and maximum turns."""

    tokenizer: Any = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_SAMPLING)
    max_length: int | None = None
    max_steps: int | None = None


class AgentFileConfig(OpenRLHFFileConfig):
    """Settings of an agent from a file for OpenRLHF."""

    chat: bool = False
    """Send the first observation as chat messages, through the model's template. Later ones are appended as raw text
    either way: the agent writes its own markup."""


class AgentEnv(Env):
    """One episode: an `AgentInstance` of the file, in one of its processes."""

    spec: AgentFile

    def __init__(self) -> None:
        self.policy = PolicyView()
        """Set by the run's agent before `reset`."""
        self.score: float | None = None
        """The last score of the file's agent, None if it was outside [0, 1]."""
        self._session: ProcessSession[AgentHost] | None = None
        self._key = uuid.uuid4().hex

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        """The first observation: the agent's own or, before `execute` runs the episode, the prompt."""
        self.score = None
        *messages, last = as_messages(self.task.prompt)
        if self.spec.executes and self.policy.tokenizer is not None:  # `execute` comes next
            refuse_images([*messages, last], "an agent file for OpenRLHF with an execute of its own")
            text = last.text
        else:
            session = await self._open()
            prompt = last.text if self._is_chat else prompt_text(self.task)
            sampling = dict(self.policy.sampling)
            text = await session.call(lambda host: host.reset(self._key, prompt, self.task.answer, sampling))
        if self._is_chat:
            message = last if text == last.text else Message(last.role, (*last.images, text))
            return Observation(messages=(*messages, message)), {}
        return Observation(text=text), {}

    async def step(self, action: Action) -> StepResult:
        assert self._session is not None
        result, metrics, sampling = await self._session.call(lambda host: host.step(self._key, action.text))
        self.score = result.score
        observation = Observation(text=result.feedback, sampling=sampling, images=result.images)
        return observation, result.reward, result.is_done, False, {"score": result.score, "metrics": metrics}

    async def execute(self, sample: Sample) -> dict[str, Any]:
        """Run the episode by the file's own `execute`, after `reset`. `sample` answers its requests to the engine.
        Returns its result as plain numbers; see `host.read_result`."""
        session = await self._open()
        async with self.spec.sending_tokenizer:  # sent once per process, since it is large
            if not await session.run(lambda host: host.has_tokenizer()):
                await session.run(lambda host: host.set_tokenizer(self.policy.tokenizer))
        prompt: str | list[dict[str, Any]] = prompt_text(self.task)
        if self._is_chat:
            prompt = [message.as_dict() for message in as_messages(self.task.prompt)]
        limits = {"max_length": self.policy.max_length, "max_steps": self.policy.max_steps}
        run_sampling = dict(self.policy.sampling)
        await session.call(lambda host: host.start_execute(self._key, prompt, self.task.answer, run_sampling, limits))
        while True:
            kind, value = await session.call(lambda host: host.next(self._key))
            if kind == "result":
                return dict(value)
            number, token_ids, sampling = value
            generation = await sample(token_ids, sampling)
            await session.run(lambda host: host.answer(self._key, number, generation))  # noqa: B023

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close(lambda: session.run(lambda host: host.close_episode(self._key)))

    @property
    def _is_chat(self) -> bool:
        return self.config.chat or not isinstance(self.task.prompt, str)

    async def _open(self) -> ProcessSession[AgentHost]:
        if self._session is None or not self._session.alive:
            if self._session is not None:
                await self._session.close()
            self._session = await self.spec.processes.session()
        return self._session


class AgentFile(OpenRLHFFile):
    """The environment of a file that defines `AgentInstance` and `AgentExecutor`.

    If its executor does not override `execute`, this is an environment like others, with `reset` and `step`. Otherwise
    the file drives the model itself, which only the agent named here supports; others ignore its `execute`.
    """

    agent = "openrlhf_executor"
    env_class = AgentEnv
    Config = AgentFileConfig
    config: AgentFileConfig
    processes: Processes[AgentHost]
    host = "envgym.envs.openrlhf.host:AgentHost"

    executes = False
    """True if the file has its own `execute`. `setup` asks a process of the file."""

    async def setup(self) -> None:
        await super().setup()
        self.sending_tokenizer = asyncio.Lock()
        self.executes = await self.processes.run(lambda host: host.executes(), timeout=self.config.call_timeout)


# -- recognition ------------------------------------------------------------------------------------------

EXECUTOR, INSTANCE, FUNCTION = "AgentExecutor", "AgentInstance", "reward_func"
PARAMETERS = ("queries", "prompts", "labels")


def environment_of(path: Path, name: str) -> type[EnvSpec] | None:
    """The environment of the file at `path`; None if it is not written for OpenRLHF, or imports envgym.

    `name` is the reward function or executor that the user gave after the file's path, if any.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # importing it will name the problem
    if any(_imports_envgym(node) for node in ast.walk(tree)):
        return None
    defined = {defined: node for node in _top_level(tree) for defined in _names(node)}
    if _is_trl(defined.get(FUNCTION)):
        del defined[FUNCTION]
    if name:
        is_function = isinstance(defined.get(name), ast.FunctionDef | ast.AsyncFunctionDef)
        is_agent = isinstance(defined.get(name), ast.ClassDef) and name != INSTANCE and INSTANCE in defined
        takes_columns = is_function and _parameters(defined[name])[:3] == PARAMETERS
        is_reward = takes_columns or (name == FUNCTION and name in defined)
    else:
        is_agent = EXECUTOR in defined or INSTANCE in defined
        is_reward = FUNCTION in defined
        name = EXECUTOR if is_agent else FUNCTION
    if is_agent:
        return AgentFile.for_file(path, name, ast.get_docstring(tree))
    return RewardFile.for_file(path, name, ast.get_docstring(tree)) if is_reward else None


def _imports_envgym(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "envgym" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "envgym"


def _top_level(parent: ast.AST) -> Iterator[ast.AST]:
    """The statements that run on import, including those in `if` and `try`."""
    for node in ast.iter_child_nodes(parent):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _top_level(node)


def _names(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _is_trl(node: ast.AST | None) -> bool:
    """True for a reward function in TRL's form, which may have the same name."""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and any(name.startswith("completion") for name in _parameters(node))


def _parameters(node: ast.AST | None) -> tuple[str, ...]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
