"""A remote environment's episodes, each a session on one of its servers, and its tasks, read in pages."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from envgym.env import CheckedEnv, Info, TaskSet
from envgym.env.protocol import posed_task
from envgym.errors import ResetNeeded
from envgym.net.shared_calls import SharedCalls
from envgym.processes.cancellation import pause_timeouts
from envgym.types import Action, Observation, Task, as_action, as_observation, timed
from envgym.types.episodes import check_numbers

from .encoding import encode, load_images
from .replicas import Replica, Replicas
from .transport import RemoteError, ServerFull
from .wire import Method, Opened, Opening, Step, Stepped, TaskPage

if TYPE_CHECKING:
    from .client import RemoteEnvSpec

CLOSE_SECONDS = 10.0
CLOSE_PATIENCE = 2.0
PAGE = 100
"""Tasks in a page."""
MAX_STORED = 10_000
"""Tasks of the largest split that is stored in memory."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class RemoteEnv(CheckedEnv):
    """One session at a time on a server. The server makes the checks of `CheckedEnv`, where the environment is; numbers
    and sizes are checked here too."""

    spec: RemoteEnvSpec

    def __init__(self, spec: RemoteEnvSpec) -> None:
        self.rng = random.Random()
        super().__init__(self, spec)
        self._pool: Replicas | None = None
        self._replica: Replica | None = None
        self._session: str | None = None
        self._next_step = 0

    async def acquire(self) -> None:
        """Wait for a slot within the environment's limit, and for one on a server. `close` releases both."""
        await self.spec.ensure_setup()
        await super().acquire()
        if self._replica is not None and self._replica.is_retired:
            self._release_slot()
        if self._replica is None:
            self._pool = self.spec.replicas
            self._replica = await self._pool.acquire_slot()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Open a new session. Without a seed, one is drawn by the generator that the last seed set."""
        await self._end_session()
        if seed is None:
            seed = self.rng.getrandbits(31)
        else:
            self.rng.seed(seed)
        task, extras = posed_task(options), {k: v for k, v in (options or {}).items() if k != "task"}
        answer = await self._open(seed, task, extras)
        self.spec.report_dropped(answer.dropped)
        self.task = answer.task if task is None else task
        observation = await self._with_files(as_observation(answer.observation, self.spec.id))
        self._begin(observation)
        return observation, answer.info

    async def _open(self, seed: int, task: Task | None, options: dict[str, Any]) -> Opened:
        """Open a session on a server with a free slot, and on another one where that cannot be reached."""
        await self.spec.ensure_setup()
        pool, deadline = self.spec.replicas, asyncio.timeout(self.spec.config.timeout)
        refusal: ServerFull | None = None
        try:
            async with deadline:
                while True:
                    with pause_timeouts():  # waiting for a slot does not count as the episode's time
                        await self.acquire()
                    assert self._replica is not None
                    replica = self._replica
                    try:
                        return await self._open_at(replica, seed, task, options)
                    except ServerFull as full:
                        refusal, self._replica = full, None
                        pool.mark_full(replica, full)
                    except RemoteError:
                        if not replica.is_down or not pool.has_other(replica):
                            raise
                        await self._end_session()
                        self._release_slot()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise self._timeout_error(refusal) from None

    def _timeout_error(self, refusal: ServerFull | None) -> RemoteError:
        """The error where no session opened in time. A server that has not answered is skipped for a while."""
        seconds, reason = self.spec.config.timeout, f" ({refusal})" if refusal else ""
        if self._replica is None:
            return RemoteError("capacity", f"no slot became free within {seconds:g} s{reason}")
        self._replica.mark_down()
        message = f"no answer within {seconds:g} s; is the server well?{reason}"
        return RemoteError("timeout", f"{self._replica.address}: {message}")

    async def _open_at(self, replica: Replica, seed: int, task: Task | None, options: dict[str, Any]) -> Opened:
        """Open a session at `replica`. Raises `ServerFull` or another `RemoteError`."""
        pool, patience = self.spec.replicas, 0.0
        if not pool.has_other(replica):  # `reconnect` from when the last server was lost, which may be another one
            patience = self.spec.config.reconnect + pool.lost_at - (replica.transport.lost_at or pool.lost_at)
        name = (await self.spec.describe(replica, patience)).name
        self._session, self._next_step = uuid.uuid4().hex, 0
        loaded = task if task is None else load_images(task)
        opening = Opening(session_id=self._session, env=name, seed=seed, task=loaded, options=options)
        try:
            return await self._ask(Opened, "POST", "/v1/sessions", encode(opening), patience)
        except RemoteError as error:
            if error.kind == "refused":
                replica.description = None  # it may have become another server: ask again before the next session
            raise

    async def step(self, action: Action | str) -> tuple[Observation, float | None, bool, bool, Info]:
        if self._session is None:
            raise ResetNeeded(f"{self.spec.id}: call reset before step")
        step = encode(Step(step_id=self._next_step, action=as_action(action)))
        self._next_step += 1  # only now: an action that cannot be sent is no step
        path = f"/v1/sessions/{self._session}/step"
        stepped = await self._ask(Stepped, "POST", path, step, self.spec.config.reconnect)
        self.spec.report_dropped(stepped.dropped)
        try:
            reward = check_numbers(stepped.reward, stepped.info)
        except ValueError as error:
            raise RemoteError("server", f"{self.spec.id}: {error}") from None
        observation = await self._with_files(as_observation(stepped.observation, self.spec.id))
        self.tally.add(observation, reward)
        return observation, reward, stepped.terminated, stepped.truncated, stepped.info

    async def _ask(self, model: type[B], method: Method, path: str, body: bytes, patience: float) -> B:
        """Send a request to the session, which renews its lease."""
        replica, session = self._replica, self._session
        assert replica is not None
        assert session is not None
        replica.leases.renew(session)
        try:
            with timed(self.spans, "environment"):
                seconds = self.spec.config.timeout
                answer = await replica.ask(model, method, path, body, seconds=seconds, patience=patience)
        except RemoteError as error:
            if error.kind in ("capacity", "session_lost"):  # no session to close
                replica.leases.end(session)
                self._session = None
            raise
        if self._session == session:
            replica.leases.renew(session)
        return answer

    async def _close_instance(self) -> None:
        try:
            await self._end_session()
        finally:
            self._release_slot()
            self.release()

    def _release_slot(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None and self._pool is not None:
            self._pool.release_slot(replica)

    async def _end_session(self) -> None:
        """Close the session; on a server that cannot be reached its lease ends it."""
        session, self._session, replica = self._session, None, self._replica
        if session is None or replica is None:
            return
        replica.leases.end(session)
        seconds, patience = (1.0, 0.0) if replica.is_down else (CLOSE_SECONDS, CLOSE_PATIENCE)
        try:
            await replica.transport.call("DELETE", f"/v1/sessions/{session}", seconds=seconds, patience=patience)
        except RemoteError as error:
            logger.debug("session %s was not closed: %s", session, error)  # counted; its episode is over either way


class RemoteTasks(TaskSet):
    """A split on a server, read on demand: in pages that stay in memory, or task by task if it is larger than
    `MAX_STORED` or endless.

    `ask(TaskPage, "GET", path)` answers requests below the environment's own path.
    """

    def __init__(self, ask: Callable[[type[TaskPage], Method, str], Awaitable[TaskPage]], split: str, size: int | None):
        self._ask = ask
        self._split = split
        self._size = size
        self._pages: dict[int, tuple[Task, ...]] = {}
        self._reading: SharedCalls[int, tuple[Task, ...]] = SharedCalls()
        """Reads in flight, by the page's number."""

    @property
    def size(self) -> int | None:
        return self._size

    async def get(self, index: int) -> Task:
        if index < 0 or (self._size is not None and index >= self._size):
            raise IndexError(f"task {index} of {self._size} in split {self._split!r}")
        if self._size is None or self._size > MAX_STORED:
            return (await self._read(index, 1))[0]
        number, offset = divmod(index, PAGE)
        if number not in self._pages:
            self._pages[number] = await self._reading.result(number, lambda: self._read(number * PAGE, PAGE))
        return self._pages[number][offset]

    async def _read(self, start: int, count: int) -> tuple[Task, ...]:
        """Read tasks from a server. Raises `RemoteError` if it sends too few."""
        page = await self._ask(TaskPage, "GET", f"/tasks?split={self._split}&start={start}&count={count}")
        expected = count if self._size is None else min(count, self._size - start)
        if len(page.tasks) < expected:
            raise RemoteError("server", f"the server sent {len(page.tasks)} of {expected} tasks from {start} on")
        return page.tasks
