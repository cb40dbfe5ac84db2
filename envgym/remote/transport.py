"""The client's requests: one connection pool, one deadline for all tries, and every failure as one clear line."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from envgym import errors
from envgym.errors import EnvgymError

from .wire import ProblemBody

TRIES = 5
"""How often a request is sent before its connection errors are given up on."""
FIRST_PAUSE = 0.2
"""Seconds before the second try; doubled before each further one."""
CONNECT_SECONDS = 10.0
TRY_AGAIN = (429, 502, 503)
"""Statuses of a server, or of a proxy before it, that cannot answer just now."""

logger = logging.getLogger(__name__)


class RemoteError(EnvgymError):
    """A remote environment could not do what was asked.

    `retryable` says whether a new episode may succeed: True where the network, the server or its session failed,
    False where the environment itself raised or the request was refused.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(slots=True)
class Counters:
    """What a client met since it was made."""

    requests: int = 0
    """Requests sent, repeats included."""
    retries: int = 0
    """Repeats among them."""
    failures: int = 0
    """Calls that came to nothing, whatever was tried."""
    dropped_info: int = 0
    """Entries of `info` that JSON could not carry."""


class Transport:
    """Calls to one server from one event loop. Every call may be sent twice: the protocol makes that harmless."""

    def __init__(self, url: str, counters: Counters) -> None:
        self._url = url
        self._counters = counters
        # No limit: each running episode has at most one request in flight, and none should wait for another's step.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float, tries: int = TRIES
    ) -> bytes:
        """The body of a successful answer, within `seconds` for all tries together.

        Raises the server's own `EnvgymError` where it names one, and else `RemoteError`.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._call(method, path, body, tries)
        except TimeoutError:
            self._counters.failures += 1
            raise RemoteError(
                f"{self._url}: no answer within {seconds:g} s; is the server well, and reachable from here?",
                retryable=True,
            ) from None
        except EnvgymError:
            self._counters.failures += 1
            raise

    async def _call(self, method: str, path: str, body: bytes | None, tries: int) -> bytes:
        pause = FIRST_PAUSE
        for attempt in range(tries):
            if attempt:
                self._counters.retries += 1
                await asyncio.sleep(pause)
                pause *= 2
            self._counters.requests += 1
            try:
                async with self._session.request(
                    method, self._url + path, data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    content = await response.read()
            except (aiohttp.ClientError, ConnectionError) as error:
                failure = self._unreachable(error)
            else:
                if response.ok:
                    return content
                failure = self._refused(method, path, response, content)
                if response.status not in TRY_AGAIN:
                    raise failure
            logger.debug("%s %s, try %d: %s", method, path, attempt + 1, failure)
        raise failure

    def _unreachable(self, error: Exception) -> EnvgymError:
        address = urlsplit(self._url)
        if isinstance(error, aiohttp.InvalidURL):
            return errors.ConfigError(f"{self._url}: not a usable URL; it looks like http://127.0.0.1:8000")
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if isinstance(cause, socket.gaierror) or isinstance(error, aiohttp.ClientConnectorDNSError):
            what = f"the host name {address.hostname!r} is not known; check the address"
        elif isinstance(cause, ConnectionRefusedError):
            what = "nothing answers there (connection refused); start `envgym serve` there, or check the address"
        elif isinstance(error, aiohttp.ServerTimeoutError):
            what = (
                f"no connection within {CONNECT_SECONDS:g} s; check the address, and that it can be reached from here"
            )
        else:
            what = f"the connection failed ({str(error) or type(error).__name__}); check the server and the address"
        return RemoteError(f"{self._url}: {what}", retryable=True)

    def _refused(self, method: str, path: str, response: aiohttp.ClientResponse, content: bytes) -> EnvgymError:
        if response.content_type != "application/problem+json":
            return RemoteError(
                f"{self._url}: answered {method} {path} with {response.status} {response.reason}, not as an envgym "
                "server would; check the address, its port and its path",
                retryable=response.status in TRY_AGAIN,
            )
        try:
            problem = ProblemBody.model_validate_json(content)
        except ValidationError:
            problem = ProblemBody(detail=f"{response.status} {response.reason}")
        if problem.kind != "environment-error":
            passing = ("session-not-found", "shutting-down", "environment-timeout", "internal-error")
            retryable = problem.kind in passing or response.status in TRY_AGAIN
            return RemoteError(f"{self._url}: {problem.detail}", retryable=retryable)
        known = getattr(errors, problem.error, None)
        if known is errors.InvalidOutcome:
            return errors.InvalidOutcome(problem.failure, problem.detail, retryable=problem.retryable)
        if isinstance(known, type) and issubclass(known, EnvgymError):
            return known(problem.detail)
        return RemoteError(f"{self._url}: the environment raised {problem.error}: {problem.detail}", retryable=False)
