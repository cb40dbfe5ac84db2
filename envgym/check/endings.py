"""Checks after the end of an episode, of an instance and of the environment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from pathlib import Path

from envgym.env import CheckedEnv
from envgym.errors import CallTimeout
from envgym.processes.cancellation import call_in_time
from envgym.processes.family import descendants, stat
from envgym.registry import spec
from envgym.rollout.scripted import ScriptedEpisode, script_of
from envgym.services import start_services
from envgym.types import Action, Observation

from .play import CLOSE_SECONDS, CheckedEpisode, difference
from .report import CheckVerdict, Finding, failure, join_first, not_applicable, ok
from .scripts import monkey
from .subject import Subject

CHECKS = ("after the end", "close")
CYCLES = 3
"""Rounds of set-up, episodes and teardown: a resource that every round leaves behind is a leak."""
PATIENCE_SECONDS = 3.0
"""Seconds in which closed resources must disappear."""


async def check(subject: Subject) -> list[Finding]:
    return [await _check_reset_after_end(subject), await _check_close(subject)]


class RepeatedEpisode(CheckedEpisode):
    """A second run of an episode on the same instance, after a step past the end of the first run."""

    has_ended_before = False
    step_is_answered = False

    async def reset(self, env: CheckedEnv) -> Observation:
        """Run the turns once, take a step after the end, and reset the instance again for the second run."""
        first_run = ScriptedEpisode(self.task, self.seed, self._script)
        await first_run.play(env)
        self.has_ended_before = first_run.has_ended
        with contextlib.suppress(Exception):
            await env.step(Action("more"))
            self.step_is_answered = True
        return await super().reset(env)


async def _check_reset_after_end(subject: Subject) -> Finding:
    """The finding on a step after the end, which must raise an error, and on an instance that is reset after it."""
    for number, task in enumerate(await subject.tasks(2)):
        for script in subject.scripts(task).values():
            original = await subject.play(task, number, script)
            repeated = RepeatedEpisode(subject.spec, task, number, script_of([turn.action for turn in original.turns]))
            if original.has_ended:
                await repeated.play_out()
            if not repeated.has_ended_before:  # the same turns did not end the first run
                continue
            if repeated.step_is_answered:
                advice = "raise ResetNeeded from a step after the end"
                return failure("a step after the end returns a result instead of raising an error", advice)
            return _compare_after_reset(subject, original, repeated)
    return not_applicable("no episode came to an end")


def _compare_after_reset(subject: Subject, original: CheckedEpisode, repeated: CheckedEpisode) -> Finding:
    """Compare `original`, the episode of a new instance, with `repeated`, the same turns after a reset. Only if the
    checks `seed` and `generators` passed: otherwise two episodes may differ in any case."""
    if repeated.failed and not original.failed:
        advice = "reset must start a new episode in every state of the instance"
        return failure(f"an instance cannot be reset again: {repeated.problem()}", advice)
    repeatable = all(subject.verdicts.get(check) is CheckVerdict.OK for check in ("seed", "generators"))
    if repeatable and (problem := difference(original.record(), repeated.record())):
        advice = "let reset set everything that an episode changes"
        return failure(f"an instance that is reset gives another episode than a new one: {problem}", advice)
    comparison = "and then behaves as a new one" if repeatable else "and was not compared with a new one"
    return ok(f"a step after the end raises an error; the instance can be reset, {comparison}")


async def _check_close(subject: Subject) -> Finding:
    """Close in the middle of an episode, twice, and before any reset."""
    [task] = await subject.tasks(1)
    for label, resets, closes in (
        ("after a reset", True, 1),
        ("a second time", True, 2),
        ("before any reset", False, 1),
    ):
        env = subject.spec.spec_for(task).make()
        try:
            if resets:
                await call_in_time(env.reset(seed=0, options={"task": task}), CLOSE_SECONDS, "reset")
            for _ in range(closes):
                await call_in_time(env.close(), CLOSE_SECONDS, "close")
        except Exception as error:
            problem = f"raises {error!r:.100}"
            if isinstance(error, CallTimeout):
                problem = f"takes longer than {CLOSE_SECONDS:g} s"
            advice = "close is always called, also after a failed reset: let it release whatever was acquired"
            return failure(f"close {label} {problem}", advice)
    return ok("no error in the middle of an episode, twice, and before a reset")


# -- resources left behind ----------------------------------------------------------------------------------

LEFT_BEHIND = ("left behind",)


async def check_left_behind(subject: Subject) -> list[Finding]:
    """The finding on processes and open files that remain after teardown. The calling process must have closed its own
    environment."""
    if sys.platform != "linux":
        return [not_applicable("it needs Linux's /proc")]
    await _cycle(subject)  # resources that a library creates once, on its first use, are no leak
    n_files = _count_open_files()
    cycles = 1 if subject.needs_services else CYCLES
    for _ in range(cycles):
        await _cycle(subject)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while leftovers := _leftovers(n_files, cycles):
        if time.monotonic() > deadline:
            advice = "release in close what reset and step acquire, and in teardown what setup acquires"
            return [failure(f"after {cycles} rounds of set-up, episodes and teardown there are {leftovers}", advice)]
        await asyncio.sleep(0.05)
    return [ok("no processes or open files")]


async def _cycle(subject: Subject) -> None:
    env_spec = spec(subject.name, **subject.settings)
    async with start_services(env_spec, eager=False):
        subject_copy = Subject(env_spec, subject.name, subject.settings)
        for task in await subject_copy.tasks(2):
            await subject_copy.play(task, 0, monkey(0))
    gc.collect()


def _leftovers(n_files: int, cycles: int) -> str:
    """Running processes, and open files beyond `n_files` if there is at least one per cycle, as text."""
    leftovers = []
    if processes := _processes():
        leftovers.append(f"{len(processes)} processes ({join_first(dict.fromkeys(processes))})")
    if (n_new := _count_open_files() - n_files) >= cycles:
        leftovers.append(f"{n_new} open files more")
    return " and ".join(leftovers)


def _count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _processes() -> list[str]:
    """Commands of all running descendants, except multiprocessing's helpers."""
    commands = []
    for pid in descendants({os.getpid()}) - {os.getpid()}:
        with contextlib.suppress(OSError):  # the process ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            is_helper = "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
            if (fields := stat(pid)) and fields[0] != "Z" and not is_helper:
                commands.append(command[:60])
    return commands
