"""Checks that the same seed and task give the same episode: when repeated, in another process, with other states of
the process's random generators, and with concurrent episodes."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.hashing import task_hash
from envgym.rollout.scripted import Script
from envgym.types import Task

from .play import CheckedEpisode, difference
from .report import CheckVerdict, Finding, failure, join_first, not_applicable, ok, warning
from .scripts import monkey
from .subject import Subject, take_in_time

CHECKS = ("seed", "problems", "generators")
TASKS = 4
SECONDS = 3.0
PROBLEMS = 12
"""Tasks and seeds among which at least two must differ."""
CONCURRENT = 4
"""Number of concurrent episodes."""


Records = Mapping[str, list[dict[str, Any]]]
"""The records of episodes (`CheckedEpisode.record`), by their keys."""


async def check(subject: Subject) -> list[Finding]:
    """The findings on repeated episodes (seed), on the variety of problems, and on the global generators."""
    tasks = await subject.tasks(TASKS)
    await _play(subject, tasks[:1])  # imports and caches of the first episode are no difference
    first, touched = await _play(subject, tasks)
    seed_finding = await _check_repeat(subject, tasks, first)
    if seed_finding.verdict is not CheckVerdict.FAILED:
        generator_finding = await _generators(subject, tasks, first, touched)
    else:
        generator_finding = _touches(touched) if touched else not_applicable("episodes differ anyway (seed)")
    return [seed_finding, await _problems(subject), generator_finding]


async def _play(
    subject: Subject, tasks: Sequence[Task], *, keys: Sequence[str] = (), global_seed: int = 1
) -> tuple[dict[str, CheckedEpisode], list[str]]:
    """Run the scripts of the tasks, as many as fit into `SECONDS`, or those of `keys`, in that order.

    The global generators have the same state at the start of each episode. Also returns the names of those used.
    """
    jobs: dict[str, tuple[Task, int, Script, str]] = {}
    for number, task in enumerate(tasks):
        jobs |= {f"{number} {name}": (task, number, script, name) for name, script in subject.scripts(task).items()}
    episodes: dict[str, CheckedEpisode] = {}
    touched: set[str] = set()
    for _, key in take_in_time(keys or jobs, SECONDS, len(keys) or 2):
        _seed_generators(global_seed)
        states = _generator_states()
        episodes[key] = await subject.play(*jobs[key])
        new_states = _generator_states()
        # A generator that was only imported during the episode was not used.
        touched |= {name for name, state in states.items() if new_states.get(name) != state}
    return episodes, sorted(touched)


def _records(episodes: Mapping[str, CheckedEpisode]) -> Records:
    return {key: episode.record() for key, episode in episodes.items()}


def _first_difference(first: Records, second: Records) -> str:
    """The first difference between the episodes that are in both, as a sentence, or ""."""
    return next((text for key in first if key in second and (text := difference(first[key], second[key]))), "")


async def _check_repeat(subject: Subject, tasks: Sequence[Task], first: dict[str, CheckedEpisode]) -> Finding:
    """Repeat the episodes in reverse order, which also shows effects of one episode on the next."""
    second, _ = await _play(subject, tasks, keys=list(reversed(first)))
    if problem := _first_difference(_records(first), _records(second)):
        advice = "draw from self.rng (or from the seed that reset is given), and store an episode's state on self"
        return failure(f"the same task, seed and actions gave another episode the second time: {problem}", advice)
    metrics = {
        metric
        for key in first
        for turn, second_turn in zip(first[key].turns, second[key].turns, strict=False)
        for metric, value in (turn.info.get("metrics") or {}).items()
        if value != (second_turn.info.get("metrics") or {}).get(metric)
    }
    exception = f" (except the metrics {join_first(sorted(metrics))})" if metrics else ""
    return ok(f"{len(first)} episodes were the same when repeated{exception}")


async def _problems(subject: Subject) -> Finding:
    """The finding on variety: another task or seed must give another problem."""
    if subject.spec.tasks(subject.split).size == 1:
        return not_applicable("there is one task")
    tasks = await subject.tasks(PROBLEMS)
    records: set[str] = set()
    beginnings: set[str] = set()
    short = True
    for number, task in take_in_time(tasks, SECONDS, fewest=4):
        for name, script in subject.scripts(task).items():
            episode = await subject.play(task, number, script)
            beginnings.add(repr(episode.record()[:1]))
            records.add(f"{name} {episode.record()}")
            short = short and len(episode.turns) <= 1
    if len(beginnings) > 1:
        return ok(f"{len(beginnings)} different first observations in {number + 1} tasks")
    if len(records) > len(subject.scripts(tasks[0])):
        return ok(f"{number + 1} tasks begin with the same observation and continue differently")
    message = f"{number + 1} tasks with different seeds posed the same problem"
    asks = {repr((task.prompt, task.answer, dict(task.fields))) for task in tasks}
    if short or len(asks) > 1:
        advice = "pose self.task, or draw the problem from self.rng; if there is only one, return one task from tasks()"
        return failure(message, advice)
    advice = "in an environment without variation, held-out tasks measure nothing more"
    return warning(f"{message}, judging by a few random turns", advice)


# -- the generators that a whole process shares -----------------------------------------------------------


async def _generators(
    subject: Subject, tasks: Sequence[Task], first: dict[str, CheckedEpisode], touched: list[str]
) -> Finding:
    """The finding on the process's own generators, which must be neither used nor seeded."""
    if subject.is_remote:
        return not_applicable("it runs on its server")
    second, also_touched = await _play(subject, tasks, keys=list(first), global_seed=2)
    if problem := _first_difference(_records(first), _records(second)):
        names = join_first(touched or ["a library"])
        advice = "draw from self.rng, which is this instance's own and seeded by reset"
        return failure(f"episodes depend on the process's random generator ({names}): {problem}", advice)
    if touched := sorted({*touched, *also_touched}):
        return _touches(touched)
    return ok(f"{join_first(_generator_states())}: unchanged, and without influence")


