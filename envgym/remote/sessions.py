"""The server's sessions: one episode each, where a repeated request is carried out once."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence

from envgym.env import CheckedEnv
from envgym.net.problems import Problem, ProblemKind
from envgym.net.server import RETRY_SECONDS
from envgym.net.tokens import ServerClient
from envgym.processes.cancellation import UsersCode, is_shutdown, start_task
from envgym.types import Action

from .admission import ServerLimits
from .encoding import encodable_info, encode
from .metrics import ServerMetrics
from .served_env import ServedEnv
from .wire import Opened, Opening, Step, Stepped

CLOSE_SECONDS = 10.0
"""Time limit for an environment to stop and to close."""

logger = logging.getLogger(__name__)


class EnvSession:
    """One environment instance, and the answers to requests that may be repeated.

    `reset` and each step run in the task of their first request, which only the session's end cancels: it continues
    when its connection drops, and a repeated request waits for the same answer.
    """

    def __init__(self, env: ServedEnv, opening: Opening, limits: ServerLimits, metrics: ServerMetrics) -> None:
        self.served = env
        self.id = opening.session_id
        self._opening = opening
        self._limits = limits
        self._metrics = metrics
        self._steps, self._step_seconds = metrics.steps.labels(env.name), metrics.step_seconds.labels(env.name)
        self._last_used = time.monotonic()
        self._env: CheckedEnv | None = None
        self._step_id = -1
        self._action: Action | None = None
        self._open_answer: asyncio.Future[bytes] | None = None
        self._last_answer: asyncio.Future[bytes] | None = None
        """The answer to the newest request, done or not."""
        self._working: asyncio.Task[object] | None = None
        """The request in whose task the environment is at work."""
        self._is_closed = False

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request or the end of the environment's last work; 0 while it works."""
        return time.monotonic() - self._last_used if self._working is None else 0.0

    def touch(self) -> None:
        """Restart the lease."""
        self._last_used = time.monotonic()

    def is_opened_by(self, env: ServedEnv, opening: Opening) -> bool:
        """Tell whether this session was opened with the arguments of `opening`."""
        return self.served is env and opening.model_copy(update={"env": self._opening.env}) == self._opening

    async def open(self) -> bytes:
        """Make the instance and reset it, once; returns an encoded `Opened`."""
        self.touch()
        if self._open_answer is None:
            self._open_answer = self._last_answer = asyncio.get_running_loop().create_future()
            return await self._work(self._open(self._opening), self._open_answer)
        return await self._stored_answer(self._open_answer)

    async def step(self, step: Step) -> bytes:
        """Take a step, or return the stored answer if its `step_id` was already taken; an encoded `Stepped`."""
        self.touch()
        assert self._last_answer is not None
        if step.step_id == self._step_id:
            if step.action != self._action:
                raise Problem(409, "step-conflict", f"step {step.step_id} was taken already, with another action")
            return await self._stored_answer(self._last_answer)
        if step.step_id != self._step_id + 1 or not self._last_answer.done():
            raise Problem(409, "step-conflict", f"step {step.step_id} cannot follow step {self._step_id}")
        self._step_id, self._action = step.step_id, step.action
        self._last_answer = asyncio.get_running_loop().create_future()
        return await self._work(self._take_step(step.action), self._last_answer)

    async def _work(self, work: Awaitable[bytes], answer: asyncio.Future[bytes]) -> bytes:
        """The result of the environment's work, stored as `answer` for repeated requests."""
        task = self._working = asyncio.current_task()
        try:
            result = await work
        except asyncio.CancelledError as error:
            while task is not None and task.uncancel():
                pass  # the work was cancelled; the request still needs an answer
            if self._is_closed:
                raise self._closed_problem() from None
            label = "reset" if self._step_id < 0 else f"step {self._step_id}"
            problem = self.served.problem_of(error, label)  # the environment cancelled the task that it ran in
            self._store_error(answer, problem)
            raise problem from None
        except Exception as error:
            self._store_error(answer, error)
            raise
        else:
            answer.set_result(result)
            return result
        finally:
            self._working = None
            if not answer.done():
                answer.cancel()
            self.touch()

    def _store_error(self, answer: asyncio.Future[bytes], error: Exception) -> None:
        answer.set_exception(error)
        answer.exception()  # marks it as retrieved: no request may repeat it

    async def _stored_answer(self, answer: asyncio.Future[bytes]) -> bytes:
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                raise self._closed_problem() from None
            raise

    def _closed_problem(self) -> Problem:
        return Problem(404, "session-not-found", f"session {self.id} was closed meanwhile")

    async def close(self) -> None:
        """Stop the environment's work and close it, in any state."""
        self._is_closed = True
        if self._working is not None and self._last_answer is not None:
            self._working.cancel()
            await asyncio.wait([self._last_answer], timeout=CLOSE_SECONDS)
        if self._env is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._env.close()
            # The session is over either way, no client waits for the error, and nothing else cancels this task.
            except BaseException as error:
                if not isinstance(error, asyncio.CancelledError) and is_shutdown(error):
                    raise
                logger.exception("session %s: the environment did not close", self.id)

    async def _open(self, opening: Opening) -> bytes:
        """Make the instance and reset it; an encoded `Opened`."""

        async def reset() -> bytes:
            env = self._env = self.served.spec.make()
            options = {**opening.options, "task": opening.task}
            observation, info = await env.reset(seed=opening.seed, options=options)
            assert env.task is not None
            sendable, dropped = encodable_info(info)
            lease = self._limits.lease_seconds
            answer = Opened(task=env.task, observation=observation, info=sendable, dropped=dropped, lease_seconds=lease)
            return encode(answer)

        return await self.served.call(reset(), "reset", self._metrics.reset_seconds)

    async def _take_step(self, action: Action) -> bytes:
        """Take a step; an encoded `Stepped`. Raises a `Problem` for an exception of the environment."""
        if self._env is None:  # its constructor raised, which the client knows
            raise Problem(409, "step-conflict", "the session did not open")
        start = time.monotonic()
        try:
            with UsersCode() as stepped:
                observation, reward, terminated, truncated, info = await self._env.step(action)
                sendable, dropped = encodable_info(info)
                ends = {"terminated": terminated, "truncated": truncated}
                return encode(Stepped(observation=observation, reward=reward, **ends, info=sendable, dropped=dropped))
            raise self.served.problem_of(stepped.error, f"step {self._step_id}")
        finally:
            self._steps.inc()
            self._step_seconds.observe(time.monotonic() - start)


