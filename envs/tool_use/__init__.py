"""Tasks done with tools: Python functions or an MCP server's, and answers that are checked against the task's."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from envgym.env import ListTasks, TaskSet
from envgym.errors import ConfigError
from envgym.hashing import hash_fraction
from envgym.sandbox import Limits, Sandbox, python_tool
from envgym.tasks import DataEnvConfig, DataEnvSpec, FunctionTasks
from envgym.tools import McpServer, McpSession, Tool, ToolBox, ToolEnv, ToolEnvConfig, load_tool
from envgym.types import Action, Message, Task, TextPart, ToolCall

PYTHON = "python"
"""The sandbox's name among the tools."""
TEST_TASKS = 512
TEST_SHARE = 1 / 8  # of all keys
UNAIDED = ("I do not know.", "No idea.")
"""Demonstrations without a call of the tool."""
Match = Literal["auto", "number", "exact", "contains"]

_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class McpSetting(McpServer):
    shared: bool = False
    """One session for all episodes, for servers without state that are slow to start."""


class ToolUseConfig(ToolEnvConfig, DataEnvConfig):
    """Without data the tasks are made here: the value of a key, which only the tool `get` tells."""

    tools: tuple[str, ...] = ()
    """Functions, as `file.py:name` or `package.module:name`, or `python` for the sandbox."""
    mcp: tuple[McpSetting, ...] = ()
    """MCP servers: `{command: [program, argument, …]}` or `{url: …}`."""
    sandbox: Limits = Limits()
    """Limits of a program that the tool `python` runs."""
    match: Match = "auto"
    """Comparison of the final answer with the task's."""
    hops: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    """Without data: look-ups a task takes, drawn for each task; the value of the value of … a key."""
    digits: int = Field(2, ge=2, le=9)
    """Without data: digits of keys and values. Guessing is right in one of 9 * 10 ** (digits - 1) cases."""
    call_share: float = Field(0.4, ge=0, le=1)
    """Without data: share of the demonstrations that call the tool. The others give up, and would earn nothing."""


class ToolUseEnv(ToolEnv):
    """Tasks done with tools (functions, MCP servers): pays 1 for a right final answer, 0 for anything else."""

    spec: ToolUse

    async def tools(self) -> list[Any]:
        return await self.spec.tools_of(self.task)

    def grade(self, action: Action) -> float:
        return float(is_right(action.text, self.task.answer, self.spec.config.match))

    def answer(self, action: Action) -> str | None:
        return given(action.text, self.task.answer, self.spec.config.match)


