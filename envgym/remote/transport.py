"""The client's requests to one server: one pool of connections, one deadline for all tries, one line per failure."""

from __future__ import annotations

import asyncio
import http.client
import logging
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from envgym.errors import CallTimeout, ConfigError, DataError, EnvgymError, InvalidOutcome, InvalidStep, ResetNeeded
from envgym.net.client import CONNECT_SECONDS, NoAnswer, read_content
from envgym.net.problems import ProblemBody, main_error
from envgym.net.retries import WAITS, pauses, retry_after
from envgym.net.shared_calls import SharedCalls
from envgym.processes.cancellation import Deadline, start_task

from .access import Access, connection_failure
from .channel import CHANNEL_BODY, CHANNEL_PATH, MAX_MESSAGE, PING_SECONDS, ChannelClient
from .wire import Answer, Method

FIRST_PAUSE = 0.2
"""Seconds before the second try; doubled before each further one."""
LONGEST_PAUSE = 5.0
REPORT_SECONDS = 5.0
"""Seconds between two lines about a server that cannot be reached."""
NO_CHANNEL_SECONDS = 60.0
"""Seconds after which a server without a WebSocket is tried with one again."""

_SAME_HERE = (CallTimeout, ConfigError, DataError, InvalidStep, ResetNeeded)
ENVIRONMENT_ERRORS = {error.__name__: error for error in _SAME_HERE}
"""Errors that are raised here by their own class. Others are not: a `WorkerError` would name the wrong worker."""

ERROR_KINDS = {
    "environment-timeout": "timeout",
    "session-not-found": "session_lost",
    "shutting-down": "connection",
    **dict.fromkeys(("internal-error", "too-slow", "environment-not-found"), "server"),  # it listed the environment
}
"""The kind of `RemoteError` for each kind of problem; any other is `refused`."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class RemoteError(InvalidOutcome):
    """A failed request to a remote environment. Its episode fails with `kind`.

    | kind | what happened | retryable |
    |---|---|---|
    | `connection` | the server cannot be reached, or answers no more | yes |
    | `no_server` | no server has registered, or all have gone | yes |
    | `session_lost` | the server does not know the session (any more): it was restarted, or the lease ran out | yes |
    | `capacity` | no slot became free in time | yes |
    | `timeout` | no answer in time, of the server or of the environment | yes |
    | `server` | the answer is not one of an envgym server, or the server has a defect | yes |
    | `refused` | the server rejects the request: a wrong token, other tasks than it had | no |
    | `environment` | the environment raised | no |
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message, retryable=kind not in ("refused", "environment"))


