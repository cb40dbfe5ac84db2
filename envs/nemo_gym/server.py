"""What is said to a NeMo-Gym resources server over HTTP: one session an episode, each request sent at most once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from envgym.errors import InvalidOutcome

REFUSED_TRIES = 3
"""How often a connection is tried that is refused: nothing has been sent then."""
FIRST_PAUSE = 0.2
"""Seconds before the second try; doubled before the third."""
KEEPALIVE = 2.0
"""Seconds an unused connection is kept: less than servers do, or a request might meet one that is just closing."""
MAX_BODY = 16 * 2**20
"""Bytes of the longest answer taken."""


def connector() -> aiohttp.TCPConnector:
    """The connections that all episodes share. Without a limit: none should wait for another's slow call."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)


class Session:
    """One episode's session with a server. Its cookies are its own; the server knows it by them alone.

    Every failure is an `InvalidOutcome`: `server_unreachable`, `server_lost` (the connection broke when the request may
    have been heard, so that it cannot be sent again), `server_timeout`, `server_error` (an error status) or
    `server_protocol` (an answer that NeMo-Gym does not give).
    """

    def __init__(self, url: str, connections: aiohttp.TCPConnector, timeout: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._http = aiohttp.ClientSession(
            connector=connections,
            connector_owner=False,
            # The usual jar refuses cookies of hosts that are addresses, and every session would be a new one.
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            timeout=aiohttp.ClientTimeout(total=timeout),
        )

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, route: str, body: Mapping[str, Any], *, repeatable: bool = False) -> dict[str, Any]:
        """POST to a route of the server's own, and the JSON object it answers with.

        `repeatable`: the server knows the request by an id in it, so that a lost one is sent once more.
        """
        try:
            status, text = await self.post(route, body)
        except InvalidOutcome as error:
            if not repeatable or error.kind != "server_lost":
                raise
            status, text = await self.post(route, body)
        if status != 200:
            raise InvalidOutcome(
                "server_error",
                f"{self._url}/{route} answered {status}: {' '.join(text.split())[:300]}",
                retryable=status >= 500 or status == 429,
            )
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise InvalidOutcome("server_protocol", f"{self._url}/{route} answered no JSON object: {text[:80]!r}")
        return answer

    async def post(self, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """The status and the text that the server answers a POST with, whatever they are."""
        # Encoded here, as `/` and `..` in a tool's name would lead elsewhere.
        url = f"{self._url}/{quote(route, safe='')}"
        pause = FIRST_PAUSE
        for attempt in range(REFUSED_TRIES):
            try:
                async with self._http.post(url, json=dict(body), allow_redirects=False) as answer:
                    return answer.status, (await self._read(answer)).decode("utf-8", "replace")
            except aiohttp.ClientConnectorError as error:
                if attempt == REFUSED_TRIES - 1:
                    raise InvalidOutcome("server_unreachable", f"{self._url}: {error}", retryable=True) from None
                await asyncio.sleep(pause)
                pause *= 2
            except TimeoutError:
                raise InvalidOutcome(
                    "server_timeout", f"{url} has not answered within {self._timeout:g} s", retryable=True
                ) from None
            except (aiohttp.ClientError, ConnectionError) as error:
                what = str(error) or type(error).__name__
                raise InvalidOutcome("server_lost", f"{url}: the connection broke ({what})", retryable=True) from None
        raise AssertionError("every try returns or raises")

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in answer.content.iter_chunked(2**16):
            content += chunk
            if len(content) > MAX_BODY:
                raise InvalidOutcome("server_protocol", f"{answer.url} answers with more than {MAX_BODY} bytes")
        return bytes(content)
