"""A process that runs attempts (`rollout.processes`): its environment, its agent, and connections to the engines."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.agent import Agent
from envgym.engine import ChatEngine, ChatReply, ChatRequest, Engine
from envgym.engines.pool import EngineClient, EnginePool
from envgym.env import EnvSpec
from envgym.env.marks import Marked, Marks
from envgym.errors import WorkerDied, report_full_disk
from envgym.images import ImageFolder
from envgym.processes.callbacks import SUBJECT, CallsBack, ForwardingClient
from envgym.processes.cancellation import wait_for_end
from envgym.processes.garbage import rare_collections
from envgym.processes.runtime import Reference
from envgym.processes.watch import LoopWatch
from envgym.services.start import with_parts
from envgym.types import Episode, Span, Task
from envgym.types.sealed import SealedEpisode

from .attempts import Attempt, LocalAttempts, Work
from .branches import Branch
from .config import RolloutConfig
from .runner import SamplingPlan

ENGINE, POOL = "engine", "pool"
"""Names of the controller's objects that a shard calls: what samples, and the pool of the engines. Others are
services."""
POOLS_SUBJECT = 0
"""The number of what a shard asks for all its episodes."""
COMMON = 256
"""Groups whose task and plan are remembered."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How a shard is made. The two functions run in its process."""

    make_spec: Callable[[], EnvSpec]
    make_agent: Callable[[], Agent]
    config: RolloutConfig
    max_model_len: int
    seed: int
    deterministic: bool
    images: Path | None
    """The folder of the run's images."""
    engines: int = 0
    """Engines that it connects to. With 0 the controller samples for it."""
    is_chat: bool = False
    """True if the controller's engine takes messages."""
    services: Collection[str] = ()
    """Names of the clients, `PART/NAME`, where PART is the index of the part of the environment."""
    marks: Path = Path()
    """The folder of the marks that tell whose code has ended a process."""
    seals: bool = True
    """False if the controller reads the tokens and messages of every episode."""


class ForwardedApi(ChatEngine):
    """An API that the controller asks."""

    def __init__(self, client: ForwardingClient) -> None:
        self._client = client

    async def chat(self, request: ChatRequest) -> ChatReply:
        reply: ChatReply = await self._client.chat(request)
        return reply


class RolloutShard(CallsBack):
    """Runs attempts in a process. `number` tells the shards of a run apart."""

    def __init__(self, number: int, shard: ShardSpec) -> None:
        super().__init__()
        self._number, self._shard = number, shard
        self._spec, self._agent = shard.make_spec(), shard.make_agent()
        if shard.images is not None:
            self._spec.store_images(ImageFolder(shard.images))
        for index, part in enumerate(with_parts(self._spec)):
            part.slots = None  # the controller holds the slots of all shards
            names = [name.partition("/")[2] for name in shard.services if name.startswith(f"{index}/")]
            part.clients = {name: ForwardingClient(self, f"{index}/{name}") for name in names}
        self._marks = Marks(shard.marks) if shard.marks.is_dir() else None  # on another machine there is no such folder
        self._references: dict[int, Reference] = {}
        self._common: dict[bytes, tuple[Task, SamplingPlan]] = {}
        """The tasks and plans of the last groups, as they were sent."""
        self._jobs = set[asyncio.Task[Any]]()
        self._closing = AsyncExitStack()
        self._closing.push_async_callback(self._spec.close)
        self._closing.enter_context(LoopWatch(asyncio.get_running_loop()))
        self._attempts: LocalAttempts

    async def setup(self, subject: int) -> int:
        """Set up the environment, and connect to the engines. Returns the process's id."""
        self.begin_requests(subject)
        try:
            await self._spec.ensure_setup()
            shard, engine = self._shard, await self._connect()
            self._attempts = LocalAttempts(
                self._spec,
                self._agent,
                engine,
                shard.config,
                max_model_len=shard.max_model_len,
                seed=shard.seed,
                deterministic=shard.deterministic,
                forks=False,  # the controller does not say when a group has ended
            )
            self._closing.enter_context(rare_collections())
        finally:
            self._end_requests(subject)
        return os.getpid()

    def _end_requests(self, subject: int) -> None:
        if self._shard.services or not self._shard.engines:  # else nobody waits for one
            self.end_requests(subject)

    async def _connect(self) -> Engine | ChatEngine | None:
        if self._shard.engines:
            settings = {"preferred": self._number, "note": lambda text: print(text, flush=True)}
            pool = await EnginePool.start(self._connect_to, self._shard.engines, **settings)
            self._closing.push_async_callback(pool.close)
            return pool
        client = ForwardingClient(self, ENGINE)
        return (ForwardedApi(client) if self._shard.is_chat else client) if self._agent.uses_policy else None

    async def _connect_to(self, number: int) -> EngineClient:
        """A connection to the engine of a number, once it is another than the one before."""
        SUBJECT.set(POOLS_SUBJECT)  # the episode that needs it may end before
        dead = self._references.get(number)
        reference = self._references[number] = await self.ask(POOL, "reference", (number, dead), {})
        return EngineClient(await reference.open())

    async def run(
        self, subject: int, group_id: str, member: int, number: int, waiting: Span, common: bytes, branch: Branch | None
    ) -> Episode | str:
        """Run an attempt; `common` is the pickled task and plan of its group, `waiting` the attempt's span before its
        start. Returns its episode, with None for a task that is the attempt's; or why no episode can continue, which is
        not the death of this process."""
        self.begin_requests(subject)
        if common not in self._common:
            self._common[common] = pickle.loads(common)
            if len(self._common) > COMMON:
                self._common.pop(next(iter(self._common)))
        task, plan = self._common[common]
        attempt = Attempt(group_id, task, member, number, plan, branch)
        job = asyncio.current_task()
        assert job is not None
        self._jobs.add(job)
        try:
            episode = await self._attempts.run(attempt, mark=self._mark(subject))
        except WorkerDied as error:
            return str(error)
        finally:
            self._jobs.discard(job)
            self._end_requests(subject)
        if episode.task is attempt.task:
            episode.task = None  # type: ignore[assignment]
        episode.spans = [waiting, *(span for span in episode.spans if span[0] != "waiting")]
        if self._shard.seals:
            episode.n_spelled = episode.count_messages(self._agent.renderer.spells)
            episode = SealedEpisode.seal(episode)
        return episode

    async def write(self, write: Callable[[], None]) -> None:
        """See `Attempts.write`."""
        with report_full_disk():
            await asyncio.to_thread(write)

    def answer_ping(self) -> None:
        """Show that no code blocks the event loop."""

    def _mark(self, subject: int) -> Callable[[Work], Work] | None:
        """A wrapper of an agent's run that marks the attempt whose code runs, in case that ends the process."""
        if (marks := self._marks) is None:
            return None

        async def marked(work: Work) -> Episode:
            return await Marked(work, marks, subject)

        return marked

    async def close(self) -> None:
        """Cancel the running attempts, and close the environment once their instances are closed."""
        tasks = set(self._jobs)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await wait_for_end(tasks)
        await self._closing.aclose()