class ServerFull(RemoteError):
    """The server has no free slot for a session; one may be free in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__("capacity", message)
        self.retry_after = retry_after


@dataclass(slots=True)
class Counters:
    """Counts of a client since its creation."""

    requests: int = 0
    """Requests sent, repeats included."""
    retries: int = 0
    """Repeats among them."""
    failures: int = 0
    """Calls that failed after all retries."""
    heartbeats: int = 0
    """Requests among them that kept sessions alive."""
    dropped_info: int = 0
    """Entries of `info` that JSON could not carry."""


class Transport:
    """Calls one server, and is used within one event loop. Every call may be sent twice: the protocol makes that
    harmless.

    Small requests of sessions share one WebSocket (`channel`): a message there costs much less than a request, and
    sessions need no connection each.
    """

    def __init__(self, url: str, access: Access, counters: Counters) -> None:
        self.url = url
        self.last_answer = 0.0
        """The loop's time of the last answer of any kind."""
        self.lost_at = 0.0
        """The loop's time of the first failed connection since the last answer; 0: none has failed."""
        self._reported_at = 0.0
        self.counters = counters
        redirected = aiohttp.TraceConfig()
        redirected.on_request_redirect.append(_reject_redirect)  # `allow_redirects` does not hold for WebSockets
        # No limit: each running episode has at most one request in flight, and none should wait for another's step.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=access.tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"Content-Type": "application/json", **access.headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[redirected],
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        self._waiting: dict[Deadline, RemoteError | None] = {}
        """The error of each call whose deadline was ended early; None while it was not."""
        self._closed = False
        self._asking: ChannelClient | None = None
        self._dialling: SharedCalls[str, ChannelClient | None] = SharedCalls()
        self._listening: set[asyncio.Task[None]] = set()
        self._no_channel_until = 0.0

    @property
    def is_busy(self) -> bool:
        """Tell whether a call waits for its answer."""
        return bool(self._waiting)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._drop_channel(), return_exceptions=True)
        await self._session.close()

    def give_up(self, seconds: float) -> None:
        """Fail every call that waits: the server has given no sign of life for so long."""
        message = f"the server has given no sign of life for {seconds:.0f} s"
        for deadline in self._waiting:
            self._waiting[deadline] = RemoteError("connection", f"{self.url}: {message}")
            deadline.expire()
        self._drop_channel()

    async def ask(
        self,
        model: type[B],
        method: Method,
        path: str,
        body: bytes | None = None,
        *,
        seconds: float,
        patience: float = 0.0,
    ) -> B:
        """The server's answer as a `model`. Raises as `call` does, and `RemoteError` for any other answer."""
        content = await self.call(method, path, body, seconds=seconds, patience=patience)
        try:
            return model.model_validate_json(content, strict=True)
        except ValidationError as error:
            self.counters.failures += 1
            reason = main_error(error)["msg"].lower()
            message = f"the answer to {method} {path} is not one of an envgym server ({reason}); check the address"
            raise RemoteError("server", f"{self.url}: {message}") from None

    async def call(
        self, method: Method, path: str, body: bytes | None = None, *, seconds: float, patience: float = 0.0
    ) -> bytes:
        """The body of a successful answer, within `seconds` for all tries together.

        A connection that cannot be made, or drops, is tried again until the server has been lost for `patience`
        seconds: calls and episodes that come later do not wait anew. Raises the server's own `EnvgymError` where it
        names one, and else `RemoteError`; `ServerFull` where no slot is free.
        """
        deadline = Deadline(seconds)
        self._waiting[deadline] = None
        try:
            async with deadline:
                return await self._call(method, path, body, patience)
        except TimeoutError:
            self.counters.failures += 1
            message = f"no answer within {seconds:g} s; is the server well, and reachable from here?"
            raise self._waiting[deadline] or RemoteError("timeout", f"{self.url}: {message}") from None
        except ServerFull:
            raise  # no failure: the caller waits for a slot
        except EnvgymError:
            self.counters.failures += 1
            raise
        finally:
            del self._waiting[deadline]

    async def _call(self, method: Method, path: str, body: bytes | None, patience: float) -> bytes:
        """Send a request until it succeeds, or the server has been lost for `patience` seconds. Raises as `call`
        does."""
        clock = asyncio.get_running_loop().time
        waits = pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            if self._closed:  # say, by a server that has left permanently
                raise RemoteError("connection", f"{self.url}: the connection was closed here")
            self.counters.requests += 1
            try:
                answer = await self._send(method, path, body)
                self.last_answer = clock()
                if self.lost_at and answer.status not in (502, 503, 504):  # those are a proxy's, without its server
                    self.lost_at = 0.0
                    WAITS.pop(self.url, None)
                if answer.status < 400:
                    return answer.content
                failure = self._error_of(method, path, answer)
                if answer.status != 429 or isinstance(failure, ServerFull):
                    raise failure
                wait = answer.retry_after  # a proxy's 429, which may come as often as the deadline allows
            except RemoteError as error:
                if error.kind != "connection":
                    raise
                logger.debug("%s %s: %s", method, path, error)
                failed_at = clock()
                if not self.lost_at:
                    self.lost_at = self._reported_at = failed_at
                wait, seconds_left = next(waits), self.lost_at + patience - failed_at
                if wait > seconds_left:
                    raise
                WAITS[self.url] = failed_at + seconds_left
                if failed_at - self._reported_at >= REPORT_SECONDS:
                    self._reported_at = failed_at
                    logger.warning("%s cannot be reached: its episodes fail in %.0f s", self.url, seconds_left)
            self.counters.retries += 1
            await asyncio.sleep(wait)

    def _error_of(self, method: Method, path: str, answer: Answer) -> EnvgymError:
        """The exception for an answer of status 400 or above."""
        if answer.content_type == "application/problem+json":
            try:
                return as_error(self.url, ProblemBody.model_validate_json(answer.content))
            except ValidationError:
                pass
        kind = "connection" if answer.status in (502, 503, 504) else "server"  # a proxy without its server
        phrase = http.client.responses.get(answer.status, "")
        message = f"answered {method} {path} with {answer.status} {phrase}".rstrip() + ", not as an envgym server would"
        return RemoteError(kind, f"{self.url}: {message}; check the address, its port and its path")

    async def _send(self, method: Method, path: str, body: bytes | None) -> Answer:
        """Send a request once, over the channel if possible. Raises `RemoteError` of kind `connection` if it fails."""
        if path.startswith("/v1/sessions") and len(body or b"") <= CHANNEL_BODY:
            channel = await self._channel()
            if channel is not None:
                try:
                    answer = await channel.ask(method, path, body or b"")
                except ConnectionError as error:
                    raise self._connection_error(error) from None
                if answer.status != 413:  # too large an answer for the channel
                    return answer
        try:
            async with self._session.request(method, self.url + path, data=body, allow_redirects=False) as response:
                content = await read_content(response)
        except aiohttp.InvalidURL:
            raise ConfigError(f"{self.url}: not a usable URL; it looks like http://127.0.0.1:8000/NAME") from None
        except NoAnswer as failure:
            raise RemoteError("server", f"{self.url}: {failure}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._connection_error(error) from None
        retry_after = response.headers.get("Retry-After", 1.0) if response.status == 429 else 1.0
        return Answer(response.status, response.content_type, content, _pause(retry_after))

    async def _channel(self) -> ChannelClient | None:
        """The channel; None where the server, or a proxy before it, takes no WebSocket."""
        if self._asking is not None and self._asking.is_open:
            return self._asking
        if asyncio.get_running_loop().time() < self._no_channel_until:
            return None
        closed = self._connection_error(ConnectionError("it was closed here"))
        return await self._dialling.result(CHANNEL_PATH, self._dial, closed=closed)

    async def _dial(self) -> ChannelClient | None:
        """Open the channel; None, and no attempt for a while, if the server takes no WebSocket."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await self._session.ws_connect(
                    self.url + CHANNEL_PATH, heartbeat=PING_SECONDS, max_msg_size=MAX_MESSAGE
                )
        except aiohttp.ClientResponseError as error:
            self._disable_channel(f"it answers {error.status}")
            return None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._connection_error(error) from None
        except TimeoutError:
            self._disable_channel(f"no answer within {CONNECT_SECONDS:g} s")
            return None
        asking = self._asking = ChannelClient(socket)
        start_task(self._listen(asking), self._listening)
        return asking

    def _disable_channel(self, why: str) -> None:
        logger.debug("%s takes no WebSocket (%s): every session gets a connection", self.url, why)
        self._no_channel_until = asyncio.get_running_loop().time() + NO_CHANNEL_SECONDS

    async def _listen(self, asking: ChannelClient) -> None:
        """Deliver the answers of a channel until it ends; disable channels if there were none."""
        try:
            has_answers = await asking.listen()
        except ValueError:
            logger.warning("%s sent a malformed answer; the connection is closed", self.url)
            has_answers = False
        if not has_answers:  # a proxy accepts WebSockets and cannot carry them
            self._disable_channel("it carried nothing")

    def _drop_channel(self) -> list[asyncio.Task[Any]]:
        for task in self._listening:
            task.cancel()
        return [*self._listening, *self._dialling.cancel()]

    def _connection_error(self, error: Exception) -> RemoteError:
        return RemoteError("connection", f"{self.url}: {connection_failure(error)}")


async def _reject_redirect(
    session: aiohttp.ClientSession, context: object, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    """Raise for a redirect: only configured and allowed servers are dialled."""
    response = redirect.response
    response.close()
    raise aiohttp.TooManyRedirects(response.request_info, (response,), status=response.status)


def as_error(url: str, problem: ProblemBody) -> EnvgymError:
    """The exception for a problem: an error of envgym's that the environment raised, else a `RemoteError`."""
    message = f"{url}: {problem.detail}"
    if problem.kind == "environment-error":
        if problem.failure:  # the environment itself made the episode invalid
            return InvalidOutcome(problem.failure, problem.detail, retryable=problem.retryable)
        if problem.error in ENVIRONMENT_ERRORS:
            return ENVIRONMENT_ERRORS[problem.error](problem.detail)
        return RemoteError("environment", f"{url}: the environment raised {problem.error}: {problem.detail}")
    if problem.kind in ("server-full", "quota-exceeded"):
        return ServerFull(message, _pause(problem.retry_after or 1.0))
    if problem.kind == "unauthorized":
        message += " (the setting token_file, --token-file or --register-token-file names the file that holds it)"
    return RemoteError(ERROR_KINDS.get(problem.kind, "refused"), message)


def _pause(value: str | float) -> float:
    """Seconds to wait from a `Retry-After` value, within bounds."""
    return min(max(0.1, retry_after(str(value))), 60.0)
