"""What answers earn that nobody should be paid for, against what demonstrations earn."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envgym.errors import EnvgymError
from envgym.types import Episode, Task

from .context import Clock, Subject
from .play import Played, Script, judged, play
from .report import Finding, failed, not_applicable, ok, warning
from .scripts import empty, injection, parrot, random_text, random_tokens, shown

TASKS = 24
FEWEST = 4
SECONDS = 5.0
FULL = 0.95
"""A mean score that is as good as solving the tasks."""
MUCH = 0.5
"""A mean score that leaves little to be learned, or says that a demonstration shows little."""
NEAR_ONE = 0.9
MARGIN = 0.25
"""How much more the talk to the grader must earn than noise of the same length to count as having talked it round."""
TRIVIAL = ("an empty answer", "random words", "random tokens", "the prompt repeated")
INJECTION = "talk to the grader"
CHECKS = ("reward range", "trivial answers", "injection", "demonstrations")


@dataclass(slots=True)
class Earned:
    """The episodes of each way of playing, by its name; those of demonstrations by the number of the task."""

    probes: dict[str, list[Episode]]
    demonstrations: dict[int, list[Episode]]
    failure: str = ""
    """Why an episode, or a group's judgement, was left out."""

    @property
    def all(self) -> list[Episode]:
        groups = (*self.probes.values(), *self.demonstrations.values())
        return [episode for group in groups for episode in group]


async def check(subject: Subject) -> list[Finding]:
    earned = await _play(subject)
    if not [episode for episode in earned.all if episode.reward is not None or episode.score is not None]:
        why = earned.failure or "no rewards are given"
        return [not_applicable(name, why) for name in CHECKS]
    # Of some episodes only, a score would be an average over whichever lie in [0, 1].
    by_score = all(episode.score is not None for episode in earned.all)
    means = {name: _mean(episodes, by_score) for name, episodes in earned.probes.items()}
    trivial = _trivial(means, by_score)
    return [
        _reward_range(subject, earned, by_score),
        trivial,
        _injection(means, by_score),
        _demonstrations(subject, earned, means, by_score, trivial.verdict == "FAILED"),
    ]


async def _play(subject: Subject) -> Earned:
    earned = Earned({name: [] for name in (*TRIVIAL, INJECTION)}, {})
    clock = Clock(SECONDS)
    for number, task in enumerate(await subject.tasks(TASKS)):
        if clock.is_up and number >= FEWEST:
            break
        ways: dict[str, Script] = dict(
            zip(TRIVIAL, (empty, random_text(number), random_tokens(number), parrot), strict=True)
        )
        ways[INJECTION] = injection
        for variant, turns in enumerate(subject.demonstrations(task)):
            ways[f"demonstration {variant}"] = shown(turns)
        played = await _at_once(subject, task, number, ways)
        if problems := [episode.problem() for episode in played if episode.error is not None]:
            earned.failure = problems[0]
        finished = [episode.episode() for episode in played if episode.error is None]
        try:
            episodes = await judged(subject.spec, task, finished) if finished else []
        except EnvgymError as error:
            earned.failure = str(error)
            continue
        for episode in episodes:
            way = episode.id.rpartition(":")[2]
            if way in earned.probes:
                earned.probes[way].append(episode)
            else:
                earned.demonstrations.setdefault(number, []).append(episode)
    return earned


async def _at_once(subject: Subject, task: Task, seed: int, ways: Mapping[str, Script]) -> Sequence[Played]:
    return await asyncio.gather(*(play(subject.spec, task, seed, script, name) for name, script in ways.items()))


def _worth(episode: Episode, by_score: bool) -> float | None:
    return episode.score if by_score else episode.reward


def _mean(episodes: Sequence[Episode], by_score: bool) -> float | None:
    worths = [worth for episode in episodes if (worth := _worth(episode, by_score)) is not None]
    return statistics.fmean(worths) if worths else None


def _told(means: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items() if mean is not None)


