"""The attack on an environment, in a process that may hang or end."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envgym.check.run import GROUP_SECONDS, CheckHost, HostProcess, host_process, name_for_process, without_log
from envgym.check.scores import run_group
from envgym.errors import ConfigError, EnvgymError, WorkerDied, WorkerError

from .attempts import TASKS, CheatAttempt, CheatAttempts
from .report import ECHO_MARGIN, FULL, MARGIN, AttackReport, AttackRow, AttackVerdict, compare

FIRST_TASKS = 16
"""A cheat that earns no more than blind play on this many tasks is not tried on the others."""
ENDLESS = {"hanging": 4, "endless_programs": 4}
"""The first tasks of cheats that may take as long as a call may. They are played one at a time, so that each has the
machine."""
CONCURRENCY = 8
"""Number of tasks that are played at once."""

OnRow = Callable[[AttackRow, int], None]
"""Called with each row, and the number of rows that there will be."""
Play = tuple[float | None, float | None]
"""(The reward that training would use, the score) of an episode; None and None if it failed."""


@dataclass(slots=True)
class Plays:
    """The episodes of an attempt: a list per task, with an entry per variant; the last failure, and the verdict if the
    process hangs or has ended."""

    tasks: list[list[Play]] = field(default_factory=list)
    problem: str = ""
    verdict: AttackVerdict | None = None

    def rewards(self) -> list[list[float | None]]:
        """The rewards of each variant."""
        return [[reward for reward, _ in variant] for variant in zip(*self.tasks, strict=True)]


async def attack_environment(
    name: str, settings: Mapping[str, Any] | None = None, on_row: OnRow | None = None, *, setup_seconds: float = 300.0
) -> AttackReport:
    """Play the cheats in the environment `name` with `settings`, and compare each with the best answer-blind play.
    `on_row` is called with each row immediately; `setup_seconds` is the time limit of a set-up, services included.

    Call it from the main thread, with a name that a new process can resolve too: an id of an installed package, a file,
    an import path or a URL. Raises `EnvgymError` if the environment cannot be set up, has no tasks or gives no rewards.
    """
    report, start = AttackReport(name_for_process(name)), time.monotonic()
    async with host_process(AttackHost, report.env, settings, setup_seconds) as process:
        await Attack(report, process).run(on_row or (lambda row, total: None))
    report.seconds = time.monotonic() - start
    return report


class AttackHost(CheckHost):
    """The worker process that sets an environment up and plays attempts at it."""

    async def open(self) -> None:
        await super().open()
        self._plan = CheatAttempts(self._subject)
        await self._plan.prepare()
        self._attempts = list(self._plan.attempts()) if self._plan.tasks else []

    async def describe(self) -> tuple[list[tuple[str, str]], float]:
        """(The kind and the name of each attempt, the reward of a right answer)."""
        return [(attempt.kind, attempt.name) for attempt in self._attempts], self._plan.right_value

    async def play(self, index: int, start: int, stop: int) -> Plays:
        """The episodes of an attempt, by its index, on the tasks from `start` to `stop`, up to one that hangs."""
        attempt, plays = self._attempts[index], Plays()
        step = 1 if attempt.kind in ENDLESS else CONCURRENCY
        while start < stop and plays.verdict is None:
            numbers = range(start, min(start + step, stop))
            plays.tasks += await asyncio.gather(*(self._play_task(attempt, number, plays) for number in numbers))
            start += step
        return plays

    async def _play_task(self, attempt: CheatAttempt, number: int, plays: Plays) -> list[Play]:
        """The episodes of the variants in one task, after a right one of the task for the kind `left_behind`."""
        if attempt.kind == "left_behind":
            demonstrations = next(attempt for attempt in self._attempts if attempt.kind == "demonstrations")
            await self._play_task(demonstrations, number, Plays())
        task = self._plan.tasks[number]
        scripts = {str(variant): script for variant, script in enumerate(attempt.scripts(task, number))}
        results: list[Play] = []
        for episode in (await run_group(self._subject, task, number, scripts)).values():
            if episode.failed or episode.hangs:
                plays.problem = episode.problem()
                plays.verdict = AttackVerdict.HANGS if episode.hangs else plays.verdict
            reward, score = episode.result.reward, episode.result.score
            results.append((None, None) if episode.failed else (score if reward is None else reward, score))
        return results


class Attack:
    """The rows of an attack, one after the other."""

    def __init__(self, report: AttackReport, process: HostProcess[AttackHost]) -> None:
        self._report = report
        self._process = process
        self._blind: list[float] = []
        self._right: list[float] = []

    async def run(self, on_row: OnRow) -> None:
        try:
            names, right_value = await self._process.call(lambda host: host.describe())
        except WorkerError as error:
            raise EnvgymError(f"{self._report.env} raised {without_log(error)}: see envgym envs check") from None
        n_rows = sum(kind != "blind" for kind, _ in names)
        for index, (kind, name) in enumerate(names):
            if kind == "blind":
                self._compare_blind(name, await self._play(index, 0, TASKS))
                continue
            # Demonstrations that hang, or end the process, have no reward for every task to compare with.
            if not self._blind or (kind == "excess" and len(self._right) < TASKS):
                break
            self._way = max(right_value - self._report.blind, 0) or 1.0  # from blind play to a right answer
            self._report.rows.append(await self._row(index, kind, name))
            on_row(self._report.rows[-1], n_rows)
        if not self._report.rows:
            raise ConfigError(f"{self._report.env} has no tasks, or rewards no answer-blind play, not even with 0")

    def _compare_blind(self, name: str, plays: Plays) -> None:
        """Keep the rewards of the best answer-blind play. A failed episode counts as the worst of the others."""
        for rewards in plays.rewards():
            worst = min((reward for reward in rewards if reward is not None), default=None)
            if len(rewards) < TASKS or worst is None:
                continue
            values = [worst if reward is None else reward for reward in rewards]
            if not self._blind or sum(values) > sum(self._blind):
                self._blind = values
                self._report.blind_play, self._report.blind = name, statistics.fmean(values)

    async def _row(self, index: int, kind: str, name: str) -> AttackRow:
        if kind == "demonstrations":
            return self._demonstrations_row(name, await self._play(index, 0, TASKS))
        first = ENDLESS.get(kind, FIRST_TASKS)
        plays = await self._play(index, 0, first)
        row = self._cheat_row(kind, name, plays)
        if row.verdict is AttackVerdict.NO and (row.earned or 0) > (row.blind or 0):
            further_plays = await self._play(index, first, TASKS)
            further_plays.tasks[:0] = plays.tasks if further_plays.tasks else []
            row = self._cheat_row(kind, name, further_plays)
        return row

    async def _play(self, index: int, start: int, stop: int) -> Plays:
        """The episodes of an attempt. A process that hangs or has ended is replaced."""
        try:
            plays = await self._process.call(lambda host: host.play(index, start, stop))
        except WorkerDied:
            problem, _ = self._process.describe_death()
            plays = Plays([], problem, AttackVerdict.HANGS if "blocked" in problem else AttackVerdict.ENDS)
        except TimeoutError:
            plays = Plays([], f"the episodes take longer than {GROUP_SECONDS:g} s", AttackVerdict.HANGS)
        except WorkerError as error:
            plays = Plays([], without_log(error), AttackVerdict.FAILS)
        if plays.verdict is not None:
            await self._process.kill()
        return plays

    def _cheat_row(self, kind: str, name: str, plays: Plays) -> AttackRow:
        """The row of a cheat in the variant that earned most."""
        row = AttackRow(kind, name, plays.verdict or AttackVerdict.NO, plays.problem if plays.verdict else "")
        baseline = self._right if kind == "excess" else self._blind
        margin = self._way * (ECHO_MARGIN if kind == "echoes" else MARGIN)
        for rewards in plays.rewards():
            blind = statistics.fmean(baseline[: len(rewards)])
            mean, lower_bound = compare(rewards, baseline[: len(rewards)]) if len(rewards) > 1 else (0.0, 0.0)
            if row.earned is None or blind + mean > row.earned:
                row.earned, row.blind, row.lower_bound, row.tasks = blind + mean, blind, lower_bound, len(rewards)
                if plays.verdict is None and len(rewards) == TASKS and lower_bound > 0:
                    row.verdict = AttackVerdict.PAYS if mean >= margin else AttackVerdict.NO
        if plays.verdict is None and all(reward is None for rewards in plays.rewards() for reward in rewards):
            row.verdict, row.message = AttackVerdict.FAILS, plays.problem
        return row

    def _demonstrations_row(self, name: str, plays: Plays) -> AttackRow:
        """The row of the demonstrations, which must all end: the best one of each task counts, since some environments
        add bad ones. Its score must be full, and its reward above that of blind play."""
        self._right = [max((reward for reward, _ in task if reward is not None), default=0.0) for task in plays.tasks]
        scores = [
            max((score for _, score in task if score is not None), default=right)
            for task, right in zip(plays.tasks, self._right, strict=True)
        ]
        earned, blind, message = statistics.fmean(self._right or [0.0]), self._report.blind, ""
        is_less = all(0 <= score <= 1 for score in scores) and statistics.fmean(scores or [0.0]) < FULL
        if is_less or plays.verdict is not None:
            message = plays.problem or "a right answer must earn all: see envgym envs try"
        elif earned <= blind:
            message = "the best answer-blind play earns as much as right answers"
        verdict = AttackVerdict.LESS if message else AttackVerdict.ALL
        return AttackRow("demonstrations", name, verdict, message, earned, blind, tasks=len(scores))
