"""Steps a second of an environment in four processes (`env.processes=4`) and in threads of the run's process.

    .venv/bin/python benchmarks/env_processes.py

Three environments: one that does nothing, one that sleeps for 10 ms, and one that computes in Python for 10 ms, which
holds the interpreter's lock. Thirty-two instances run concurrently.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from record import ROOT, conditions, conditions_in_words, fill_docs, store, table

import envgym
from envgym.env import EnvSpec

PAGE = ROOT / "docs" / "environments" / "environments.md"
INSTANCES, PROCESSES, ROUNDS = 32, 4, 3
STEPS = {"Nothing": 200, "Sleeps": 50, "Computes": 10}
WORDS = {"Nothing": "does nothing", "Sleeps": "sleeps for 10 ms", "Computes": "computes for 10 ms"}


class Nothing(envgym.Env):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "", {}

    def step(self, action: Any) -> Any:
        self.work()
        return "", 0.0, False, False, {}

    def work(self) -> None: ...


class Sleeps(Nothing):
    def work(self) -> None:
        time.sleep(0.01)


class Computes(Nothing):
    def work(self) -> None:
        end = time.thread_time() + 0.01  # of this thread: waiting for the lock is no work
        while time.thread_time() < end:
            pass


async def steps_per_second(name: str, processes: int) -> float:
    async with envgym.spec(f"{__file__}:{name}", processes=processes) as spec:
        envs = [spec.make() for _ in range(INSTANCES)]
        await asyncio.gather(*(env.reset(seed=0) for env in envs))
        start = time.perf_counter()
        await asyncio.gather(*(_steps(env, STEPS[name]) for env in envs))
        seconds = time.perf_counter() - start
        await asyncio.gather(*(env.close() for env in envs))
    return INSTANCES * STEPS[name] / seconds


async def _steps(env: EnvSpec, count: int) -> None:
    for _ in range(count):
        await env.step("")


async def main() -> None:
    where, rates = conditions(["envgym"]), {}
    for name in STEPS:
        pairs = [(await steps_per_second(name, 0), await steps_per_second(name, PROCESSES)) for _ in range(ROUNDS)]
        rates[name] = {"threads": [pair[0] for pair in pairs], "processes": [pair[1] for pair in pairs]}
        print(name, rates[name], flush=True)
    store("env_processes", {"conditions": where, "steps_per_second": rates})
    rows = []
    for name, both in rates.items():
        ratios = sorted(b / a for a, b in zip(both["threads"], both["processes"], strict=True))
        best = [f"{max(both[key]):,.0f}" for key in ("threads", "processes")]
        rows.append([WORDS[name], *best, f"{ratios[len(ratios) // 2]:.2f}"])
    header = ["a step", "threads, steps/s", f"{PROCESSES} processes, steps/s", "ratio (median of pairs)"]
    fill_docs("env_processes", "\n\n".join([table(header, rows), conditions_in_words(where)]), PAGE)


if __name__ == "__main__":
    asyncio.run(main())
