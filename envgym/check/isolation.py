"""Whether episodes that are played at the same time leave each other and the process alone."""

from __future__ import annotations

import asyncio
import os

from .context import Subject
from .play import Played, Player, difference, play
from .report import Finding, failed, listed, not_applicable, ok
from .scripts import monkey

EPISODES = 4


async def check(subject: Subject) -> list[Finding]:
    variables = dict(os.environ)
    return [await _together(subject), _left_alone(variables, subject)]


async def _together(subject: Subject) -> Finding:
    name = "isolation"
    most = min(EPISODES, subject.spec.concurrency_bound() or EPISODES)
    if most < 2:
        return not_applicable(name, "only one episode is in play at once (env.concurrency)")
    tasks = (await subject.tasks(EPISODES - 1))[: most - 1]
    games = [(task, number, monkey(number)) for number, task in enumerate(tasks)]
    games += [(tasks[0], 0, monkey("another"))] * (most - len(games))  # members of a group share a task and a seed
    alone = [await play(subject.spec, task, seed, script, "alone") for task, seed, script in games]

    def players() -> list[Player]:
        return [Player(subject.spec, task, seed, script, "together") for task, seed, script in games]

    for together in (await _in_turns(players()), await asyncio.gather(*map(_alone, players()))):
        for one, other in zip(alone, together, strict=True):
            if found := difference(one.heard(), other.heard()):
                return failed(
                    name,
                    f"an episode was another one with others in play beside it: {found}",
                    "keep what belongs to an episode on self: class attributes, globals and the spec are shared",
                )
    return ok(name, f"{len(games)} episodes at once were what each was alone")


async def _in_turns(players: list[Player]) -> list[Played]:
    """All are reset before any takes a turn, and each takes its turn between two of another's."""
    goes_on = [await player.begin() for player in players]
    forwards = True
    while any(goes_on):
        order = range(len(players)) if forwards else range(len(players) - 1, -1, -1)
        for index in order:
            goes_on[index] = goes_on[index] and await players[index].turn()
        forwards = not forwards
    return [await player.end() for player in players]


async def _alone(player: Player) -> Played:
    goes_on = await player.begin()
    while goes_on:
        await asyncio.sleep(0)  # methods that never wait would else be played one episode after the other
        goes_on = await player.turn()
    return await player.end()


def _left_alone(variables: dict[str, str], subject: Subject) -> Finding:
    """What a process has one of is as it was. Variables that a library sets once, with its first episode, may be."""
    name = "surroundings"
    if subject.is_remote:
        return not_applicable(name, "it plays on its server")
    now = dict(os.environ)
    changes = [f"environment variable {key}" for key in sorted(variables | now) if variables.get(key) != now.get(key)]
    if os.getcwd() != subject.working_directory:
        changes.insert(0, "working directory")
        os.chdir(subject.working_directory)  # the later checks look for its files
    if changes:
        advice = "use absolute paths, and pass env= and cwd= to processes: all episodes share these"
        return failed(name, f"episodes change the process's {listed(changes)}", advice)
    return ok(name, "working directory and environment variables are as they were")
