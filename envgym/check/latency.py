"""Checks of time: the duration of calls, and of holding up the event loop that all episodes share."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from .report import Finding, failed, not_applicable, ok, warning
from .subject import Clock, Subject

CHECKS = ("latency", "event loop")
SLOW_SECONDS = 1.0
"""A median call above this is worth a word: a step of training waits for its slowest episode."""
HOLD_SECONDS = 0.05
"""No call may keep the event loop to itself for longer: every other episode, and the engine's answers, wait."""
REPEATS = 3
"""Times a call is repeated: what a busy machine delays once, it does not delay each time."""
BEAT_SECONDS = 0.005
SECONDS = 4.0


async def check(subject: Subject) -> list[Finding]:
    clock = Clock(SECONDS)
    resets: list[float] = []
    steps: list[float] = []
    held: dict[str, float] = {}
    async with _Heart() as heart:
        for number, task in enumerate(await subject.tasks(3)):
            for script in subject.scripts(task).values():
                if clock.is_up and resets:
                    break
                runs = []
                for _ in range(REPEATS):
                    runs.append(heart.begin_episode())
                    played = await subject.play(task, number, script, around=heart.call)
                    resets += played.seconds[:1]
                    steps += played.seconds[1:]
                    if played.failed and not steps:
                        return [not_applicable(played.problem()), not_applicable(played.problem())]
                for index, same_call in enumerate(zip(*runs, strict=False)):
                    call = "step" if index else "reset"
                    held[call] = max(held.get(call, 0.0), min(same_call))
    return [_latency(resets, steps), _event_loop(subject, held)]


def _latency(resets: list[float], steps: list[float]) -> Finding:
    found = ", ".join(
        f"{call} {_duration(statistics.median(seconds))} (at most {_duration(max(seconds))})"
        for call, seconds in (("reset", resets), ("step", steps))
        if seconds
    )
    if max(statistics.median(seconds) for seconds in (resets, steps) if seconds) > SLOW_SECONDS:
        return warning(found, "what is the same for every episode belongs into EnvSpec.setup")
    return ok(found)


def _event_loop(subject: Subject, held: dict[str, float]) -> Finding:
    if subject.is_remote:
        return not_applicable("it plays on its server")
    worst = max(held, key=lambda call: held[call])
    if held[worst] > HOLD_SECONDS:
        found = f"{worst} holds up all other episodes for {_duration(held[worst])}, each time"
        advice = (
            f"write {worst} as plain def, or set blocking = True: it then gets a thread of its own; "
            "what holds Python's lock even there belongs into a process"
        )
        return failed(found, advice)
    return ok(f"never held for longer than {_duration(held[worst])}")


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


class _Heart:
    """Beats on the event loop while it is open; the longest pause is how long somebody kept the loop."""

    async def __aenter__(self) -> Self:
        self._last, self._longest = time.monotonic(), 0.0
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._beating.cancel()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Add the longest time without a beat in here to the pauses of the episode."""
        await asyncio.sleep(0)
        self._note()
        self._longest = 0.0
        yield
        self._note()
        self._pauses.append(max(0.0, self._longest - BEAT_SECONDS))

    def begin_episode(self) -> list[float]:
        """The list that is to hold the longest pause of each call, in seconds."""
        self._pauses: list[float] = []
        return self._pauses

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self._last, self._longest = now, max(self._longest, now - self._last)
