"""HTTP requests over aiohttp: one policy for retries and rate limits, and every failure as a one-line message."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import aiohttp
from aiohttp import BaseConnector, ClientSession

from envgym.errors import InvalidOutcome
from envgym.processes.deadline import pause_timeouts

from .retries import LONGEST_PAUSE, RETRY_STATUSES, pauses, retry_after

FIRST_PAUSE = 0.5
"""Seconds before the second try; doubled before each further one, and shortened by up to a half at random."""
CONNECT_SECONDS = 10.0
MAX_ANSWER = 64 * 2**20
"""Maximum number of bytes of an answer, decompressed."""
MAX_HEADER = 100_000
"""Maximum number of bytes of each header of an answer."""

Kind = Literal["url", "unreachable", "lost", "timeout", "unusable"]


class NoAnswer(Exception):
    """A request without a usable answer. The message completes a sentence that begins with the server's name; `reason`
    is the operating system's part of it, and `wait` the pause in seconds that the server asked for.

    With the kinds `url` and `unreachable` nothing was sent; with the others the whole request may have arrived.
    """

    def __init__(self, kind: Kind, message: str, reason: str = "", wait: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.reason = reason
        self.wait = wait


def http_client(
    connector: BaseConnector | None = None, *, secret: str = "", keeps_cookies: bool = False, keepalive: float = 5.0
) -> ClientSession:
    """A client of the running event loop, over the connections of another, or over its own: as many as it has requests
    at a time, each closed once it has been idle for `keepalive` seconds.

    The environment's proxies and passwords are not used: key and request are for the address alone. Cookies are stored
    with `keeps_cookies` only.
    """
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    return ClientSession(
        connector=connector or aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive),
        connector_owner=connector is None,
        cookie_jar=aiohttp.CookieJar(unsafe=True) if keeps_cookies else aiohttp.DummyCookieJar(),
        headers=headers | ({"Authorization": f"Bearer {secret}"} if secret else {}),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
        max_field_size=MAX_HEADER,
    )


async def exchange(
    http: ClientSession, method: str, url: str, body: bytes | None = None, *, seconds: float | None, connects: int = 1
) -> tuple[int, Mapping[str, str], bytes]:
    """Status (any), headers and body of the answer, each try within `seconds`. Redirects are not followed.

    A failed connection is tried `connects` times in all: nothing has been sent then. If it breaks later, aiohttp itself
    repeats a GET once, and never a POST. Raises `NoAnswer`.
    """
    waits = pauses(FIRST_PAUSE, jitter=0.5)
    while True:
        for _ in range(2):  # the loop takes two turns to notice connections that the server has closed
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(seconds), http.request(method, url, data=body, allow_redirects=False) as answer:
                return answer.status, answer.headers, await _read(answer)
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:  # some are TimeoutErrors as well
            failure = _failure(error)
        except TimeoutError:
            failure = NoAnswer("timeout", f"gave no answer within {seconds:g} s")
        connects -= 1
        if failure.kind != "unreachable" or connects == 0:
            raise failure
        await asyncio.sleep(next(waits))


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER:
            raise NoAnswer("unusable", f"answers with more than {MAX_ANSWER / 2**20:.3g} MiB")
    return bytes(content)


class RequestRejected(InvalidOutcome):
    """The server has rejected the request, and a retry would not help. `status` is the answer's, `code` the server's
    error code, if any."""

    def __init__(self, message: str, status: int, code: str = "") -> None:
        super().__init__("service", message)
        self.status = status
        self.code = code


class Unreachable(InvalidOutcome):
    """The address cannot be reached: no such host, no listener, no secure connection."""


class JsonCaller:
    """Posts JSON to one service, and is used within one event loop.

    `secret` is sent as a bearer token and appears in no message. `requests_per_minute` spaces requests evenly.
    When a server asks for a pause, all requests observe it. Every `Deadline` pauses while a request waits for either.
    """

    def __init__(
        self,
        name: str,
        counters: Counter[str],
        *,
        secret: str = "",
        timeout: float,
        tries: int,
        concurrency: int,
        requests_per_minute: float | None = None,
    ) -> None:
        self.name = name
        self.counters = counters
        self._secret = secret
        self._tries = tries
        self._slots = asyncio.Semaphore(concurrency)
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._line = asyncio.Lock()
        self._next_start = 0.0
        self._not_before = 0.0
        self._timeout = timeout
        self._http = http_client(secret=secret)

    async def close(self) -> None:
        await self._http.close()

    async def post(
        self, url: str, body: Any, *, defect: Callable[[Any], str] = lambda answer: "", tries: int | None = None
    ) -> Any:
        """The parsed answer. `defect` returns why an answer is unusable (`answers without …`), "" for a usable one; an
        unusable one is retried. `tries` overrides the caller's number.

        Raises `InvalidOutcome` of kind `service`, after the last try.
        """
        content = json.dumps(body, default=str).encode()  # a label from Parquet may be a date
        tries, waits = tries or self._tries, pauses(FIRST_PAUSE, jitter=0.5)
        async with self._slots:
            for attempt in range(1, tries + 1):
                await self._wait_for_turn()
                self.counters["requests"] += 1
                wait, outcome = 0.0, InvalidOutcome
                try:
                    answer = self._parse(*await exchange(self._http, "POST", url, content, seconds=self._timeout))
                    if not (problem := defect(answer)):
                        return answer
                except NoAnswer as failure:
                    problem, wait = str(failure), failure.wait
                    outcome = Unreachable if failure.kind == "unreachable" else outcome
                except RequestRejected:
                    self.counters["failures"] += 1
                    raise
                if attempt == tries or wait > LONGEST_PAUSE:
                    break
                self.counters["retries"] += 1
                await asyncio.sleep(next(waits))  # `_wait_for_turn` adds the server's pause
        self.counters["failures"] += 1
        tries_text = f" in {attempt} tries" if attempt > 1 else ""
        raise outcome("service", self._hide(f"{self.name} {problem}{tries_text}"), retryable=True)

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit and the server's requested pause allow a request."""
        with pause_timeouts():
            async with self._line:  # in the order of arrival; a cancelled request leaves the queue
                start = time.monotonic()
                while (earliest := max(self._next_start, self._not_before)) > start:
                    start = earliest
                    await _sleep_until(start)
                self._next_start = start + self._interval

    def _parse(self, status: int, headers: Mapping[str, str], content: bytes) -> Any:
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):  # often a proxy's page in place of the server's answer
            body = None
        if 200 <= status < 300:
            if body is None:
                raise NoAnswer("unusable", "answers with something that is not JSON")
            return body
        reason, code = _problem(body, content)
        if status in RETRY_STATUSES:
            wait = retry_after(headers.get("Retry-After", ""))
            if wait <= LONGEST_PAUSE:
                self._not_before = max(self._not_before, time.monotonic() + wait)
            requested = f" and asks to wait {wait:.0f} s" if wait > LONGEST_PAUSE else ""
            raise NoAnswer("unusable", f"answers {status} {reason}{requested}", wait=wait)
        hint = "; check the key or token" if status in (401, 403) else ""
        message = f"{self.name} answers {status} {reason}{hint}"
        raise RequestRejected(self._hide(message), status, code)

    def _hide(self, message: str) -> str:
        return message.replace(self._secret, "[secret]") if self._secret else message


