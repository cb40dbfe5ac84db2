"""JSON requests to a service over httpx: one policy for tries and rates, and every failure as one clear line.

API keys and tokens are read from a variable or a file; none is ever a setting.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, InvalidOutcome, needs
from envgym.processes.deadline import pause_timeouts

with needs("httpx", "api", "a service over HTTP"):
    import httpx

FIRST_PAUSE = 0.5
"""Seconds before the second try; doubled before each further one, and shortened by up to a half at random."""
LONGEST_PAUSE = 60.0
"""Seconds that a server may ask to wait (`Retry-After`) before it is given up on."""
CONNECT_SECONDS = 10.0
MAX_ANSWER = 16 * 2**20
"""Bytes an answer may have."""
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses of a server, or of a proxy before it, that cannot answer just now."""
HEADERS = ("host", "content-length", "content-type", "accept", "accept-encoding", "connection", "user-agent")
"""Headers of a request that are sent, beside its own key or token."""


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
        self.name = name
        self.counters = counters
        self._secret = secret
        self._tries = tries
        self._slots = asyncio.Semaphore(concurrency)
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._line = asyncio.Lock()
        self._next_start = 0.0
        self._not_before = 0.0
        self._jitter = random.Random()
        self._timeout = timeout
        # Neither redirects nor the environment's proxies and passwords: key and question are for this address alone.
        self.client = httpx.AsyncClient(
            transport=_Transport(),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,
            event_hooks={"request": [self._set_headers]},
        )

    async def close(self) -> None:
        await self.client.aclose()

    async def post(
        self, url: str, body: Any, *, wrong: Callable[[Any], str] = lambda answer: "", tries: int | None = None
    ) -> Any:
        """The parsed answer. `wrong` says what makes an answer no answer at all (`answers without …`), or nothing; then
        it is asked again. `tries` replaces the caller's own number.

        Raises `InvalidOutcome` of kind `service`, after the last try.
        """
        content = json.dumps(body, default=str).encode()  # a label from Parquet may be a date
        tries = tries or self._tries
        async with self._slots:
            for attempt in range(1, tries + 1):
                await self._wait_for_turn()
                self.counters["requests"] += 1
                problem, wait, outcome = "", 0.0, InvalidOutcome
                try:
                    async with asyncio.timeout(self._timeout):
                        response = await self._send(url, content)
                    answer = self._parsed(response)
                    if problem := wrong(answer):
                        raise _TryAgain(problem)
                    return answer
                except TimeoutError:
                    problem = f"gave no answer within {self._timeout:g} s"
                except _TryAgain as failure:
                    problem, wait = str(failure), failure.wait
                except httpx.ConnectTimeout:
                    problem, outcome = f"cannot be reached (no connection within {CONNECT_SECONDS:g} s)", Unreachable
                except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                    problem = f"cannot be reached ({_reason(error)})"
                    outcome = Unreachable if isinstance(error, httpx.ConnectError) else outcome
                except Refused:
                    self.counters["failures"] += 1
                    raise
                if attempt == tries or wait > LONGEST_PAUSE:
                    break
                self.counters["retries"] += 1
                pause = FIRST_PAUSE * 2 ** (attempt - 1) * (1 - 0.5 * self._jitter.random())
                await asyncio.sleep(min(pause, LONGEST_PAUSE))  # for what was asked for, `_wait_for_turn` waits
        self.counters["failures"] += 1
        tried = f" in {attempt} tries" if attempt > 1 else ""
        raise outcome("service", self._hide(f"{self.name} {problem}{tried}"), retryable=True)

    async def _send(self, url: str, content: bytes) -> httpx.Response:
        return await self.client.post(url, content=content, headers={"Content-Type": "application/json"})

    async def _set_headers(self, request: httpx.Request) -> None:
        """Leave out what a library adds of its own (other credentials from `OPENAI_…` variables among it)."""
        for name in set(request.headers) - set(HEADERS):
            del request.headers[name]
        if self._secret:
            request.headers["Authorization"] = f"Bearer {self._secret}"

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit, and the pause a server asked for, allow a request."""
        with pause_timeouts():
            async with self._line:  # in the order of arrival; who gives up leaves it, and takes no request's place
                start = time.monotonic()
                while (later := max(self._next_start, self._not_before)) > start:
                    start = later
                    await _sleep_until(start)
                self._next_start = start + self._interval

    def _parsed(self, response: httpx.Response) -> Any:
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError):  # what a proxy says in the server's place, often
            body = None
        if response.is_success:
            if body is None:
                raise _TryAgain("answers with something that is not JSON")
            return body
        reason, code = _problem(body, response.content)
        if response.status_code in TRY_AGAIN:
            wait = _retry_after(response.headers.get("Retry-After", ""))
            if wait <= LONGEST_PAUSE:
                self._not_before = max(self._not_before, time.monotonic() + wait)
            asked = f" and asks to wait {wait:.0f} s" if wait > LONGEST_PAUSE else ""
            raise _TryAgain(f"answers {response.status_code} {reason}{asked}", wait)
        hint = "; check the key or token" if response.status_code in (401, 403) else ""
        message = f"{self.name} answers {response.status_code} {reason}{hint}"
        raise Refused(self._hide(message), response.status_code, code)

    def _hide(self, message: str) -> str:
        return message.replace(self._secret, "[secret]") if self._secret else message


def api_key(variable: str, api: str) -> str:
    """The key that the environment variable holds; empty where none is named. Raises `ConfigError` where it is not
    set or no key; `api` says in the message whose key it is."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{api}: the environment variable {variable}, which should hold its API key, is not set")
    if not _is_token(key):
        raise ConfigError(f"{api}: the environment variable {variable} must hold one API key and nothing else")
    return key


