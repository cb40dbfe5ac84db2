"""Tasks solved with tools: Python functions or an MCP server's, and a final answer compared with the reference."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from envgym.env import TaskList, TaskSet
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.env.tools import ToolEnv, ToolEnvConfig
from envgym.errors import ConfigError
from envgym.hashing import hash_fraction
from envgym.sandbox import Limits, Sandbox, python_tool
from envgym.tasks import GeneratedTasks
from envgym.tools import McpServer, McpSession, Tool, ToolBox, load_tool
from envgym.types import Action, Message, Task, ToolCall

PYTHON = "python"
"""Name of the sandbox among the tools."""
TEST_TASKS = 512
TEST_SHARE = 1 / 8  # of all keys
UNAIDED = ("I do not know.", "No idea.")
"""Demonstrations that do not call the tool."""
Match = Literal["auto", "number", "exact", "contains"]

_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class McpSetting(McpServer):
    shared: bool = False
    """Share one session among all episodes: for stateless servers that are slow to start."""


class ToolUseConfig(ToolEnvConfig, DataEnvConfig):
    """Without data the tasks are generated: look up the value of a key, which only the tool `get` returns."""

    tools: tuple[str, ...] = ()
    """Functions, as `file.py:name` or `package.module:name`, or `python` for the sandbox."""
    mcp: tuple[McpSetting, ...] = ()
    """MCP servers: `{command: [program, argument, …]}` or `{url: …}`."""
    sandbox: Limits = Limits()
    """Limits of a program run by the tool `python`."""
    match: Match = "auto"
    """Comparison of the final answer with the reference answer."""
    hops: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    """Without data: look-ups that a task needs, drawn per task: the value of the value of … a key."""
    digits: int = Field(2, ge=2, le=9)
    """Without data: digits of keys and values. A guess is right in one of 9 * 10 ** (digits - 1) cases."""
    call_share: float = Field(0.4, ge=0, le=1)
    """Without data: share of the demonstrations that call the tool. The others give up, and would get no reward."""


class ToolUseEnv(ToolEnv):
    """Tasks solved with tools (functions, MCP servers): the reward is 1 for a right final answer, else 0."""

    spec: ToolUse
    config: ToolUseConfig

    async def tools(self) -> list[Any]:
        return await self.spec.tools_of(self.task)

    def grade(self, action: Action) -> float:
        return float(is_right(action.text, self.task.answer, self.config.match))

    def answer(self, action: Action) -> str | None:
        return final_answer(action.text, self.task.answer, self.config.match)


class ToolUse(DataEnvSpec):
    """The tasks, the tools, and the MCP sessions that episodes share."""

    env_class = ToolUseEnv
    agent = "tool_calling"
    Config = ToolUseConfig
    config: ToolUseConfig

    def __init__(self, id: str, /, **kwargs: Any) -> None:
        super().__init__(id, **kwargs)
        config = self.config
        if config.data is not None and not (config.tools or config.mcp):
            raise ConfigError(f"environment {id}: which tools do the tasks need? set env.tools or env.mcp")
        if config.data is None and (config.tools or config.mcp):
            raise ConfigError(f"environment {id}: custom tools need tasks: give some with data.path=FILE")
        self._tools: list[Tool] = []
        self._shared: dict[int, McpSession] = {}
        self._sharing = asyncio.Lock()

    async def setup(self) -> None:
        await super().setup()
        self.closing.push_async_callback(self._close, self._shared)
        self._tools = [await self._tool(name) for name in self.config.tools]
        # Every server starts here once, so that a mistake is reported before the first episode.
        sessions = await asyncio.gather(*(self._session(index) for index in range(len(self.config.mcp))))
        ToolBox([*self._tools, *(tool for session in sessions for tool in session.tools)])
        await self._close([index for index, server in enumerate(self.config.mcp) if not server.shared])

    async def tools_of(self, task: Task) -> list[Tool | McpServer]:
        """The tools of one episode. Each server in the list gets a separate session."""
        if self.config.data is None:
            return [Tool.from_function(look_up_in(task))]
        tools: list[Tool | McpServer] = [*self._tools]
        for index, server in enumerate(self.config.mcp):
            tools += (await self._session(index)).tools if server.shared else [server]
        return tools

    def default_tasks(self, split: str) -> TaskSet:
        hops, digits = self.config.hops, self.config.digits
        if split == "train":
            return GeneratedTasks(lambda index: train_task(index, hops, digits))
        return TaskList(held_out_tasks(hops, digits))

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """Demonstrate the calls and the answer, or one turn that gives up, depending on `seed`."""
        if self.config.data is not None:
            return super().demonstrations(task, seed)
        rng = random.Random(f"{task.id} {seed}")
        return demonstration(task, calls=rng.random() < self.config.call_share, rng=rng)

    async def _tool(self, name: str) -> Tool:
        if name != PYTHON:
            return load_tool(name)
        sandbox = await self.closing.enter_async_context(Sandbox(self.config.sandbox))
        # The sandbox limits the program's own time; the deadline of the call also covers waiting for a slot.
        return Tool.from_function(python_tool(sandbox), timeout=self.config.call_timeout)

    async def _session(self, index: int) -> McpSession:
        """The shared session with a server; reopened if it has died."""
        async with self._sharing:
            session = self._shared.get(index)
            if session is None or not session.alive:
                session = self._shared[index] = self.config.mcp[index].session()
                await session.start()
            return session

    async def _close(self, indices: Iterable[int]) -> None:
        sessions = [self._shared.pop(index) for index in list(indices)]
        await asyncio.gather(*(session.close() for session in sessions))


def final_answer(text: str, answer: object, match: Match) -> str | None:
    """The final answer in `text`, as `is_right` compares it; None if there is none."""
    final = text.rpartition("</think>")[2]
    if match == "number" or (match == "auto" and number(str(answer)) is not None):
        value = last_number(final)
        return None if value is None else f"{value:.12g}"
    return _plain(final) or None


def is_right(text: str, answer: object, match: Match) -> bool:
    """True if the final answer in `text` is `answer`. `auto` compares numbers if `answer` is one, else the whole text.

    `number`: the last number in the text equals the answer. `exact`: the same text, ignoring case, spacing and a full
    stop at the end. `contains`: the answer occurs in the text, as whole words. Thoughts before `</think>` do not count.
    """
    final = text.rpartition("</think>")[2]
    reference = str(answer)
    if match == "auto":
        match = "exact" if number(reference) is None else "number"
    if match == "number":
        expected, value = number(reference), last_number(final)
        return expected is not None and value is not None and math.isclose(expected, value, rel_tol=1e-9, abs_tol=1e-12)
    if match == "exact":
        return _plain(final) == _plain(reference)
    return re.search(rf"(?<!\w){re.escape(_plain(reference))}(?!\w)", _plain(final)) is not None


def number(text: str) -> float | None:
    """Parse `text` as a number, with or without thousands' commas; None if it is none."""
    text = text.strip()
    if not any(map(str.isdigit, text)) or not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", ""))


