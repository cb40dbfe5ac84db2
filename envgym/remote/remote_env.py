"""A remote environment's episodes, each a session on one of its servers, and its tasks, read by pages."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from envgym.env import CheckedEnv, Info, TaskSet
from envgym.env.checked import checked_numbers, posed_task
from envgym.errors import ResetNeeded
from envgym.net.shared_calls import SharedCalls
from envgym.processes.deadline import pause_timeouts
from envgym.types import Action, Observation, Task, timed

from .encoding import encode
from .replicas import Replica, Replicas
from .transport import Full, RemoteError
from .wire import Method, Opened, Opening, Step, Stepped, TaskPage

if TYPE_CHECKING:
    from .client import RemoteEnvSpec

CLOSE_SECONDS = 10.0
CLOSE_PATIENCE = 2.0
PAGE = 100
"""Tasks in a page."""
PAGES = 100
"""Pages kept in memory. The longest unused goes first."""
NEAR = 64
"""Tasks wanted last, by which is told whether a split too large to keep is gone through in order."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class RemoteEnv(CheckedEnv):
    """One session at a time on a server. The checks of `CheckedEnv` are made there, where the environment is."""

    spec: RemoteEnvSpec

    def __init__(self, spec: RemoteEnvSpec) -> None:
        self.rng = random.Random()
        super().__init__(self, spec)
        self._pool: Replicas | None = None
        self._place: Replica | None = None
        self._session: str | None = None
        self._next_step = 0

    async def acquire(self) -> None:
        """Wait for a place within the environment's limit, and on a server that has room. `close` gives it back."""
        await self.spec.ensure_setup()
        await super().acquire()
        if self._place is not None and self._place.is_retired:
            self._leave()
        if self._place is None:
            self._pool = self.spec.replicas
            self._place = await self._pool.take()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Open a new session. Without a seed, one is drawn by the generator that the last seed set."""
        await self._end_session()
        if seed is None:
            seed = self.rng.getrandbits(31)
        else:
            self.rng.seed(seed)
        task, others = posed_task(options), {k: v for k, v in (options or {}).items() if k != "task"}
        opened = await self._open(seed, task, others)
        self.spec.report_dropped(opened.dropped)
        self.task = opened.task if task is None else task
        return opened.observation, opened.info

    async def _open(self, seed: int, task: Task | None, options: dict[str, Any]) -> Opened:
        """Open a session where there is room, on another server where one cannot be reached."""
        await self.spec.ensure_setup()
        replicas, deadline = self.spec.replicas, asyncio.timeout(self.spec.config.timeout)
        refusal: Full | None = None
        try:
            async with deadline:
                while True:
                    with pause_timeouts():  # waiting for a place is not the episode's own time
                        await self.acquire()
                    assert self._place is not None
                    place = self._place
                    try:
                        return await self._open_at(place, seed, task, options)
                    except Full as full:
                        refusal, self._place = full, None
                        replicas.refused(place, full)
                    except RemoteError:
                        if not place.down or not replicas.others(place):
                            raise
                        await self._end_session()
                        self._leave()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise self._overdue(refusal) from None

    def _overdue(self, refusal: Full | None) -> RemoteError:
        """The error where no session opened in time. A server that has not answered is left out for a while."""
        seconds, reason = self.spec.config.timeout, f" ({refusal})" if refusal else ""
        if self._place is None:
            return RemoteError("capacity", f"no place became free within {seconds:g} s{reason}")
        self._place.mark_down()
        what = f"no answer within {seconds:g} s; is the server well?{reason}"
        return RemoteError("timeout", f"{self._place.address}: {what}")

    async def _open_at(self, place: Replica, seed: int, task: Task | None, options: dict[str, Any]) -> Opened:
        patience = 0.0 if self.spec.replicas.others(place) else self.spec.config.reconnect
        name = (await self.spec.describe(place, patience)).name
        self._session, self._next_step = uuid.uuid4().hex, 0
        opening = Opening(session_id=self._session, env=name, seed=seed, task=task, options=options)
        try:
            return await self._ask(Opened, "POST", "/v1/sessions", encode(opening), patience)
        except RemoteError as error:
            if error.kind == "refused":
                place.description = None  # it may have become another server: whoever comes next asks
            raise

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if self._session is None:
            raise ResetNeeded(f"{self.spec.id}: call reset before step")
        if not isinstance(action, Action):
            raise TypeError(f"{self.spec.id}: step takes an envgym.Action, not {action!r:.80}")
        step = encode(Step(step_id=self._next_step, action=action))
        self._next_step += 1  # only now: what cannot be sent is no step
        path = f"/v1/sessions/{self._session}/step"
        stepped = await self._ask(Stepped, "POST", path, step, self.spec.config.reconnect)
        self.spec.report_dropped(stepped.dropped)
        try:
            reward = checked_numbers(stepped.reward, stepped.info)
        except ValueError as error:
            raise RemoteError("server", f"{self.spec.id}: {error}") from None
        return stepped.observation, reward, stepped.terminated, stepped.truncated, stepped.info

    async def _ask(self, model: type[B], method: Method, path: str, body: bytes, patience: float) -> B:
        """A request to the session, whose lease it renews."""
        place, session = self._place, self._session
        assert place is not None
        assert session is not None
        place.leases.renew(session)
        try:
            with timed(self.spans, "environment"):
                seconds = self.spec.config.timeout
                answer = await place.ask(model, method, path, body, seconds=seconds, patience=patience)
        except RemoteError as error:
            if error.kind in ("capacity", "session_lost"):  # there is nothing to end
                place.leases.end(session)
                self._session = None
            raise
        if self._session == session:
            place.leases.renew(session)
        return answer

    async def _close_instance(self) -> None:
        try:
            await self._end_session()
        finally:
            self._leave()
            self.leave()

    def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None and self._pool is not None:
            self._pool.leave(place)

    async def _end_session(self) -> None:
        """Close the session; one that cannot be reached any more is left to its lease."""
        session, self._session, place = self._session, None, self._place
        if session is None or place is None:
            return
        place.leases.end(session)
        seconds, patience = (1.0, 0.0) if place.down else (CLOSE_SECONDS, CLOSE_PATIENCE)
        try:
            await place.transport.call("DELETE", f"/v1/sessions/{session}", seconds=seconds, patience=patience)
        except RemoteError as error:
            logger.debug("session %s was not closed: %s", session, error)  # counted; its episode is over either way


class RemoteTasks(TaskSet):
    """A split on a server, read by pages when they are asked for; those read last are kept. Of a split that is larger
    than what is kept, and gone through in no order, tasks are read one by one.

    `ask(TaskPage, "GET", path)` answers requests below the environment's own path.
    """

    def __init__(self, ask: Callable[[type[TaskPage], Method, str], Awaitable[TaskPage]], split: str, size: int | None):
        self._ask = ask
        self._split = split
        self._size = size
        self._pages: OrderedDict[int, tuple[Task, ...]] = OrderedDict()
        self._wanted: deque[int] = deque(maxlen=NEAR)
        self._reading: SharedCalls[tuple[int, int], tuple[Task, ...]] = SharedCalls()
        """By their first task and their number."""

    @property
    def size(self) -> int | None:
        return self._size

    async def get(self, index: int) -> Task:
        if index < 0 or (self._size is not None and index >= self._size):
            raise IndexError(f"task {index} of {self._size} in split {self._split!r}")
        in_order = index - 1 in self._wanted or index + 1 in self._wanted
        self._wanted.append(index)
        number, offset = divmod(index, PAGE)
        if number in self._pages:
            self._pages.move_to_end(number)
            return self._pages[number][offset]
        all_are_kept = self._size is not None and self._size <= PAGE * PAGES
        if all_are_kept or in_order:
            return (await self._read(number * PAGE, PAGE))[offset]
        return (await self._read(index, 1))[0]

    async def _read(self, start: int, count: int) -> tuple[Task, ...]:
        return await self._reading.result((start, count), lambda: self._ask_for(start, count))

    async def _ask_for(self, start: int, count: int) -> tuple[Task, ...]:
        page = await self._ask(TaskPage, "GET", f"/tasks?split={self._split}&start={start}&count={count}")
        wanted = count if self._size is None else min(count, self._size - start)
        if len(page.tasks) < wanted:
            raise RemoteError("server", f"the server sent {len(page.tasks)} of {wanted} tasks from {start} on")
        if count == PAGE:
            self._pages[start // PAGE] = page.tasks
            if len(self._pages) > PAGES:
                self._pages.popitem(last=False)
        return page.tasks
