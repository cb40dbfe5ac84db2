"""Runs the checks of an environment one group after the other, in processes that may hang or crash."""

from __future__ import annotations

import asyncio
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envgym.errors import EnvgymError, WorkerDied, WorkerError
from envgym.loading import absolute_target, names_file
from envgym.workers.local import LocalRuntime, LocalWorker

from . import repeatability, scores
from .report import Finding, Report, Verdict, failed, not_applicable

GROUP_SECONDS = 300.0
"""Seconds a group of checks may take. Each keeps itself to far less, but for an environment that is slow throughout."""
GROUPS = {
    "description": ("settings", "tasks", "splits", "fingerprints"),
    "episodes": ("episodes", "types", "tools"),
    "repeatability": ("seed", "problems", "generators"),
    "another_process": ("process",),
    "isolation": ("isolation", "surroundings"),
    "latency": ("latency", "event loop"),
    "leak": ("leak",),
    "scores": scores.CHECKS,
    "endings": ("after the end", "close"),
    "left_behind": ("left behind",),
}
"""The groups in their order, and the checks of each."""

OnFinding = Callable[[Finding], None]


async def check_environment(
    name: str,
    settings: Mapping[str, Any] | None = None,
    on_finding: OnFinding | None = None,
    *,
    setup_seconds: float = 300.0,
) -> Report:
    """Examine the environment that `name` stands for, with `settings`. `on_finding` is told of each as it is found;
    `setup_seconds` is how long setting it up may take, its services included.

    Call it from the main thread, with a name that a fresh process understands too: an id of an installed package, a
    file, an import path or a URL. Raises `EnvgymError` where the environment cannot be set up.
    """
    report, start = Report(absolute_target(name) if names_file(name) else name), time.monotonic()
    logs = tempfile.mkdtemp(prefix="envgym-check-")
    arguments = {"name": report.env, "settings": dict(settings or {}), "setup_seconds": setup_seconds}
    examination = _Examination(report, LocalRuntime(logs), arguments, on_finding)
    try:
        await examination.run()
    finally:
        await examination.close()
        shutil.rmtree(logs, ignore_errors=True)
        report.seconds = time.monotonic() - start
    return report


class _Examination:
    """The checks in their order, and what becomes of the later ones when an earlier one failed."""

    def __init__(
        self, report: Report, runtime: LocalRuntime, arguments: Mapping[str, Any], on_finding: OnFinding | None
    ) -> None:
        self._report = report
        self._runtime = runtime
        self._arguments = arguments
        self._on_finding = on_finding
        self._can_play = False
        self._worker: LocalWorker | None = None
        self._workers: list[LocalWorker] = []

    async def run(self) -> None:
        for group, checks in GROUPS.items():
            why = self._not_worth_it(group)
            findings = [not_applicable(check, why) for check in checks] if why else await self._group(group, checks)
            self._report.findings += findings
            for finding in findings:
                if self._on_finding is not None:
                    self._on_finding(finding)

    async def close(self) -> None:
        """End the processes, with all that the environment left in them."""
        for worker in self._workers:
            await worker.kill()
        await self._runtime.close()

    def _not_worth_it(self, group: str) -> str:
        """Why the checks of `group` would say nothing of their own; empty where they would."""
        verdict = self._report.verdict
        if group in ("description", "episodes"):
            return ""
        if verdict("episodes") is Verdict.NOT_APPLICABLE:
            return "no episode could be judged (episodes)"
        if not self._can_play:
            return "no episode could be played (episodes)"
        if group in ("another_process", "isolation") and verdict("seed") is Verdict.FAILED:
            return "episodes differ anyway (seed)"
        if group in ("another_process", "isolation") and verdict("generators") is Verdict.FAILED:
            return "episodes share the process's generator (generators)"
        return ""

    async def _group(self, group: str, checks: tuple[str, ...]) -> list[Finding]:
        try:
            if group == "another_process":
                return [await self._compare_processes()]
            if group == "episodes":
                findings, self._can_play = await self._call(group)
                return list(findings)
            repeatable = self._report.verdict("seed") is Verdict.OK is self._report.verdict("generators")
            return list(await self._call(group, *([repeatable] if group == "endings" else [])))
        except WorkerDied:
            finding = failed(checks[0], *self._how_it_died())
        except TimeoutError:
            advice = "give what it waits for a deadline, or call the check with settings that make it quicker"
            finding = failed(checks[0], f"this takes longer than {GROUP_SECONDS:g} s", advice)
        except WorkerError as error:
            found = re.sub(r" \(log: .*\)$|^check: ", "", str(error))
            finding = failed(checks[0], f"the environment raised {found}", "envgym envs try shows more")
        await self._end_worker()
        return [finding, *(not_applicable(check, f"see {checks[0]}") for check in checks[1:])]

    async def _call(self, method: str, *args: Any) -> Any:
        if self._worker is None:
            self._worker = await self._start("1")
        async with asyncio.timeout(GROUP_SECONDS):
            return await self._worker.call(method, *args)

    async def _start(self, hash_seed: str) -> LocalWorker:
        """A process that is ready. Hashes differ from one seed to the next, as they do from one process to the next."""
        worker = await self._runtime.start(
            "envgym.check.host:CheckHost", self._arguments, name="check", environ={"PYTHONHASHSEED": hash_seed}
        )
        self._workers.append(worker)
        try:
            await worker.call("open")  # it keeps its own time
        except WorkerDied:
            self._worker = worker
            found, _ = self._how_it_died()
            raise EnvgymError(f"{self._report.env} cannot be set up: {found}") from None
        return worker

    async def _compare_processes(self) -> Finding:
        sound = [self._report.verdict(check) in (Verdict.OK, Verdict.WARNING) for check in ("fingerprints", "tasks")]
        one, other = await asyncio.gather(self._call("recorded", *sound), self._start("2"))
        try:
            async with asyncio.timeout(GROUP_SECONDS):
                return repeatability.compared(one, await other.call("recorded", *sound))
        finally:
            await other.kill()

    async def _end_worker(self) -> None:
        """The next group begins with a new process."""
        if self._worker is not None:
            await self._worker.kill()
            self._worker = None

    def _how_it_died(self) -> tuple[str, str]:
        """What a process that ended by itself was doing, from its log, and what to do about it."""
        text = ""
        if self._worker is not None:
            text = self._worker.log.read_text(errors="replace")[-20_000:]
        if "Timeout (" in text:
            where = _frame(text.rpartition("Timeout (")[2])
            return f"the event loop was held for good{where}", "no call may block for ever: give it a deadline"
        reason = next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        return f"the process ended: {reason.strip()[:200]}", "an environment must not end the process it runs in"


def _frame(stack: str) -> str:
    """The innermost function of the user's in a stack written by `faulthandler`, as part of a sentence."""
    ours = (str(Path(__file__).parents[1]) + "/", sysconfig.get_paths()["stdlib"] + "/")
    stack = stack.rpartition("(most recent call first)")[2]  # the main thread's comes last
    frames = re.findall(r'File "(.+)", line (\d+) in (\w+)', stack)
    theirs = [f for f in frames if not f[0].startswith(ours) and not f[0].startswith("<")] or frames
    return f" in {theirs[0][2]} ({theirs[0][0]}, line {theirs[0][1]})" if theirs else ""
