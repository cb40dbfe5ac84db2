"""A remote environment, played as if it were local: `envgym.make("http://127.0.0.1:8000/NAME")`."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field, field_validator

from envgym.env import CheckedEnv, EnvConfig, EnvSpec, TaskSet
from envgym.episodes.record import to_record
from envgym.errors import ConfigError, EnvgymError
from envgym.types import Episode, Judgement, Task

from .access import access, parse_address
from .encoding import encode
from .frames import Method
from .remote_env import RemoteEnv
from .remote_tasks import RemoteTasks
from .replicas import CONNECT_SECONDS, Replica, Replicas
from .transport import FIRST_PAUSE, LONGEST_PAUSE, Counters, HttpTransport, RemoteError, as_error
from .wire import MAX_BATCH, MAX_BODY, EnvDescription, Group, Verdict, Verdicts

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class ConnectionConfig(EnvConfig):
    """Settings of the connection. The environment's own are set where it is served."""

    timeout: float = Field(default=660.0, gt=0)
    """Seconds one reset, step or page of tasks may take, all tries together. By default the server's own limits come
    first: 600 s for a reset or a page, and for a step the environment's `call_timeout`."""
    reconnect: float = Field(default=30.0, ge=0)
    """Seconds for which a server that cannot be reached is tried again, before an episode on it fails."""

    @field_validator("call_timeout")
    @classmethod
    def _call_timeout(cls, seconds: float) -> float:
        if seconds != EnvConfig.model_fields["call_timeout"].default:  # a saved configuration says all there is
            raise ValueError("it is set where the environment is served; from here, timeout bounds a reset or a step")
        return seconds


class RemoteConfig(ConnectionConfig):
    """Also where the servers are, and what they are shown."""

    urls: tuple[str, ...] = ()
    """Servers of the same environment, beside the one it is named by; sessions are spread over them."""
    token_file: Path | None = None
    """File with the token that the servers ask for; others may not be able to read it. Only its path is saved."""
    ca_file: Path | None = None
    """Certificates (PEM) that are trusted in place of the system's."""