async def _sleep_until(moment: float) -> None:
    if (pause := moment - time.monotonic()) > 0:
        await asyncio.sleep(pause)


def _problem(body: Any, content: bytes) -> tuple[str, str]:
    """The message of an error's body, in parentheses, and its code in OpenAI's form."""
    text, code = content[:2000].decode("utf-8", "replace"), None
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body.get("message", "")))
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        details = body.get("error", body)
        code = (details.get("code") or details.get("type")) if isinstance(details, dict) else None
    text = " ".join(text.split())[:200]
    return f"({text})" if text else "(no reason given)", code if isinstance(code, str) else ""


def _failure(error: Exception) -> NoAnswer:
    """The failure behind an error of aiohttp's, with the operating system's reason, if any, else the library's."""
    kind: Kind = "lost"
    cause = error.__cause__ or error
    reason = getattr(cause, "strerror", None) or getattr(cause, "message", None) or str(cause)
    if isinstance(cause, ConnectionError) and cause.errno:
        reason = os.strerror(cause.errno).lower()
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        kind, reason = "unreachable", f"no connection within {CONNECT_SECONDS:g} s"
    elif isinstance(error, aiohttp.ClientConnectorError):
        kind = "unreachable"
    elif isinstance(error, ValueError | aiohttp.NonHttpUrlClientError):
        kind, reason = "url", "not a usable http:// or https:// URL"  # the library's reason may hold a password
    elif isinstance(error, aiohttp.ServerDisconnectedError):
        reason = "Server disconnected without sending a response."
    reason = " ".join(reason.split()) or type(error).__name__
    return NoAnswer(kind, f"cannot be reached ({reason})", reason)
