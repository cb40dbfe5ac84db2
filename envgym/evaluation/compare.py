"""Comparing two evaluations: the same tasks under either policy, environment by environment and as a suite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from envgym.errors import RunError
from envgym.types import Episode

from .folder import EvalFolder
from .paired import POWER, Paired, paired_difference, sign_flip
from .statistics import Mean, cluster_sums, suite_mean, t_quantile, t_quantile_975

DESCRIBED = (("code", "code"), ("settings", "spec"))
PLAYED = {
    "sampling": "the two were sampled differently",
    "agent": "the two were played by agents of other settings",
    "split": "the two played other splits",
}


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that one policy mostly does and the other mostly does not: mean scores under A and B."""

    task: str
    a: float
    b: float


@dataclass(slots=True)
class EnvComparison:
    """One environment under both policies. `weight` is what it counts in the suite's difference."""

    paired: Paired
    weight: float
    clusters: Mapping[str, str]
    flips: list[Flip] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**self.paired.as_dict(), "weight": self.weight, "flips": [asdict(flip) for flip in self.flips]}


@dataclass(slots=True)
class Comparison:
    """B against A. `notes` say what makes them less comparable than they look; `unpaired` are environments with a
    weight in either that have no pair, for which reason there is no difference of the suite."""

    a: str
    b: str
    envs: dict[str, EnvComparison]
    unpaired: list[str]
    notes: list[str]

    @property
    def suite(self) -> dict[str, Any] | None:
        """The weighted mean of the environments' differences, with the keys of `Paired.as_dict`."""
        weighed = {name: env for name, env in self.envs.items() if env.weight}
        if self.unpaired or not weighed:
            return None
        pairs = [env.paired for env in weighed.values()]
        if len(pairs) == 1:
            return pairs[0].as_dict()
        means = [Mean(p.mean, p.low, p.high, p.n, p.stderr, p.n_clusters, "t") for p in pairs]
        mean = suite_mean(means, [env.weight for env in weighed.values()])
        whole = math.fsum(env.weight for env in weighed.values())
        totals = [
            total * env.weight / whole / env.paired.n
            for env in weighed.values()
            for total, _ in cluster_sums(env.paired.differences, env.clusters)
        ]
        df, detectable = sum(paired.n_clusters - 1 for paired in pairs), math.nan
        # Where all tasks of one environment differ alike its error is 0, which is not how sure anything is.
        if not any(math.isnan(paired.detectable) for paired in pairs):
            detectable = (t_quantile_975(df) + t_quantile(POWER, df)) * mean.stderr
        differences = {(name, task): d for name, env in weighed.items() for task, d in env.paired.differences.items()}
        only_a, only_b = sum(paired.only_a for paired in pairs), sum(paired.only_b for paired in pairs)
        return Paired(
            mean.score, mean.low, mean.high, mean.stderr, sign_flip(totals, 0), detectable, mean.n_clusters,
            differences, only_a, only_b,
        ).as_dict()  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        envs = {name: env.as_dict() for name, env in self.envs.items()}
        suite = self.suite or {"difference": None}
        return {"a": self.a, "b": self.b, **suite, "envs": envs, "unpaired": self.unpaired, "notes": self.notes}


