"""Training on groups of answers to one prompt: a worker that computes shared prefixes once, and one that does not.

    .venv/bin/python benchmarks/shared_prefixes.py [--repeats 6] [--case NAME …]

Forward and backward are `ModelWorker.accumulate` with the GRPO loss; with AdamW's `step` they are the learn phase of
an optimizer step. The log-prob pass is `ModelWorker.forward`. Both sides have the same rows, random prompts with
answers of lengths between half and one and a half of the mean, and the same budget of tokens per micro-batch; they
alternate in one process, in an order that changes from turn to turn, and the first turn is not counted. Peak memory is
measured in separate processes, with the whole group in one micro-batch on both sides: that of the process during a
learn phase, less that before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from record import conditions, conditions_in_words, fill_docs, store, table

if TYPE_CHECKING:
    from envgym.types import Row
    from envgym.workers.model import ModelWorker

BUDGET = 4096
SIDES = ("shared", "padded")
PHASES = {"backward": "forward and backward", "learn": "learn phase", "score": "log-prob pass"}


@dataclass(frozen=True)
class Case:
    """Groups of `size` answers with a mean of `answer` tokens to prompts of `prompt` tokens, in micro-batches of
    at most `budget` tokens."""

    model: str
    groups: int
    prompt: int
    answer: int
    size: int = 8
    budget: int = BUDGET


CASES = {
    "main job": Case("starter", 64, 27, 7),
    "short prompt": Case("34 M", 4, 27, 84),
    "long prompt": Case("34 M", 4, 512, 64),
    "longer prompt": Case("34 M", 1, 2048, 128),
    "longer prompt at once": Case("34 M", 1, 2048, 128, budget=2**20),
    "a fifth is shared": Case("34 M", 16, 32, 64, 2),
    "nothing is shared": Case("34 M", 32, 27, 69, 1),
}
MEMORY = "longer prompt at once"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--memory", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(peak_of_learning(options.memory)))
        return
    where = conditions(["envgym", "torch", "transformers", "deepspeed"])
    cases = {}
    for name in options.case:
        cases[name] = asdict(CASES[name]) | measured(CASES[name], options.repeats)
        print(name, json.dumps(cases[name]), flush=True)
    peaks = {side: peak_in_process(side) for side in SIDES}
    result = {
        "conditions": where,
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "repeats": options.repeats,
        "cases": cases,
        "peak_bytes": peaks,
    }
    path = store("shared_prefixes", result)
    text = markdown(result)
    if options.case == list(CASES):
        fill_docs("shared_prefixes", text)
    print(f"{text}\n\nstored in {path}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    rows = [
        [
            f"{case['model']}: {case['groups']} × ({case['prompt']} + {case['size']} × {case['answer']})"
            f"{', in one micro-batch' * (case['budget'] > BUDGET)}",
            f"{case['tokens']:.2f}",
            *("{median:.2f} ({least:.2f} to {greatest:.2f})".format(**case[phase]) for phase in PHASES),
        ]
        for case in result["cases"].values()
    ]
    peaks, case = result["peak_bytes"], CASES[MEMORY]
    shared, padded = (peaks[side] / 2**20 for side in SIDES)
    what = (
        f"How many times as long whole sequences take; medians of {result['repeats']} turns, micro-batches of {BUDGET} "
        f"tokens, OMP_NUM_THREADS {result['threads']}. With {case.prompt} + {case.size} × {case.answer} tokens in one "
        f"micro-batch, a learn phase takes {shared:.0f} MiB above the loaded model, and {padded:.0f} MiB with whole "
        f"sequences: {shared / padded:.2f}. "
    )
    header = ["groups × (prompt + size × answer), tokens", "tokens", *PHASES.values()]
    return f"{table(header, rows)}\n\n{what}{conditions_in_words(result['conditions'])}"


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Ratios of whole sequences over shared prefixes: tokens computed, and seconds of both phases."""
    from envgym.workers.micro_batches import cost, micro_batches

    with tempfile.TemporaryDirectory() as folder:
        worker = load_worker(case.model, folder, case.budget)
        rows = rows_of(case, worker.info().vocabulary)
        layouts = {"padded": "padded", "shared": worker.info().layout_of(rows)}
        turns = []
        for number in range(1 + repeats):
            turn = {}
            for side in SIDES if number % 2 else reversed(SIDES):
                layout = layouts[side]
                began = time.perf_counter()
                [batches] = micro_batches(rows, case.budget, 1, layout=layout)
                worker.accumulate(batches, worker.learner.loss_normalizers(rows), layout)
                accumulated = time.perf_counter()
                worker.step(0.0)
                learned = time.perf_counter()
                worker._not_shared = "" if side == "shared" else "this side has whole sequences"
                worker.forward(rows)
                worker._not_shared = ""
                ended = time.perf_counter()
                turn[side] = {"backward": accumulated - began, "learn": learned - began, "score": ended - learned}
            turns.append(turn)
        [shared], [padded] = (micro_batches(rows, case.budget, 1, layout=layouts[side]) for side in SIDES)
        tokens = sum(cost(batch, layout="packed") for batch in padded)
        computed = sum(cost(batch, layout=layouts["shared"]) for batch in shared)
        worker.close()
    result: dict[str, Any] = {"tokens": tokens / computed if layouts["shared"] == "shared" else 1.0}
    for phase in PHASES:
        ratios = sorted(turn["padded"][phase] / turn["shared"][phase] for turn in turns[1:])
        result[phase] = {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]}
    return result


