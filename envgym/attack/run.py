"""The attack on an environment, in a process that may hang or end."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envgym.check.run import GROUP_SECONDS, CheckHost, HostProcess
from envgym.check.scores import run_group
from envgym.errors import ConfigError, WorkerDied, WorkerError
from envgym.loading import absolute_target, is_file_target
from envgym.processes.local import LocalRuntime
from envgym.services.start import temporary_runtime

from .attempts import TASKS, Attempt, Attempts
from .report import ECHO_MARGIN, FULL, MARGIN, AttackReport, AttackVerdict, Play, Row, compare

FIRST_TASKS = 16
"""A cheat that earns no more than blind play on this many tasks is not tried on the others."""
ENDLESS = ("hanging", "endless_programs")
"""Kinds of cheats that may take as long as a call may: one task at a time, so that each has the machine."""
FIRST_TASKS_OF_ENDLESS = 4
CONCURRENCY = 8
"""Number of tasks that are played at once."""

OnRow = Callable[[Row, int], None]
"""Called with each row, and the number of attempts."""


@dataclass(slots=True)
class Plays:
    """The episodes of an attempt: a list per variant, with an entry per task, and the problem that ended them."""

    variants: list[list[Play]] = field(default_factory=list)
    problem: str = ""
    """The last failure."""
    verdict: AttackVerdict | None = None
    """The verdict, if the process hangs or has ended."""

    def add(self, plays: Plays) -> None:
        """Add the episodes on further tasks."""
        for variant, episodes in zip(self.variants, plays.variants, strict=False):
            variant += episodes
        self.problem, self.verdict = plays.problem or self.problem, plays.verdict


async def attack_environment(
    name: str,
    settings: Mapping[str, Any] | None = None,
    on_row: OnRow | None = None,
    *,
    setup_seconds: float = 300.0,
) -> AttackReport:
    """Play the cheats in the environment `name` with `settings`, and compare each with the best answer-blind play.
    `on_row` is called with each row immediately; `setup_seconds` is the time limit of a set-up, services included.

    Call it from the main thread, with a name that a new process can resolve too: an id of an installed package, a file,
    an import path or a URL. Raises `EnvgymError` if the environment cannot be set up, has no tasks or gives no rewards.
    """
    if not isinstance(name, str):
        raise ConfigError(f"cheats are played in another process, so give a name (a file, say), not {name!r:.60}")
    report, start = AttackReport(absolute_target(name) if is_file_target(name) else name), time.monotonic()
    arguments = {"name": report.env, "settings": dict(settings or {}), "setup_seconds": setup_seconds}
    async with temporary_runtime("attack") as (runtime, logs):
        attack = _Attack(report, runtime, arguments, logs)
        try:
            await attack.run(on_row)
        finally:
            await attack.close()
    report.seconds = time.monotonic() - start
    return report


class AttackHost(CheckHost):
    """The worker process that sets an environment up and plays attempts at it."""

    _attempts: Sequence[Attempt] = ()

    async def open(self) -> None:
        await super().open()
        attempts = Attempts(self._subject)
        await attempts.prepare()
        self._tasks, self._right_value = attempts.tasks, attempts.right_value
        self._attempts = list(attempts.attempts()) if attempts.tasks else ()

    async def describe(self) -> tuple[list[tuple[str, str]], float]:
        """(The kind and the name of each attempt, the reward of a right answer)."""
        return [(attempt.kind, attempt.name) for attempt in self._attempts], self._right_value

    async def play(self, index: int, start: int, stop: int) -> Plays:
        """The episodes of an attempt, by its index, on the tasks from `start` to `stop`, up to one that hangs."""
        attempt = self._attempts[index]
        plays = Plays([[] for _ in attempt.variants])
        concurrency = 1 if attempt.kind in ENDLESS else CONCURRENCY
        for first in range(start, stop, concurrency):
            numbers = range(first, min(first + concurrency, stop))
            for episodes in await asyncio.gather(*(self._play_task(attempt, number, plays) for number in numbers)):
                for variant, play in zip(plays.variants, episodes, strict=True):
                    variant.append(play)
            if plays.verdict is not None:
                break
        return plays

    async def _play_task(self, attempt: Attempt, number: int, plays: Plays) -> list[Play]:
        """The episodes of the variants in one task, after a right one of the task for the kind `left_behind`."""
        task = self._tasks[number]
        if attempt.kind == "left_behind":
            demonstrations = next(attempt for attempt in self._attempts if attempt.kind == "demonstrations")
            await self._play_task(demonstrations, number, Plays())
        scripts = {str(variant): script_of(task, number) for variant, script_of in enumerate(attempt.variants)}
        episodes = (await run_group(self._subject, task, number, scripts)).values()
        for episode in episodes:
            if episode.failed or episode.hangs:
                plays.problem = episode.problem()
                plays.verdict = AttackVerdict.HANGS if episode.hangs else plays.verdict
        return [
            Play(None, None) if episode.failed else Play(episode.result.reward, episode.result.score)
            for episode in episodes
        ]


class _Attack(HostProcess[AttackHost]):
    """The rows of an attack, one after the other."""

    def __init__(
        self, report: AttackReport, runtime: LocalRuntime, arguments: Mapping[str, Any], temporary: str
    ) -> None:
        super().__init__("envgym.attack.run:AttackHost", report.env, runtime, arguments, temporary)
        self._report = report
        self._blind: list[float] = []
        self._right: list[float] = []
        self._way = 1.0
        """The difference between a right answer and blind play."""

    async def run(self, on_row: OnRow | None) -> None:
        names, right_value = await self.call(lambda host: host.describe())
        if not names:
            raise ConfigError(f"{self._report.env} has no tasks to attack")
        cheats = [(index, kind, name) for index, (kind, name) in enumerate(names) if kind != "blind"]
        for index, (kind, name) in enumerate(names):
            if kind == "blind":
                self._compare_blind(name, await self._play(index, 0, TASKS))
        if not self._blind:
            raise ConfigError(
                f"{self._report.env} rewards no answer-blind play, not even with 0: nothing to compare with"
            )
        self._way = max(right_value - self._report.blind, 0) or 1.0
        for index, kind, name in cheats:
            row = await self._row(index, kind, name)
            self._report.rows.append(row)
            if on_row is not None:
                on_row(row, len(cheats))

    def _compare_blind(self, name: str, plays: Plays) -> None:
        """Keep the rewards of the best answer-blind play. A failed episode counts as the worst of the others."""
        for variant in plays.variants:
            values = [play.value for play in variant]
            lowest = min((value for value in values if value is not None), default=None)
            if lowest is not None and len(values) == TASKS:
                rewards = [lowest if value is None else value for value in values]
                if not self._blind or sum(rewards) > sum(self._blind):
                    self._blind = rewards
                    self._report.blind_play, self._report.blind = name, statistics.fmean(rewards)

    async def _row(self, index: int, kind: str, name: str) -> Row:
        if kind == "demonstrations":
            return self._demonstrations_row(name, await self._play(index, 0, TASKS))
        first = FIRST_TASKS_OF_ENDLESS if kind in ENDLESS else FIRST_TASKS
        plays = await self._play(index, 0, first)
        row = self._cheat_row(kind, name, plays)
        if row.verdict is AttackVerdict.NO and (row.earned or 0) > (row.blind or 0):
            plays.add(await self._play(index, first, TASKS))
            row = self._cheat_row(kind, name, plays)
        return row

    async def _play(self, index: int, start: int, stop: int) -> Plays:
        """The episodes of an attempt. A process that hangs or has ended is replaced."""
        try:
            plays = await self.call(lambda host: host.play(index, start, stop))
        except WorkerDied:
            problem, _ = self.describe_death()
            verdict = AttackVerdict.HANGS if "blocked" in problem else AttackVerdict.ENDS
            plays = Plays(verdict=verdict, problem=problem)
        except TimeoutError:
            plays = Plays(verdict=AttackVerdict.HANGS, problem=f"the episodes take longer than {GROUP_SECONDS:g} s")
        except WorkerError as error:
            plays = Plays(verdict=AttackVerdict.FAILS, problem=str(error))
        if plays.verdict is not None:
            await self.kill()
        return plays

    def _cheat_row(self, kind: str, name: str, plays: Plays) -> Row:
        """The row of a cheat in the variant that earned most."""
        row = Row(kind, name, plays.verdict or AttackVerdict.NO, message=plays.problem if plays.verdict else "")
        best = -math.inf
        for variant in plays.variants:
            values = [play.value for play in variant]
            baseline = (self._right if kind == "excess" else self._blind)[: len(values)]
            mean, lower_bound = compare(values, baseline)
            if mean > best:
                best = mean
                row.blind, row.lower_bound, row.tasks = statistics.fmean(baseline), lower_bound, len(values)
                row.earned = row.blind + mean
        margin = self._way * (ECHO_MARGIN if kind == "echoes" else MARGIN)
        if plays.verdict is None and row.tasks == TASKS and best >= margin and (row.lower_bound or 0) > 0:
            row.verdict = AttackVerdict.PAYS
        elif plays.verdict is None and all(play.value is None for variant in plays.variants for play in variant):
            row.verdict, row.message = AttackVerdict.FAILS, plays.problem
        return row

    def _demonstrations_row(self, name: str, plays: Plays) -> Row:
        """The row of the demonstrations: the best one of each task counts, since some environments add bad ones. Its
        score must be full, and its reward above that of blind play."""
        tasks = list(zip(*plays.variants, strict=True))
        self._right = [max((play.value for play in task if play.value is not None), default=0.0) for task in tasks]
        scores = [max((play.score for play in task if play.score is not None), default=None) for task in tasks]
        in_scale = [reward if score is None else score for score, reward in zip(scores, self._right, strict=True)]
        row = Row("demonstrations", name, AttackVerdict.ALL, None, self._report.blind, None, len(tasks), plays.problem)
        row.earned = statistics.fmean(self._right or [0.0])
        if all(0 <= value <= 1 for value in in_scale) and statistics.fmean(in_scale or [0.0]) < FULL:
            row.verdict, row.message = AttackVerdict.LESS, "a right answer must earn all: see envgym envs try"
        elif row.earned <= self._report.blind:
            row.verdict, row.message = AttackVerdict.LESS, "the best answer-blind play earns as much as right answers"
        return row
