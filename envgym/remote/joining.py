"""`envgym serve --join`: a server behind a firewall dials the trainer, and answers it over that connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import aiohttp

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.services import start_services

from .access import DIAL_SECONDS, Access, access, unreachable, url_parts
from .application import Application
from .frames import HELLO_SECONDS, JOIN_PATH, MAX_MESSAGE, PING_SECONDS, Hello, Notice
from .limits import Limits
from .server import check_name, check_servable, stop_signals
from .tokens import Client
from .transport import FIRST_PAUSE

LONGEST_PAUSE = 15.0
"""Seconds between two tries to reach the trainer, at most: it may be started long after the server."""
TRAINER = Client("trainer")

logger = logging.getLogger(__name__)


async def serve_joined(
    specs: Mapping[str, EnvSpec],
    url: str,
    *,
    on_joined: Callable[[], None],
    limits: Limits | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    weight: float = 1.0,
) -> None:
    """Serve the environments, by their names, to the trainer that listens at `url`, until SIGINT or SIGTERM.

    Nothing listens here. The trainer is dialled again whenever the connection is lost, for as long as it takes;
    sessions outlive that as long as their leases. `on_joined` is called the first time. The end is that of `serve`.

    Raises `ConfigError` where the trainer refuses this server, for files that cannot be used, and for an environment
    that cannot be served.
    """
    for name, spec in specs.items():
        check_name(name)
        check_servable(spec)
    url = check_join_url(url)
    shown = access([url], token_file, ca_file)
    stopping = asyncio.Event()
    limits = limits or Limits()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(stop_signals(stopping))
        for spec in specs.values():
            await stack.enter_async_context(start_services(spec))
        application = Application(specs, limits, None)
        await stack.enter_async_context(application.running())
        joining = Joining(application, url, shown, weight, on_joined)
        running = asyncio.create_task(joining.run())
        stopped = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await joining.leave()
                await application.drain()
        finally:
            stopped.cancel()
            running.cancel()
            await asyncio.wait([running, stopped])
        if not running.cancelled():
            running.result()


def check_join_url(url: str) -> str:
    """The trainer's address without a slash at its end. Raises `ConfigError` for another form of URL."""
    form = "--join takes one that looks like http://TRAINER:PORT or https://TRAINER:PORT"
    url_parts(url, ("http", "https"), form, token="--token-file F")
    return url.rstrip("/")


class Joining:
    """The connection to one trainer, made again whenever it is lost."""

    def __init__(
        self, application: Application, url: str, shown: Access, weight: float, on_joined: Callable[[], None]
    ) -> None:
        self._application = application
        self._url = url
        self._shown = shown
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "server"
        self._hello = Hello(instance=uuid.uuid4().hex, name=name, weight=weight)
        self._on_joined: Callable[[], None] | None = on_joined
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def run(self) -> None:
        """Join, and join again. Raises `ConfigError` where the trainer refuses."""
        pause, said = FIRST_PAUSE, ""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._shown.tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=DIAL_SECONDS),
            headers=self._shown.headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as http:
            while True:
                try:
                    joined = await self._join(http)
                    why = "the connection was lost"
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise ConfigError(
                            f"{self._url} refuses this server ({error.status}): it asks for a token that it knows "
                            "(--token-file F)"
                        ) from None
                    joined, why = False, f"there is nothing that servers can join (status {error.status})"
                except aiohttp.ClientConnectorCertificateError as error:
                    raise ConfigError(f"{self._url}: {unreachable(self._url, error)}") from None
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    joined, why = False, unreachable(self._url, error)
                if joined:
                    pause, said = FIRST_PAUSE, ""
                if why != said:
                    logger.warning("%s: %s; trying again until it can be joined", self._url, why)
                    said = why
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # many servers lose one trainer at once
                pause = min(pause * 2, LONGEST_PAUSE)

    async def leave(self) -> None:
        """Tell the trainer that no new sessions are taken."""
        self._hello = self._hello.model_copy(update={"leaving": True})
        if self._socket is not None:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await self._socket.send_str(self._hello.model_dump_json())

    async def _join(self, http: aiohttp.ClientSession) -> bool:
        """Answer requests over one connection until it ends. Returns whether the trainer took this server."""
        async with (
            asyncio.timeout(DIAL_SECONDS + HELLO_SECONDS) as deadline,
            http.ws_connect(
                self._url + JOIN_PATH, heartbeat=PING_SECONDS, max_msg_size=MAX_MESSAGE, autoclose=True
            ) as link,
        ):
            await link.send_str(self._hello.model_dump_json())
            first = await link.receive()
            deadline.reschedule(None)
            if first.type is not aiohttp.WSMsgType.TEXT:
                if link.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
                    raise ConfigError(f"{self._url} refuses this server: {first.extra or 'it does not say why'}")
                return False
            self._socket = link
            if self._on_joined is not None:
                self._on_joined()
                self._on_joined = None
            else:
                logger.warning("%s: joined again", self._url)
            try:
                async with self._application.answering(link, TRAINER) as answering:
                    await answering.run(self._told)
            except ValueError:
                logger.warning("%s sent a request that is none", self._url)
                await link.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)
            finally:
                self._socket = None
            return True

    def _told(self, message: str) -> None:
        logger.warning("%s: %s", self._url, Notice.model_validate_json(message, strict=True).text)