def read_token(file: str) -> str:
    """The token in a file. Raises `ConfigError` where there is none."""
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"token file {file} cannot be read: {reason}") from None
    if not token or not _is_token(token):
        raise ConfigError(f"token file {file} must hold one token and nothing else")
    return token


def _is_token(text: str) -> bool:
    """True for a text that can stand in a header."""
    return text.isascii() and not any(character.isspace() for character in text)


class _TryAgain(Exception):
    """A try failed; `wait` seconds were asked for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class _Transport(httpx.AsyncBaseTransport):
    """Connections to one server, and answers of up to `MAX_ANSWER` bytes, decompressed.

    Each connection has a pool of its own: httpx's looks at all of its connections at each request, which with 256 of
    them took 18 ms.
    """

    def __init__(self) -> None:
        self._verify = ssl.create_default_context()
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._idle.pop() if self._idle else httpx.AsyncHTTPTransport(self._verify, trust_env=False)
        try:
            response = await connection.handle_async_request(request)
            try:
                content = await _read(response)
            finally:
                await response.aclose()
        finally:
            self._idle.append(connection)
        headers = {name: response.headers[name] for name in ("Retry-After", "Location") if name in response.headers}
        return httpx.Response(response.status_code, headers=headers, content=content)

    async def aclose(self) -> None:
        await asyncio.gather(*(connection.aclose() for connection in self._idle))


async def _read(response: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_ANSWER:
            raise _TryAgain(f"answers with more than {MAX_ANSWER // 2**20} MiB")
    return bytes(content)


async def _sleep_until(moment: float) -> None:
    if (pause := moment - time.monotonic()) > 0:
        await asyncio.sleep(pause)


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


def _problem(body: Any, content: bytes) -> tuple[str, str]:
    """The part of an error's body that a person can act on, and its code in the form that OpenAI gave it."""
    text, code = content[:2000].decode("utf-8", "replace"), None
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body.get("message", "")))
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        details = body.get("error", body)
        code = (details.get("code") or details.get("type")) if isinstance(details, dict) else None
    text = " ".join(text.split())[:200]
    return f"({text})" if text else "(no reason given)", code if isinstance(code, str) else ""


def _reason(error: BaseException) -> str:
    """The system's reason for a failed connection, where there is one below what the library says."""
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
