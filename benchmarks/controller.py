"""Trajectories and tokens per second that the controller handles, with an engine that answers immediately.

    .venv/bin/python benchmarks/controller.py [--repeats 3]

The engine is a separate process, as in a run, so that its messages are pickled, written and read; it does nothing else.
One prompt and its completion make a trajectory of one turn, twenty exchanges one of twenty, of 200, 2,000 and 16,000
tokens in all (those of the chat template included), half of them sampled. `playing` is `Runner.roll_out`; `whole` adds
the work of a step on the groups before a model gets them: the Parquet file, the metrics, advantages and token sequences
(GRPO). Each figure is the median of several rounds, after a warm-up round.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
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
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One token before each message and one after each answer, as DeepSeek's: twenty turns fit into 200 tokens."""


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
            *(f"{case['trajectories'] / case[part]:,.0f}" for part in ("playing", "whole")),
            *(f"{case['trajectories'] * case['tokens'] / case[part]:,.0f}" for part in ("playing", "whole")),
            f"{1e6 * case['whole'] / case['trajectories'] / case['tokens']:.2f}",
        ]
        for case in result["cases"]
    ]
    header = [
        "trajectory", "per round", "rollout, per second", "whole, per second", "tokens per second, rollout", "whole",
        "whole, µs per token",
    ]  # fmt: skip
    return (
        f"{table(header, rows)}\n\nMedians of {result['repeats']} rounds. {conditions_in_words(result['conditions'])}"
    )


async def measured(tokens: int, turns: int, repeats: int) -> dict[str, Any]:
    """Seconds of a round of one case: the rollout, and the whole."""
    from envgym import Env, EnvSpec
    from envgym.agents.token_level import MultiTurn, MultiTurnConfig
    from envgym.engine import SamplingParams
    from envgym.engines.pool import EngineClient
    from envgym.episodes.record import write_rollouts
    from envgym.learners.grpo import GRPO
    from envgym.models.fresh import FreshModelConfig, make_fresh_model
    from envgym.monitoring.metrics import rollout_metrics
    from envgym.processes.local import LocalRuntime
    from envgym.render import load_tokenizer, make_renderer
    from envgym.rollout.config import RolloutConfig
    from envgym.rollout.runner import Runner, SamplingPlan
    from envgym.types import Message, Task, number_rows

    of_turn = tokens // turns
    sampled = of_turn // 2
    said = "g" * (of_turn - sampled - 2)  # without the template's two

    class Talks(Env):
        async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.left = turns
            return [Message("user", said)], {}

        async def step(self, action: Any) -> Any:
            self.left -= 1
            return [Message("user", said)], self.rng.random(), self.left == 0, False, {}

    with tempfile.TemporaryDirectory() as folder:
        # No merge: a byte is a token, so that lengths are what they are called.
        make_fresh_model(Path(folder, "model"), FreshModelConfig(vocab_size=300), [], 0)
        tokenizer = load_tokenizer(str(Path(folder, "model")))
        tokenizer.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
        tokenizer.chat_template = TEMPLATE
        renderer = make_renderer("auto", tokenizer)
        letter, end = tokenizer.encode("a")[0], renderer.stop_token_ids[0]
        runtime = LocalRuntime(Path(folder), deterministic=False)
        arguments = {"letter": letter, "end": end, "max_model_len": 2 * tokens}
        engine = EngineClient(await runtime.start("null_engine:NullEngine", arguments, name="engine"))
        runner = Runner(
            EnvSpec("Talks-v0", Talks),
            MultiTurn(renderer, MultiTurnConfig()),
            engine,
            RolloutConfig(),
            max_model_len=2 * tokens,
            seed=0,
            deterministic=False,
        )
        learner = GRPO(GRPO.Config(name="grpo"))
        n = min(MOST_TRAJECTORIES, MOST_TURNS // turns, MOST_TOKENS // tokens) // GROUP_SIZE
        play = SamplingPlan("p", SamplingParams(max_tokens=sampled, stop_token_ids=renderer.stop_token_ids), GROUP_SIZE)
        playing, whole = [], []
        gc.collect()
        gc.freeze()  # as a run does
        for round in range(repeats + 1):
            tasks = [Task(f"{round}-{index}") for index in range(n)]
            began = time.perf_counter()
            groups = await runner.roll_out(tasks, play)
            played = time.perf_counter()
            episodes = [episode for group in groups for episode in group.episodes]
            write_rollouts(Path(folder, "rollouts.parquet"), episodes)
            rollout_metrics(groups)
            rows = learner.prepare(number_rows(groups))
            learner.metrics(rows)
            whole.append(time.perf_counter() - began)
            playing.append(played - began)
        assert all(not e.failed and len(e.rows) == 1 and len(e.rows[0].turns) == turns for e in episodes)
        assert {len(row.token_ids) for row in rows} == {tokens}, "lengths are what they are called"
        await runtime.close()
    return {
        "tokens": tokens,
        "turns": turns,
        "trajectories": n * GROUP_SIZE,
        "playing": median(playing[1:]),
        "whole": median(whole[1:]),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
