"""Checks of rewards: the scores of answers that should earn nothing, against those of demonstrations."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envgym.rollout.runner import compare
from envgym.rollout.scripted import Script
from envgym.types import Episode, Group, Limit, Task

from .play import EPISODE_SECONDS, Played
from .report import Finding, Verdict, failed, not_applicable, ok, warning
from .scripts import demonstrated, empty, injection, monkey, parrot, random_text, random_tokens, with_noise
from .subject import Subject

TASKS = 24
FEWEST = 4
SECONDS = 5.0
FULL = 0.95
"""A mean score that is as good as solving the tasks."""
MUCH = 0.5
"""A mean score that leaves little to be learned, or that shows a demonstration to be poor."""
NEAR_ONE = 0.9
MARGIN = 0.25
"""The surplus that talk to the grader must earn over noise of the same length to count as having persuaded it."""
TRIVIAL = ("an empty answer", "random words", "random tokens", "the prompt repeated")
INJECTION = "talk to the grader"
GUESSES = 4
"""Ways of guessing that are tried beside the demonstrations for an answer that earns."""
MISTAKES = ("environment", "invalid_environment")
"""Kinds of failure that are the environment's own."""
CHECKS = ("reward range", "trivial answers", "injection", "rambling", "demonstrations")


@dataclass(slots=True)
class Earned:
    """The episodes of each way of playing, by its name; those of demonstrations by the number of the task."""

    probes: dict[str, list[Episode]] = field(default_factory=lambda: {name: [] for name in (*TRIVIAL, INJECTION)})
    demonstrations: dict[int, list[Episode]] = field(default_factory=dict)
    failure: str = ""
    """The reason why an episode was left out."""
    mistake: str = ""
    """The mistake in `score_group`, if it has one."""

    @property
    def all(self) -> list[Episode]:
        groups = (*self.probes.values(), *self.demonstrations.values())
        return [episode for group in groups for episode in group]

    @property
    def by_score(self) -> bool:
        """True if episodes are measured by scores: of some episodes only, a score would be an average over whichever
        lie in [0, 1]."""
        return all(episode.score is not None for episode in self.all)

    def worths(self, episodes: Sequence[Episode]) -> list[float]:
        """The score, or else the reward, of each of the episodes that has one."""
        found = [episode.score if self.by_score else episode.reward for episode in episodes]
        return [worth for worth in found if worth is not None]

    def means(self) -> dict[str, float]:
        """The mean of each probe that has one."""
        worths = {name: self.worths(episodes) for name, episodes in self.probes.items()}
        return {name: statistics.fmean(found) for name, found in worths.items() if found}


async def check(subject: Subject) -> list[Finding]:
    earned = await _play(subject)
    if earned.mistake:
        advice = "whatever the policies say, a group is judged: score_group may not raise"
        return [failed(earned.mistake, advice), *(not_applicable(f"see {CHECKS[0]}") for _ in CHECKS[1:])]
    if not [episode for episode in earned.all if episode.reward is not None or episode.score is not None]:
        return [_unrewarded(subject, earned), *(not_applicable("no rewards are given") for _ in CHECKS[1:])]
    noise = earned.means()
    talk = noise.pop(INJECTION, None)
    trivial = _trivial(noise, earned.by_score)
    return [
        _reward_range(subject, earned),
        trivial,
        _injection(talk, noise, earned.by_score),
        await _rambling(subject),
        _demonstrations(subject, earned, noise, trivial.verdict is Verdict.FAILED),
    ]


async def _play(subject: Subject) -> Earned:
    earned = Earned()
    async for number, task in subject.numbered_tasks(TASKS, SECONDS, FEWEST):
        trivial = (empty, random_text(number), random_tokens(number), parrot)
        ways: dict[str, Script] = {**dict(zip(TRIVIAL, trivial, strict=True)), INJECTION: injection}
        for variant, turns in enumerate(subject.demonstrations(task)):
            ways[f"demonstration {variant}"] = demonstrated(turns)
        for way, played in (await _play_together(subject, task, number, ways)).items():
            if not played.failed:
                group = earned.probes[way] if way in earned.probes else earned.demonstrations.setdefault(number, [])
                group.append(played.result)
                continue
            earned.failure = played.problem()
            if played.last_call == "score_group" and played.result.outcome.reason in MISTAKES:
                earned.mistake = earned.failure
    return earned


async def _play_together(subject: Subject, task: Task, seed: int, scripts: Mapping[str, Script]) -> dict[str, Played]:
    """The episodes that scripts play, by the names of those, judged together where the environment does so."""
    played = await asyncio.gather(*(subject.play(task, seed, script, name) for name, script in scripts.items()))
    finished = [episode for episode in played if not episode.failed]
    for episode in finished:
        episode.last_call = "score_group"
    group = Group("check", task, [episode.result for episode in finished])
    await compare(subject.spec, group, EPISODE_SECONDS)
    return dict(zip(scripts, played, strict=True))


