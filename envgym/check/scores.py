"""Checks of rewards: the scores of worthless completions, compared with those of demonstrations."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envgym.rollout.runner import score_group
from envgym.rollout.scripted import Script
from envgym.types import Episode, Group, Limit, Task

from .play import EPISODE_SECONDS, CheckedEpisode
from .report import CheckVerdict, Finding, failure, not_applicable, ok, warning
from .scripts import demonstration_script, parrot, random_text, random_tokens, silence
from .subject import Subject, take_in_time

TASKS = 24
MIN_TASKS = 4
SECONDS = 5.0
FULL = 0.95
"""A mean score that counts as solving the tasks."""
MUCH = 0.5
"""A mean score that is suspiciously high for a worthless completion."""
NEAR_ONE = 0.9
TRIVIAL = ("an empty answer", "random words", "random tokens", "the prompt repeated")
MISTAKES = ("environment", "invalid_environment")
"""Kinds of failure that are the environment's mistakes."""
CHECKS = ("reward range", "trivial answers", "demonstrations")


@dataclass(slots=True)
class ScoredEpisodes:
    """The episodes of each probe (a script) by its name, and of demonstrations by the task's number."""

    probes: dict[str, list[Episode]] = field(default_factory=lambda: {name: [] for name in TRIVIAL})
    demonstrations: dict[int, list[Episode]] = field(default_factory=dict)
    failure: str = ""
    """The reason of the last failed episode, which is excluded."""
    mistake: str = ""
    """The error in `score_group`, if any."""

    @property
    def episodes(self) -> list[Episode]:
        groups = (*self.probes.values(), *self.demonstrations.values())
        return [episode for group in groups for episode in group]

    @property
    def has_scores(self) -> bool:
        """True if every episode has a score. Otherwise rewards are compared; a mean of some scores is biased."""
        return all(episode.score is not None for episode in self.episodes)

    def values(self, episodes: Sequence[Episode]) -> list[float]:
        """The scores of the episodes or, unless `has_scores`, their rewards; episodes without one are skipped."""
        values = [episode.score if self.has_scores else episode.reward for episode in episodes]
        return [value for value in values if value is not None]

    def means(self) -> dict[str, float]:
        """The mean score, or reward, of each probe that has one."""
        return {name: statistics.fmean(values) for name in self.probes if (values := self.values(self.probes[name]))}


async def check(subject: Subject) -> list[Finding]:
    """The findings on rewards and scores of trivial completions and of demonstrations."""
    scored = await _collect(subject)
    if scored.mistake:
        advice = "score_group may not raise for any completions"
        return [failure(scored.mistake, advice), *(not_applicable(f"see {CHECKS[0]}") for _ in CHECKS[1:])]
    if not [episode for episode in scored.episodes if episode.reward is not None or episode.score is not None]:
        return [_no_rewards_finding(subject, scored), *(not_applicable("no rewards are given") for _ in CHECKS[1:])]
    noise = scored.means()
    trivial = _trivial(noise, scored.has_scores)
    demonstrations = _demonstrations(subject, scored, noise, trivial.verdict is CheckVerdict.FAILED)
    return [_reward_range(subject, scored), trivial, demonstrations]


async def _collect(subject: Subject) -> ScoredEpisodes:
    """Run the trivial completions and the demonstrations of some tasks. Failed episodes are omitted; the last error is
    recorded."""
    scored = ScoredEpisodes()
    for number, task in take_in_time(await subject.tasks(TASKS), SECONDS, MIN_TASKS):
        trivial = (silence, random_text(number), random_tokens(number), parrot)
        scripts: dict[str, Script] = dict(zip(TRIVIAL, trivial, strict=True))
        for variant, turns in enumerate(subject.demonstrations(task)):
            scripts[f"demonstration {variant}"] = demonstration_script(turns)
        for name, episode in (await run_group(subject, task, number, scripts)).items():
            if not episode.failed:
                group = scored.probes[name] if name in scored.probes else scored.demonstrations.setdefault(number, [])
                group.append(episode.result)
                continue
            scored.failure = episode.problem()
            if episode.last_call == "score_group" and episode.result.outcome.reason in MISTAKES:
                scored.mistake = scored.failure
    return scored