class ToolUse(DataEnvSpec):
    """The tasks, the tools, and the sessions with MCP servers that episodes share."""

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
            raise ConfigError(f"environment {id}: tools of your own need tasks: give it some with data.path=FILE")
        self._tools: list[Tool] = []
        self._shared: dict[int, McpSession] = {}
        self._sharing = asyncio.Lock()

    async def setup(self) -> None:
        await super().setup()
        self.closing.push_async_callback(self._close, self._shared)
        self._tools = [await self._tool(name) for name in self.config.tools]
        # Each server is started now: a mistake is reported before the first episode.
        sessions = await asyncio.gather(*(self._session(index) for index in range(len(self.config.mcp))))
        ToolBox([*self._tools, *(tool for session in sessions for tool in session.tools)])
        await self._close([index for index, server in enumerate(self.config.mcp) if not server.shared])

    async def tools_of(self, task: Task) -> list[Tool | McpServer]:
        """The tools of one episode; a server among them gets a session of its own."""
        if self.config.data is None:
            return [Tool.of(Table(task).get)]
        tools: list[Tool | McpServer] = [*self._tools]
        for index, server in enumerate(self.config.mcp):
            tools += (await self._session(index)).tools if server.shared else [server]
        return tools

    def own_tasks(self, split: str) -> TaskSet:
        hops, digits = self.config.hops, self.config.digits
        if split == "train":
            return FunctionTasks(lambda index: train_task(index, hops, digits))
        return ListTasks(held_out_tasks(hops, digits))

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The calls and the answer; or, by the seed, a turn that gives up."""
        if self.config.data is not None:
            return super().demonstrations(task, seed)
        rng = random.Random(f"{task.id} {seed}")
        return demonstration(task, calls=rng.random() < self.config.call_share, rng=rng)

    async def _tool(self, name: str) -> Tool:
        if name != PYTHON:
            return load_tool(name)
        sandbox = await self.closing.enter_async_context(Sandbox(self.config.sandbox))
        # A program has limits of its own, and waiting for its turn is not its fault: only the whole call's deadline
        # stands above those.
        return Tool.of(python_tool(sandbox), timeout=self.config.call_timeout)

    async def _session(self, index: int) -> McpSession:
        """The shared session with a server, opened anew where it has died."""
        async with self._sharing:
            session = self._shared.get(index)
            if session is None or not session.alive:
                session = self._shared[index] = self.config.mcp[index].session()
                await session.start()
            return session

    async def _close(self, indices: Iterable[int]) -> None:
        sessions = [self._shared.pop(index) for index in list(indices)]
        await asyncio.gather(*(session.close() for session in sessions))


def given(text: str, answer: object, match: Match) -> str | None:
    """The answer in `text`, as `is_right` compares it; None where there is none."""
    final = text.rpartition("</think>")[2]
    if match == "number" or (match == "auto" and number(str(answer)) is not None):
        found = last_number(final)
        return None if found is None else f"{found:.12g}"
    return _plain(final) or None


def is_right(text: str, answer: object, match: Match) -> bool:
    """True if `text` gives `answer`. `auto` compares numbers where the answer is one, else the whole text.

    `number`: the last number in the text equals the answer. `exact`: the same text, but for case, spacing and a full
    stop at the end. `contains`: the answer occurs in the text, as whole words. Thoughts before `</think>` do not count.
    """
    final = text.rpartition("</think>")[2]
    wanted = str(answer)
    if match == "auto":
        match = "exact" if number(wanted) is None else "number"
    if match == "number":
        right, found = number(wanted), last_number(final)
        return right is not None and found is not None and math.isclose(right, found, rel_tol=1e-9, abs_tol=1e-12)
    if match == "exact":
        return _plain(final) == _plain(wanted)
    return re.search(rf"(?<!\w){re.escape(_plain(wanted))}(?!\w)", _plain(final)) is not None


def number(text: str) -> float | None:
    """The number that `text` is, with or without thousands' commas; None where it is none."""
    text = text.strip()
    if not any(map(str.isdigit, text)) or not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", ""))


def last_number(text: str) -> float | None:
    """The last number in `text`."""
    found = [value for word in _NUMBER.findall(text) if (value := number(word)) is not None]
    return found[-1] if found else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


# -- tasks that only a tool can answer: the value of a key in a table of the task's own, which is not shown --


def train_task(index: int, hops: Sequence[int], digits: int) -> Task:
    """Train task `index`: a function of `index` alone."""
    return _task(f"train-{index}", hops, digits, held_out=False)


def held_out_tasks(hops: Sequence[int], digits: int) -> list[Task]:
    """The 512 test tasks. They begin with keys that no train task begins with."""
    return [_task(f"test-{index}", hops, digits, held_out=True) for index in range(TEST_TASKS)]


class Table:
    """The table of one task, behind the tool `get`."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def get(self, key: int) -> int:
        """Get the value of a key."""
        return value_of(self._task, key)


def value_of(task: Task, key: int) -> int:
    """The value of `key` in the table of `task`: another number of as many digits, drawn by task and key."""
    rng = random.Random(f"{task.id} {key}")
    start = 10 ** (task.fields["digits"] - 1)
    value = rng.randrange(start, 10 * start - 1)
    return value + (value >= key)  # any but the key


def demonstration(task: Task, *, calls: bool, rng: random.Random) -> list[str | Message]:
    """The turns that answer `task` by calling the tool, or a turn that gives up."""
    if not calls:
        return [rng.choice(UNAIDED)]
    turns: list[str | Message] = []
    key = task.fields["key"]
    for _ in range(task.fields["hops"]):
        call = ToolCall("", "get", {"key": key})
        turns.append(Message("assistant", (TextPart(""),), (call,)))
        key = value_of(task, key)
    return [*turns, str(key)]


def is_held_out(key: int) -> bool:
    """True for a key that test tasks begin with, by a hash that is the same everywhere."""
    return hash_fraction(f"key {key}") < TEST_SHARE


def _task(id: str, hops: Sequence[int], digits: int, *, held_out: bool) -> Task:
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
