"""A thousand concurrent episodes compared with one: wall time and memory, for asynchronous and blocking environments.

    .venv/bin/python benchmarks/concurrency.py [--episodes 1000]

Each episode takes ten steps of one second, in which the environment waits; the engine answers immediately, so only the
framework's own time is measured. Episodes do not delay each other if a thousand take as long as one. Each case runs in
a separate process, which has only that case's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from record import conditions, conditions_in_words, publish, table

STEPS = 10
SECONDS = 1.0
FEW = 100  # episodes from which the growth of memory is counted: what every run needs is in it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--case", nargs=2, metavar=("KIND", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(options.case[0], int(options.case[1]))))
        return
    where = conditions(["envgym", "transformers"])
    cases: dict[str, dict[str, float]] = {}
    for kind in ("asynchronous", "blocking"):
        one, few, many = (case(kind, n) for n in (1, FEW, options.episodes))
        cases[kind] = {
            "one_seconds": one["seconds"],
            "many_seconds": many["seconds"],
            "ratio": many["seconds"] / one["seconds"],
            "cpu_ms_a_turn": many["cpu_seconds"] / options.episodes / STEPS * 1000,
            "memory_growth_mb": (many["peak_rss"] - few["peak_rss"]) / 2**20,
        }
    job = {"episodes": options.episodes, "few": FEW, "steps": STEPS, "seconds_a_step": SECONDS}
    result = {"conditions": where, "job": job, "cases": cases}
    publish("concurrency", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs: the rows and the conditions."""
    job = result["job"]
    rows = [
        [
            kind,
            f"{case['one_seconds']:.2f}",
            f"{case['many_seconds']:.2f}",
            f"{case['ratio']:.2f}",
            f"{case['cpu_ms_a_turn']:.2f}",
            f"{case['memory_growth_mb']:.0f}",
        ]
        for kind, case in result["cases"].items()
    ]
    many = f"{job['episodes']:,}"
    header = ["environment", "one, s", f"{many}, s", f"{many} / one", "CPU per turn, ms", f"memory {FEW} to {many}, MB"]
    return f"{table(header, rows)}\n\n{conditions_in_words(result['conditions'])}"


def case(kind: str, n: int) -> dict[str, float]:
    """The result of `measured`, from a separate process."""
    command = [sys.executable, __file__, "--case", kind, str(n)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])  # libraries print lines before it
    return result


def measured(kind: str, n: int) -> dict[str, float]:
    """Wall-clock and CPU seconds of `n` concurrent episodes, and the process's peak resident memory in bytes."""
    import resource

    from envgym import Env, EnvSpec
    from envgym.agents.token_level import MultiTurn, MultiTurnConfig
    from envgym.engine import Generation, Request, SamplingParams
    from envgym.models.fresh import FreshModelConfig, make_fresh_model
    from envgym.render import load_tokenizer, make_renderer
    from envgym.rollout.config import RolloutConfig
    from envgym.rollout.runner import Runner, SamplingPlan
    from envgym.types import Message, StopReason, Task, VersionSpan

    class Waits(Env):
        async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.left = STEPS
            return [Message("user", "go")], {}

        async def step(self, action: Any) -> Any:
            await asyncio.sleep(SECONDS)
            return self.answer()

        def answer(self) -> Any:
            self.left -= 1
            return [Message("user", "go on")], 0.1, self.left == 0, False, {}

    class Blocks(Waits):
        def step(self, action: Any) -> Any:
            time.sleep(SECONDS)
            return self.answer()

    class Null:
        async def generate(self, request: Request) -> Generation:
            return Generation((40, 41, end), (-0.5,) * 3, StopReason.STOP, (VersionSpan(0, 0, 3),))

    with tempfile.TemporaryDirectory() as folder:
        make_fresh_model(Path(folder), FreshModelConfig(), ["user\ngo", "user\ngo on"], 0)
        renderer = make_renderer("auto", load_tokenizer(folder))
    end = renderer.stop_token_ids[0]
    runner = Runner(
        EnvSpec("Waits-v0", Blocks if kind == "blocking" else Waits),
        MultiTurn(renderer, MultiTurnConfig()),
        Null(),  # type: ignore[arg-type]
        RolloutConfig(),
        max_model_len=4096,
        seed=0,
        deterministic=False,
    )
    tasks = [Task(f"t{index}") for index in range(n)]
    began, cpu_began = time.perf_counter(), time.process_time()
    groups = asyncio.run(runner.roll_out(tasks, SamplingPlan("p", SamplingParams(max_tokens=8), 1)))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    assert all(episode.reward and len(episode.rows[0].turns) == STEPS for g in groups for episode in g.episodes)
    assert threading.active_count() < 50, "threads are left"
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss": peak_rss}


if __name__ == "__main__":
    main()