def last_number(text: str) -> float | None:
    """The last number in `text`."""
    values = [value for word in _NUMBER.findall(text) if (value := number(word)) is not None]
    return values[-1] if values else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


# -- tasks that only a tool can answer: the value of a key in the task's own, hidden table ----------------


def train_task(index: int, hops: Sequence[int], digits: int) -> Task:
    """Train task `index`: a function of `index` alone."""
    return _task(f"train-{index}", hops, digits, held_out=False)


def held_out_tasks(hops: Sequence[int], digits: int) -> list[Task]:
    """The 512 test tasks. Their first keys are those of no train task."""
    return [_task(f"test-{index}", hops, digits, held_out=True) for index in range(TEST_TASKS)]


def look_up_in(task: Task) -> Callable[[int], int]:
    """The function behind the tool `get`, which looks a key up in the table of one task."""

    def get(key: int) -> int:
        """Get the value of a key."""
        return value_of(task, key)

    return get


def value_of(task: Task, key: int) -> int:
    """The value of `key` in the table of `task`: another number of as many digits, drawn by task and key."""
    rng = random.Random(f"{task.id} {key}")
    start = 10 ** (task.fields["digits"] - 1)
    value = rng.randrange(start, 10 * start - 1)
    return value + (value >= key)  # any but the key


def demonstration(task: Task, *, calls: bool, rng: random.Random) -> list[str | Message]:
    """Demonstrate how `task` is solved by calling the tool, or one turn that gives up."""
    if not calls:
        return [rng.choice(UNAIDED)]
    turns: list[str | Message] = []
    key = task.fields["key"]
    for _ in range(task.fields["hops"]):
        call = ToolCall("", "get", {"key": key})
        turns.append(Message("assistant", "", (call,)))
        key = value_of(task, key)
    return [*turns, str(key)]


def is_held_out(key: int) -> bool:
    """True for a first key of test tasks, by a hash that is the same everywhere."""
    return hash_fraction(f"key {key}") < TEST_SHARE


def _task(id: str, hops: Sequence[int], digits: int, *, held_out: bool) -> Task:
    """The task with this id: a function of the arguments."""
    rng = random.Random(f"lookup {id}")
    n_hops = rng.choice(list(hops))
    key = -1
    while key < 0 or is_held_out(key) != held_out:
        key = rng.randrange(10 ** (digits - 1), 10**digits)
    fields = {"key": key, "hops": n_hops, "digits": digits}
    task = Task(id=id, prompt=f"Value of {'the value of ' * (n_hops - 1)}{key}?", fields=fields, difficulty=n_hops)
    answer = key
    for _ in range(n_hops):
        answer = value_of(task, answer)
    return Task(task.id, task.prompt, answer, fields, float(n_hops))
