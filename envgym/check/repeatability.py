"""Whether the same seed and task give the same episode: again, in another process, whatever the global generators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from envgym.hashing import task_hash
from envgym.types import Task

from . import generators
from .context import Clock, Subject
from .play import Played, Script, difference, play
from .report import Finding, failed, listed, not_applicable, ok, warning

TASKS = 4
SECONDS = 3.0
PROBLEMS = 12
"""Tasks and seeds tried to find two that differ."""

Account = list[dict[str, Any]]


async def check(subject: Subject) -> list[Finding]:
    tasks = await subject.tasks(TASKS)
    await _play(subject, tasks[:1])  # what is imported or cached with the first episode is no difference
    first, touched = await _play(subject, tasks)
    same = await _same_again(subject, tasks, first)
    if same.verdict == "FAILED":
        shared = not_applicable("generators", "episodes differ anyway (seed)")
        if touched:
            shared = _touches(touched)
    else:
        shared = await _generators(subject, tasks, first, touched)
    return [same, await _problems(subject), shared]


async def _play(
    subject: Subject, tasks: Sequence[Task], *, again: Iterable[str] = (), global_seed: int = 1
) -> tuple[dict[str, Played], list[str]]:
    """Play the scripts of the tasks, as many as there is time for, or those of `again` in that order.

    The global generators begin each episode alike. Also returns which of them were used.
    """
    jobs: dict[str, tuple[Task, int, str, Script]] = {}
    for number, task in enumerate(tasks):
        jobs |= {f"{number} {name}": (task, number, name, script) for name, script in subject.scripts(task).items()}
    clock = Clock(SECONDS)
    played: dict[str, Played] = {}
    touched: set[str] = set()
    for key in again or jobs:
        if not again and clock.is_up and len(played) >= 2:
            break
        task, number, name, script = jobs[key]
        generators.seed(global_seed)
        before = generators.state()
        played[key] = await play(subject.spec, task, number, script, name)
        touched |= set(generators.changed(before, generators.state()))
    return played, sorted(touched)


async def _same_again(subject: Subject, tasks: Sequence[Task], first: dict[str, Played]) -> Finding:
    """In the other order, so that what an episode leaves behind for the next one shows as well."""
    name = "seed"
    again, _ = await _play(subject, tasks, again=list(reversed(first)))
    for key in first:
        if found := difference(first[key].heard(), again[key].heard()):
            return failed(
                name,
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
    return ok(name, f"{len(first)} episodes played twice were the same{also}")


async def _problems(subject: Subject) -> Finding:
    """Another task or seed makes another problem."""
    name = "problems"
    if subject.spec.tasks(subject.split).size == 1:
        return not_applicable(name, "there is one task")
    tasks = await subject.tasks(PROBLEMS)
    heard: set[str] = set()
    said: set[str] = set()
    short = True
    clock = Clock(SECONDS)
    for number, task in enumerate(tasks):
        if clock.is_up and number >= 4:
            break
        for script_name, script in subject.scripts(task).items():
            played = await play(subject.spec, task, number, script, script_name)
            account = played.heard()
            said.add(repr(account[:1]))
            heard.add(f"{script_name} {account}")
            short = short and len(played.turns) <= 1
    if len(said) > 1:
        return ok(name, f"{len(said)} different first observations in {number + 1} tasks")
    if len(heard) > len(subject.scripts(tasks[0])):
        return ok(name, f"{number + 1} tasks begin alike and go on differently")
    found = f"{number + 1} tasks with different seeds posed the same problem"
    asks = {repr((task.prompt, task.answer, dict(task.fields))) for task in tasks}
    if short or len(asks) > 1:
        advice = 'pose options["task"], or draw the problem from self.rng; if there is only one, let tasks() say so'
        return failed(name, found, advice)
    advice = "in a world that is always the same, held-out tasks tell nothing new"
    return warning(name, f"{found}, as far as a few random turns can tell", advice)


async def _generators(subject: Subject, tasks: Sequence[Task], first: dict[str, Played], touched: list[str]) -> Finding:
    """The process's own generators are neither used nor seeded."""
    name = "generators"
    if subject.is_remote:
        return not_applicable(name, "it plays on its server")
    other, touched_again = await _play(subject, tasks, again=list(first), global_seed=2)
    for key in first:
        if found := difference(first[key].heard(), other[key].heard()):
            return failed(
                name,
                f"episodes depend on the process's random generator ({listed(touched or ['a library'])}): {found}",
                "draw from self.rng, which is this instance's own and seeded by reset",
            )
    if touched := sorted({*touched, *touched_again}):
        return _touches(touched)
    return ok(name, f"{listed(generators.state())}: as they were, and without influence")


def _touches(touched: Sequence[str]) -> Finding:
    return failed(
        "generators",
        f"an episode draws from or seeds the process's generator ({listed(touched)}), which others use as well",
        "draw from self.rng; for NumPy numpy.random.default_rng(self.rng.getrandbits(64))",
    )


# ---------------------------------------------------------------------------------------------------------
# In two processes


async def recorded(subject: Subject, with_spec: bool, with_tasks: bool) -> dict[str, Any]:
    """What one process hears of a few episodes, to be compared with another's, and the fingerprints: where these are
    sound, of the environment (`with_spec`) and of tasks."""
    tasks = await subject.tasks(TASKS)
    played, _ = await _play(subject, tasks)
    fingerprints = subject.spec.fingerprint() if with_spec else {}
    if with_tasks:
        fingerprints |= {f"task {task.key}": task_hash(task) for task in tasks}
    return {"episodes": {key: episode.heard() for key, episode in played.items()}, "fingerprints": fingerprints}


def compared(one: dict[str, Any], other: dict[str, Any]) -> Finding:
    """Whether two processes heard the same. Sets and `hash` of texts differ between processes."""
    name = "process"
    for what in one["fingerprints"].keys() | other["fingerprints"].keys():
        if one["fingerprints"].get(what) != other["fingerprints"].get(what):
            found = f"the fingerprint of {what} is another in another process"
            return failed(name, found, "sort what comes out of sets, and leave memory addresses out of tasks")
    episodes: dict[str, Account] = one["episodes"]
    for key in episodes.keys() & other["episodes"].keys():
        if found := difference(episodes[key], other["episodes"][key]):
            return failed(
                name,
                f"the same episode is another in another process: {found}",
                "sort sets before drawing from them or showing them, and do not use hash() of texts: "
                "both differ between processes",
            )
    return ok(name, f"{len(episodes.keys() & other['episodes'].keys())} episodes were the same in another process")
