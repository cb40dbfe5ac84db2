"""Checks that the same seed and task give the same episode: again, in another process, whatever the process's own
random generators do, and with others in play beside it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

from envgym.hashing import task_hash
from envgym.rollout.scripted import Script
from envgym.types import Task

from .play import Played, difference
from .report import Finding, Verdict, failed, listed, not_applicable, ok, warning
from .scripts import monkey
from .subject import Clock, Subject

CHECKS = ("seed", "problems", "generators")
TASKS = 4
SECONDS = 3.0
PROBLEMS = 12
"""Tasks and seeds tried to find two that differ."""
TOGETHER = 4
"""Episodes that are in play at the same time."""


async def check(subject: Subject) -> list[Finding]:
    tasks = await subject.tasks(TASKS)
    await _play(subject, tasks[:1])  # what is imported or cached with the first episode is no difference
    first, touched = await _play(subject, tasks)
    same = await _same_again(subject, tasks, first)
    if same.verdict is not Verdict.FAILED:
        shared = await _generators(subject, tasks, first, touched)
    else:
        shared = _touches(touched) if touched else not_applicable("episodes differ anyway (seed)")
    return [same, await _problems(subject), shared]


async def _play(
    subject: Subject, tasks: Sequence[Task], *, again: Sequence[str] = (), global_seed: int = 1
) -> tuple[dict[str, Played], list[str]]:
    """Play the scripts of the tasks, as many as there is time for, or those of `again` in that order.

    The global generators begin each episode alike. Also returns which of them were used.
    """
    jobs: dict[str, tuple[Task, int, Script, str]] = {}
    for number, task in enumerate(tasks):
        jobs |= {f"{number} {name}": (task, number, script, name) for name, script in subject.scripts(task).items()}
    clock = Clock(SECONDS)
    played: dict[str, Played] = {}
    touched: set[str] = set()
    for key in again or jobs:
        if not again and clock.is_up and len(played) >= 2:
            break
        _seed_generators(global_seed)
        before = _generator_states()
        played[key] = await subject.play(*jobs[key])
        after = _generator_states()
        # One that was only imported meanwhile was not used.
        touched |= {name for name, state in before.items() if after.get(name) != state}
    return played, sorted(touched)


def _first_difference(first: dict[str, Played], again: dict[str, Played]) -> str:
    return next((found for key in first if (found := difference(first[key].record(), again[key].record()))), "")


async def _same_again(subject: Subject, tasks: Sequence[Task], first: dict[str, Played]) -> Finding:
    """In the other order, so that what an episode leaves behind for the next one shows as well."""
    again, _ = await _play(subject, tasks, again=list(reversed(first)))
    if found := _first_difference(first, again):
        return failed(
            f"the same task, seed and actions gave something else the second time: {found}",
            "draw from self.rng (or from the seed that reset is given), and keep what an episode changes on self",
        )
    metrics = {
        metric
        for key in first
        for one, other in zip(first[key].turns, again[key].turns, strict=False)
        for metric, value in (one.info.get("metrics") or {}).items()
        if value != (other.info.get("metrics") or {}).get(metric)
    }
    also = f" (but for the metrics {listed(sorted(metrics))})" if metrics else ""
    return ok(f"{len(first)} episodes played twice were the same{also}")


async def _problems(subject: Subject) -> Finding:
    """Another task or seed makes another problem."""
    if subject.spec.tasks(subject.split).size == 1:
        return not_applicable("there is one task")
    tasks = await subject.tasks(PROBLEMS)
    records: set[str] = set()
    beginnings: set[str] = set()
    short = True
    clock = Clock(SECONDS)
    for number, task in enumerate(tasks):
        if clock.is_up and number >= 4:
            break
        for name, script in subject.scripts(task).items():
            played = await subject.play(task, number, script)
            beginnings.add(repr(played.record()[:1]))
            records.add(f"{name} {played.record()}")
            short = short and len(played.turns) <= 1
    if len(beginnings) > 1:
        return ok(f"{len(beginnings)} different first observations in {number + 1} tasks")
    if len(records) > len(subject.scripts(tasks[0])):
        return ok(f"{number + 1} tasks begin alike and go on differently")
    found = f"{number + 1} tasks with different seeds posed the same problem"
    asks = {repr((task.prompt, task.answer, dict(task.fields))) for task in tasks}
    if short or len(asks) > 1:
        advice = 'pose options["task"], or draw the problem from self.rng; if there is only one, let tasks() say so'
        return failed(found, advice)
    advice = "in a world that is always the same, held-out tasks tell nothing new"
    return warning(f"{found}, as far as a few random turns can tell", advice)


# -- the generators that a whole process shares -----------------------------------------------------------


async def _generators(subject: Subject, tasks: Sequence[Task], first: dict[str, Played], touched: list[str]) -> Finding:
    """The process's own generators are neither used nor seeded."""
    if subject.is_remote:
        return not_applicable("it plays on its server")
    other, touched_again = await _play(subject, tasks, again=list(first), global_seed=2)
    if found := _first_difference(first, other):
        return failed(
            f"episodes depend on the process's random generator ({listed(touched or ['a library'])}): {found}",
            "draw from self.rng, which is this instance's own and seeded by reset",
        )
    if touched := sorted({*touched, *touched_again}):
        return _touches(touched)
    return ok(f"{listed(_generator_states())}: as they were, and without influence")