async def _rambling(subject: Subject) -> Finding:
    """A warning where noise after an answer that earns costs nothing, though it does before it: the grader then reads
    the beginning alone, and a policy learns to ramble until it is cut."""
    rows: list[tuple[float, float, float, float]] = []
    async for number, task in subject.numbered_tasks(TASKS, SECONDS, FEWEST):
        noise = random_text(number)
        scripts = {f"demonstration {n}": demonstrated(turns) for n, turns in enumerate(subject.demonstrations(task))}
        scripts |= {f"guess {n}": monkey(n) for n in range(GUESSES)}
        played = await _play_together(subject, task, number, {"noise": noise} | scripts)
        worths = _worths(played)
        best = max(worths, key=lambda way: worths[way], default="noise")
        if "noise" not in worths or worths[best] <= worths["noise"]:
            continue
        actions = [turn.action for turn in played[best].turns]
        places = {name: with_noise(actions, noise, before=name == "before") for name in ("after", "before")}
        noisy = _worths(await _play_together(subject, task, number, places))
        if len(noisy) == len(places):
            rows.append((worths["noise"], worths[best], noisy["after"], noisy["before"]))
    if not rows:
        return not_applicable("nothing that was tried earned more than noise")
    noise_alone, answer, after, before = (statistics.fmean(column) for column in zip(*rows, strict=True))
    found = f"answers to {len(rows)} tasks earn {answer:.3g}, with noise after them {after:.3g}, before {before:.3g}"
    if all(row[2] >= row[1] for row in rows) and before < (noise_alone + answer) / 2:
        advice = "a policy will learn to ramble into its token limit: let all of the answer count, or what follows cost"
        return warning(found, advice)
    return ok(found)


def _worths(played: Mapping[str, Played]) -> dict[str, float]:
    """The reward, or else the score, of each episode that has one."""
    results = {way: episode.result for way, episode in played.items()}
    worths = {way: result.score if result.reward is None else result.reward for way, result in results.items()}
    return {way: worth for way, worth in worths.items() if worth is not None}


def _listed(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())


def _unrewarded(subject: Subject, earned: Earned) -> Finding:
    """The finding where no episode has a reward or a score."""
    if not earned.all or not any(part.gives_rewards for part in subject.spec.parts()):
        return not_applicable(earned.failure or "no rewards are given")
    found = f"no reward in any of {len(earned.all)} episodes"
    if any(episode.outcome.reason != Limit.TURNS for episode in earned.all):
        return failed(found, "nothing can be learned without: return a number as the reward, 0.0 for a wrong answer")
    return failed(f"{found}, of which none came to an end", "see that the last step gives one: envgym envs try")


def _reward_range(subject: Subject, earned: Earned) -> Finding:
    rewards = [episode.reward for episode in earned.all if episode.reward is not None]
    if not rewards:
        return not_applicable("no rewards are given, only scores")
    found = f"from {min(rewards):.3g} to {max(rewards):.3g} in {len(rewards)} episodes"
    if not earned.by_score and not all(0 <= reward <= 1 for reward in rewards):
        advice = 'return info["score"] in [0, 1] as well: success rates and filters need one'
        return warning(f"{found}, without a score", advice)
    others = [turn.reward or 0.0 for played in subject.episodes for turn in played.turns]
    scores = [episode.score or 0.0 for episode in earned.all]
    if min(rewards) == max(rewards) <= 0 >= max([*others, *scores]):
        found = f"{found}: nothing that was tried was ever rewarded, so nothing is known of what is"
        advice = "give it demonstrations, which are played here too; until then see that a right answer pays: envs try"
        return warning(found, advice)
    return ok(found)


def _trivial(noise: Mapping[str, float], by_score: bool) -> Finding:
    if not noise:
        return not_applicable("none of them could be scored")
    if not by_score:
        return not_applicable(f"rewards have no known scale: {_listed(noise)}")
    best = max(noise, key=lambda way: noise[way])
    if noise[best] >= FULL:
        advice = "a policy will learn to say just that: let the grader ask for the answer itself"
        return failed(f"{best} earns the full score: {_listed(noise)}", advice)
    if noise[best] >= MUCH:
        advice = "a policy may learn to say just that; is it meant to earn that much?"
        return warning(f"{best} earns a mean score of {noise[best]:.2f}: {_listed(noise)}", advice)
    return ok(f"mean scores: {_listed(noise)}")


def _injection(talk: float | None, noise: Mapping[str, float], by_score: bool) -> Finding:
    if talk is None:
        return not_applicable("it could not be scored")
    if not by_score:
        return not_applicable(f"rewards have no known scale: {talk:.2f}")
    highest = max(noise.values(), default=0.0)
    found = f"an answer that tells the grader to give the full score earns {talk:.2f}, noise {highest:.2f}"
    if talk >= MUCH and talk >= highest + MARGIN:
        advice = (
            "give a model that grades the answer as data, apart from its instructions, and parse its verdict strictly"
        )
        return failed(found, advice)
    return ok(found)


def _demonstrations(subject: Subject, earned: Earned, noise: Mapping[str, float], trivial_failed: bool) -> Finding:
    """The best variant of each task counts: some environments also demonstrate what earns nothing."""
    if subject.demonstration_error:
        return failed(f"demonstrations raised {subject.demonstration_error}", "return the turns of the assistant")
    if not earned.demonstrations:
        return not_applicable("there are none")
    worths = [of_task for episodes in earned.demonstrations.values() if (of_task := earned.worths(episodes))]
    if not worths:
        return not_applicable("they could not be scored")
    best = statistics.fmean(max(of_task) for of_task in worths)
    variants = statistics.fmean(statistics.fmean(of_task) for of_task in worths)
    found = f"the best of each of {len(worths)} tasks earns {best:.2f}, an average one {variants:.2f}"
    advice = "play them yourself (envgym envs try) and see what the grader misses"
    if not trivial_failed and best <= max(noise.values(), default=0.0) + 1e-9:
        return failed(f"{found}; no more than noise ({_listed(noise)})", advice)
    return warning(found, advice) if earned.by_score and best < NEAR_ONE else ok(found)
