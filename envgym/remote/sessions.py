"""The server's sessions: one episode each, where a request that is sent again is never carried out again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence

from envgym.env import CheckedEnv
from envgym.env.boundary import UsersCode
from envgym.net.problems import Problem, ProblemKind
from envgym.net.server import RETRY_SECONDS
from envgym.net.tokens import ServerClient
from envgym.processes.cancellation import is_shutdown
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
    """One environment instance, and the answers to the requests that may come again.

    `reset` and each step are done in the task of the request that asked first, which nothing but the session's end
    cancels: it goes on when its connection drops, and the repeated request waits for the same answer.
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
        self._opened: asyncio.Future[bytes] | None = None
        self._newest: asyncio.Future[bytes] | None = None
        """The answer to the newest request, done or not."""
        self._working: asyncio.Task[object] | None = None
        """The request in whose task the environment is at work."""
        self._is_closed = False

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request, or since the environment was last at work; 0 while it is."""
        return time.monotonic() - self._last_used if self._working is None else 0.0

    def touch(self) -> None:
        """The lease begins anew."""
        self._last_used = time.monotonic()

    def opened_by(self, env: ServedEnv, opening: Opening) -> bool:
        """Tell whether `opening` asks for what this session was opened with."""
        return self.served is env and _asked(self._opening) == _asked(opening)

    async def open(self) -> bytes:
        """Make the instance and reset it, once; gives an encoded `Opened`."""
        self.touch()
        if self._opened is None:
            self._opened = self._newest = asyncio.get_running_loop().create_future()
            return await self._work(self._open(self._opening), self._opened)
        return await self._again(self._opened)

    async def step(self, step: Step) -> bytes:
        """Take one step, now, or before if it is asked for again; gives an encoded `Stepped`."""
        self.touch()
        assert self._newest is not None
        if step.step_id == self._step_id:
            if step.action != self._action:
                raise Problem(409, "step-conflict", f"step {step.step_id} was taken already, with another action")
            return await self._again(self._newest)
        if step.step_id != self._step_id + 1 or not self._newest.done():
            raise Problem(409, "step-conflict", f"step {step.step_id} cannot follow step {self._step_id}")
        self._step_id, self._action = step.step_id, step.action
        self._newest = asyncio.get_running_loop().create_future()
        return await self._work(self._take(step.action), self._newest)

    async def _work(self, work: Awaitable[bytes], answer: asyncio.Future[bytes]) -> bytes:
        """The result of the environment's work, kept as `answer` for those who ask again."""
        task = self._working = asyncio.current_task()
        try:
            result = await work
        except asyncio.CancelledError as error:
            while task is not None and task.uncancel():
                pass  # what was cancelled is the work; the request is still to be answered
            if self._is_closed:
                raise self._closed_meanwhile() from None
            what = "reset" if self._step_id < 0 else f"step {self._step_id}"
            problem = self.served.raised(error, what)  # the environment cancelled the task that it ran in
            self._keep(answer, problem)
            raise problem from None
        except Exception as error:
            self._keep(answer, error)
            raise
        else:
            answer.set_result(result)
            return result
        finally:
            self._working = None
            if not answer.done():
                answer.cancel()
            self.touch()

    def _keep(self, answer: asyncio.Future[bytes], error: Exception) -> None:
        answer.set_exception(error)
        answer.exception()  # nobody may ask again

    async def _again(self, answer: asyncio.Future[bytes]) -> bytes:
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                raise self._closed_meanwhile() from None
            raise

    def _closed_meanwhile(self) -> Problem:
        return Problem(404, "session-not-found", f"session {self.id} was closed meanwhile")

    async def close(self) -> None:
        """Stop what runs and close the environment, whatever state it is in."""
        self._is_closed = True
        if self._working is not None and self._newest is not None:
            self._working.cancel()
            await asyncio.wait([self._newest], timeout=CLOSE_SECONDS)
        if self._env is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._env.close()
            # The session is over either way, its client has nobody to tell, and nobody else cancels this task.
            except BaseException as error:
                if not isinstance(error, asyncio.CancelledError) and is_shutdown(error):
                    raise
                logger.exception("session %s: the environment did not close", self.id)

    async def _open(self, opening: Opening) -> bytes:
        async def reset() -> bytes:
            env = self._env = self.served.spec.make()
            options = {**opening.options, "task": opening.task}
            observation, info = await env.reset(seed=opening.seed, options=options)
            assert env.task is not None
            kept, dropped = encodable_info(info)
            lease = self._limits.lease_seconds
            opened = Opened(task=env.task, observation=observation, info=kept, dropped=dropped, lease_seconds=lease)
            return encode(opened)

        return await self.served.call(reset(), "reset", self._metrics.reset_seconds)

    async def _take(self, action: Action) -> bytes:
        if self._env is None:  # its constructor raised, and the client was told
            raise Problem(409, "step-conflict", "the session did not open")
        began = time.monotonic()
        try:
            with UsersCode() as stepped:
                observation, reward, terminated, truncated, info = await self._env.step(action)
                kept, dropped = encodable_info(info)
                ends = {"terminated": terminated, "truncated": truncated}
                return encode(Stepped(observation=observation, reward=reward, **ends, info=kept, dropped=dropped))
            raise self.served.raised(stepped.error, f"step {self._step_id}")
        finally:
            self._steps.inc()
            self._step_seconds.observe(time.monotonic() - began)


