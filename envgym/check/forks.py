"""Checks that an instance's `fork` is one: the two continue alike, and neither changes the other."""

from __future__ import annotations

import contextlib
from typing import Any

from envgym.env import CheckedEnv
from envgym.processes.cancellation import call_in_time
from envgym.rollout.scripted import PlayedTurn, script_of
from envgym.types import Action, Task

from .play import CheckedEpisode, difference, entry_of
from .report import Finding, failure, not_applicable, ok
from .subject import Subject

CHECKS = ("fork",)
TASKS = 2
FORKS = 3
"""Forks of an episode, at its first turns."""


class ForkedEpisode(CheckedEpisode):
    """An episode in whose first turns the instance is forked. Each fork gets the actions that are left, before the
    instance gets them."""

    def __init__(self, subject: Subject, task: Task, seed: int, actions: list[Action]) -> None:
        super().__init__(subject.spec, task, seed, script_of(actions))
        self.actions = actions
        self.forks: list[list[dict[str, Any]]] = []
        """The record of each fork, by the number of turns before it."""

    async def step(self, env: CheckedEnv, action: Action) -> PlayedTurn:
        if env.can_fork and len(self.turns) < FORKS:
            self.last_call, fork, record = "fork", env.fork(), list[dict[str, Any]]()
            for next_action in self.actions[len(self.turns) :]:
                record.append(entry_of(PlayedTurn(next_action, *await fork.step(next_action))))
            self.forks.append(record)
            with contextlib.suppress(Exception):  # another check is about that
                await call_in_time(fork.close(), self.close_limit, "close")
        return await super().step(env, action)

    def difference(self) -> str:
        """The first difference between a fork and the instance as a sentence, or ""."""
        record = self.record()
        texts = (difference([*record[: n + 1], *fork], record) for n, fork in enumerate(self.forks))
        return next(
            (f"a fork before turn {n + 1} and its instance differ: {text}" for n, text in enumerate(texts) if text), ""
        )


async def check(subject: Subject) -> list[Finding]:
    """The finding on forks in the middle of episodes."""
    n_forks = 0
    for number, task in enumerate(await subject.tasks(TASKS)):
        for script in subject.scripts(task).values():
            original = await subject.play(task, number, script)
            episode = ForkedEpisode(subject, task, number, [turn.action for turn in original.turns])
            await episode.play_out()
            advice = "copy in fork all that reset and step change, lists and mappings too"
            if episode.failed and not original.failed:
                return [failure(f"with forks in its first turns, an episode fails: {episode.problem()}", advice)]
            if text := episode.difference():
                return [failure(text, advice)]
            n_forks += len(episode.forks)
    if not n_forks:
        return [not_applicable("it has no fork, so that branches get the actions again")]
    return [ok(f"{n_forks} forks continued as the instances did, and changed nothing in these")]
