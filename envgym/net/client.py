"""Requests to other people's services: one policy for retries and rate limits, and every failure as a one-line
message."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from envgym.errors import InvalidOutcome
from envgym.processes.cancellation import pause_timeouts

from .retries import LONGEST_PAUSE, RETRY_STATUSES, pauses, retry_after
from .tokens import hide_secret

FIRST_PAUSE = 0.5
"""Seconds before the second try; doubled before each further one, and shortened by up to a half at random."""
CONNECT_SECONDS = 10.0
KEEPALIVE = 2.0
"""Seconds to keep an unused connection: less than servers do, or a request might meet one that is closing."""
MAX_ANSWER = 64 * 2**20
"""Maximum number of bytes of an answer, decompressed."""
QUOTA_CODES = ("insufficient_quota", "exceeded_current_quota_error", "billing_not_active", "billing_hard_limit_reached")
"""Codes of a 429 that no pause removes: the account's quota is used up (OpenAI's, Moonshot's)."""
HEADERS = {"Accept": "application/json", "Accept-Encoding": "gzip, deflate", "Content-Type": "application/json"}

Kind = Literal["url", "unreachable", "lost", "timeout", "unusable"]


class NoAnswer(Exception):
    """A request without a usable answer. The message completes a sentence that begins with the server's name. `reason`
    is the part of it that the operating system gave; `wait` is the pause in seconds that the server asked for.

    With the kinds `url` and `unreachable` nothing was sent; with the others the whole request may have arrived.
    """

    def __init__(self, kind: Kind, message: str, reason: str = "", wait: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.reason = reason
        self.wait = wait


class HttpClient(AbstractAsyncContextManager["HttpClient"]):
    """A client of the running event loop, with one connection for each concurrent request. The connections are its own,
    or those of `shared`, which then closes them. Cookies are stored with `keeps_cookies` only.

    Key and request go to the address alone: passwords in this process's environment are not used, and `HTTPS_PROXY` for
    https:// only, where a proxy sees neither.
    """

    def __init__(self, shared: HttpClient | None = None, *, secret: str = "", keeps_cookies: bool = False) -> None:
        # Not headers of the session, which a proxy would get too.
        self._headers = HEADERS | ({"Authorization": f"Bearer {secret}"} if secret else {})
        connector = shared._session.connector if shared is not None else None
        self._session: aiohttp.ClientSession = aiohttp.ClientSession(
            connector=connector or aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
            connector_owner=connector is None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.CookieJar(unsafe=True) if keeps_cookies else aiohttp.DummyCookieJar(),
        )

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def send(self, method: str, url: str, body: bytes | None) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and decompressed body of the answer. Raises aiohttp's errors, `ValueError`, and `NoAnswer`
        for too long a body."""
        for _ in range(2):  # in which the event loop notices connections that their servers have closed
            await asyncio.sleep(0)
        fields: dict[str, Any] = {"data": body, "headers": self._headers, "proxy": _proxy(url)}
        async with self._session.request(method, url, allow_redirects=False, **fields) as answer:
            return answer.status, answer.headers, await read_content(answer)

    async def connect(self, url: str, *, heartbeat: float) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket, closed after a ping that has no answer for half of `heartbeat` seconds. Raises `NoAnswer`."""
        options: dict[str, Any] = {"headers": self._headers, "proxy": _proxy(url), "max_msg_size": MAX_ANSWER}
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket: aiohttp.ClientWebSocketResponse = await self._session.ws_connect(
                    url, heartbeat=heartbeat, **options
                )
                return socket
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise failure_of(error) from None


def json_object(content: Any) -> dict[str, Any] | None:
    """The JSON object in an answer or a message, bytes or text; None for any other content, such as the error in place
    of a message that could not be read."""
    try:
        value = json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def read_content(answer: aiohttp.ClientResponse) -> bytes:
    """The decompressed body of an answer. Raises `NoAnswer` for one of more than `MAX_ANSWER` bytes."""
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER:
            answer.close()
            raise NoAnswer("unusable", f"answers with more than {MAX_ANSWER / 2**20:.3g} MiB")
    return bytes(content)


def _proxy(url: str) -> str | None:
    """The environment's proxy for an https:// address, if there is one that can be used: SOCKS needs another
    package."""
    parts = urlsplit(url)
    proxy = getproxies().get("https", "") if parts.scheme == "https" and not proxy_bypass(parts.hostname or "") else ""
    proxy = proxy if not proxy or "://" in proxy else f"http://{proxy}"
    return proxy if proxy.startswith(("http://", "https://")) else None


async def exchange(
    http: HttpClient, method: str, url: str, body: bytes | None = None, *, seconds: float | None, connects: int = 1
) -> tuple[int, Mapping[str, str], bytes]:
    """Status (any), headers and body of the answer, each try within `seconds`. Redirects are not followed.

    A failed connection is tried `connects` times in all: nothing has been sent then. Raises `NoAnswer`.
    """
    waits = pauses(FIRST_PAUSE, jitter=0.5)
    while True:
        try:
            async with asyncio.timeout(seconds):
                return await http.send(method, url, body)
        except (aiohttp.ClientError, ValueError) as error:
            failure = failure_of(error)
        except TimeoutError:
            failure = NoAnswer("timeout", f"gave no answer within {seconds:g} s")
        except OSError as error:
            failure = failure_of(error)
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
        raise outcome("service", f"{self.name} {hide_secret(problem, self._secret)}{tries_text}", retryable=True)

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
        text, code = _problem(body, content)
        text = " ".join(hide_secret(text, self._secret).split())[:200]
        reason = f"({text})" if text else "(no reason given)"
        if status in RETRY_STATUSES and code not in QUOTA_CODES:
            wait = retry_after(headers.get("Retry-After", ""))
            if wait <= LONGEST_PAUSE:
                self._not_before = max(self._not_before, time.monotonic() + wait)
            requested = f" and asks to wait {wait:.0f} s" if wait > LONGEST_PAUSE else ""
            raise NoAnswer("unusable", f"answers {status} {reason}{requested}", wait=wait)
        hint = "; check the key or token" if status in (401, 403) else ""
        raise RequestRejected(f"{self.name} answers {status} {reason}{hint}", status, code)


async def _sleep_until(moment: float) -> None:
    if (pause := moment - time.monotonic()) > 0:
        await asyncio.sleep(pause)


def _problem(body: Any, content: bytes) -> tuple[str, str]:
    """The message of an error's body, at most 2,000 characters, and its code in OpenAI's form."""
    text, code = content[:2000].decode("utf-8", "replace"), ""
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body.get("message", "")))
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        details = body.get("error", body)
        codes = [details.get("code"), details.get("type")] if isinstance(details, dict) else []
        code = next((code for code in codes if isinstance(code, str) and code), "")
    return text[:2000], code


def failure_of(error: Exception) -> NoAnswer:
    """The failure that an error of aiohttp or the operating system stands for."""
    is_slow = isinstance(error, aiohttp.ConnectionTimeoutError)
    if is_slow or isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientHttpProxyError):
        reason = f"no connection within {CONNECT_SECONDS:g} s" if is_slow else _reason(error)
        return NoAnswer("unreachable", f"cannot be reached ({reason})", reason)
    if isinstance(error, aiohttp.NonHttpUrlClientError | ValueError):  # as aiohttp's InvalidURL is
        reason = "not a usable http:// or https:// URL"  # the library's reason may hold a password or the key
        return NoAnswer("url", f"cannot be reached ({reason})", reason)
    reason = _reason(error)
    return NoAnswer("lost", f"cannot be reached ({reason})", reason)


def _reason(error: Exception) -> str:
    """The operating system's reason for a failed connection, if any, else the library's message."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", error)
    if isinstance(cause, ConnectionError) and cause.errno:
        return os.strerror(cause.errno).lower()
    text = getattr(cause, "strerror", None) or getattr(error, "message", None) or error
    return " ".join(str(text).split()) or type(error).__name__
