"""One JSON request to a service, tried again where that may help, with every failure as one clear line."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from envgym.errors import InvalidOutcome
from envgym.isolation.deadline import pause_timeouts

FIRST_PAUSE = 0.5
"""Seconds before the second try; doubled before each further one, and shortened by up to a half at random."""
LONGEST_PAUSE = 60.0
"""Seconds that a server may ask to wait (`Retry-After`) before it is given up on."""
CONNECT_SECONDS = 10.0
MAX_ANSWER = 16 * 2**20
"""Bytes an answer may have."""
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses of a server, or of a proxy before it, that cannot answer just now."""


class Refused(InvalidOutcome):
    """The server understood the request and will not answer it; another try would not help. `status` is its own, and
    so is `code`, its word for what is wrong, where it gives one."""

    def __init__(self, message: str, status: int, code: str = "") -> None:
        super().__init__("service", message)
        self.status = status
        self.code = code


class Unreachable(InvalidOutcome):
    """Nobody answers at the address: no such host, nothing that listens, no secure connection."""


class JsonCaller:
    """Posts JSON to one service, from one event loop.

    `secret` is sent as a bearer token and appears in no message. `requests_per_minute` spaces requests evenly.
    When a server asks for a pause, all requests keep to it. No `Deadline` moves on while a request waits for either.
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
        self._name = name
        self._counters = counters
        self._secret = secret
        self._tries = tries
        self._slots = asyncio.Semaphore(concurrency)
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._line = asyncio.Lock()
        self._next_start = 0.0
        self._not_before = 0.0
        self._jitter = random.Random()
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def post(
        self, url: str, body: Any, *, wrong: Callable[[Any], str] = lambda answer: "", tries: int | None = None
    ) -> Any:
        """The parsed answer. `wrong` says what makes an answer no answer at all (`answers without …`), or nothing; then
        it is asked again. `tries` replaces the caller's own number.

        Raises `InvalidOutcome` of kind `service`, after the last try.
        """
        tries = tries or self._tries
        async with self._slots:
            for attempt in range(1, tries + 1):
                await self._turn()
                self._counters["requests"] += 1
                problem, wait, reached = "", 0.0, True
                try:
                    async with asyncio.timeout(self._timeout):
                        answer = await self._try(url, body)
                        if problem := wrong(answer):
                            raise _TryAgain(problem)
                        return answer
                except aiohttp.ConnectionTimeoutError:
                    problem, reached = f"cannot be reached (no connection within {CONNECT_SECONDS:g} s)", False
                except TimeoutError:
                    problem = f"gave no answer within {self._timeout:g} s"
                except _TryAgain as failure:
                    problem, wait = str(failure), failure.wait
                except (aiohttp.ClientError, OSError) as error:
                    problem = f"cannot be reached ({_reason(error)})"
                    reached = not isinstance(error, aiohttp.ClientConnectorError)
                except Refused:
                    self._counters["failures"] += 1
                    raise
                if attempt == tries or wait > LONGEST_PAUSE:
                    break
                self._counters["retries"] += 1
                pause = FIRST_PAUSE * 2 ** (attempt - 1) * (1 - 0.5 * self._jitter.random())
                await asyncio.sleep(min(pause, LONGEST_PAUSE))  # for what was asked for, `_turn` waits
        self._counters["failures"] += 1
        tried = f" in {attempt} tries" if attempt > 1 else ""
        outcome = InvalidOutcome if reached else Unreachable
        raise outcome("service", self._hide(f"{self._name} {problem}{tried}"), retryable=True)

    async def _turn(self) -> None:
        """Wait until the rate limit, and the pause a server asked for, allow a request."""
        with pause_timeouts():
            async with self._line:  # in the order of arrival; who gives up leaves it, and takes no request's place
                start = time.monotonic()
                while (later := max(self._next_start, self._not_before)) > start:
                    start = later
                    await _sleep_until(start)
                self._next_start = start + self._interval

    async def _try(self, url: str, body: Any) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        data = json.dumps(body, default=str)  # a label from Parquet may be a date
        # No redirects: the key and the question are meant for this address alone.
        async with self._session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            content = await _read(response)
            if response.status in TRY_AGAIN:
                wait = _retry_after(response.headers.get("Retry-After", ""))
                if wait <= LONGEST_PAUSE:
                    self._not_before = max(self._not_before, time.monotonic() + wait)
                asked = f" and asks to wait {wait:.0f} s" if wait > LONGEST_PAUSE else ""
                raise _TryAgain(f"answers {response.status} {_said(content)}{asked}", wait)
            if not 200 <= response.status < 300:
                hint = "; check the key or token" if response.status in (401, 403) else ""
                raise Refused(
                    self._hide(f"{self._name} answers {response.status} {_said(content)}{hint}"),
                    response.status,
                    _code(content),
                )
            try:
                return json.loads(content)
            except (ValueError, RecursionError):  # what a proxy says in the server's place, often
                raise _TryAgain("answers with something that is not JSON") from None

    def _hide(self, message: str) -> str:
        return message.replace(self._secret, "[secret]") if self._secret else message


class _TryAgain(Exception):
    """A try failed; `wait` seconds were asked for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


async def _sleep_until(moment: float) -> None:
    if (pause := moment - time.monotonic()) > 0:
        await asyncio.sleep(pause)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        content += chunk
        if len(content) > MAX_ANSWER:
            raise _TryAgain(f"answers with more than {MAX_ANSWER // 2**20} MiB")
    return bytes(content)


def _retry_after(value: str) -> float:
    """Seconds that a `Retry-After` header (seconds or a date) asks for; 0 where it says nothing usable."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0


def _said(content: bytes) -> str:
    """The part of an error's body that a person can act on."""
    text = content[:2000].decode("utf-8", "replace")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body.get("message", "")))
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error)
    text = " ".join(text.split())[:200]
    return f"({text})" if text else "(no reason given)"


def _code(content: bytes) -> str:
    """An error's code, in the form that OpenAI gave it."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    error = body.get("error", body) if isinstance(body, dict) else None
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return code if isinstance(code, str) else ""


def _reason(error: BaseException) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
