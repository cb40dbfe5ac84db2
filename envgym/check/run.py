"""The checks of an environment, one group after the other, in processes that may hang or crash."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from envgym.errors import EnvgymError, WorkerDied, WorkerError
from envgym.loading import absolute_target, is_users, names_file
from envgym.processes.local import LocalRuntime, LocalWorker
from envgym.registry import spec
from envgym.remote.client import RemoteEnvSpec
from envgym.services import start_services

from . import endings, episodes, latency, leak, repeatability, scores, tasks
from .play import call_limit
from .report import Finding, Report, Verdict, failed, not_applicable
from .subject import Subject

GROUP_SECONDS = 300.0
"""Seconds a group of checks may take. Each keeps itself to far less, but for an environment that is slow throughout."""
HOLD_SECONDS = 3.0
"""Seconds that the event loop may be held beyond what a call may take before the process ends itself."""

OTHER_PROCESS = ("process",)
GROUPS: dict[tuple[str, ...], Callable[[Subject], Awaitable[list[Finding]]] | None] = {
    tasks.CHECKS: tasks.check,
    episodes.CHECKS: episodes.check,
    repeatability.CHECKS: repeatability.check,
    OTHER_PROCESS: None,  # by `_compare_processes`
    repeatability.ISOLATION: repeatability.check_isolation,
    latency.CHECKS: latency.check,
    leak.CHECKS: leak.check,
    scores.CHECKS: scores.check,
    endings.CHECKS: endings.check,
    endings.LEFT_BEHIND: endings.check_left_behind,
}
"""The groups in their order: the names of the checks, and the function that gives a finding for each."""

OnFinding = Callable[[Finding], None]


async def check_environment(
    name: str,
    settings: Mapping[str, Any] | None = None,
    on_finding: OnFinding | None = None,
    *,
    setup_seconds: float = 300.0,
) -> Report:
    """Examine the environment that `name` stands for, with `settings`. `on_finding` is called with each finding as it
    is made; `setup_seconds` is the time that setting it up may take, its services included.

    Call it from the main thread, with a name that a fresh process understands too: an id of an installed package, a
    file, an import path or a URL. Raises `EnvgymError` where the environment cannot be set up.
    """
    report, start = Report(absolute_target(name) if names_file(name) else name), time.monotonic()
    logs = tempfile.mkdtemp(prefix="envgym-check-")
    arguments = {"name": report.env, "settings": dict(settings or {}), "setup_seconds": setup_seconds}
    examination = _Examination(report, LocalRuntime(logs), arguments, logs)
    try:
        for checks in GROUPS:
            for finding in await examination.findings(checks):
                report.findings.append(finding)
                if on_finding is not None:
                    on_finding(finding)
            if checks == episodes.CHECKS and not examination.can_play:
                break  # all other checks need episodes
    except EnvgymError as error:
        if logs in str(error):
            logs = ""  # it names one of them, so they are kept
        raise
    finally:
        await examination.close()
        if logs:
            shutil.rmtree(logs, ignore_errors=True)
        report.seconds = time.monotonic() - start
    return report


class CheckHost:
    """The process in which an environment is examined, and set up for as long as that takes. One that hangs or crashes
    takes this process along, and nothing else."""

    def __init__(self, name: str, settings: Mapping[str, Any], setup_seconds: float) -> None:
        self._subject = Subject(spec(name, **settings), name, dict(settings))
        self._subject.is_remote = isinstance(self._subject.spec, RemoteEnvSpec)
        self._setup_seconds = setup_seconds
        self._open = contextlib.AsyncExitStack()
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Set the environment up. Raises `EnvgymError` for what the user can mend."""
        limit = self._setup_seconds
        faulthandler.dump_traceback_later(limit + HOLD_SECONDS, exit=True)  # set-up may hold the loop, within limits
        try:
            async with asyncio.timeout(limit):
                await self._open.enter_async_context(start_services(self._subject.spec))
        except TimeoutError:
            raise EnvgymError(f"{self._subject.spec.id}: its set-up takes longer than {limit:g} s") from None
        self._beating = asyncio.create_task(self._beat())

    async def check(self, checks: tuple[str, ...], verdicts: Mapping[str, Verdict]) -> list[Finding]:
        """Run a group of checks, given the answers so far."""
        self._subject.verdicts = verdicts
        if checks == endings.LEFT_BEHIND:
            await self._open.aclose()
        run = GROUPS[checks]
        assert run is not None
        return await run(self._subject)

    async def can_go_on(self) -> bool:
        return episodes.can_go_on(self._subject)

    async def recorded(self, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
        self._subject.verdicts = verdicts
        return await repeatability.recorded(self._subject)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        faulthandler.cancel_dump_traceback_later()
        await self._open.aclose()

    async def _beat(self) -> None:
        """Have the process print its stack and end once the event loop is held for good. This watch needs neither the
        loop nor Python's lock."""
        limit = call_limit(self._subject.spec) + HOLD_SECONDS
        while True:
            faulthandler.dump_traceback_later(limit, exit=True)
            await asyncio.sleep(limit / 10)


class _Examination:
    """The processes that examine an environment, and what becomes of later checks when an earlier one failed."""

    def __init__(self, report: Report, runtime: LocalRuntime, arguments: Mapping[str, Any], temporary: str) -> None:
        self._report = report
        self._runtime = runtime
        self._arguments = arguments
        self._temporary = temporary
        self.can_play = False
        """True once the checks of single episodes found some that the others can look at."""
        self._worker: LocalWorker | None = None
        self._workers: list[LocalWorker] = []

    async def findings(self, checks: tuple[str, ...]) -> list[Finding]:
        """The findings of a group of checks, with their names."""
        why = self._not_worth_it(checks)
        found = [not_applicable(why) for _ in checks] if why else await self._run(checks)
        for finding, check in zip(found, checks, strict=True):
            finding.check = check
        if checks == episodes.CHECKS and not self.can_play:  # the first says why the others have nothing to look at
            return [found[0], *(finding for finding in found[1:] if finding.verdict is not Verdict.NOT_APPLICABLE)]
        return found

    async def close(self) -> None:
        """End the processes, with all that the environment left in them."""
        for worker in self._workers:
            await worker.kill()
        await self._runtime.close()

    def _not_worth_it(self, checks: tuple[str, ...]) -> str:
        """The reason why these checks would say nothing of their own; empty where they would."""
        verdict = self._report.verdict
        if checks in (tasks.CHECKS, episodes.CHECKS):
            return ""
        if checks in (OTHER_PROCESS, repeatability.ISOLATION):
            if verdict("seed") is Verdict.FAILED:
                return "episodes differ anyway (seed)"
            if verdict("generators") is Verdict.FAILED:
                return "episodes share the process's generator (generators)"
        return ""

    async def _run(self, checks: tuple[str, ...]) -> list[Finding]:
        try:
            if checks == OTHER_PROCESS:
                return [await self._compare_processes()]
            found: list[Finding] = await self._call("check", checks, self._report.verdicts())
            if checks == episodes.CHECKS:
                is_judged = found[0].verdict is not Verdict.NOT_APPLICABLE
                self.can_play = is_judged and await self._call("can_go_on")
            return found
        except WorkerDied:
            finding = failed(*self._how_it_died())
        except TimeoutError:
            advice = "give what it waits for a deadline, or call the check with settings that make it quicker"
            finding = failed(f"this takes longer than {GROUP_SECONDS:g} s", advice)
        except WorkerError as error:
            found_error = re.sub(r" \(log: .*\)$|^check: ", "", str(error))
            finding = failed(f"the environment raised {found_error}", "envgym envs try shows more")
        if self._worker is not None:  # the next group begins with a new process
            await self._worker.kill()
            self._worker = None
        return [finding, *(not_applicable(f"see {checks[0]}") for _ in checks[1:])]

    async def _call(self, method: str, *args: Any) -> Any:
        if self._worker is None:
            self._worker = await self._start("1")
        async with asyncio.timeout(GROUP_SECONDS):
            return await self._worker.call(method, *args)

    async def _start(self, hash_seed: str) -> LocalWorker:
        """A process that is ready. Hashes differ from one seed to the next, as they do from one process to the next.
        Its temporary files lie in ours: it is killed, and cannot tidy up."""
        environ = {"PYTHONHASHSEED": hash_seed, "TMPDIR": self._temporary}
        worker = await self._runtime.start("envgym.check.run:CheckHost", self._arguments, name="check", environ=environ)
        self._workers.append(worker)
        try:
            await worker.call("open")  # it keeps its own time
        except WorkerDied:
            self._worker = worker
            found, _ = self._how_it_died()
            raise EnvgymError(f"{self._report.env} cannot be set up: {found}") from None
        return worker

    async def _compare_processes(self) -> Finding:
        verdicts = self._report.verdicts()
        one, other = await asyncio.gather(self._call("recorded", verdicts), self._start("2"))
        try:
            async with asyncio.timeout(GROUP_SECONDS):
                return repeatability.compared(one, await other.call("recorded", verdicts))
        finally:
            await other.kill()

    def _how_it_died(self) -> tuple[str, str]:
        """The last act of a process that ended by itself, from its log, and what to do about it."""
        text = "" if self._worker is None else self._worker.log.read_text(encoding="utf-8", errors="replace")[-20_000:]
        if "Timeout (" in text:
            where = _frame(text.rpartition("Timeout (")[2])
            return f"the event loop was held for good{where}", "no call may block for ever: give it a deadline"
        reason = next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        return f"the process ended: {reason.strip()[:200]}", "an environment must not end the process it runs in"


def _frame(stack: str) -> str:
    """The innermost function of the user's in a stack written by `faulthandler`, as part of a sentence."""
    stack = stack.rpartition("(most recent call first)")[2]  # the main thread's comes last
    frames = re.findall(r'File "(.+)", line (\d+) in (\w+)', stack)
    theirs = [frame for frame in frames if is_users(frame[0])] or frames
    return f" in {theirs[0][2]} ({theirs[0][0]}, line {theirs[0][1]})" if theirs else ""