class Sessions:
    """All sessions of a server, by client and by the id that the client chose."""

    def __init__(self, environments: Mapping[str, ServedEnv], limits: ServerLimits, metrics: ServerMetrics) -> None:
        self._environments = environments
        self._limits = limits
        self._metrics = metrics
        self._sessions: dict[tuple[str, str], EnvSession] = {}
        self._by_env: Counter[str] = Counter()
        self._by_client: Counter[str] = Counter()
        for name in environments:
            metrics.open_sessions.labels(name).set_function(functools.partial(self._by_env.__getitem__, name))
        self.is_draining = False
        self._session_closed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def environment(self, name: str) -> ServedEnv:
        """The environment called `name`, or the only one for an empty name. Raises a 404 `Problem`."""
        if not name and len(self._environments) == 1:
            return next(iter(self._environments.values()))
        env = self._environments.get(name)
        if env is None:
            names = ", ".join(self._environments)
            raise Problem(404, "environment-not-found", f"there is no environment {name!r} here; there is {names}")
        return env

    def open(self, client: ServerClient, opening: Opening) -> EnvSession:
        """The session for `opening`: a new one, or the one that an earlier copy of the request opened."""
        env = self.environment(opening.env)
        session = self._sessions.get((client.name, opening.session_id))
        if session is not None:
            if not session.is_opened_by(env, opening):
                detail = f"session {opening.session_id} exists and was opened differently"
                raise Problem(409, "session-conflict", detail)
            return session
        if self.is_draining:
            raise Problem(503, "shutting-down", "the server is shutting down", retry_after=RETRY_SECONDS)
        self._check_capacity(client, env)
        session = EnvSession(env, opening, self._limits, self._metrics)
        self._sessions[client.name, opening.session_id] = session
        self._by_client[client.name] += 1
        self._by_env[env.name] += 1
        self._metrics.opened_sessions.labels(env.name).inc()
        return session

    def _check_capacity(self, client: ServerClient, env: ServedEnv) -> None:
        """Raise a `Problem` if the client's quota is used up or no slot is free."""
        quota, limit, bound = client.max_sessions, self._limits.max_sessions, env.spec.concurrency_bound()
        if quota is not None and self._by_client[client.name] >= quota:
            raise _full_problem("quota-exceeded", f"this client's quota of {quota} sessions is used up")
        if self._by_env.total() >= limit:  # including sessions that are being closed
            raise _full_problem("server-full", f"all {limit} sessions of this server are taken")
        if bound is not None and self._by_env[env.name] >= bound:
            raise _full_problem("server-full", f"all {bound} sessions of environment {env.name} are taken")

    def get(self, client: ServerClient, session_id: str) -> EnvSession:
        """One of the client's sessions. Raises a 404 `Problem`, of other clients' sessions too."""
        session = self._sessions.get((client.name, session_id))
        if session is None:
            detail = f"no session {session_id}: closed, or not heard of for {self._limits.lease_seconds:g} s"
            raise Problem(404, "session-not-found", detail)
        return session

    def renew(self, client: ServerClient, session_ids: Sequence[str]) -> tuple[str, ...]:
        """Renew the leases of `session_ids`; returns the ids of open sessions."""
        sessions = [self._sessions.get((client.name, session_id)) for session_id in session_ids]
        for session in sessions:
            if session is not None:
                session.touch()
        return tuple(session.id for session in sessions if session is not None)

    async def close(self, client: str, session_id: str, closed_by: str = "client") -> None:
        """Close a session. An unknown one is no error, since the request may be a repeated one."""
        session = self._sessions.pop((client, session_id), None)
        if session is None:
            return
        # A separate task: the environment is closed completely even if the caller stops waiting.
        closing = start_task(self._end(session, client, closed_by), self._closing)
        await asyncio.shield(closing)

    async def _end(self, session: EnvSession, client: str, closed_by: str) -> None:
        """Close a session that is no longer listed, then free its slot."""
        try:
            await session.close()
        finally:
            self._by_client[client] -= 1
            self._by_env[session.served.name] -= 1
            self._metrics.closed_sessions.labels(session.served.name, closed_by).inc()
            self._session_closed.set()

    async def wait_until_empty(self) -> None:
        """Wait until no session is open."""
        while self._sessions:
            self._session_closed.clear()
            await self._session_closed.wait()

    async def close_all(self) -> None:
        """Close every session, and wait for the ones that are being closed."""
        await asyncio.gather(*(self.close(*key, closed_by="end") for key in list(self._sessions)))
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def close_expired(self) -> None:
        """Close the sessions whose leases have run out."""
        lease = self._limits.lease_seconds
        expired = [key for key, session in self._sessions.items() if session.idle_seconds > lease]
        if expired:
            logger.warning("closing sessions not heard of for %g s: %d", lease, len(expired))
        await asyncio.gather(*(self.close(*key, closed_by="lease") for key in expired))


def _full_problem(kind: ProblemKind, detail: str) -> Problem:
    return Problem(429, kind, detail, retry_after=RETRY_SECONDS)
