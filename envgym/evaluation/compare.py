"""Comparing two evaluations: the same tasks under either policy, environment by environment and as a suite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from envgym.config.words import differing_keys
from envgym.errors import RunError
from envgym.types import Episode

from .paired import POWER, Paired, paired_difference, sign_flip
from .result import cluster_of
from .statistics import Mean, cluster_sums, suite_mean, t_quantile

if TYPE_CHECKING:
    from envgym.jobs.folder import JobFolder

DESCRIBED = (("code", "code"), ("grader's version", "grader"), ("settings", "spec"))
SHOWN = 60
"""Maximum characters of a setting's value in a note."""
PLAYED = {
    "sampling": "the two were sampled differently",
    "agent": "the agents of the two have different settings",
    "split": "the two ran on different splits",
}


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that one policy mostly does and the other mostly does not: mean scores under A and B."""

    task: str
    a: float
    b: float


@dataclass(slots=True)
class EnvComparison:
    """One environment under both policies. `weight` is its weight in the suite's difference."""

    paired: Paired
    weight: float
    clusters: Mapping[str, str]
    flips: list[Flip] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**self.paired.as_dict(), "weight": self.weight, "flips": [asdict(flip) for flip in self.flips]}


@dataclass(slots=True)
class Comparison:
    """B against A. `notes` list what makes them less comparable; `unpaired` lists the environments with a weight that
    only one of the two has, or without common scores: with any of them the suite has no difference."""

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
        total_weight = math.fsum(env.weight for env in weighed.values())
        totals = [
            total * env.weight / total_weight / env.paired.n
            for env in weighed.values()
            for total, _ in cluster_sums(env.paired.differences, env.clusters)
        ]
        df, detectable = sum(paired.n_clusters - 1 for paired in pairs), math.nan
        # An environment whose tasks all differ alike has an error of 0, which would understate the suite's.
        if not any(math.isnan(paired.detectable) for paired in pairs):
            detectable = (t_quantile(0.975, df) + t_quantile(POWER, df)) * mean.stderr
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


def compare(a: JobFolder, b: JobFolder) -> Comparison:
    """Pair the tasks of two evaluations. Raises `RunError` if one is not finished or they share no task."""
    results = [_result(folder) for folder in (a, b)]
    episodes = [list(folder.journal.latest().values()) for folder in (a, b)]
    names, notes = _names(results)
    notes += _notes(a, b, results, names)
    envs: dict[str, EnvComparison] = {}
    unpaired = [n for n, env in results[0]["envs"].items() if n not in names and env["weight"]]
    unpaired += [n for n, env in results[1]["envs"].items() if n not in names.values() and env["weight"]]
    for name, name_b in names.items():
        env_a = results[0]["envs"][name]
        sides = [
            [e for e in side if e.purpose == purpose] for side, purpose in zip(episodes, (name, name_b), strict=True)
        ]
        scores_a, scores_b = map(_scores, sides)
        clusters = {_key(e): cluster_of(e.task, env_a["cluster"]) for e in (*sides[0], *sides[1])}
        paired = paired_difference(scores_a, scores_b, clusters=clusters)
        if not paired.n:
            reason = "with another seed or other tasks the problems differ"
            if unscored := [label for label, side in zip("AB", sides, strict=True) if side and _has_only_rewards(side)]:
                reason = f"in {' and '.join(unscored)} rewards are not all in [0, 1], and nothing else gives a score"
            notes.append(f"{name}: no task has a score in both ({reason})")
            unpaired += [name] if env_a["weight"] else []
            continue
        if paired.only_a or paired.only_b:
            notes.append(f"{name}: {paired.only_a} tasks have a score in A alone and {paired.only_b} in B alone")
        threshold = env_a["success"]["threshold"]
        flips = [
            Flip(_task(key), fmean(scores_a[key]), fmean(scores_b[key]))
            for key in paired.differences
            if _is_mostly_solved(scores_a[key], threshold) != _is_mostly_solved(scores_b[key], threshold)
        ]
        envs[name] = EnvComparison(paired, env_a["weight"], clusters, flips)
    if not any(env.weight for env in envs.values()):
        reasons = "; ".join(notes) or "they share no environment"
        raise RunError(f"{a.path} and {b.path} share no task that has a score in both: {reasons}")
    return Comparison(str(a.path), str(b.path), envs, unpaired, notes)


def _names(results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """The environments of A, mapped to their names in B, and notes. Equal names match; if each side has only one
    environment with a weight, these match whatever their names (`my.py`, `./my.py`)."""
    names = {name: name for name in results[0]["envs"] if name in results[1]["envs"]}
    weighted = [[name for name, env in result["envs"].items() if env["weight"]] for result in results]
    if [len(items) for items in weighted] == [1, 1] and weighted[0] != weighted[1]:
        [[name], [name_b]] = weighted
        return {**names, name: name_b}, [f"{name} of A is compared with {name_b} of B"]
    return names, []


def _result(folder: JobFolder) -> dict[str, Any]:
    result = folder.read_result()
    if result is None or result["status"] != "completed":
        raise RunError(f"evaluation {folder.path} is not finished: {folder.resume_hint}")
    return result


def _notes(a: JobFolder, b: JobFolder, results: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """Notes on environments in one evaluation only, and on differences in code, settings, weights and model."""
    result_a, result_b = results
    notes = [f"{name}: not in {b.path}" for name in result_a["envs"] if name not in names]
    notes += [f"{name}: not in {a.path}" for name in result_b["envs"] if name not in names.values()]
    for name, name_b in names.items():
        x, y = result_a["envs"][name], result_b["envs"][name_b]
        prints = x["fingerprints"], y["fingerprints"]
        differences = [word for word, key in DESCRIBED if prints[0].get(key) != prints[1].get(key)]
        if differences:
            notes.append(f"{name}: the environment's {' and '.join(differences)} differ")
            notes += [f"{name}: {line}" for line in _setting_differences(x.get("settings", {}), y.get("settings", {}))]
        for key, difference in PLAYED.items():
            if x[key] != y[key]:
                notes.append(f"{name}: {difference}")
        if x["weight"] != y["weight"]:
            notes.append(f"{name}: its weights differ ({x['weight']:g} and {y['weight']:g}); that of A is used")
    if result_a["fingerprints"]["model"] == result_b["fingerprints"]["model"] is not None:
        notes.append("both evaluate the same model")
    return notes


def _setting_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for each setting with another value, by its key as users write it: `data.template is '…' in A and '…' in
    B`."""
    differences = {
        key if key.partition(".")[0] == "data" else f"env.{key}": values for key, values in differing_keys(a, b).items()
    }
    return [f"{key} is {_text(x)} in A and {_text(y)} in B" for key, (x, y) in differences.items()]


def _text(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _scores(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    scores: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.is_counted and episode.score is not None:
            scores.setdefault(_key(episode), []).append(episode.score)
    return scores


def _has_only_rewards(episodes: Sequence[Episode]) -> bool:
    finished = [episode for episode in episodes if episode.is_counted]
    return not _scores(finished) and any(episode.reward is not None for episode in finished)


def _key(episode: Episode) -> str:
    """Identity of a problem: the content hash of the task, its seed, and its key."""
    return f"{episode.fingerprints.get('task', '')}@{episode.seed}@{episode.task.key}"


def _task(key: str) -> str:
    return key.split("@", 2)[2]


def _is_mostly_solved(scores: Sequence[float], threshold: float) -> bool:
    """True if at least half of the scores are successes."""
    return sum(score >= threshold - 1e-9 for score in scores) * 2 >= len(scores)
