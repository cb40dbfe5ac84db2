"""The server's sessions: one episode each, where a request that is sent again is never carried out again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from envgym.env import CheckedEnv, EnvSpec

from .wire import Opened, Opening, Problem, Step, Stepped, encodable_info, encode

CALL_SECONDS = 600.0
"""How long an environment may take to answer one reset or step."""
CLOSE_SECONDS = 10.0
"""How long an environment may take to stop and to close."""
IDLE_SECONDS = 1800.0
"""After this long without a request a session is closed: its client is gone."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Session:
    """One environment instance, and the answers to the requests that may come again.

    `reset` and each step run in a task of their own: they go on when the connection that asked for them drops,
    and the repeated request waits for the same task.
    """

    def __init__(self, spec: EnvSpec, opening: Opening) -> None:
        self.opening = opening
        self.last_used = time.monotonic()
        self._spec = spec
        self._env: CheckedEnv | None = None
        self._opened = asyncio.create_task(self._open())
        self._step: Step | None = None
        self._stepped: asyncio.Task[bytes] = self._opened

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request; 0 while the environment is at work."""
        return time.monotonic() - self.last_used if self._stepped.done() else 0.0

    async def opened(self) -> bytes:
        """The answer to the request that opened this session, an encoded `Opened`."""
        self.last_used = time.monotonic()
        return await self._answer(self._opened)

    async def step(self, step: Step) -> bytes:
        """The answer to one step, an encoded `Stepped`; to the last step again if it is asked for again."""
        self.last_used = time.monotonic()
        last = -1 if self._step is None else self._step.step_id
        if step.step_id == last:
            if step != self._step:
                raise Problem(409, "step-conflict", f"step {last} was taken already, with another action")
        elif step.step_id == last + 1 and self._stepped.done():
            self._step, self._stepped = step, asyncio.create_task(self._take(step))
        else:
            raise Problem(409, "step-conflict", f"step {step.step_id} cannot follow step {last}")
        return await self._answer(self._stepped)

    async def close(self) -> None:
        """Stop what runs and close the environment, whatever state it is in."""
        self._stepped.cancel()
        await asyncio.wait([self._stepped], timeout=CLOSE_SECONDS)
        if self._env is not None:
            try:
                await asyncio.wait_for(self._env.close(), CLOSE_SECONDS)
            except Exception:  # the session is over either way; its client has nobody to tell
                logger.exception("session %s: the environment did not close", self.opening.session_id)

    async def _answer(self, work: asyncio.Task[bytes]) -> bytes:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise Problem(404, "session-not-found", f"session {self.opening.session_id} closed meanwhile") from None
            raise

    async def _open(self) -> bytes:
        async def reset() -> bytes:
            env = self._env = self._spec.make()
            options = dict(self.opening.options)
            if self.opening.task is not None:
                options["task"] = self.opening.task
            observation, info = await env.reset(seed=self.opening.seed, options=options)
            assert env.task is not None
            kept, dropped = encodable_info(info)
            return encode(Opened(task=env.task, observation=observation, info=kept, dropped=dropped))

        return await self._run(reset(), "reset")

    async def _take(self, step: Step) -> bytes:
        async def take() -> bytes:
            if self._env is None:  # its constructor raised, and the client was told
                raise Problem(409, "step-conflict", "the session did not open")
            observation, reward, terminated, truncated, info = await self._env.step(step.action)
            kept, dropped = encodable_info(info)
            return encode(
                Stepped(
                    observation=observation,
                    reward=reward,
                    terminated=terminated,
                    truncated=truncated,
                    info=kept,
                    dropped=dropped,
                )
            )

        return await self._run(take(), f"step {step.step_id}")

    async def _run(self, work: Awaitable[T], what: str) -> T:
        """The environment's answer within the limit; its exception as a `Problem`, logged here in full."""
        deadline = asyncio.timeout(CALL_SECONDS)
        try:
            async with deadline:
                return await work
        except Problem:
            raise
        except Exception as error:
            if deadline.expired():
                raise Problem(504, "environment-timeout", f"{what}: no answer within {CALL_SECONDS:g} s") from None
            logger.exception("session %s: %s raised", self.opening.session_id, what)
            raise Problem(500, "environment-error", str(error), error=type(error).__name__) from None


class Sessions:
    """All sessions of a server, by the ids their clients gave them."""

    def __init__(self, spec: EnvSpec, idle_seconds: float = IDLE_SECONDS) -> None:
        self._spec = spec
        self._idle_seconds = idle_seconds
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, opening: Opening) -> Session:
        """The session `opening` asks for: a new one, or the one it opened when it came before."""
        session = self._sessions.get(opening.session_id)
        if session is None:
            session = self._sessions[opening.session_id] = Session(self._spec, opening)
        elif session.opening != opening:
            raise Problem(409, "session-conflict", f"session {opening.session_id} exists and was opened differently")
        return session

    def __getitem__(self, session_id: str) -> Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise Problem(404, "session-not-found", f"no session {session_id}: closed, or idle too long") from None

    async def close(self, session_id: str) -> None:
        """Close one; closing one that is not there is no error, since the request may have come before."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.close()

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(session_id) for session_id in list(self._sessions)))

    async def close_idle(self) -> None:
        """Close the sessions whose clients have not been heard of for the idle limit."""
        idle = [name for name, session in self._sessions.items() if session.idle_seconds > self._idle_seconds]
        if idle:
            logger.warning("closing %d sessions idle for %g s", len(idle), self._idle_seconds)
        await asyncio.gather(*(self.close(session_id) for session_id in idle))
