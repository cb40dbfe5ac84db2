"""Checks of time: the duration of calls, and the time for which they block the event loop of all episodes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from .report import Finding, failure, not_applicable, ok, warning
from .subject import Clock, Subject

CHECKS = ("latency", "event loop")
SLOW_SECONDS = 1.0
"""A longer median call is a warning: a training step waits for its slowest episode."""
HOLD_SECONDS = 0.05
"""A call that blocks the event loop for longer fails: all other episodes and the engine's answers wait for it."""
REPEATS = 3
"""Repeats of each call; the shortest counts, so that a busy machine causes no failure."""
BEAT_SECONDS = 0.005
SECONDS = 4.0


async def check(subject: Subject) -> list[Finding]:
    """The findings on latency and event loop. Both are not applicable if an episode fails before the first step."""
    clock = Clock(SECONDS)
    resets: list[float] = []
    steps: list[float] = []
    hold_seconds: dict[str, float] = {}
    async with _Heart() as heart:
        for number, task in enumerate(await subject.tasks(3)):
            for script in subject.scripts(task).values():
                if clock.is_up and resets:
                    break
                runs = []
                for _ in range(REPEATS):
                    runs.append(heart.begin_episode())
                    episode = await subject.play(task, number, script, call_context=heart.call)
                    resets += episode.seconds[:1]
                    steps += episode.seconds[1:]
                    if episode.failed and not steps:
                        return [not_applicable(episode.problem()), not_applicable(episode.problem())]
                for index, same_call in enumerate(zip(*runs, strict=False)):
                    call = "step" if index else "reset"
                    hold_seconds[call] = max(hold_seconds.get(call, 0.0), min(same_call))
    return [_latency(resets, steps), _event_loop(subject, hold_seconds)]


def _latency(resets: list[float], steps: list[float]) -> Finding:
    """The finding on durations: a warning if the median reset or step takes longer than `SLOW_SECONDS`."""
    message = ", ".join(
        f"{call} {_duration(statistics.median(seconds))} (at most {_duration(max(seconds))})"
        for call, seconds in (("reset", resets), ("step", steps))
        if seconds
    )
    if max(statistics.median(seconds) for seconds in (resets, steps) if seconds) > SLOW_SECONDS:
        return warning(message, "move work that is the same for every episode to EnvSpec.setup")
    return ok(message)


def _event_loop(subject: Subject, hold_seconds: dict[str, float]) -> Finding:
    """The finding on the calls (`reset`, `step`) that block the event loop, by the longest time of each."""
    if subject.is_remote:
        return not_applicable("it runs on its server")
    worst = max(hold_seconds, key=lambda call: hold_seconds[call])
    if hold_seconds[worst] > HOLD_SECONDS:
        message = f"{worst} holds up all other episodes for {_duration(hold_seconds[worst])}, each time"
        advice = (
            f"write {worst} as plain def, or set blocking = True: it then runs on its own thread; "
            "code that also holds Python's global lock needs a process"
        )
        return failure(message, advice)
    return ok(f"never held for longer than {_duration(hold_seconds[worst])}")


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


class _Heart:
    """A periodic task on the event loop; the longest pause between two beats is the time the loop was blocked."""

    async def __aenter__(self) -> Self:
        self._last, self._longest = time.monotonic(), 0.0
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._beating.cancel()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Append the longest pause within the block to the episode's pauses."""
        await asyncio.sleep(0)
        self._note()
        self._longest = 0.0
        yield
        self._note()
        self._pauses.append(max(0.0, self._longest - BEAT_SECONDS))

    def begin_episode(self) -> list[float]:
        """A new list, filled by `call` with the longest pause of each call, in seconds."""
        self._pauses: list[float] = []
        return self._pauses

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._note()

    def _note(self) -> None:
        last, self._last = self._last, time.monotonic()
        self._longest = max(self._longest, self._last - last)