def _asked(opening: Opening) -> tuple[object, ...]:
    return opening.seed, opening.task, opening.options


class Sessions:
    """All sessions of a server, by their clients and the ids those gave them."""

    def __init__(self, environments: Mapping[str, ServedEnv], limits: ServerLimits, metrics: ServerMetrics) -> None:
        self._environments = environments
        self._limits = limits
        self._metrics = metrics
        self._sessions: dict[tuple[str, str], EnvSession] = {}
        self._by_env: Counter[str] = Counter()
        self._by_client: Counter[str] = Counter()
        self.draining = False
        self._closed_one = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def open_by_env(self) -> dict[str, float]:
        """The number of sessions of each environment."""
        return {name: float(self._by_env[name]) for name in self._environments}

    def environment(self, name: str) -> ServedEnv:
        """The environment called `name`; without one the only one there is. Raises a 404 `Problem`."""
        if not name and len(self._environments) == 1:
            return next(iter(self._environments.values()))
        found = self._environments.get(name)
        if found is None:
            known = ", ".join(self._environments)
            raise Problem(404, "environment-not-found", f"there is no environment {name!r} here; there is {known}")
        return found

    def open(self, client: ServerClient, opening: Opening) -> EnvSession:
        """The session `opening` asks for: a new one, or the one it opened when it came before."""
        env = self.environment(opening.env)
        session = self._sessions.get((client.name, opening.session_id))
        if session is not None:
            if not session.opened_by(env, opening):
                detail = f"session {opening.session_id} exists and was opened differently"
                raise Problem(409, "session-conflict", detail)
            return session
        if self.draining:
            raise Problem(503, "shutting-down", "the server is shutting down", retry_after=RETRY_SECONDS)
        self._check_room(client, env)
        session = EnvSession(env, opening, self._limits, self._metrics)
        self._sessions[client.name, opening.session_id] = session
        self._by_client[client.name] += 1
        self._by_env[env.name] += 1
        self._metrics.opened.labels(env.name).inc()
        return session

    def _check_room(self, client: ServerClient, env: ServedEnv) -> None:
        quota, most, bound = client.max_sessions, self._limits.max_sessions, env.spec.concurrency_bound()
        if quota is not None and self._by_client[client.name] >= quota:
            raise _full("quota-exceeded", f"this client's quota of {quota} sessions is used up")
        if self._by_env.total() >= most:  # those that are being closed among them
            raise _full("server-full", f"all {most} sessions of this server are taken")
        if bound is not None and self._by_env[env.name] >= bound:
            raise _full("server-full", f"all {bound} sessions of environment {env.name} are taken")

    def get(self, client: ServerClient, session_id: str) -> EnvSession:
        """One of the client's sessions. Raises a 404 `Problem`, of other clients' sessions too."""
        session = self._sessions.get((client.name, session_id))
        if session is None:
            detail = f"no session {session_id}: closed, or not heard of for {self._limits.lease_seconds:g} s"
            raise Problem(404, "session-not-found", detail)
        return session

    def alive(self, client: ServerClient, session_ids: Sequence[str]) -> tuple[str, ...]:
        """Those that are there, with their leases renewed."""
        found = [self._sessions.get((client.name, session_id)) for session_id in session_ids]
        for session in found:
            if session is not None:
                session.touch()
        return tuple(session.id for session in found if session is not None)

    async def close(self, client: str, session_id: str, by: str = "client") -> None:
        """Close one; closing one that is not there is no error, since the request may have come before."""
        session = self._sessions.pop((client, session_id), None)
        if session is None:
            return
        # In a task of its own: an environment is closed to the end, whoever stops waiting for it.
        closing = asyncio.create_task(self._end(session, client, by))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def _end(self, session: EnvSession, client: str, by: str) -> None:
        try:
            await session.close()
        finally:
            self._by_client[client] -= 1
            self._by_env[session.served.name] -= 1
            self._metrics.closed.labels(session.served.name, by).inc()
            self._closed_one.set()

    async def emptied(self) -> None:
        """Wait until there is no session left."""
        while self._sessions:
            self._closed_one.clear()
            await self._closed_one.wait()

    async def close_all(self) -> None:
        """Close every session, and wait for those that are being closed."""
        await asyncio.gather(*(self.close(*key, by="end") for key in list(self._sessions)))
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def close_expired(self) -> None:
        """Close the sessions whose leases have run out."""
        lease = self._limits.lease_seconds
        expired = [key for key, session in self._sessions.items() if session.idle_seconds > lease]
        if expired:
            logger.warning("closing sessions not heard of for %g s: %d", lease, len(expired))
        await asyncio.gather(*(self.close(*key, by="lease") for key in expired))


def _full(kind: ProblemKind, detail: str) -> Problem:
    return Problem(429, kind, detail, retry_after=RETRY_SECONDS)