class ServedEnvSpec(EnvSpec):
    """An environment on servers, whichever way they are found. Its instances are sessions there."""

    agent = "tool_calling"  # whether it offers tools is known once it is reached; without them this is `multi_turn`
    Config = ConnectionConfig
    config: ConnectionConfig

    def __init__(self, id: str, **kwargs: Any) -> None:
        super().__init__(id, **kwargs)
        self.counters = Counters()
        self._description: EnvDescription | None = None
        self._task_sets: dict[str, RemoteTasks] = {}
        # Connections belong to the event loop that opened them.
        self._replicas: WeakKeyDictionary[asyncio.AbstractEventLoop, Replicas] = WeakKeyDictionary()
        self._reported: set[str] = set()

    @property
    def description(self) -> EnvDescription:
        """What the server said it serves. Raises `EnvgymError` before it was asked."""
        if self._description is None:
            raise EnvgymError(f"{self.id}: not connected yet; write `async with spec:` around what uses it")
        return self._description

    @property
    @abstractmethod
    def replicas(self) -> Replicas:
        """The servers, from this event loop."""

    @property
    def about(self) -> str:
        return "" if self._description is None else self._description.about

    def fingerprint(self) -> dict[str, str]:
        """That of the environment where it is served, once it is known."""
        return super().fingerprint() if self._description is None else dict(self._description.fingerprint)

    def concurrency_bound(self) -> int | None:
        """No more than the servers take, once they are asked."""
        rooms = [replicas.room for replicas in self._replicas.values()]
        bounds = [bound for bound in (self.config.concurrency, *rooms) if bound is not None]
        return min(bounds, default=None)

    async def teardown(self) -> None:
        replicas = self._replicas.pop(asyncio.get_running_loop(), None)
        if replicas is not None:
            await replicas.close()

    def tasks(self, split: str) -> TaskSet:
        """The tasks of `split` on the server, read in pages. Raises `ConfigError` where it has none."""
        if split not in self._task_sets:
            known = self.description.splits
            if split not in known:
                raise ConfigError(f"{self.id} has no split {split!r}; it has {', '.join(known)}")
            error = known[split].error
            if error is not None:
                raise ConfigError(f"{self.id}: {error}")
            self._task_sets[split] = RemoteTasks(self.ask_any, split, known[split].size)
        return self._task_sets[split]

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Judgement | Exception] | None:
        """What the server's environment says of a group, where it judges groups."""
        if not self.description.scores_groups:
            return None
        if len(episodes) > MAX_BATCH:
            what = (
                f"{self.id}: a group that is judged by a server has at most {MAX_BATCH} episodes, not {len(episodes)}"
            )
            raise RemoteError("refused", what, retryable=False)
        group = Group(task=task, episodes=tuple(_for_judges(episode) for episode in episodes))
        answer = await self.ask_any(Verdicts, "POST", "/score_group", group)
        return None if answer.verdicts is None else [self._judgement(verdict) for verdict in answer.verdicts]

    def _judgement(self, verdict: Verdict) -> Judgement | Exception:
        if verdict.problem is not None:
            return as_error(self.id, verdict.problem)
        return Judgement(verdict.reward, verdict.score, verdict.metrics)

    def make(self) -> CheckedEnv:
        return RemoteEnv(self)

    async def ask_any(self, model: type[B], method: Method, path: str, body: BaseModel | None = None) -> B:
        """What a server says to a request below the environment's own path. Where one has no answer the others are
        asked, and once none is left all of them again, for `reconnect` seconds."""
        replicas, config, now = self.replicas, self.config, asyncio.get_running_loop().time
        content = None if body is None else encode(body)
        if content is not None and len(content) > MAX_BODY:
            what = f"{self.id}: a {type(body).__name__} of {len(content)} bytes; a server takes at most {MAX_BODY}"
            raise RemoteError("refused", what, retryable=False)
        ends, gives_up, pause = now() + config.timeout, 0.0, FIRST_PAUSE
        failed: set[Replica] = set()
        may_pass = False
        while True:
            replica, began = replicas.any_up(failed), now()
            others = replicas.others(replica, failed)
            seconds, patience = ends - began, gives_up - began if gives_up else config.reconnect
            if others:  # one that says nothing leaves them time
                seconds, patience = seconds / 2, 0.0
            try:
                where = f"/v1/envs/{(await self.describe(replica, patience)).name}{path}"
                answer = await replica.transport.ask(model, method, where, content, seconds=seconds, patience=patience)
            except RemoteError as error:
                if not error.retryable and replica.description is not None:
                    raise  # it is the request that is wrong
                replica.is_down()
                failed.add(replica)
                may_pass |= error.retryable
                if not others:
                    since = began if error.kind == "connection" else now()  # that was tried again already
                    gives_up = gives_up or min(ends, since + config.reconnect)
                if replicas.unasked(failed):
                    continue
                if not may_pass or now() + pause >= gives_up:
                    raise
            else:
                replica.is_up()
                return answer
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            failed.clear()

    async def describe(self, replica: Replica, patience: float) -> EnvDescription:
        """What `replica` serves; where it is asked anew, it must be what it was. Raises `RemoteError`."""
        if replica.description is not None:
            return replica.description
        replica.expected = self._description
        try:
            return await replica.describe(patience)
        except EnvgymError as error:
            replica.is_down()
            if isinstance(error, RemoteError):
                raise
            raise RemoteError("refused", str(error), retryable=False) from None

    def report_dropped(self, names: tuple[str, ...]) -> None:
        """Count `info` entries that JSON could not carry, and warn once of each name."""
        self.counters.dropped_info += len(names)
        for name in set(names) - self._reported:
            self._reported.add(name)
            logger.warning("%s: info[%r] cannot be sent as JSON and is left out", self.id, name)


class RemoteEnvSpec(ServedEnvSpec):
    """The environment served at `id`, a URL, and at `config.urls`."""

    Config = RemoteConfig
    config: RemoteConfig

    def __init__(self, id: str, **kwargs: Any) -> None:
        is_url = id.startswith(("http://", "https://"))
        super().__init__(id.rstrip("/") if is_url else id, **kwargs)
        urls = [*([self.id] if is_url else []), *self.config.urls]
        if not urls:
            raise ConfigError(f"environment {id}: urls says where it is served")
        self.addresses = [parse_address(url) for url in urls]
        if len({address.server for address in self.addresses}) < len(urls):
            raise ConfigError(f"environment {id}: the same server is named twice; its places are there once")

    @property
    def replicas(self) -> Replicas:
        loop = asyncio.get_running_loop()
        if loop not in self._replicas:
            servers = [address.server for address in self.addresses]
            shown = access(servers, self.config.token_file, self.config.ca_file)
            self._replicas[loop] = Replicas(
                [Replica(address, HttpTransport(address.server, shown, self.counters)) for address in self.addresses]
            )
        return self._replicas[loop]

    async def setup(self) -> None:
        """Ask the servers what they serve. Raises `EnvgymError` where nothing answers, or something else does."""
        try:
            # Nothing is tried twice: at the start a wrong address is likelier than a passing fault.
            self._description = await self.replicas.connect(min(CONNECT_SECONDS, self.config.timeout))
        except BaseException:
            await self.teardown()
            raise


def _for_judges(episode: Episode) -> dict[str, Any]:
    """Its record without the log-probabilities it was sampled with, which are half of it and say nothing of it."""
    record = to_record(episode)
    for row in record["rows"]:
        for segment in row["segments"]:
            segment["logprobs"] = None
    return record