def load_worker(model: str, folder: str, budget: int = BUDGET) -> ModelWorker:
    """A worker that trains the starter, or a random Qwen2 of 34 million parameters, made in `folder`."""
    from envgym.config.recipes import recipe_model_folder
    from envgym.learner import RoleSpec
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.model import ModelWorker

    path = str(recipe_model_folder(model)) if model == "starter" else make_model(folder)
    settings = WorkersConfig(dtype="float32", tokens_per_microbatch=budget)
    worker = ModelWorker(WorkerSpec("actor", path, RoleSpec(trained=True), {"name": "grpo"}, settings))
    worker.load()
    return worker


def make_model(folder: str) -> str:
    """Save a random Qwen2 of 34 million parameters in `folder`, and return it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def rows_of(case: Case, vocabulary: int) -> list[Row]:
    """The case's groups; as a chat template's do, all prompts begin with the same six tokens."""
    import numpy as np

    from envgym.types import Objective, Row

    rng, rows = np.random.default_rng(0), []
    head = rng.integers(vocabulary, size=6)
    for group in range(case.groups):
        prompt = np.concatenate([head, rng.integers(vocabulary, size=case.prompt - len(head))])
        for _ in range(case.size):
            answer = rng.integers(vocabulary, size=rng.integers(case.answer // 2, case.answer + case.answer // 2 + 1))
            ids = np.concatenate([prompt, answer])
            weights, old = np.zeros(len(ids), np.float32), np.full(len(ids), np.nan, np.float32)
            weights[case.prompt :], old[case.prompt :] = 1.0, -8.0
            advantages = {"advantages": np.full(len(ids), rng.normal(), np.float32)}
            index = len(rows)
            rows.append(
                Row.from_arrays(
                    ids, weights, old, Objective.POLICY_GRADIENT, advantages,
                    microbatch_key=index, episode_index=index, group_index=group,
                )
            )  # fmt: skip
    return rows


def peak_in_process(side: str) -> float:
    """The result of `peak_of_learning`, from a separate process."""
    command: Sequence[str] = [sys.executable, __file__, "--memory", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=900)
    peak: float = json.loads(done.stdout.splitlines()[-1])
    return peak


def peak_of_learning(side: str) -> int:
    """Bytes that a learn phase of the case `MEMORY` takes above the loaded model and optimizer, in one micro-batch."""
    case = CASES[MEMORY]
    with tempfile.TemporaryDirectory() as folder:
        worker = load_worker(case.model, folder, case.budget)
        rows = rows_of(case, worker.info().vocabulary)
        normalizers = worker.learner.loss_normalizers(rows)
        worker.accumulate([rows[:1]], normalizers, "padded")
        worker.step(0.0)  # the optimizer's state exists from here
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        worker.accumulate([rows], normalizers, side)
        # Not `ru_maxrss`, which a process inherits from the one that started it.
        [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        worker.close()
    return 1024 * int(peak) - before


if __name__ == "__main__":
    main()
