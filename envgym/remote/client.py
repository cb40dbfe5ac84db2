"""A remote environment, played as if it were local: `envgym.make("http://127.0.0.1:8000")`."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field, ValidationError

from envgym.env import CheckedEnv, EnvConfig, EnvSpec, Info, TaskSet
from envgym.errors import ConfigError, EnvgymError, InvalidStep, ResetNeeded
from envgym.types import Action, Observation, Task

from .encoding import encode
from .transport import Counters, RemoteError, Transport
from .wire import VERSION, EnvDescription, EnvList, Opened, Opening, Step, Stepped, TaskPage

SETUP_SECONDS = 30.0
CLOSE_SECONDS = 10.0
PAGE = 100
"""Tasks in a page."""
PAGES = 100
"""Pages kept in memory. The longest unused goes first."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class RemoteConfig(EnvConfig):
    """Settings of the connection. The environment's own are set where it is served."""

    timeout: float = Field(default=660.0, gt=0)
    """Seconds one reset, step or page of tasks may take, all tries together. By default the server's own limit
    on an environment, 600 s, comes first."""


class RemoteEnvSpec(EnvSpec):
    """The environment served at `url`. Its instances are sessions there; it holds the connections to them."""

    agent = "tool_calling"  # whether it offers tools is known once it is reached; without them this is `multi_turn`
    Config = RemoteConfig
    config: RemoteConfig

    def __init__(self, url: str, **kwargs: Any) -> None:
        super().__init__(url.rstrip("/"), **kwargs)
        self.counters = Counters()
        self._description: EnvDescription | None = None
        self._task_sets: dict[str, RemoteTasks] = {}
        # Connections belong to the event loop that opened them.
        self._transports: WeakKeyDictionary[asyncio.AbstractEventLoop, Transport] = WeakKeyDictionary()
        self._reported: set[str] = set()

    @property
    def description(self) -> EnvDescription:
        """What the server said it serves. Raises `EnvgymError` before it was asked."""
        if self._description is None:
            raise EnvgymError(f"{self.id}: not connected yet; write `async with spec:` around what uses it")
        return self._description

    async def setup(self) -> None:
        """Ask the server what it serves. Raises `EnvgymError` where nothing answers, or something else does."""
        seconds = min(SETUP_SECONDS, self.config.timeout)
        try:
            # One try: at the start a wrong address is likelier than a passing fault.
            served = await self.call(EnvList, "GET", "/v1/envs", seconds=seconds, tries=1)
            if served.version != VERSION:
                raise ConfigError(
                    f"{self.id} speaks version {served.version} of the protocol, this envgym version {VERSION}: "
                    "install the same envgym on both sides"
                )
            description = self._choose(served)
        except BaseException:
            await self.teardown()
            raise
        self._description = description

    def _choose(self, served: EnvList) -> EnvDescription:
        name = urlsplit(self.id).path.strip("/")
        found = [env for env in served.envs if name in ("", env.name)]
        if len(found) != 1:
            known = ", ".join(env.name for env in served.envs)
            raise ConfigError(f"{self.id}: the address ends in the name of one of the server's environments: {known}")
        return found[0]

    async def teardown(self) -> None:
        transport = self._transports.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.close()

    def tasks(self, split: str) -> TaskSet:
        """The tasks of `split` on the server, read in pages. Raises `ConfigError` where it has none."""
        if split not in self._task_sets:
            known = self.description.splits
            if split not in known:
                raise ConfigError(f"{self.id} has no split {split!r}; it has {', '.join(known)}")
            error = known[split].error
            if error is not None:
                raise ConfigError(f"{self.id}: {error}")
            self._task_sets[split] = RemoteTasks(self, split, known[split].size)
        return self._task_sets[split]

    def make(self) -> CheckedEnv:
        return RemoteEnv(self)

    async def call(self, model: type[B], method: str, path: str, body: BaseModel | None = None, **limits: Any) -> B:
        """The server's answer to one request, as a `model`. Raises as `Transport.call` does."""
        content = await self._transport.call(method, path, None if body is None else encode(body), **limits)
        try:
            return model.model_validate_json(content)
        except ValidationError as error:
            self.counters.failures += 1
            what = f"the answer to {method} {path} is not one of an envgym server ({error.errors()[0]['msg'].lower()})"
            raise RemoteError(f"{self.id}: {what}; check the address", retryable=True) from None

    async def end_session(self, session: str) -> None:
        """Close a session; one that cannot be reached any more is left to the server's idle limit."""
        try:
            await self._transport.call("DELETE", f"/v1/sessions/{session}", None, seconds=CLOSE_SECONDS, tries=2)
        except RemoteError as error:
            logger.debug("session %s was not closed: %s", session, error)  # counted; its episode is over either way

    def report_dropped(self, names: tuple[str, ...]) -> None:
        """Count `info` entries that JSON could not carry, and warn once of each name."""
        self.counters.dropped_info += len(names)
        for name in set(names) - self._reported:
            self._reported.add(name)
            logger.warning("%s: info[%r] cannot be sent as JSON and is left out", self.id, name)

    @property
    def _transport(self) -> Transport:
        loop = asyncio.get_running_loop()
        if loop not in self._transports:
            self._transports[loop] = Transport("{0.scheme}://{0.netloc}".format(urlsplit(self.id)), self.counters)
        return self._transports[loop]


