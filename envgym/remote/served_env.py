"""An environment on a server: its description, its tasks by the page, and its judgement of groups."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from prometheus_client import Histogram

from envgym.env import EnvSpec, TaskSet
from envgym.env.boundary import UsersCode
from envgym.episodes.record import from_record
from envgym.errors import EnvgymError, InvalidOutcome, InvalidStep, printable_line
from envgym.loading import names_file
from envgym.net.problems import Problem
from envgym.rollout.runner import as_judgement
from envgym.types import Episode

from .encoding import encode
from .metrics import ServerMetrics
from .wire import EnvDescription, EpisodeVerdict, GroupToScore, Split, TaskPage, TaskQuery, Verdicts

SPLITS = ("train", "test")
HASHED, HASH_SECONDS = 5, 5.0
"""Tasks of a split that are hashed, and how long they may take to be read."""
KEPT_VERDICTS = 256
"""Judgements kept for groups that are sent again: judges may be slow and dear."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ServedEnv:
    """One environment under its name on the server, with what the server does around every call of it."""

    def __init__(self, name: str, spec: EnvSpec, call_seconds: float, metrics: ServerMetrics) -> None:
        self.name = name
        self.spec = spec
        self._call_seconds = call_seconds
        self._metrics = metrics
        self._task_hashes: dict[str, str] = {}
        self._verdicts: OrderedDict[bytes, asyncio.Task[bytes]] = OrderedDict()

    async def describe(self) -> EnvDescription:
        return EnvDescription(
            name=self.name,
            id=_without_folder(self.spec.id),
            about=_sendable(self.spec.about),
            agent=self.spec.agent,
            splits={split: await self._split(split) for split in SPLITS},
            services={name: type(service).__name__ for name, service in self.spec.services.items()},
            concurrency=self.spec.concurrency_bound(),
            scores_groups=self.spec.scores_groups,
            fingerprint=self.spec.fingerprint(),
        )

    async def _split(self, name: str) -> Split:
        with UsersCode() as asked:
            tasks = self.spec.tasks(name)
            if name not in self._task_hashes:
                self._task_hashes[name] = await self._hash(tasks)
            return Split(size=tasks.size, tasks=self._task_hashes[name])
        message = _message(asked.error)  # no held-out file, say: the other split is still of use
        ours = isinstance(asked.error, EnvgymError)
        return Split(error=message if ours else f"{type(asked.error).__name__}: {message}")

    async def _hash(self, tasks: TaskSet) -> str:
        """A hash of some tasks, by which servers of the same ones are told; empty where a task cannot be sent."""
        size = HASHED if tasks.size is None else tasks.size
        indices = sorted({index * max(size - 1, 0) // (HASHED - 1) for index in range(HASHED)}) if size else []
        with UsersCode() as asked:
            async with asyncio.timeout(HASH_SECONDS):
                page = tuple([await tasks.get(index) for index in indices])
            # Their prompts: fields may hold paths of this machine.
            page = tuple(dataclasses.replace(task, answer=None, fields={}) for task in page)
            return hashlib.sha256(encode(TaskPage(split="", start=0, tasks=page))).hexdigest()[:16]
        logger.debug("%s: no hash of its tasks", self.name, exc_info=asked.error)
        return ""

    async def page(self, query: TaskQuery) -> bytes:
        """The tasks that are asked for, an encoded `TaskPage`."""

        async def read() -> bytes:
            tasks = self.spec.tasks(query.split)
            end = query.start + query.count if tasks.size is None else min(query.start + query.count, tasks.size)
            page = tuple([await tasks.get(index) for index in range(query.start, end)])
            return encode(TaskPage(split=query.split, start=query.start, tasks=page))

        return await self.call(read(), f"tasks {query.start} to {query.start + query.count} of {query.split}")

    async def score_group(self, client: str, group: GroupToScore, body: bytes) -> bytes:
        """The environment's judgement of a group, encoded `Verdicts`; the same one for a `body` that is sent again."""
        key = hashlib.sha256(client.encode() + b"\0" + body).digest()
        judging = self._verdicts.get(key)
        if judging is None:
            episodes = [_episode(number, record) for number, record in enumerate(group.episodes)]
            judging = self._verdicts[key] = asyncio.create_task(self._decide(group, episodes))
            judging.add_done_callback(lambda task: self._forget(key, task))
            done = [other for other, task in self._verdicts.items() if task.done()]
            for other in done[:-KEPT_VERDICTS]:
                del self._verdicts[other]
        return await asyncio.shield(judging)

    def _forget(self, key: bytes, task: asyncio.Task[bytes]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._verdicts.get(key) is task:  # asked again, the judge may do better
            del self._verdicts[key]

    async def _decide(self, group: GroupToScore, episodes: Sequence[Episode]) -> bytes:
        async def decide() -> bytes:
            judged = await self.spec.score_group(group.task, episodes)
            if judged is None:
                return encode(Verdicts(verdicts=None))
            if len(judged) != len(episodes):
                raise InvalidStep(
                    f"{self.spec.id}: score_group must say one thing for each of {len(episodes)} episodes"
                )
            return encode(Verdicts(verdicts=tuple(self._verdict(each) for each in judged)))

        return await self.call(decide(), "score_group", self._metrics.group_seconds)

    def _verdict(self, found: object) -> EpisodeVerdict:
        judged = as_judgement(found)
        if isinstance(judged, Exception):
            return EpisodeVerdict(problem=self.raised(judged, "score_group").body)
        number = None if judged.reward is None else float(judged.reward)
        score = None if judged.score is None else float(judged.score)
        metrics = {name: float(value) for name, value in judged.metrics.items()}
        return EpisodeVerdict(reward=number, score=score, metrics=metrics)

    async def call(self, work: Awaitable[T], what: str, seconds: Histogram | None = None) -> T:
        """The environment's answer within the limit; its exception as a `Problem`, logged here in full."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = asyncio.timeout(self._call_seconds)
        try:
            with UsersCode(Problem) as called:
                async with deadline:
                    return await work
            if deadline.expired():
                self._metrics.failures.labels(self.name, "environment-timeout").inc()
                detail = f"{what}: no answer within {self._call_seconds:g} s"
                raise Problem(504, "environment-timeout", detail)
            raise self.raised(called.error, what)
        finally:
            if seconds is not None:
                seconds.labels(self.name).observe(loop.time() - began)

    def raised(self, error: BaseException, what: str) -> Problem:
        """The problem for an exception of the environment. That is no fault of the server (no 5xx): with other actions
        the environment may well go on."""
        kind = type(error).__name__
        self._metrics.failures.labels(self.name, kind).inc()
        message = _message(error)
        if isinstance(error, EnvgymError):
            logger.warning("%s: %s raised %s: %s", self.name, what, kind, printable_line(message))
        else:
            logger.error("%s: %s raised", self.name, what, exc_info=error)
        more: dict[str, Any] = {}
        if isinstance(error, InvalidOutcome):
            more = {"failure": error.kind, "retryable": error.retryable}
        return Problem(422, "environment-error", message, error=kind, **more)


def _episode(number: int, record: dict[str, Any]) -> Episode:
    try:
        return from_record(record)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        detail = f"episodes.{number}: not an episode's record ({type(error).__name__}: {_sendable(str(error))})"
        raise Problem(422, "invalid-request", detail) from None


def _message(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception:
        return f"a {type(error).__name__} that cannot be printed"


def _without_folder(id: str) -> str:
    """An environment's id; where it is a file, its name: where things lie on this machine is nobody's business."""
    return id.rpartition("/")[2] if names_file(id) else id


def _sendable(text: str) -> str:
    """`text` without what UTF-8 cannot say."""
    return text.encode("utf-8", "replace").decode()
