"""The checks of an environment, group by group, in processes that may hang or crash."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from envgym.errors import ConfigError, EnvgymError, WorkerDied, WorkerError
from envgym.loading import absolute_target, is_file_target, is_user_file
from envgym.processes.local import LocalRuntime, LocalWorker
from envgym.processes.runtime import Result
from envgym.registry import spec
from envgym.remote.client import RemoteEnvSpec
from envgym.services.start import start_services, temporary_runtime

from . import endings, episodes, forks, leak, repeatability, scores, tasks
from .play import call_limit
from .report import CheckVerdict, Finding, Report, failure, not_applicable
from .subject import Subject

GROUP_SECONDS = 300.0
"""Time limit of a group of checks. Each takes far less, unless the environment is slow."""
HOLD_SECONDS = 3.0
"""The process ends itself if the event loop is blocked for this many seconds beyond a call's time limit."""

OTHER_PROCESS = ("process",)
GROUPS: dict[tuple[str, ...], Callable[[Subject], Awaitable[Any]]] = {
    tasks.CHECKS: tasks.check,
    episodes.CHECKS: episodes.check,
    repeatability.CHECKS: repeatability.check,
    OTHER_PROCESS: repeatability.collect_records,  # which `_compare_processes` compares
    repeatability.ISOLATION: repeatability.check_isolation,
    leak.CHECKS: leak.check,
    scores.CHECKS: scores.check,
    forks.CHECKS: forks.check,
    endings.CHECKS: endings.check,
    endings.LEFT_BEHIND: endings.check_left_behind,
}
"""The groups in their order: names of the checks -> function that returns a finding for each, or records."""

Host = TypeVar("Host", bound="CheckHost")
OnFinding = Callable[[Finding], None]


async def check_environment(
    name: str,
    settings: Mapping[str, Any] | None = None,
    on_finding: OnFinding | None = None,
    *,
    setup_seconds: float = 300.0,
) -> Report:
    """Check the environment `name` with `settings`. `on_finding` is called with each finding immediately;
    `setup_seconds` is the time limit of its set-up, services included.

    Call it from the main thread, with a name that a new process can resolve too: an id of an installed package, a file,
    an import path or a URL. Raises `EnvgymError` if the environment cannot be set up.
    """
    report, start = Report(name_for_process(name)), time.monotonic()
    async with host_process(CheckHost, report.env, settings, setup_seconds) as process:
        examination = _Examination(report, process)
        for checks in GROUPS:
            findings = await examination.findings(checks)
            for finding in findings:
                report.findings.append(finding)
                if on_finding is not None:
                    on_finding(finding)
            if findings[0].is_last:
                break
    report.seconds = time.monotonic() - start
    return report


def name_for_process(name: str) -> str:
    """The name of an environment for another process. Raises `ConfigError` for a class."""
    if not isinstance(name, str):
        raise ConfigError(f"it is set up in another process, so give a name (a file, say), not {name!r:.60}")
    return absolute_target(name) if is_file_target(name) else name


@contextlib.asynccontextmanager
async def host_process(
    host: type[Host], env: str, settings: Mapping[str, Any] | None, setup_seconds: float
) -> AsyncIterator[HostProcess[Host]]:
    """The process in which an environment is set up, with all that it leaves deleted at the end."""
    arguments = {"name": env, "settings": dict(settings or {}), "setup_seconds": setup_seconds}
    async with temporary_runtime("check") as (runtime, temporary), contextlib.AsyncExitStack() as workers:
        yield HostProcess(host, env, runtime, arguments, temporary, workers)


class CheckHost:
    """The worker process that sets an environment up and checks it, so that a hang or crash ends this process only."""

    def __init__(self, name: str, settings: Mapping[str, Any], setup_seconds: float) -> None:
        self._subject = Subject(spec(name, **settings), name, dict(settings))
        self._subject.is_remote = isinstance(self._subject.spec, RemoteEnvSpec)
        self._setup_seconds = setup_seconds
        self._open = contextlib.AsyncExitStack()
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Set the environment up. Raises `EnvgymError` for a mistake of the user."""
        limit = self._setup_seconds
        faulthandler.dump_traceback_later(limit + HOLD_SECONDS, exit=True)  # set-up may block the loop until then
        try:
            async with asyncio.timeout(limit):
                await self._open.enter_async_context(start_services(self._subject.spec))
        except TimeoutError:
            raise EnvgymError(f"{self._subject.spec.id}: its set-up takes longer than {limit:g} s") from None
        self._beating = asyncio.create_task(self._beat())

    async def check(self, checks: tuple[str, ...], verdicts: Mapping[str, CheckVerdict]) -> Any:
        """Run a group of checks, given the verdicts so far."""
        self._subject.verdicts = verdicts
        if checks == endings.LEFT_BEHIND:
            await self._open.aclose()
        return await GROUPS[checks](self._subject)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        faulthandler.cancel_dump_traceback_later()
        await self._open.aclose()

    async def _beat(self) -> None:
        """Print the stack and end the process once the event loop is blocked permanently: `faulthandler`'s timer needs
        neither the loop nor Python's lock, and this task postpones it."""
        limit = call_limit(self._subject.spec) + HOLD_SECONDS
        while True:
            faulthandler.dump_traceback_later(limit, exit=True)
            await asyncio.sleep(limit / 10)


