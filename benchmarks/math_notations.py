"""Share of MATH's references in other notations that `math_verify` rewards, and that the bare math-verify library does.

    ENVGYM_BENCHMARK_DATA=DIR .venv/bin/python benchmarks/math_notations.py [--sample N] [--only WORDS]

Every reference of `math_500.jsonl` is written in each notation of `notations.py` that applies to it, and the answers
that the environment and the library accept are counted. So are copies of the problems (`copies.py`), which must get no
reward. Without `--sample` and `--only` the table goes to `docs/environments/math_verify.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from copies import copies, copies_of_references
from notations import NOTATIONS
from record import ROOT, conditions, fill_docs, store, table

import envgym
from envgym.types import Task

PAGE = ROOT / "docs" / "environments" / "math_verify.md"
AT_ONCE = 4
BY_HAND_BELOW = 30
"""References made by hand are added if the notation applies to fewer of the data."""

Case = tuple[str, str, str]
"""Problem, reference, written answer."""


def as_text(written: str) -> str:
    """The model's text: `written` in a box, or `written` itself if it has one."""
    return written if r"\boxed" in written else rf"\boxed{{{written}}}"


def cases(rows: list[dict[str, Any]]) -> dict[str, list[Case]]:
    """The answers to grade, by notation."""
    tried: dict[str, list[Case]] = {}
    for notation in NOTATIONS:
        answers = ((row["problem"], row["answer"], notation.write(row["answer"])) for row in rows)
        tried[notation.name] = [(problem, gold, written) for problem, gold, written in answers if written is not None]
        if len(tried[notation.name]) < BY_HAND_BELOW:
            tried[notation.name] += notation.by_hand
    return tried


async def grade_by_environment(spec: Any, answers: Sequence[Case]) -> tuple[list[bool], list[float]]:
    """Whether each answer is rewarded, and the seconds each took."""
    free = asyncio.Semaphore(AT_ONCE)

    async def grade(problem: str, gold: str, written: str) -> tuple[bool, float]:
        env = spec.make()
        async with free:
            start = time.perf_counter()
            await env.reset(options={"task": Task("t", problem, gold)})
            _, reward, *_ = await env.step(envgym.Action(as_text(written)))
            return reward == 1.0, time.perf_counter() - start

    await spec.ensure_setup()
    graded = await asyncio.gather(*(grade(*case) for case in answers))
    return [right for right, _ in graded], [seconds for _, seconds in graded]


def grade_by_library(case: Case) -> bool:
    """The library's verdict, with its own time limits."""
    from math_verify import parse, verify

    _, gold, written = case
    return verify(parse(rf"\boxed{{{gold}}}"), parse(as_text(written)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=1, help="take every Nth reference only")
    parser.add_argument("--only", default="", help="notations whose name holds these words")
    parser.add_argument("--show", action="store_true", help="print what the library rewards and the environment not")
    options = parser.parse_args()
    where = conditions(["math-verify", "sympy"])
    data = Path(os.environ["ENVGYM_BENCHMARK_DATA"]) / "math_500.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()][:: options.sample]
    tried = {name: answers for name, answers in cases(rows).items() if options.only in name}
    flat = [case for answers in tried.values() for case in answers]
    spec = envgym.spec("math_verify", grader_timeout=20.0)
    ours, seconds = asyncio.run(grade_by_environment(spec, flat))
    with ProcessPoolExecutor(2) as pool:
        library = list(pool.map(grade_by_library, flat, chunksize=50))

    results, position = [], 0
    for name, answers in tried.items():
        part = slice(position, position := position + len(answers))
        both = [right for right, theirs in zip(ours[part], library[part], strict=True) if theirs]
        results.append(
            {
                "notation": name, "n": len(answers), "ours": sum(ours[part]), "library": sum(library[part]),
                "ours_of_librarys": sum(both),
            }
        )  # fmt: skip
        print(results[-1])
        for case, right, theirs in zip(answers, ours[part], library[part], strict=True):
            if options.show and theirs and not right:
                print("   ", case[1], "|", case[2])
    forged = [*copies(), *copies_of_references(rows)]
    earned, _ = asyncio.run(grade_by_environment(spec, [copy[1:] for copy in forged]))
    asyncio.run(spec.close())
    paired = [copy for copy, right in zip(forged, earned, strict=True) if right]
    print(f"{len(forged)} copies, {len(paired)} of them earn", *paired, sep="\n    ")
    print(f"median {1000 * median(seconds):.1f} ms an answer, mean {1000 * sum(seconds) / len(seconds):.1f} ms")
    if options.sample > 1 or options.only:
        return
    store("math_notations", {"conditions": where, "notations": results, "copies": len(forged), "earning": paired})
    written = table(
        ["notation", "n", "envgym", "library"],
        [[r["notation"], str(r["n"]), f"{r['ours'] / r['n']:.1%}", f"{r['library'] / r['n']:.1%}"] for r in results],
    )
    fill_docs("notations", f"{written}\n\n{len(forged)} copies and undone operations: {len(paired)} rewarded.", PAGE)


if __name__ == "__main__":
    main()
