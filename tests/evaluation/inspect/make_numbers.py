"""inspect_ai's statistics of random scores, stored in `numbers.json` for `tests/evaluation/test_statistics.py`.

    python -m venv VENV && VENV/bin/pip install inspect-ai==0.3.285
    VENV/bin/python tests/evaluation/inspect/make_numbers.py

It runs in an environment of its own and knows nothing of envgym. What is inspect_ai's: the reducers `mean`, `pass_at`
and `pass_k`, which make one score of a sample's epochs, and the metrics `mean`, `stderr` and `ci` of those, with and
without clusters. What is made up: the scores, multiples of 1/8 or 0 and 1.
"""

from __future__ import annotations

import json
import math
import platform
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

from inspect_ai.scorer import SampleScore, Score, ci, mean, mean_score, pass_at, pass_k, stderr

OUT = Path(__file__).with_name("numbers.json")

CASES: dict[str, dict[str, Any]] = {
    # Tasks, episodes of each, whether scores are 0 or 1, and the sizes of clusters ([]: each task is its own).
    "single": {"tasks": 20, "episodes": [1], "binary": False, "clusters": []},
    "binary": {"tasks": 25, "episodes": [1], "binary": True, "clusters": []},
    "repeated": {"tasks": 12, "episodes": [4], "binary": True, "clusters": []},
    "ragged": {"tasks": 15, "episodes": [1, 2, 5], "binary": False, "clusters": []},
    "clusters": {"tasks": 12, "episodes": [2], "binary": True, "clusters": [3, 3, 3, 3]},
    "unequal_clusters": {"tasks": 20, "episodes": [1, 3], "binary": False, "clusters": [1, 1, 2, 3, 5, 8]},
    "two_clusters": {"tasks": 7, "episodes": [1], "binary": True, "clusters": [3, 4]},
}
SEEDS = (0, 1, 2)
ATTEMPTS = [(1, 0), (1, 1), (4, 2), (5, 0), (5, 5), (10, 3), (16, 1), (64, 7), (200, 3)]  # episodes, right ones
KS = (1, 2, 4, 5, 8, 32)


def case(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    sizes = settings["clusters"] or [1] * settings["tasks"]
    cluster_of = [f"c{index}" for index, size in enumerate(sizes) for _ in range(size)]
    scores = []
    for _ in range(settings["tasks"]):
        drawn = [rng.randint(0, 8) / 8 for _ in range(rng.choice(settings["episodes"]))]
        scores.append([float(value > 0.4) for value in drawn] if settings["binary"] else drawn)
    reduce = mean_score()
    samples = [
        SampleScore(
            score=reduce([Score(value=value) for value in values]),
            sample_id=index,
            sample_metadata={"cluster": cluster_of[index]},
        )
        for index, values in enumerate(scores)
    ]
    cluster = "cluster" if settings["clusters"] else None
    interval = ci(cluster=cluster)(samples)
    return {
        "scores": scores,
        "clusters": cluster_of if cluster else None,
        "mean": mean()(samples),
        "stderr": stderr(cluster=cluster)(samples),
        "ci": [interval["lower"], interval["upper"]],
    }


def attempt(n: int, c: int, k: int) -> dict[str, Any]:
    scores = [Score(value=float(index < c)) for index in range(n)]
    return {
        "n": n,
        "c": c,
        "k": k,
        "pass_at": pass_at(k)(scores).as_float(),
        "pass_k": pass_k(k)(scores).as_float(),
    }


def main() -> None:
    made_with = {"python": platform.python_version(), "inspect-ai": version("inspect-ai")}
    means = [{"case": name, **case(settings, seed)} for name, settings in CASES.items() for seed in SEEDS]
    attempts = [attempt(n, c, k) for n, c in ATTEMPTS for k in KS]
    for made in attempts:  # inspect_ai's NaN: fewer episodes than k
        made |= {name: None for name in ("pass_at", "pass_k") if math.isnan(made[name])}
    parts = [f' "made_with": {json.dumps(made_with)}']
    for name, cases in (("means", means), ("attempts", attempts)):
        lines = ",\n".join(f"  {json.dumps(made, allow_nan=False)}" for made in cases)
        parts.append(f' "{name}": [\n{lines}\n ]')
    OUT.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
