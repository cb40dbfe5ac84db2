"""HTTP requests over httpx: one policy for retries and rate limits, and every failure as a one-line message."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Literal

from envgym.errors import InvalidOutcome, needs
from envgym.processes.deadline import pause_timeouts

from .retries import LONGEST_PAUSE, RETRY_STATUSES, pauses, retry_after

with needs("httpx", "api", "a service over HTTP"):
    import httpx

FIRST_PAUSE = 0.5
"""Seconds before the second try; doubled before each further one, and shortened by up to a half at random."""
CONNECT_SECONDS = 10.0
MAX_ANSWER = 16 * 2**20
"""Maximum number of bytes of an answer."""
KEEPALIVE_SECONDS = 5.0
"""Seconds after which an idle connection is closed."""
KEPT_HEADERS = ("retry-after", "location", "set-cookie")
"""Headers of an answer that callers get."""

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


class ConnectionPool(httpx.AsyncBaseTransport):
    """A pool of connections, and answers of up to `max_answer` bytes, decompressed.

    Each connection has a separate httpx pool: httpx's pool scans all of its connections at each request, which took
    18 ms with 256 of them.
    """

    def __init__(self, max_answer: int, keepalive: float = KEEPALIVE_SECONDS) -> None:
        self._max_answer = max_answer
        self._limits = httpx.Limits(keepalive_expiry=keepalive)
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._idle.pop() if self._idle else self._new()
        try:
            response = await connection.handle_async_request(request)
            try:
                content = await self._read(response)
            finally:
                await response.aclose()
        finally:
            self._idle.append(connection)
        headers = [item for item in response.headers.multi_items() if item[0] in KEPT_HEADERS]
        return httpx.Response(response.status_code, headers=headers, content=content)

    def _new(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(_tls_context(), trust_env=False, limits=self._limits)

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > self._max_answer:
                raise NoAnswer("unusable", f"answers with more than {self._max_answer / 2**20:.3g} MiB")
        return bytes(content)

    async def aclose(self) -> None:
        await asyncio.gather(*(connection.aclose() for connection in self._idle))


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads a file of 200 kB


class HttpClient(httpx.AsyncClient):
    """Requests from one event loop. With shared `connections`, close these and not the clients.

    Redirects and the environment's proxies and passwords are not used: key and request are for the address alone.
    Cookies are stored with `keeps_cookies` only.
    """

    def __init__(
        self, connections: ConnectionPool | None = None, *, secret: str = "", keeps_cookies: bool = False
    ) -> None:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        super().__init__(
            transport=connections or ConnectionPool(MAX_ANSWER),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,
            headers=headers | ({"Authorization": f"Bearer {secret}"} if secret else {}),
            cookies=CookieJar(None if keeps_cookies else DefaultCookiePolicy(allowed_domains=[])),
        )

    async def exchange(
        self, method: str, url: str, content: bytes = b"", *, seconds: float | None, connects: int = 1
    ) -> httpx.Response:
        """The answer, of any status, each try within `seconds`. A failed connection is tried `connects` times in all:
        nothing has been sent then. Raises `NoAnswer`."""
        waits = pauses(FIRST_PAUSE, jitter=0.5)
        while True:
            try:
                async with asyncio.timeout(seconds):
                    return await self.request(method, url, content=content)
            except TimeoutError:
                failure = NoAnswer("timeout", f"gave no answer within {seconds:g} s")
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                failure = _failure(error)
            connects -= 1
            if failure.kind != "unreachable" or connects == 0:
                raise failure
            await asyncio.sleep(next(waits))


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
        self._http = HttpClient(secret=secret)

    async def close(self) -> None:
        await self._http.aclose()

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
                    answer = self._parse(await self._http.exchange("POST", url, content, seconds=self._timeout))
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

    def _parse(self, response: httpx.Response) -> Any:
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError):  # often a proxy's page in place of the server's answer
            body = None
        if response.is_success:
            if body is None:
                raise NoAnswer("unusable", "answers with something that is not JSON")
            return body
        reason, code = _problem(body, response.content)
        if response.status_code in RETRY_STATUSES:
            wait = retry_after(response.headers.get("Retry-After", ""))
            if wait <= LONGEST_PAUSE:
                self._not_before = max(self._not_before, time.monotonic() + wait)
            requested = f" and asks to wait {wait:.0f} s" if wait > LONGEST_PAUSE else ""
            raise NoAnswer("unusable", f"answers {response.status_code} {reason}{requested}", wait=wait)
        hint = "; check the key or token" if response.status_code in (401, 403) else ""
        message = f"{self.name} answers {response.status_code} {reason}{hint}"
        raise RequestRejected(self._hide(message), response.status_code, code)

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
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return NoAnswer("url", f"cannot be reached ({error})", str(error))
    is_slow = isinstance(error, httpx.ConnectTimeout)
    reason = f"no connection within {CONNECT_SECONDS:g} s" if is_slow else _reason(error)
    kind: Kind = "unreachable" if is_slow or isinstance(error, httpx.ConnectError) else "lost"
    return NoAnswer(kind, f"cannot be reached ({reason})", reason)


def _reason(error: BaseException) -> str:
    """The operating system's reason for a failed connection, if any, else the library's message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, ConnectionError) and cause.errno:
            return os.strerror(cause.errno).lower()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
