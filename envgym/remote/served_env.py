"""An environment on a server: its description, its tasks in pages, and its scoring of groups."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import Histogram

from envgym.env import EnvSpec, TaskSet
from envgym.episodes.record import from_record
from envgym.episodes.scores import as_reward
from envgym.errors import EnvgymError, InvalidOutcome, InvalidStep, printable_line
from envgym.loading import is_file_target
from envgym.net.problems import Problem
from envgym.processes.cancellation import UsersCode
from envgym.types import Episode, ImagePart

from .encoding import encode
from .metrics import ServerMetrics
from .wire import EnvDescription, EpisodeVerdict, GroupToScore, Split, TaskPage, TaskQuery, Verdicts

SPLITS = ("train", "test")
HASHED, HASH_SECONDS = 5, 5.0
"""Number of tasks of a split that are hashed, and the seconds that reading them may take."""
CACHED_VERDICTS = 256
"""Number of verdicts that are stored, for groups that are sent again: scoring may be slow and expensive."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ServedEnv:
    """One environment under its name on the server, with time limits, counts and problems for its calls."""

    def __init__(self, name: str, spec: EnvSpec, call_seconds: float, metrics: ServerMetrics) -> None:
        self.name = name
        self.spec = spec
        self._call_seconds = call_seconds
        self._metrics = metrics
        self._task_hashes: dict[str, str] = {}
        self._verdicts: dict[bytes, asyncio.Task[bytes]] = {}

    async def describe(self) -> EnvDescription:
        """The description that clients get."""
        return EnvDescription(
            name=self.name,
            # Of a file the name alone, since clients need not know this machine's folders.
            id=self.spec.id.rpartition("/")[2] if is_file_target(self.spec.id) else self.spec.id,
            about=_utf8_text(self.spec.summary),
            agent=self.spec.agent,
            splits={split: await self._split(split) for split in SPLITS},
            services={name: type(service).__name__ for name, service in self.spec.services.items()},
            concurrency=self.spec.concurrency_bound(),
            scores_groups=self.spec.scores_groups,
            fingerprint=self.spec.fingerprint(),
        )

    async def _split(self, name: str) -> Split:
        """The size and hash of a split, or the error of reading it."""
        with UsersCode() as reading:
            tasks = self.spec.tasks(name)
            if name not in self._task_hashes:
                self._task_hashes[name] = await self._hash(tasks)
            return Split(size=tasks.size, tasks=self._task_hashes[name])
        message = _message(reading.error)  # say, a missing held-out file: the other split stays usable
        is_known_error = isinstance(reading.error, EnvgymError)
        return Split(error=message if is_known_error else f"{type(reading.error).__name__}: {message}")

    async def _hash(self, tasks: TaskSet) -> str:
        """A hash of some tasks, to compare servers by; empty where a task cannot be sent."""
        size = HASHED if tasks.size is None else tasks.size
        indices = sorted({index * max(size - 1, 0) // (HASHED - 1) for index in range(HASHED)}) if size else []
        with UsersCode() as reading:
            async with asyncio.timeout(HASH_SECONDS):
                page = tuple([await tasks.get(index) for index in indices])
            # Without fields, which may hold paths of this machine.
            page = tuple(dataclasses.replace(task, answer=None, fields={}) for task in page)
            return hashlib.sha256(encode(TaskPage(split="", start=0, tasks=page))).hexdigest()[:16]
        logger.debug("%s: no hash of its tasks", self.name, exc_info=reading.error)
        return ""

    async def page(self, query: TaskQuery) -> bytes:
        """The requested tasks, an encoded `TaskPage`."""

        async def read() -> bytes:
            tasks = self.spec.tasks(query.split)
            end = query.start + query.count if tasks.size is None else min(query.start + query.count, tasks.size)
            page = tuple([await tasks.get(index) for index in range(query.start, end)])
            return encode(TaskPage(split=query.split, start=query.start, tasks=page))

        return await self.call(read(), f"tasks {query.start} to {query.start + query.count} of {query.split}")

    async def score_group(self, client: str, group: GroupToScore, body: bytes) -> bytes:
        """The environment's scores of a group, encoded `Verdicts`; the stored ones for a `body` that is sent again."""
        key = hashlib.sha256(client.encode() + b"\0" + body).digest()
        scoring = self._verdicts.get(key)
        if scoring is None:
            images = {image.sha256: image for image in group.images}
            episodes = [_episode(number, record, images) for number, record in enumerate(group.episodes)]
            scoring = self._verdicts[key] = asyncio.create_task(self._score(group, episodes))
            scoring.add_done_callback(lambda task: self._forget(key, task))
            finished = [old_key for old_key, task in self._verdicts.items() if task.done()]
            for old_key in finished[:-CACHED_VERDICTS]:
                del self._verdicts[old_key]
        return await asyncio.shield(scoring)

    def _forget(self, key: bytes, task: asyncio.Task[bytes]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._verdicts.get(key) is task:  # a repeated request may succeed
            del self._verdicts[key]

    async def _score(self, group: GroupToScore, episodes: Sequence[Episode]) -> bytes:
        """The encoded `Verdicts` of a group. Raises a `Problem` for an exception of the environment."""

        async def score() -> bytes:
            rewards = await self.spec.score_group(group.task, episodes)
            if rewards is None:
                return encode(Verdicts(verdicts=None))
            if len(rewards) != len(episodes):
                raise InvalidStep(
                    f"{self.spec.id}: score_group must return one item for each of {len(episodes)} episodes"
                )
            return encode(Verdicts(verdicts=tuple(self._verdict(reward) for reward in rewards)))

        return await self.call(score(), "score_group", self._metrics.group_seconds)

    def _verdict(self, result: object) -> EpisodeVerdict:
        reward = as_reward(result)
        if isinstance(reward, Exception):
            return EpisodeVerdict(problem=self.problem_of(reward, "score_group").body)
        return EpisodeVerdict(reward=reward.reward, score=reward.score, metrics=dict(reward.metrics))

    async def call(self, work: Awaitable[T], label: str, seconds: Histogram | None = None) -> T:
        """Await a call of the environment within its time limit. Raises the environment's exception as a `Problem`, and
        logs it in full on the server."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = asyncio.timeout(self._call_seconds)
        try:
            with UsersCode(Problem) as called:
                async with deadline:
                    return await work
            if deadline.expired():
                self._metrics.failures.labels(self.name, "environment-timeout").inc()
                detail = f"{label}: no answer within {self._call_seconds:g} s"
                raise Problem(504, "environment-timeout", detail)
            raise self.problem_of(called.error, label)
        finally:
            if seconds is not None:
                seconds.labels(self.name).observe(loop.time() - start)

    def problem_of(self, error: BaseException, label: str) -> Problem:
        """The problem for an exception of the environment: no 5xx, since the server works, and other actions may not
        raise."""
        kind = type(error).__name__
        self._metrics.failures.labels(self.name, kind).inc()
        message = _message(error)
        if isinstance(error, EnvgymError):
            logger.warning("%s: %s raised %s: %s", self.name, label, kind, printable_line(message))
        else:
            logger.error("%s: %s raised", self.name, label, exc_info=error)
        fields: dict[str, Any] = {}
        if isinstance(error, InvalidOutcome):
            fields = {"failure": error.kind, "retryable": error.retryable}
        return Problem(422, "environment-error", message, error=kind, **fields)


def _episode(number: int, record: dict[str, Any], images: Mapping[str, ImagePart]) -> Episode:
    try:
        return from_record(record, lambda image: images.get(image.sha256, image))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        detail = f"episodes.{number}: not an episode's record ({type(error).__name__}: {_utf8_text(str(error))})"
        raise Problem(422, "invalid-request", detail) from None


def _message(error: BaseException) -> str:
    try:
        return _utf8_text(str(error))
    except Exception:
        return f"a {type(error).__name__} that cannot be printed"


def _utf8_text(text: str) -> str:
    """`text` with `?` for characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