def compare(a: EvalFolder, b: EvalFolder) -> Comparison:
    """Pair the tasks of two evaluations. Raises `RunError` where one is not finished or they share no task."""
    results = [_result(folder) for folder in (a, b)]
    episodes = [list(folder.journal.judged().values()) for folder in (a, b)]
    names, notes = _names(results)
    notes += _notes(a, b, results, names)
    envs: dict[str, EnvComparison] = {}
    unpaired = [n for n, env in results[0]["envs"].items() if n not in names and env["weight"]]
    unpaired += [n for n, env in results[1]["envs"].items() if n not in names.values() and env["weight"]]
    for name, name_b in names.items():
        of_a = results[0]["envs"][name]
        both = [[e for e in side if e.purpose == own] for side, own in zip(episodes, (name, name_b), strict=True)]
        scores_a, scores_b = map(_scores, both)
        clusters = _clusters([*both[0], *both[1]], of_a["cluster"])
        paired = paired_difference(scores_a, scores_b, clusters=clusters)
        if not paired.n:
            why = "another seed or other tasks make other problems"
            if alone := [side for side, own in zip("AB", both, strict=True) if own and _gives_rewards_alone(own)]:
                why = f"in {' and '.join(alone)} rewards are not all in [0, 1], and there is no other score"
            notes.append(f"{name}: no task has a score in both ({why})")
            unpaired += [name] if of_a["weight"] else []
            continue
        if paired.only_a or paired.only_b:
            notes.append(f"{name}: {paired.only_a} tasks have a score in A alone and {paired.only_b} in B alone")
        threshold = of_a["success"]["threshold"]
        flips = [
            Flip(_task(key), fmean(scores_a[key]), fmean(scores_b[key]))
            for key in paired.differences
            if _mostly(scores_a[key], threshold) != _mostly(scores_b[key], threshold)
        ]
        envs[name] = EnvComparison(paired, of_a["weight"], clusters, flips)
    if not any(env.weight for env in envs.values()):
        raise RunError(f"{a.path} and {b.path} have no task with a score in common: {'; '.join(notes) or 'no env'}")
    return Comparison(str(a.path), str(b.path), envs, unpaired, notes)


def _names(results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """The environments of A with their names in B: those of one name. Where there is one each, they are the same one
    whatever they are called (`my.py`, `./my.py`)."""
    names = {name: name for name in results[0]["envs"] if name in results[1]["envs"]}
    single = [[name for name, env in result["envs"].items() if env["weight"]] for result in results]
    if [len(names_) for names_ in single] == [1, 1] and single[0] != single[1]:
        [[name], [name_b]] = single
        return {**names, name: name_b}, [f"{name} of A is compared with {name_b} of B"]
    return names, []


def _result(folder: EvalFolder) -> dict[str, Any]:
    result = folder.read_result()
    if result is None or result["status"] != "completed":
        raise RunError(f"evaluation {folder.path} is not finished: {folder.how_to_go_on}")
    return result


def _notes(a: EvalFolder, b: EvalFolder, results: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    one, other = results
    notes = [f"{name}: not in {b.path}" for name in one["envs"] if name not in names]
    notes += [f"{name}: not in {a.path}" for name in other["envs"] if name not in names.values()]
    for name, name_b in names.items():
        x, y = one["envs"][name], other["envs"][name_b]
        changed = [word for word, key in DESCRIBED if x["fingerprints"][key] != y["fingerprints"][key]]
        if changed:
            notes.append(f"{name}: the environment has other {' and '.join(changed)} in the two")
        for key, difference in PLAYED.items():
            if x[key] != y[key]:
                notes.append(f"{name}: {difference}")
        if x["weight"] != y["weight"]:
            notes.append(f"{name}: its weights differ ({x['weight']:g} and {y['weight']:g}); that of A counts")
    if one["fingerprints"]["model"] == other["fingerprints"]["model"] is not None:
        notes.append("both are of the same model")
    return notes


def _scores(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for episode in episodes:
        if not episode.failed and episode.score is not None:
            found.setdefault(_key(episode), []).append(episode.score)
    return found


def _gives_rewards_alone(episodes: Sequence[Episode]) -> bool:
    finished = [episode for episode in episodes if not episode.failed]
    return not _scores(finished) and any(episode.reward is not None for episode in finished)


def _clusters(episodes: Sequence[Episode], name: str | None) -> dict[str, str]:
    """The cluster of each problem: its task or, with `name`, the value of that field of the task."""
    if name is None:
        return {_key(episode): episode.task.key for episode in episodes}
    return {_key(episode): str(episode.task.fields.get(name, episode.task.key)) for episode in episodes}


def _key(episode: Episode) -> str:
    """Identity of a problem: the content of the task, the seed it was posed with, and its key."""
    return f"{episode.fingerprints.get('task', '')}@{episode.seed}@{episode.task.key}"


def _task(key: str) -> str:
    return key.split("@", 2)[2]


def _mostly(scores: Sequence[float], threshold: float) -> bool:
    """At least half of the episodes were successes."""
    return sum(score >= threshold - 1e-9 for score in scores) * 2 >= len(scores)