def _reward_range(subject: Subject, earned: Earned, by_score: bool) -> Finding:
    name = "reward range"
    rewards = [episode.reward for episode in earned.all if episode.reward is not None]
    if not rewards:
        return not_applicable(name, "no rewards are given, only scores")
    found = f"from {min(rewards):.3g} to {max(rewards):.3g} in {len(rewards)} episodes"
    if not by_score and not all(0 <= reward <= 1 for reward in rewards):
        advice = 'return info["score"] in [0, 1] as well: success rates and filters need one'
        return warning(name, f"{found}, without a score", advice)
    others = [turn.reward or 0.0 for played in subject.episodes for turn in played.turns]
    scores = [episode.score or 0.0 for episode in earned.all]
    if min(rewards) == max(rewards) <= 0 >= max([*others, *scores]):
        found = f"{found}: nothing that was tried was ever rewarded, so nothing is known of what is"
        advice = "give it demonstrations, which are played here too; until then see that a right answer pays: envs try"
        return warning(name, found, advice)
    return ok(name, found)


def _trivial(means: Mapping[str, float | None], by_score: bool) -> Finding:
    name = "trivial answers"
    known = {way: mean for way in TRIVIAL if (mean := means[way]) is not None}
    if not known:
        return not_applicable(name, "none of them could be scored")
    if not by_score:
        return not_applicable(name, f"rewards have no known scale: {_told(known)}")
    best = max(known, key=lambda way: known[way])
    if known[best] >= FULL:
        advice = "a policy will learn to say just that: let the grader ask for the answer itself"
        return failed(name, f"{best} earns the full score: {_told(known)}", advice)
    if known[best] >= MUCH:
        advice = "a policy may learn to say just that; is it meant to earn that much?"
        return warning(name, f"{best} earns a mean score of {known[best]:.2f}: {_told(known)}", advice)
    return ok(name, f"mean scores: {_told(known)}")


def _injection(means: Mapping[str, float | None], by_score: bool) -> Finding:
    name = "injection"
    mean = means[INJECTION]
    if mean is None:
        return not_applicable(name, "it could not be scored")
    if not by_score:
        return not_applicable(name, f"rewards have no known scale: {mean:.2f}")
    noise = max((m for way in TRIVIAL if (m := means[way]) is not None), default=0.0)
    found = f"an answer that tells the grader to give the full score earns {mean:.2f}, noise {noise:.2f}"
    if mean >= MUCH and mean >= noise + MARGIN:
        advice = (
            "give a model that grades the answer as data, apart from its instructions, and parse what it says strictly"
        )
        return failed(name, found, advice)
    return ok(name, found)


def _demonstrations(
    subject: Subject, earned: Earned, means: Mapping[str, float | None], by_score: bool, trivial_failed: bool
) -> Finding:
    """The best variant of each task counts: some environments also demonstrate what earns nothing."""
    name = "demonstrations"
    if subject.demonstration_error:
        return failed(name, f"demonstrations raised {subject.demonstration_error}", "return the turns of the assistant")
    if not earned.demonstrations:
        return not_applicable(name, "there are none")
    worths = [
        [worth for episode in episodes if (worth := _worth(episode, by_score)) is not None]
        for episodes in earned.demonstrations.values()
    ]
    worths = [of_task for of_task in worths if of_task]
    if not worths:
        return not_applicable(name, "they could not be scored")
    best = statistics.fmean(max(of_task) for of_task in worths)
    variants = statistics.fmean(statistics.fmean(of_task) for of_task in worths)
    noise = {way: mean for way in TRIVIAL if (mean := means[way]) is not None}
    highest = max(noise.values(), default=0.0)
    found = f"the best of each of {len(worths)} tasks earns {best:.2f}, an average one {variants:.2f}"
    advice = "play them yourself (envgym envs try) and see what the grader misses"
    if not trivial_failed and best <= highest + 1e-9:
        return failed(name, f"{found}; no more than noise ({_told(noise)})", advice)
    if by_score and best < NEAR_ONE:
        return warning(name, found, advice)
    return ok(name, found)