def _touches(touched: Sequence[str]) -> Finding:
    return failed(
        f"an episode draws from or seeds the process's generator ({listed(touched)}), which others use as well",
        "draw from self.rng; for NumPy numpy.random.default_rng(self.rng.getrandbits(64))",
    )


def _generator_states() -> dict[str, Any]:
    """The state of each, as values that can be compared. Those of NumPy and PyTorch where something has imported
    these."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = numpy.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def _seed_generators(value: int) -> None:
    random.seed(value)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(value)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(value)


# -- in two processes -------------------------------------------------------------------------------------


async def recorded(subject: Subject) -> dict[str, Any]:
    """The records of a few episodes, to be compared with another process's, and the fingerprints of the environment
    and of tasks, where these are sound."""
    tasks = await subject.tasks(TASKS)
    played, _ = await _play(subject, tasks)
    fingerprints = subject.spec.fingerprint() if subject.holds("fingerprints") else {}
    if subject.holds("tasks"):
        fingerprints |= {f"task {task.key}": task_hash(task) for task in tasks}
    return {"episodes": {key: episode.record() for key, episode in played.items()}, "fingerprints": fingerprints}


def compared(one: dict[str, Any], other: dict[str, Any]) -> Finding:
    """The finding on the records of two processes. Sets and `hash` of texts differ between processes."""
    for what in one["fingerprints"].keys() | other["fingerprints"].keys():
        if one["fingerprints"].get(what) != other["fingerprints"].get(what):
            found = f"the fingerprint of {what} is another in another process"
            return failed(found, "sort what comes out of sets, and leave memory addresses out of tasks")
    both = [key for key in one["episodes"] if key in other["episodes"]]
    for key in both:
        if found := difference(one["episodes"][key], other["episodes"][key]):
            return failed(
                f"the same episode is another in another process: {found}",
                "sort sets before drawing from them or showing them, and do not use hash() of texts: "
                "both differ between processes",
            )
    return ok(f"{len(both)} episodes were the same in another process")


# -- beside others ----------------------------------------------------------------------------------------

ISOLATION = ("isolation", "surroundings")


async def check_isolation(subject: Subject) -> list[Finding]:
    """Episodes that are played at the same time leave each other and the process alone."""
    variables = dict(os.environ)
    return [await _together(subject), _surroundings(variables, subject)]


async def _together(subject: Subject) -> Finding:
    most = min(TOGETHER, subject.spec.concurrency_bound() or TOGETHER)
    if most < 2:
        return not_applicable("only one episode is in play at once (env.concurrency)")
    tasks = (await subject.tasks(TOGETHER - 1))[: most - 1]
    games = [(task, number, monkey(number)) for number, task in enumerate(tasks)]
    games += [(tasks[0], 0, monkey("another"))] * (most - len(games))  # members of a group share a task and a seed
    alone = [await subject.play(*game) for game in games]
    lock = asyncio.Lock()  # first come, first served: each call comes between two of another episode's, alone
    in_turns = await asyncio.gather(*(subject.play(*game, around=lambda: lock) for game in games))
    at_once = await asyncio.gather(*(subject.play(*game) for game in games))
    for together in (in_turns, at_once):
        for one, other in zip(alone, together, strict=True):
            if found := difference(one.record(), other.record()):
                return failed(
                    f"an episode was another one with others in play beside it: {found}",
                    "keep what belongs to an episode on self: class attributes, globals and the spec are shared",
                )
    return ok(f"{len(games)} episodes at once were what each was alone")


def _surroundings(variables: dict[str, str], subject: Subject) -> Finding:
    """The working directory and the variables are as they were, but for those that a library sets once, with its first
    episode."""
    if subject.is_remote:
        return not_applicable("it plays on its server")
    now = dict(os.environ)
    changes = [f"environment variable {key}" for key in sorted(variables | now) if variables.get(key) != now.get(key)]
    if os.getcwd() != subject.working_directory:
        changes.insert(0, "working directory")
        os.chdir(subject.working_directory)  # the later checks look for its files
    if changes:
        advice = "use absolute paths, and pass env= and cwd= to processes: all episodes share these"
        return failed(f"episodes change the process's {listed(changes)}", advice)
    return ok("working directory and environment variables are as they were")