class RemoteTasks(TaskSet):
    """A split on a server, read by pages when they are asked for; those read last are kept."""

    def __init__(self, spec: RemoteEnvSpec, split: str, size: int | None) -> None:
        self._spec = spec
        self._split = split
        self._size = size
        self._pages: OrderedDict[int, tuple[Task, ...]] = OrderedDict()
        self._reading: dict[int, asyncio.Task[tuple[Task, ...]]] = {}

    @property
    def size(self) -> int | None:
        return self._size

    async def get(self, index: int) -> Task:
        if index < 0 or (self._size is not None and index >= self._size):
            raise IndexError(f"task {index} of {self._size} in split {self._split!r}")
        number, offset = divmod(index, PAGE)
        if number in self._pages:
            self._pages.move_to_end(number)
            return self._pages[number][offset]
        if number not in self._reading:  # whoever else wants the page meanwhile waits for this one request
            self._reading[number] = asyncio.create_task(self._read(number))
            self._reading[number].add_done_callback(lambda _: self._reading.pop(number))
        return (await asyncio.shield(self._reading[number]))[offset]

    async def _read(self, number: int) -> tuple[Task, ...]:
        path = f"/v1/envs/{self._spec.description.name}/tasks?split={self._split}&start={number * PAGE}&count={PAGE}"
        page = await self._spec.call(TaskPage, "GET", path, seconds=self._spec.config.timeout)
        self._pages[number] = page.tasks
        if len(self._pages) > PAGES:
            self._pages.popitem(last=False)
        return page.tasks


class RemoteEnv(CheckedEnv):
    """One session at a time on the server. The checks of `CheckedEnv` are made there, where the environment is."""

    spec: RemoteEnvSpec

    def __init__(self, spec: RemoteEnvSpec) -> None:
        self.spec = spec
        self.env = self
        self.rng = random.Random()
        self.task: Task | None = None
        self._has_slot = False
        self._session: str | None = None
        self._next_step = 0

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Open a new session. Without a seed, one is drawn by the generator that the last seed set."""
        await self.spec.ensure_setup()
        await self.acquire()
        await self._end_session()
        if seed is None:
            seed = self.rng.getrandbits(31)
        else:
            self.rng.seed(seed)
        given = dict(options or {})
        task = given.pop("task", None)
        if not isinstance(task, Task | None):
            raise InvalidStep(f"options['task'] must be a Task, not {type(task).__name__}")
        self._session, self._next_step = uuid.uuid4().hex, 0
        opening = Opening(session_id=self._session, env=self.spec.description.name, seed=seed, task=task, options=given)
        opened = await self.spec.call(Opened, "POST", "/v1/sessions", opening, seconds=self.spec.config.timeout)
        self.spec.report_dropped(opened.dropped)
        self.task = opened.task if task is None else task
        return opened.observation, opened.info

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if self._session is None:
            raise ResetNeeded(f"{self.spec.id}: call reset before step")
        step = Step(step_id=self._next_step, action=action)
        self._next_step += 1
        path = f"/v1/sessions/{self._session}/step"
        stepped = await self.spec.call(Stepped, "POST", path, step, seconds=self.spec.config.timeout)
        self.spec.report_dropped(stepped.dropped)
        return stepped.observation, stepped.reward, stepped.terminated, stepped.truncated, stepped.info

    async def close(self) -> None:
        try:
            await self._end_session()
        finally:
            if self._has_slot and self.spec._slots is not None:
                self._has_slot = False
                self.spec._slots.release()

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self.spec.end_session(session)
