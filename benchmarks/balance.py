"""Load of the fullest micro-batch relative to the mean, for token sequences of log-normal lengths.

    .venv/bin/python benchmarks/balance.py

The units of a step (single sequences, pairs, groups of eight) are split into micro-batches, padded or packed. The load
of a micro-batch is its cost: sequences times the longest of them if padded, tokens if packed. The lower bound of any
split is the larger of the mean load and the most expensive unit, so the fullest is compared with that. Only the
splitting itself is timed.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

STEPS, ROWS, BUDGET, MEDIAN_LENGTH, SIGMA = 50, 512, 8192, 200, 1.0
UNITS = {"rows": 1, "pairs": 2, "groups of 8": 8}
RANKS = (1, 4, 8)


def main() -> None:
    where = conditions(["envgym"])
    cases = [
        {"units": name, "ranks": ranks, "packed": packed, **measured(size, ranks, packed)}
        for packed in (False, True)
        for name, size in UNITS.items()
        for ranks in RANKS
    ]
    job = {"steps": STEPS, "rows": ROWS, "budget": BUDGET, "median_length": MEDIAN_LENGTH, "sigma": SIGMA}
    result = {"conditions": where, "job": job, "cases": cases}
    publish("balance", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    job = result["job"]
    rows = [
        [
            f"{'packed' if case['packed'] else 'padded'}, {case['units']}, ranks: {case['ranks']}",
            f"{case['fullest']:.3f}",
            f"{case['fullest_worst']:.3f}",
            f"{case['ranks_apart_worst']:.3f}",
            f"{case['computed']:.2f}",
            f"{case['milliseconds']:.0f}",
        ]
        for case in result["cases"]
    ]
    what = (
        f"{job['steps']} steps of {job['rows']} rows, log-normal with median {job['median_length']} and sigma "
        f"{job['sigma']} tokens, {job['budget']} tokens per micro-batch. "
    )
    header = [
        "layout, units",
        "fullest / bound, median",
        "worst",
        "busiest rank / mean, worst",
        "computed / real tokens",
        "cutting, ms",
    ]
    return f"{table(header, rows)}\n\n{what}{conditions_in_words(result['conditions'])}"


def measured(unit_size: int, n_ranks: int, packed: bool) -> dict[str, float]:
    """Loads over steps of random lengths, as ratios, and what cutting takes."""
    import numpy as np

    from envgym.types import Objective, Row
    from envgym.workers.micro_batches import Layout, cost, micro_batches

    layout: Layout = "packed" if packed else "padded"
    fullest, apart, computed, milliseconds = [], [], [], []
    for seed in range(STEPS):
        rng = np.random.default_rng(seed)
        lengths = rng.lognormal(np.log(MEDIAN_LENGTH), SIGMA, ROWS).clip(1, BUDGET).astype(int)
        rows = []
        for index, length in enumerate(lengths.tolist()):
            zeros = np.zeros(length, np.float32)
            row = Row.from_arrays(
                zeros.astype(np.int64), zeros + 1, zeros, Objective.POLICY_GRADIENT, microbatch_key=index // unit_size
            )
            rows.append(row)
        began = time.perf_counter()
        ranks = micro_batches(rows, BUDGET, n_ranks, layout=layout)
        milliseconds.append((time.perf_counter() - began) * 1000)
        loads = [[cost(batch, layout=layout) for batch in share] for share in ranks]
        units = [rows[start : start + unit_size] for start in range(0, ROWS, unit_size)]
        every = [load for share in loads for load in share]
        bound = max(sum(every) / len(every), *(cost(unit, layout=layout) for unit in units))
        fullest.append(max(every) / bound)
        apart.append(max(map(sum, loads)) / (sum(every) / n_ranks))
        computed.append(sum(every) / lengths.sum())
    return {
        "fullest": median(fullest),
        "fullest_worst": max(fullest),
        "ranks_apart_worst": max(apart),
        "computed": float(median(computed)),
        "milliseconds": median(milliseconds),
    }


if __name__ == "__main__":
    main()