def _touches(touched: Sequence[str]) -> Finding:
    return failure(
        f"an episode draws from or seeds the process's generator ({join_first(touched)}), which others use as well",
        "draw from self.rng; for NumPy numpy.random.default_rng(self.rng.getrandbits(64))",
    )


def _generator_states() -> dict[str, Any]:
    """The state of each generator as a comparable value; of NumPy and PyTorch only if they are imported."""
    states: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *position = numpy.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *position)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def _seed_generators(value: int) -> None:
    random.seed(value)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(value)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(value)


# -- in two processes -------------------------------------------------------------------------------------


async def collect_records(subject: Subject) -> dict[str, Any]:
    """Records of a few episodes, for comparison with another process, and the fingerprints of the environment and its
    tasks if their checks passed."""
    tasks = await subject.tasks(TASKS)
    episodes, _ = await _play(subject, tasks)
    fingerprints = subject.spec.fingerprint() if subject.holds("fingerprints") else {}
    if subject.holds("tasks"):
        fingerprints |= {f"task {task.key}": task_hash(task) for task in tasks}
    return {"episodes": _records(episodes), "fingerprints": fingerprints}


def compare_records(first: dict[str, Any], second: dict[str, Any]) -> Finding:
    """The finding on the records of two processes, between which sets and the `hash` of texts differ."""
    for name in first["fingerprints"].keys() | second["fingerprints"].keys():
        if first["fingerprints"].get(name) != second["fingerprints"].get(name):
            problem = f"the fingerprint of {name} is another in another process"
            return failure(problem, "sort the items of sets, and keep memory addresses out of tasks")
    if problem := _first_difference(first["episodes"], second["episodes"]):
        message = f"the same episode is another in another process: {problem}"
        advice = "sort sets before drawing from them or showing them, and do not use hash() of texts: "
        return failure(message, advice + "both differ between processes")
    n_common = len(first["episodes"].keys() & second["episodes"].keys())
    return ok(f"{n_common} episodes were the same in another process")


# -- concurrent episodes ----------------------------------------------------------------------------------------

ISOLATION = ("isolation", "surroundings")


async def check_isolation(subject: Subject) -> list[Finding]:
    """Concurrent episodes affect neither each other nor the process."""
    variables = dict(os.environ)
    return [await _check_concurrency(subject), _surroundings(variables, subject)]


async def _check_concurrency(subject: Subject) -> Finding:
    """The finding on isolation: episodes with interleaved calls, then concurrent ones, must equal those run one at a
    time."""
    n_episodes = min(CONCURRENT, subject.spec.concurrency_bound() or CONCURRENT)
    if n_episodes < 2:
        return not_applicable("episodes do not run concurrently (env.concurrency)")
    tasks = (await subject.tasks(CONCURRENT - 1))[: n_episodes - 1]
    jobs = [(task, number, monkey(number)) for number, task in enumerate(tasks)]
    jobs += [(tasks[0], 0, monkey("another"))] * (n_episodes - len(jobs))  # members of a group share a task and a seed
    expected = [await subject.play(*game) for game in jobs]
    lock = asyncio.Lock()  # first come, first served: calls of different episodes alternate, one at a time
    interleaved = await asyncio.gather(*(subject.play(*game, call_context=lambda: lock) for game in jobs))
    concurrent = await asyncio.gather(*(subject.play(*game) for game in jobs))
    for first, second in zip([*expected, *expected], [*interleaved, *concurrent], strict=True):
        if problem := difference(first.record(), second.record()):
            advice = "store an episode's state on self: class attributes, globals and the spec are shared"
            return failure(f"an episode was another one with concurrent episodes: {problem}", advice)
    return ok(f"{len(jobs)} concurrent episodes were the same as one at a time")


def _surroundings(variables: dict[str, str], subject: Subject) -> Finding:
    """The finding on the working directory, which is restored, and the environment variables; variables that a library
    sets once, in the first episode, do not count."""
    if subject.is_remote:
        return not_applicable("it runs on its server")
    names = {name for name, _ in variables.items() ^ dict(os.environ).items()}
    changes = [f"environment variable {name}" for name in sorted(names)]
    if os.getcwd() != subject.working_directory:
        changes.insert(0, "working directory")
        os.chdir(subject.working_directory)  # the later checks look for its files
    if changes:
        advice = "use absolute paths, and pass env= and cwd= to processes: all episodes share these"
        return failure(f"episodes change the process's {join_first(changes)}", advice)
    return ok("working directory and environment variables are unchanged")
