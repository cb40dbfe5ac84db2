"""How many processes of rollouts one controller can lead: a simulation with measured times.

    .venv/bin/python benchmarks/rollout_shards.py [--again]

Measured, in seconds of computing, for each case by `benchmarks/controller.py --case`: the time of the controller of two
processes for an episode, from the task to the message for the model that trains on it (drawing up the batch, metrics,
advantages, token sequences); and the time of one process that does everything alone, which is taken for the shard's,
although the controller does a part of it. With `--again` those of the last run are used.

Assumed: a shard has 8 engines on its node, which sample 3,000 tokens per second each and 60 per sequence, or engines
that respond immediately; a message takes 0.5 ms; half of the tokens are sampled; lengths of turns are log-normal (sigma
0.5), and the times are proportional to them; rollouts are asynchronous, so that no shard waits for a step; every shard
and the controller have one core of the measured kind. Environments take no time, and shards share nothing but the
controller, whose loop does its jobs in the order in which they come. What a network adds is not simulated.

A case is simulated event by event, a queue per shard and one at the controller. It ends when as many episodes have
ended as all shards have at a time, `ROUNDS` times; the first of these rounds is not counted.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, conditions, conditions_in_words, publish, table

NAME = "rollout_shards"
SHARDS = (1, 4, 16, 64)
CASES = ((2_000, 1), (16_000, 1), (2_000, 20), (16_000, 20))
"""Tokens and turns of an episode."""
GROUP_SIZE = 8
ENGINES, ENGINE_RATE, SEQUENCE_RATE = 8, 3_000, 60
"""Engines of a shard; tokens per second of an engine, and of one sequence."""
MESSAGE = 0.5e-3
"""Seconds that a message takes."""
SIGMA = 0.5
"""Standard deviation of the logarithm of a turn's length."""
ROUNDS, IMMEDIATE_GROUPS = 3, 8
"""Rounds of a shard's episodes that are simulated; groups that a shard has at a time, if its engines respond
immediately."""
FULL = 0.9
"""Share of its time from which on a part is called the limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="simulate with the times of the last run")
    options = parser.parse_args()
    where = conditions(["envgym"])
    if options.again:
        measured = json.loads((RESULTS / f"{NAME}.json").read_text())["measured"]
    else:
        measured = [measured_case(tokens, turns) for tokens, turns in CASES]
    cases = []
    for case in measured:
        shard, controller = (case["cpu"][part] / case["trajectories"] for part in ("whole", "whole_shards"))
        for immediate in (False, True):
            for n in SHARDS:
                settings = {"tokens": case["tokens"], "turns": case["turns"], "immediate": immediate}
                figures = Simulation(n, shard, controller, **settings).run()
                cases.append({**settings, "shards": n, "seconds": [shard, controller], **figures})
                print(cases[-1], flush=True)
    result = {"conditions": where, "measured": measured, "cases": cases}
    publish(NAME, result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    rows = []
    for first, *middle, last in zip(*[iter(result["cases"])] * len(SHARDS), strict=True):
        shares = {"engines": last["engine"], "shards": last["shard"], "controller": last["controller"]}
        part = max(shares, key=lambda name: shares[name])
        shard, controller = (1e6 * seconds for seconds in first["seconds"])
        rows.append([
            f"{first['tokens']:,} tokens, {first['turns']} turn{'s' * (first['turns'] > 1)}; "
            f"{'immediate' if first['immediate'] else f'{ENGINES} engines'}",
            f"{shard:,.0f}", f"{controller:,.0f}", f"{first['per_second']:,.0f}",
            *(f"{case['per_second'] / first['per_second'] / case['shards']:.2f}" for case in (*middle, last)),
            f"{min(1, last['controller']):.0%}", part if shares[part] >= FULL else "latency",
            f"{1e6 / controller / first['per_second']:,.0f}",
        ])  # fmt: skip
    header = [
        "episodes; engines of a shard", "shard, µs per episode", "controller",
        "one shard, per second",
        *(f"{n} shards, of linear" for n in SHARDS[1:]), f"controller busy at {SHARDS[-1]}", "limit",
        "shards that fill the controller",
    ]  # fmt: skip
    return f"{table(header, rows)}\n\n{conditions_in_words(result['conditions'])}"


def measured_case(tokens: int, turns: int) -> dict[str, Any]:
    """The times of one case."""
    script = Path(__file__).with_name("controller.py")
    words = [sys.executable, str(script), "--case", str(tokens), str(turns)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    case: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return case


@dataclass(slots=True)
class _Server:
    """One process that does its jobs in the order in which they come."""

    free: float = 0.0
    busy: float = 0.0

    def do(self, now: float, seconds: float) -> float:
        """The end of a job that comes now."""
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free


class Simulation:
    """`n` shards with groups of episodes of `turns` turns and `tokens` tokens, and their controller."""

    def __init__(self, n: int, shard: float, controller: float, *, tokens: int, turns: int, immediate: bool) -> None:
        self.n, self.turns, self.immediate = n, turns, immediate
        self.of_turn, self.seconds, self.episode_seconds = tokens / turns, shard / turns, controller
        self.rate = ENGINES * ENGINE_RATE
        # So many sequences keep the engines full, with a few more for those that wait.
        waiting = max(1, round(1.2 * self.rate / SEQUENCE_RATE / GROUP_SIZE))
        self.n_groups = IMMEDIATE_GROUPS if immediate else waiting
        self.controller = _Server()
        self.shards, self.engines = ([_Server() for _ in range(n)] for _ in range(2))
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = self.ended = 0
        self.rng = random.Random(0)

    def run(self) -> dict[str, float]:
        """Episodes per second, and the share of their time in which controller, shards and engines are busy."""
        first, last = (self.n * self.n_groups * GROUP_SIZE * rounds for rounds in (1, ROUNDS))
        for _ in range(self.n_groups):
            for shard in range(self.n):
                self.deal(0.0, shard)
        began: tuple[float, list[float]] | None = None
        while self.ended < last:
            now, _, call, arguments = heapq.heappop(self.events)
            call(now, *arguments)
            if began is None and self.ended >= first:
                began = now, self.busy()
        assert began is not None
        seconds = now - began[0]
        shares = [(end - start) / seconds for start, end in zip(began[1], self.busy(), strict=True)]
        return {
            "per_second": (last - first) / seconds,
            **dict(zip(("controller", "shard", "engine"), shares, strict=True)),
        }

    def busy(self) -> list[float]:
        """Seconds of work so far: the controller's, and a shard's and its engines' in the mean."""
        parts = (self.shards, self.engines)
        return [self.controller.busy, *(sum(server.busy for server in part) / self.n for part in parts)]

    def after(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, call, arguments))

    def deal(self, now: float, shard: int) -> None:
        """The controller sends a group. Its time for an episode counts when the group is received."""
        group = [GROUP_SIZE]
        for _ in range(GROUP_SIZE):
            self.after(now + MESSAGE, self.take_turn, shard, group, 0)

    def take_turn(self, now: float, shard: int, group: list[int], turn: int) -> None:
        """A shard works on a turn of an episode, and its engines sample it."""
        length = self.rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        end = self.shards[shard].do(now, self.seconds * length)
        if not self.immediate:
            sampled = self.of_turn * length / 2
            end = max(self.engines[shard].do(end, sampled / self.rate), end + sampled / SEQUENCE_RATE)
        if turn + 1 < self.turns:
            self.after(end, self.take_turn, shard, group, turn + 1)
        else:
            self.after(end, self.end_episode, shard, group)

    def end_episode(self, now: float, shard: int, group: list[int]) -> None:
        """A group of which all have ended goes to the controller, which deals the next."""
        group[0] -= 1
        if not group[0]:
            self.after(now + MESSAGE, self.receive, shard)

    def receive(self, now: float, shard: int) -> None:
        self.ended += GROUP_SIZE
        self.after(self.controller.do(now, GROUP_SIZE * self.episode_seconds), self.deal, shard)


if __name__ == "__main__":
    main()
