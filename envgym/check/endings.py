"""Checks of what comes after the end: of an episode, of an instance, of the environment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from envgym.env import CheckedEnv
from envgym.errors import CallTimeout
from envgym.processes.deadline import call_in_time
from envgym.processes.family import descendants, stat
from envgym.registry import spec
from envgym.rollout.scripted import ScriptedEpisode, in_order
from envgym.services import start_services
from envgym.types import Action, Observation

from .play import CLOSE_SECONDS, Played, difference
from .report import Finding, Verdict, failed, listed, not_applicable, ok
from .scripts import monkey
from .subject import Subject

CHECKS = ("after the end", "close")
CYCLES = 3
"""Times the environment is set up, played and torn down: what is left each time is a leak."""
PATIENCE_SECONDS = 3.0
"""Seconds that what has been closed may take to be gone."""


async def check(subject: Subject) -> list[Finding]:
    return [await _after_the_end(subject), await _close(subject)]


class PlayedAgain(Played):
    """An episode on an instance that has played it before, and was then asked for a step after the end."""

    has_ended_before = False
    step_is_answered = False

    async def reset(self, env: CheckedEnv) -> Observation:
        before = ScriptedEpisode(self.task, self.seed, self._script)
        await before.play(env)
        self.has_ended_before = before.has_ended
        with contextlib.suppress(Exception):
            await env.step(Action("more"))
            self.step_is_answered = True
        return await super().reset(env)


async def _after_the_end(subject: Subject) -> Finding:
    for number, task in enumerate(await subject.tasks(2)):
        for script in subject.scripts(task).values():
            fresh = await subject.play(task, number, script)
            again = PlayedAgain(subject.spec, task, number, in_order([turn.action for turn in fresh.turns]))
            if fresh.has_ended:
                await again.play_out()
            if not again.has_ended_before:  # the same turns do not end it again
                continue
            if again.step_is_answered:
                advice = "raise ResetNeeded from a step that comes after the last"
                return failed("a step after the end is answered as if nothing had happened", advice)
            return _reset_again(subject, fresh, again)
    return not_applicable("no episode came to an end")


def _reset_again(subject: Subject, fresh: Played, again: Played) -> Finding:
    if again.failed and not fresh.failed:
        return failed(
            f"an instance cannot be reset again: {again.problem()}", "reset must begin anew whatever came before"
        )
    repeatable = all(subject.verdicts.get(check) is Verdict.OK for check in ("seed", "generators"))
    if repeatable and (found := difference(fresh.record(), again.record())):
        advice = "let reset set everything that an episode changes"
        return failed(f"an instance that is reset plays another episode than a new one: {found}", advice)
    return ok("a step is refused; the instance can be reset, and then plays as a new one does")


async def _close(subject: Subject) -> Finding:
    """After an episode, twice, in the middle of one, and before any."""
    [task] = await subject.tasks(1)
    for when, resets, closes in (
        ("after a reset", True, 1),
        ("a second time", True, 2),
        ("before any reset", False, 1),
    ):
        env = subject.spec.of(task).make()
        try:
            if resets:
                await call_in_time(env.reset(seed=0, options={"task": task}), CLOSE_SECONDS, "reset")
            for _ in range(closes):
                await call_in_time(env.close(), CLOSE_SECONDS, "close")
        except Exception as error:
            problem = f"raises {error!r:.100}"
            if isinstance(error, CallTimeout):
                problem = f"takes longer than {CLOSE_SECONDS:g} s"
            advice = "close is called in every path, also after a reset that failed: let it release what there is"
            return failed(f"close {when} {problem}", advice)
    return ok("harmless in the middle of an episode, twice, and before a reset")


# -- what is left behind ----------------------------------------------------------------------------------

LEFT_BEHIND = ("left behind",)


async def check_left_behind(subject: Subject) -> list[Finding]:
    """Threads, processes and open files after the environment was torn down. The process must have closed its own."""
    if sys.platform != "linux":
        return [not_applicable("it is read from /proc, which is Linux's")]
    await _cycle(subject)  # what is made once and kept, with the first use of a library, is no leak
    before = _resources()
    cycles = 1 if subject.needs_services else CYCLES
    for _ in range(cycles):
        await _cycle(subject)
    deadline = time.monotonic() + PATIENCE_SECONDS
    left = _left(before, cycles)
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        left = _left(before, cycles)
    if left:
        advice = "release in close what reset and step acquire, and in teardown what setup does"
        return [failed(f"after {cycles} rounds of set-up, episodes and teardown there are {left}", advice)]
    return [ok("no threads, processes or open files")]


async def _cycle(subject: Subject) -> None:
    fresh = spec(subject.name, **subject.settings)
    async with start_services(fresh, now=False):
        again = Subject(fresh, subject.name, subject.settings)
        for task in await again.tasks(2):
            await again.play(task, 0, monkey(0))


def _resources() -> dict[str, dict[Any, str]]:
    gc.collect()
    loop = asyncio.get_running_loop()
    kept = getattr(getattr(loop, "_default_executor", None), "_threads", ())  # those of asyncio.to_thread
    threads = {t.ident: t.name for t in threading.enumerate() if t not in kept}
    return {"threads": threads, "processes": _processes(), "open files": _open_files()}


def _left(before: dict[str, dict[Any, str]], cycles: int) -> str:
    """The resources of which there are more than before, by one for each cycle at least; processes, by one at all."""
    found = []
    for kind, now in _resources().items():
        new = [what for key, what in now.items() if key not in before[kind]]
        if len(new) >= cycles:
            found.append(f"{len(new)} {kind} more ({listed(dict.fromkeys(new))})")
        elif kind == "processes" and now:
            found.append(f"{len(now)} {kind} ({listed(now.values())})")
    return " and ".join(found)


def _processes() -> dict[int, str]:
    """Children and theirs, by what they run; but for those that have ended, and multiprocessing's own helpers."""
    found = {}
    for pid in descendants({os.getpid()}) - {os.getpid()}:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            own_helper = "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
            if (fields := stat(pid)) and fields[0] != "Z" and not own_helper:
                found[pid] = command[:60]
    return found


def _open_files() -> dict[Any, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(entry)
            found[entry.name, target] = target
    return found