async def run_group(
    subject: Subject, task: Task, seed: int, scripts: Mapping[str, Script]
) -> dict[str, CheckedEpisode]:
    """The episodes of `scripts` by their names, judged as a group if the environment does so."""
    episodes = await asyncio.gather(*(subject.play(task, seed, script, name) for name, script in scripts.items()))
    finished = [episode for episode in episodes if not episode.failed]
    for episode in finished:
        episode.last_call = "score_group"
    group = Group("check", task, [episode.result for episode in finished])
    await score_group(subject.spec, group, EPISODE_SECONDS)
    return dict(zip(scripts, episodes, strict=True))


def _format_means(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())


def _no_rewards_finding(subject: Subject, scored: ScoredEpisodes) -> Finding:
    """The finding if no episode has a reward or a score."""
    if not scored.episodes or not any(part.gives_rewards for part in subject.spec.parts()):
        return not_applicable(scored.failure or "no rewards are given")
    message = f"no reward in any of {len(scored.episodes)} episodes"
    if any(episode.outcome.reason != Limit.TURNS for episode in scored.episodes):
        return failure(message, "training needs rewards: return a number, 0.0 for a wrong answer")
    advice = "return one from the last step (look with envgym envs try)"
    return failure(f"{message}, of which none came to an end", advice)


def _reward_range(subject: Subject, scored: ScoredEpisodes) -> Finding:
    """The finding on rewards: a warning without a scale (neither scores nor rewards in [0, 1]), or if nothing was
    rewarded."""
    rewards = [episode.reward for episode in scored.episodes if episode.reward is not None]
    if not rewards:
        return not_applicable("no rewards are given, only scores")
    message = f"from {min(rewards):.3g} to {max(rewards):.3g} in {len(rewards)} episodes"
    if not scored.has_scores and not all(0 <= reward <= 1 for reward in rewards):
        advice = 'return info["score"] in [0, 1] as well: success rates and filters need it'
        return warning(f"{message}, without a score", advice)
    turn_rewards = [turn.reward or 0.0 for episode in subject.episodes for turn in episode.turns]
    scores = [episode.score or 0.0 for episode in scored.episodes]
    if min(rewards) == max(rewards) <= 0 >= max([*turn_rewards, *scores]):
        message = f"{message}: no completion that was tried was rewarded"
        advice = "no mistake if a right answer in envgym envs try is rewarded; demonstrations would be tried here too"
        return warning(message, advice)
    return ok(message)


def _trivial(noise: Mapping[str, float], has_scores: bool) -> Finding:
    """The finding on `noise`, the mean score of each kind of trivial completion."""
    if not noise:
        return not_applicable("none of them could be scored")
    if not has_scores:
        return not_applicable(f"rewards have no known scale: {_format_means(noise)}")
    best_name = max(noise, key=lambda name: noise[name])
    if noise[best_name] >= FULL:
        advice = "a policy will learn to write just that: let the grader check the answer itself"
        return failure(f"{best_name} gets the full score: {_format_means(noise)}", advice)
    if noise[best_name] >= MUCH:
        advice = "a policy may learn to write just that; is it meant to be rewarded that much?"
        return warning(f"{best_name} gets a mean score of {noise[best_name]:.2f}: {_format_means(noise)}", advice)
    return ok(f"mean scores: {_format_means(noise)}")


def _demonstrations(
    subject: Subject, scored: ScoredEpisodes, noise: Mapping[str, float], trivial_failed: bool
) -> Finding:
    """The finding on demonstrations: the best variant of each task counts, since some environments add bad ones."""
    if subject.demonstration_error:
        return failure(f"demonstrations raised {subject.demonstration_error}", "return the turns of the assistant")
    if not scored.demonstrations:
        return not_applicable("there are none")
    values = [task_values for episodes in scored.demonstrations.values() if (task_values := scored.values(episodes))]
    if not values:
        return not_applicable("they could not be scored")
    best = statistics.fmean(max(task_values) for task_values in values)
    variants = statistics.fmean(statistics.fmean(task_values) for task_values in values)
    message = f"the best of each of {len(values)} tasks scores {best:.2f} on average, all of them {variants:.2f}"
    advice = "try them (envgym envs try) and see why the grader rejects them"
    if not trivial_failed and best <= max(noise.values(), default=0.0) + 1e-9:
        return failure(f"{message}; no more than noise ({_format_means(noise)})", advice)
    return warning(message, advice) if scored.has_scores and best < NEAR_ONE else ok(message)