@dataclass(slots=True)
class HostProcess(Generic[Host]):
    """The process in which a host sets an environment up. One that dies or is killed is replaced at the next call."""

    host: type[Host]
    env: str
    runtime: LocalRuntime
    arguments: Mapping[str, Any]
    temporary: str
    """The folder of its temporary files."""
    workers: contextlib.AsyncExitStack
    """Kills the processes at its end, with everything that the environment left in them."""
    _worker: LocalWorker[Host] | None = None

    async def call(self, call: Callable[[Host], Coroutine[Any, Any, Result]]) -> Result:
        """The result of a method of the host. Raises `TimeoutError` after `GROUP_SECONDS`, and `WorkerDied`."""
        if self._worker is None:
            self._worker = await self.start("1")
        async with asyncio.timeout(GROUP_SECONDS):
            return await self._worker.call(call)

    async def start(self, hash_seed: str) -> LocalWorker[Host]:
        """Start a process and set the environment up in it. `hash_seed` makes hashes differ between processes. Its
        temporary files are in this process's folder, because it is killed and cannot delete them."""
        environ = {"PYTHONHASHSEED": hash_seed, "TMPDIR": self.temporary}
        target = f"{self.host.__module__}:{self.host.__qualname__}"
        worker: LocalWorker[Host] = await self.runtime.start(target, self.arguments, name="check", environ=environ)
        self.workers.push_async_callback(worker.kill)
        try:
            await worker.call(lambda host: host.open())  # open has its own time limit
        except WorkerDied:
            self._worker = worker
            problem, _ = self.describe_death()
            raise EnvgymError(f"{self.env} cannot be set up: {problem}") from None
        return worker

    async def kill(self) -> None:
        """Kill the process, so that the next call starts a new one. They share a log, in which the reason of the next
        one's end is looked for."""
        if self._worker is not None:
            await self._worker.kill()
            os.truncate(self._worker.log, 0)
            self._worker = None

    def describe_death(self) -> tuple[str, str]:
        """(The reason why the process ended, from its log; advice)."""
        text = "" if self._worker is None else self._worker.log.read_text(encoding="utf-8", errors="replace")[-20_000:]
        if "Timeout (" in text:
            location = _user_frame(text.rpartition("Timeout (")[2])
            return f"the event loop was blocked permanently{location}", "no call may block forever: set a timeout"
        reason = next((line for line in reversed(text.splitlines()) if line.strip()), "its log is empty")
        return f"the process ended: {reason.strip()[:200]}", "an environment must not end the process it runs in"


class _Examination:
    """The checks of an environment, group by group. Those without a basis are skipped."""

    def __init__(self, report: Report, process: HostProcess[CheckHost]) -> None:
        self._report = report
        self._process = process

    async def findings(self, checks: tuple[str, ...]) -> list[Finding]:
        """The findings of a group of checks, with their names."""
        reason = self._skip_reason(checks)
        findings = [not_applicable(reason) for _ in checks] if reason else await self._run(checks)
        for finding, check in zip(findings, checks, strict=True):
            finding.check = check
        if findings[0].is_last:  # it has the reason why others are not applicable
            findings[1:] = [finding for finding in findings[1:] if finding.verdict is not CheckVerdict.NOT_APPLICABLE]
        return findings

    def _skip_reason(self, checks: tuple[str, ...]) -> str:
        """The reason to skip these checks because an earlier one failed; empty if there is none."""
        verdict = self._report.verdict
        if checks in (OTHER_PROCESS, repeatability.ISOLATION, forks.CHECKS):
            if verdict("seed") is CheckVerdict.FAILED:
                return "episodes differ anyway (seed)"
            if verdict("generators") is CheckVerdict.FAILED:
                return "episodes share the process's generator (generators)"
        if checks == forks.CHECKS and verdict("isolation") is CheckVerdict.FAILED:
            return "episodes change each other anyway (isolation)"
        return ""

    async def _run(self, checks: tuple[str, ...]) -> list[Finding]:
        """Run a group of checks. If its process dies, hangs or raises an error, the first check fails, the others are
        not applicable, and the process is killed."""
        try:
            if checks == OTHER_PROCESS:
                return [await self._compare_processes()]
            verdicts = self._report.verdicts()
            findings: list[Finding] = await self._process.call(lambda host: host.check(checks, verdicts))
            return findings
        except WorkerDied:
            finding = failure(*self._process.describe_death())
        except TimeoutError:
            advice = "set a timeout for what it waits on, or choose faster settings for the check"
            finding = failure(f"this takes longer than {GROUP_SECONDS:g} s", advice)
        except WorkerError as error:
            finding = failure(f"the environment raised {without_log(error)}", "envgym envs try shows more")
        await self._process.kill()
        finding.is_last = checks == episodes.CHECKS
        return [finding, *(not_applicable(f"see {checks[0]}") for _ in checks[1:])]

    async def _compare_processes(self) -> Finding:
        """The finding on the same episodes in the process of the checks and in a new one with another hash seed."""
        verdicts = self._report.verdicts()
        collecting = self._process.call(lambda host: host.check(OTHER_PROCESS, verdicts))
        records, second = await asyncio.gather(collecting, self._process.start("2"))
        try:
            async with asyncio.timeout(GROUP_SECONDS):
                second_records = await second.call(lambda host: host.check(OTHER_PROCESS, verdicts))
        finally:
            await second.kill()
        return repeatability.compare_records(records, second_records)


def without_log(error: WorkerError) -> str:
    """The message of an error in the process, without the process's name and its log, which will be deleted."""
    return re.sub(r" \(log: .*\)$|^check: ", "", str(error))


def _user_frame(stack: str) -> str:
    """The innermost function of the user in a stack of `faulthandler`, as part of a sentence."""
    stack = stack.rpartition("(most recent call first)")[2]  # the main thread's comes last
    frames = re.findall(r'File "(.+)", line (\d+) in (\w+)', stack)
    user_frames = [frame for frame in frames if is_user_file(frame[0])] or frames
    return f" in {user_frames[0][2]} ({user_frames[0][0]}, line {user_frames[0][1]})" if user_frames else ""
