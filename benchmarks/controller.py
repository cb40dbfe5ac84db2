"""Trajectories and tokens per second that the controller handles, with an engine that answers immediately.

    .venv/bin/python benchmarks/controller.py [--repeats 3]

The engine is in the process that rolls out and does nothing: the controller, or each of two with
`rollout.processes=2`. Rounds of both alternate. One prompt and its completion make a trajectory of one turn, twenty
exchanges one of twenty, of 200, 2,000 and 16,000 tokens in all (those of the chat template included), half of them
sampled. `playing` is `Runner.roll_out`, and `playing_shards` that in two processes; `whole` adds the work of a step on
the groups before a model gets them: the Parquet file, the metrics, advantages and token sequences (GRPO). Each figure
is the median of several rounds, after a warm-up round. `cpu` has this process's own seconds of computing in each of the
three; `rollout_shards.py` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

NAME = "controller"
LENGTHS = (200, 2_000, 16_000)
TURNS = (1, 20)
GROUP_SIZE = 8
MOST_TRAJECTORIES, MOST_TURNS, MOST_TOKENS = 1024, 10_000, 2**20
"""Limits of a round; the first one reached ends it."""
PARTS = ("playing", "whole", "playing_shards", "whole_shards")
PROCESSES = 2
"""`rollout.processes` of the second measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds of each case")
    parser.add_argument("--case", nargs=2, type=int, metavar=("TOKENS", "TURNS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(asyncio.run(measured(*options.case, options.repeats))))
        return
    where = conditions(["envgym", "transformers"])
    cases = []
    for turns in TURNS:
        for tokens in LENGTHS:
            words = [sys.executable, __file__, "--case", str(tokens), str(turns), "--repeats", str(options.repeats)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            cases.append(json.loads(done.stdout.splitlines()[-1]))
            print(cases[-1], flush=True)
    result = {"conditions": where, "repeats": options.repeats, "group_size": GROUP_SIZE, "cases": cases}
    publish(NAME, result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{case['tokens']:,} tokens, {case['turns']} turn{'s' * (case['turns'] > 1)}",
            f"{case['trajectories']:,}",
            *(f"{case['trajectories'] / case[part]:,.0f}" for part in ("playing", "playing_shards")),
            f"{case['playing'] / case['playing_shards']:.2f}",
            *(f"{1e3 * case['cpu'][part] / case['trajectories']:.2f}" for part in ("playing", "playing_shards")),
            f"{case['trajectories'] / case['whole']:,.0f}",
            f"{case['trajectories'] * case['tokens'] / case['whole']:,.0f}",
        ]
        for case in result["cases"]
    ]
    header = [
        "trajectory", "per round", "rollout, per second", f"with {PROCESSES} processes", "ratio",
        "controller, ms of a core per trajectory", f"with {PROCESSES} processes", "whole, per second",
        "whole, tokens per second",
    ]  # fmt: skip
    return (
        f"{table(header, rows)}\n\nMedians of {result['repeats']} rounds. {conditions_in_words(result['conditions'])}"
    )


async def measured(tokens: int, turns: int, repeats: int) -> dict[str, Any]:
    """Seconds of a round of one case: the rollout in one process and in several, and the whole."""
    from null_engine import NullHandle, NullReference
    from talking_env import agent_of

    from envgym import spec
    from envgym.engine import SamplingParams
    from envgym.engines.pool import EngineClient, EnginePool
    from envgym.episodes.record import write_rollouts
    from envgym.learners.grpo import GRPO
    from envgym.models.fresh import FreshModelConfig, make_fresh_model
    from envgym.monitoring.metrics import rollout_metrics
    from envgym.processes.child import message_parts
    from envgym.processes.garbage import rare_collections
    from envgym.processes.local import LocalRuntime
    from envgym.rollout.attempts import LocalAttempts
    from envgym.rollout.config import RolloutConfig
    from envgym.rollout.runner import Runner, SamplingPlan
    from envgym.rollout.shard import ShardSpec
    from envgym.rollout.shards import Shards
    from envgym.types import Task, number_rows

    of_turn = tokens // turns
    sampled = of_turn // 2
    said = "g" * (of_turn - sampled - 2)  # without the template's two
    with tempfile.TemporaryDirectory() as folder:
        # No merge: a byte is a token, so that lengths are what they are called.
        model = Path(folder, "model")
        make_fresh_model(model, FreshModelConfig(vocab_size=300), [], 0)
        agent = agent_of(model)
        letter, end = agent.renderer.tokenizer.encode("a")[0], agent.renderer.stop_token_ids[0]
        runtime = LocalRuntime(Path(folder), deterministic=False)
        engine = EnginePool(None, [EngineClient(NullHandle(NullReference(letter, end, 2 * tokens)))])
        talks = spec(f"{Path(__file__).with_name('talking_env.py')}:Talks", turns=turns, said=said)
        settings = {"max_model_len": 2 * tokens, "seed": 0, "deterministic": False}

        async def start(number: int, shard: ShardSpec) -> Any:
            arguments = {"number": number, "shard": shard}
            return await runtime.start("envgym.rollout.shard:RolloutShard", arguments, name=f"rollout-{number}")

        shard = ShardSpec(
            partial(type(talks).from_json, talks.to_json()),
            partial(agent_of, model),
            RolloutConfig(),
            images=None,
            **settings,
        )
        local = LocalAttempts(talks, agent, None, RolloutConfig(), **settings)
        shards = Shards(start, PROCESSES, shard, local, engine, print)
        runner = Runner(talks, agent, engine, RolloutConfig(), **settings)
        sharded = Runner(talks, agent, engine, RolloutConfig(), **settings, attempts=shards)
        learner = GRPO(GRPO.Config(name="grpo"))
        n = min(MOST_TRAJECTORIES, MOST_TURNS // turns, MOST_TOKENS // tokens) // GROUP_SIZE
        stop = agent.renderer.stop_token_ids
        plan = SamplingPlan("p", SamplingParams(max_tokens=sampled, stop_token_ids=stop), GROUP_SIZE)
        file = Path(folder, "rollouts.parquet")
        times: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
        await shards.start()
        with rare_collections():  # as a run does
            for round in range(repeats + 1):
                tasks = [Task(f"{round}-{index}") for index in range(n)]
                for part, leader in (("shards", sharded), ("", runner)):
                    began, computed = time.perf_counter(), time.process_time()

                    def note(name: str, part: str = part, began: float = began, computed: float = computed) -> None:
                        words = (name, part) if part else (name,)
                        times["_".join(words)].append((time.perf_counter() - began, time.process_time() - computed))

                    groups = await leader.roll_out(tasks, plan)
                    note("playing")
                    episodes = [episode for group in groups for episode in group.episodes]
                    await leader.attempts.write(partial(write_rollouts, file, episodes))
                    rollout_metrics(groups)
                    rows = learner.prepare(number_rows(groups))
                    learner.metrics(rows)
                    message_parts([row.without_record() for row in rows])
                    note("whole")
                    check(groups, tokens, turns)
                    del groups, episodes, rows
        await shards.close()
        await runtime.close()
    return {
        "tokens": tokens,
        "turns": turns,
        "trajectories": n * GROUP_SIZE,
        **{part: median(seconds for seconds, _ in rounds[1:]) for part, rounds in times.items()},
        "cpu": {part: median(seconds for _, seconds in rounds[1:]) for part, rounds in times.items()},
    }


def check(groups: Any, tokens: int, turns: int) -> None:
    """The episodes are whole, and as long as they are called."""
    episodes = [episode for group in groups for episode in group.episodes]
    assert all(not e.failed and len(e.rows) == 1 and len(e.rows[0].turns) == turns for e in episodes)
    assert {len(episode.rows[0]) for episode in episodes} == {tokens}, "lengths are what they are called"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
