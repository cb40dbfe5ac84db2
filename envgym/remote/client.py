"""A remote environment, used like a local one: `envgym.make("http://127.0.0.1:8000/NAME")`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field, field_validator, model_validator

from envgym.env import CheckedEnv, EnvConfig, EnvSpec, TaskSet
from envgym.episodes.record import to_record
from envgym.errors import ConfigError, EnvgymError
from envgym.net.retries import pauses
from envgym.net.server import MAX_BODY
from envgym.types import Episode, Reward, Task

from .access import Access, access, parse_address
from .encoding import encode, load_image, load_images
from .registration import Listener, ListenerSettings, RegisteredServers, split_port
from .remote_env import RemoteEnv, RemoteTasks
from .replicas import CONNECT_SECONDS, Replica, Replicas
from .transport import FIRST_PAUSE, LONGEST_PAUSE, Counters, RemoteError, Transport, as_error
from .wire import MAX_GROUP, EnvDescription, EpisodeVerdict, GroupToScore, Method, Verdicts

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class RemoteConfig(EnvConfig):
    """Settings of the connection. The environment's own are set where it is served."""

    urls: tuple[str, ...] = ()
    """More servers of the same environment; sessions are distributed over all of them."""
    token_file: Path | None = None
    """File with the servers' token, which other users must not be able to read. Only its path is saved."""
    ca_file: Path | None = None
    """Certificates (PEM) that are trusted in place of the system's."""
    timeout: float = Field(default=660.0, gt=0)
    """Seconds that a reset, a step or a page of tasks may take, with all retries. The default is above the server's own
    limits: 600 s for a reset or a page, and for a step the environment's `call_timeout`."""
    reconnect: float = Field(default=30.0, ge=0)
    """Seconds of retries at an unreachable server before the episodes on it fail, from the first failure on: an episode
    that is retried does not wait anew."""
    listen: str | None = None
    """HOST:PORT of this machine where further servers may register (`envgym serve --register URL`), also in mid-run."""
    allow: tuple[str, ...] = ()
    """Hosts whose servers may register and are then contacted: names, addresses, and networks such as 10.0.0.0/8; with
    a port (`env-box:8000`) only on that port."""
    listen_token_file: Path | None = None
    """Servers that may register: lines NAME TOKEN [max_sessions=N], or one token. Only its path is saved."""
    listen_tls_cert: Path | None = None
    """Certificate of this machine, with its chain, as PEM, for `listen`."""
    listen_tls_key: Path | None = None
    """Its key, as PEM."""
    wait: float = Field(default=600.0, gt=0)
    """Seconds to wait while no server is available: for the first to register, and after the last has left."""

    @field_validator("listen")
    @classmethod
    def _listen(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:/@\s]+):[0-9]{1,5}", address):
            raise ValueError("it is HOST:PORT, where this machine listens")
        return address

    @field_validator("allow")
    @classmethod
    def _allow(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            split_port(host)
        return hosts

    @model_validator(mode="after")
    def _check_listen_settings(self) -> Self:
        if self.listen is not None and not self.allow:
            raise ValueError("listen needs allow: the hosts that are dialled when a server there registers")
        if self.listen is not None and self.token_file is not None and self.listen_token_file is None:
            raise ValueError(
                "listen needs listen_token_file beside token_file: else every server that registers gets the token"
            )
        files = (self.listen_token_file, self.listen_tls_cert, self.listen_tls_key)
        if self.listen is None and (self.allow or any(files)):
            raise ValueError("allow and the settings listen_… go with listen, HOST:PORT of this machine")
        return self

    @field_validator("call_timeout")
    @classmethod
    def _call_timeout(cls, seconds: float) -> float:
        if seconds != EnvConfig.model_fields["call_timeout"].default:  # a saved configuration has every setting
            raise ValueError("it is set where the environment is served; from here, timeout bounds a reset or a step")
        return seconds


class RemoteEnvSpec(EnvSpec):
    """The environment served at `id`, a URL, at `config.urls`, and on servers that register at `config.listen`. Its
    instances are sessions there."""

    agent = "tool_calling"  # without tools, which the server's answer shows, this is `multi_turn`
    Config = RemoteConfig
    config: RemoteConfig

    def __init__(self, id: str, **kwargs: Any) -> None:
        is_url = id.startswith(("http:", "https:"))
        super().__init__(id.rstrip("/") if is_url else id, **kwargs)
        urls = [*([self.id] if is_url else []), *self.config.urls]
        if not urls and self.config.listen is None:
            raise ConfigError(f"environment {id}: set urls, where it is served, or listen, where servers register")
        self.addresses = [parse_address(url) for url in urls]
        if len({address.server for address in self.addresses}) < len(urls):
            raise ConfigError(f"environment {id}: the same server is named twice; its slots exist once")
        self.counters = Counters()
        self._description: EnvDescription | None = None
        self._task_sets: dict[str, RemoteTasks] = {}
        # Connections belong to the event loop that opened them.
        self._replicas: WeakKeyDictionary[asyncio.AbstractEventLoop, Replicas] = WeakKeyDictionary()
        self._listening: WeakKeyDictionary[asyncio.AbstractEventLoop, contextlib.AsyncExitStack] = WeakKeyDictionary()
        self._reported: set[str] = set()

    @property
    def description(self) -> EnvDescription:
        """The server's description of the environment. Raises `EnvgymError` before the first connection."""
        if self._description is None:
            raise EnvgymError(f"{self.id}: not connected yet; write `async with spec:` around what uses it")
        return self._description

    @property
    def replicas(self) -> Replicas:
        """The servers, from this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._replicas:
            credentials = self._access()
            self._replicas[loop] = Replicas(
                [Replica(address, Transport(address.server, credentials, self.counters)) for address in self.addresses],
                self.config.wait,
            )
        return self._replicas[loop]

    def _access(self) -> Access:
        return access([address.server for address in self.addresses], self.config.token_file, self.config.ca_file)

    @property
    def summary(self) -> str:
        return "" if self._description is None else self._description.about

    def fingerprint(self) -> dict[str, str]:
        """The served environment's fingerprint, once it is known."""
        return super().fingerprint() if self._description is None else dict(self._description.fingerprint)

    def concurrency_bound(self) -> int | None:
        """The minimum of `concurrency` and the servers' known capacities."""
        capacities = [replicas.capacity for replicas in self._replicas.values()]
        bounds = [bound for bound in (self.config.concurrency, *capacities) if bound is not None]
        return min(bounds, default=None)

    async def setup(self) -> None:
        """Ask the servers for their descriptions, and listen for further ones. Raises `EnvgymError` if no envgym
        server answers, or none registers in time."""
        replicas = self.replicas
        try:
            if self.addresses:
                # No retries: at the start a wrong address is more likely than a transient fault.
                await replicas.connect(min(CONNECT_SECONDS, self.config.timeout))
            if self.config.listen is not None:
                await self._listen(replicas, self.config.listen)
            self._description = replicas.expected
        except BaseException:
            await self.teardown()
            raise

    async def _listen(self, replicas: Replicas, address: str) -> None:
        """Let servers register, and wait for the first if there is none yet."""
        config = self.config
        name = self.addresses[0].name if self.addresses else self.id.rpartition("/")[2]
        servers = RegisteredServers(replicas, name, self._access(), self.counters, self.id)
        files = config.listen_token_file, config.listen_tls_cert, config.listen_tls_key
        settings = ListenerSettings(address, config.allow, *files)
        stack = self._listening[asyncio.get_running_loop()] = contextlib.AsyncExitStack()
        stack.push_async_callback(servers.close)
        await stack.enter_async_context(Listener.subscription(servers, settings))
        if not replicas.has_servers:
            logger.warning("%s: waiting for a server; start one: envgym serve E --register %s", self.id, settings.url)
        await replicas.wait_for_server()

    async def teardown(self) -> None:
        listening = self._listening.pop(asyncio.get_running_loop(), None)
        if listening is not None:
            await listening.aclose()
        replicas = self._replicas.pop(asyncio.get_running_loop(), None)
        if replicas is not None:
            await replicas.close()

    def tasks(self, split: str) -> TaskSet:
        """The tasks of `split`, read from the servers on demand. Raises `ConfigError` for a split that is unknown or
        that the server cannot read, and `EnvgymError` before the first connection."""
        if split not in self._task_sets:
            splits = self.description.splits
            if split not in splits:
                raise ConfigError(f"{self.id} has no split {split!r}; it has {', '.join(splits)}")
            if (error := splits[split].error) is not None:
                raise ConfigError(f"{self.id}: {error}")
            self._task_sets[split] = RemoteTasks(self.ask_any, split, splits[split].size)
        return self._task_sets[split]

    @property
    def scores_groups(self) -> bool:
        return self.description.scores_groups

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Reward | Exception] | None:
        """The rewards of a group from the server's environment; None where it scores no groups."""
        if not self.description.scores_groups:
            return None
        if len(episodes) > MAX_GROUP:
            message = f"a group that a server scores has at most {MAX_GROUP} episodes, not {len(episodes)}"
            raise RemoteError("refused", f"{self.id}: {message}")
        images = {image: None for episode in episodes for message in episode.messages for image in message.images}
        records = tuple(_record_to_score(episode) for episode in episodes)
        group = GroupToScore(task=load_images(task), episodes=records, images=tuple(map(load_image, images)))
        answer = await self.ask_any(Verdicts, "POST", "/score_group", group)
        return None if answer.verdicts is None else [self._reward(verdict) for verdict in answer.verdicts]

    def _reward(self, verdict: EpisodeVerdict) -> Reward | Exception:
        if verdict.problem is not None:
            return as_error(self.id, verdict.problem)
        return Reward(verdict.reward, verdict.score, verdict.metrics)

    def make(self) -> CheckedEnv:
        return RemoteEnv(self)

    async def ask_any(self, model: type[B], method: Method, path: str, body: BaseModel | None = None) -> B:
        """A server's answer to a request below the environment's own path. If one fails the others are asked, and after
        the last one all of them again, for `reconnect` seconds. Raises `RemoteError`."""
        replicas, config, clock = self.replicas, self.config, asyncio.get_running_loop().time
        content = None if body is None else encode(body)
        if content is not None and len(content) > MAX_BODY:
            message = f"a {type(body).__name__} of {len(content)} bytes; a server takes at most {MAX_BODY}"
            raise RemoteError("refused", f"{self.id}: {message}")
        deadline, retry_until, is_transient = clock() + config.timeout, 0.0, False
        failed: set[Replica] = set()
        waits = pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            start = clock()
            await replicas.wait_for_server()
            deadline += clock() - start  # the limit without any server is `wait`
            replica, start = replicas.pick_any(failed), clock()
            has_other = replicas.has_other(replica, failed)
            seconds, patience = deadline - start, retry_until - start if retry_until else config.reconnect
            if has_other:  # leave the others time, in case it does not answer
                seconds, patience = seconds / 2, 0.0
            try:
                target = f"/v1/envs/{(await self.describe(replica, patience)).name}{path}"
                return await replica.ask(model, method, target, content, seconds=seconds, patience=patience)
            except RemoteError as error:
                if not error.retryable and replica.description is not None:
                    raise  # the request itself is wrong
                failed.add(replica)
                is_transient |= error.retryable
                if not has_other and not retry_until:
                    since = (error.kind == "connection" and replicas.lost_at) or clock()  # retried already
                    retry_until = min(deadline, since + config.reconnect)
                if replicas.has_untried(failed):
                    continue
                pause = next(waits)
                if not replicas.has_servers:
                    retry_until = 0.0  # start again with the next server that registers
                elif not is_transient or clock() + pause >= retry_until:
                    raise
            await asyncio.sleep(pause)
            failed.clear()

    async def describe(self, replica: Replica, patience: float) -> EnvDescription:
        """The description of `replica`; after a lost connection it must have the same tasks. Raises `RemoteError`."""
        replica.expected = self._description
        try:
            return await replica.describe(patience=patience)
        except EnvgymError as error:
            replica.mark_down()
            if isinstance(error, RemoteError):
                raise
            raise RemoteError("refused", str(error)) from None

    def report_dropped(self, names: tuple[str, ...]) -> None:
        """Count `info` entries that JSON could not carry, and warn once of each name."""
        self.counters.dropped_info += len(names)
        for name in set(names) - self._reported:
            self._reported.add(name)
            logger.warning("%s: info[%r] cannot be sent as JSON and is omitted", self.id, name)


def _record_to_score(episode: Episode) -> dict[str, Any]:
    """The episode's record without log-probabilities: they are half of it, and irrelevant to scoring."""
    record = to_record(episode)
    for row in record["rows"]:
        for segment in row["segments"]:
            segment["logprobs"] = None
    return record
