"""How much of a GPU's speed training reaches: each result is printed and stored as it comes.

    python benchmarks/gpu_speed.py --model SMOLLM2 [PART …] [--toy]

Parts, in this order, each a process of its own with a limit of its time, less than ten minutes together on an H100:

- `learn`: tokens per second of learning at shapes of 0.5 and 1.5 billion parameters, beside a plain loop over the same
  rows (the model and loss of transformers under `torch.compile`, fused AdamW) and beside the rate of matrix products;
- `step`: `envgym train` of SmolLM2-135M-Instruct (the folder that `examples/smollm2.py` makes), 64 groups of 8 answers
  of at most 128 tokens: seconds of each step's phases, and sampled tokens per second beside vLLM alone on as many
  requests;
- `trl`: TRL's GRPOTrainer with vLLM inside it on the same job, where TRL is installed.

`--toy` takes toy sizes, which also a CPU computes, to try the script. Nothing of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from against_trl import PROMPT
from gpu_first import _load_actor, _matmul_rate, _seconds_of_a_step, gpu_name, gpus
from gpu_main_job import ENVGYM, SIZES, make_model
from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table
from sides import trl_command

NAME = "gpu_speed"
SHAPES = {"0.5B": SIZES["0.5B"], "1.5B": (1536, 28, 8960, 12, 2), "toy": (64, 2, 128, 2, 1)}
"""As in `gpu_main_job.SIZES`; 1.5B: Qwen2.5's."""
TOKENS, LENGTH = 16_384, 512
PHASES = ("rollout", "learn", "sync", "step")
GOALS = {
    "0.5B": "82,000 tokens/s",
    "1.5B": "40% of the products' rate",
    "learn": "1 s",
    "sync": "0.15 s",
    "sampling": "0.9",
}
SECONDS = {"learn": 240, "step": 200, "trl": 150}
PAGE = ROOT / "docs" / "scale" / "gpu_walkthrough.md"


@dataclass(frozen=True)
class Job:
    """Groups, answers per group, tokens per answer, and steps of the run."""

    tasks: int = 64
    group: int = 8
    tokens: int = 128
    steps: int = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    if options.inside:
        [part] = options.parts
        print(json.dumps(PARTS[part](options.model, options.toy)), flush=True)
        return
    path = RESULTS / f"{NAME}.json"
    result = json.loads(path.read_text()) if path.exists() and not options.toy else {}
    for part in options.parts or PARTS:
        where = conditions(["envgym", "torch", "vllm", "deepspeed", "transformers", "liger-kernel", "trl"])
        result[part] = {"conditions": where, "gpu": gpu_name(), **run_part(part, options)}
        print(f"{part}: {json.dumps(result[part])}", flush=True)
        if not options.toy:
            store(NAME, result)
            fill_docs(NAME, markdown(result), PAGE)


def run_part(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a part, or the reason why there are none."""
    words = [sys.executable, __file__, part, "--inside", "--model", str(options.model), *["--toy"] * options.toy]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS[part], check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"not done after {SECONDS[part]} s"}
    if done.returncode:
        return {"problem": done.stderr.strip()[-600:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


# -- parts ------------------------------------------------------------------------------------------------


def learn(_: Path, toy: bool) -> dict[str, Any]:
    """Tokens per second of our worker and of the plain loop, and their shares of the products' rate."""
    from envgym.types import Objective
    from envgym.workers.export import flops_per_token

    budget, length = (256, 64) if toy else (TOKENS, LENGTH)
    products = _matmul_rate("cuda" if gpus() else "cpu", 8192 if gpus() else 512)
    result: dict[str, Any] = {"matmul_tflops": products / 1e12}
    for shape in ["toy"] if toy else ["0.5B", "1.5B"]:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), *SHAPES[shape])
            rows = rows_of(4 * budget // length, length)
            per_batch = budget // length
            batches = [rows[start : start + per_batch] for start in range(0, len(rows), per_batch)]
            weight, n_tokens = sum(float(row.loss_weights.sum()) for row in rows), sum(map(len, rows))
            worker = _load_actor(model, "sft", budget)
            rate = n_tokens / _seconds_of_a_step(worker, batches, {Objective.CROSS_ENTROPY: weight})
            constant, per_length = flops_per_token(worker.network.model)
            notes, attention = worker.info().notes, worker.info().attention
            worker.close()
            plain = plain_rate(model, [[list(row.token_ids) for row in batch] for batch in batches])
        share = (constant + per_length * length) / products
        result[shape] = {"tokens_per_second": rate, "share": rate * share, "plain": plain, "plain_share": plain * share}
        result[shape] |= {"attention": attention, "notes": notes}
    return result


def rows_of(count: int, length: int) -> list[Any]:
    """Rows of drawn tokens, all of one length."""
    import numpy as np

    from envgym.types import Objective, Row

    tokens = np.random.default_rng(0).integers(0, 150_000, (count, length)).astype(np.int32)
    weights, no_logprobs = np.minimum(np.arange(length), 1).astype(np.float32), np.full(length, np.nan, np.float32)
    return [Row.from_arrays(row, weights, no_logprobs, Objective.CROSS_ENTROPY) for row in tokens]


def plain_rate(model: str, batches: list[list[list[int]]]) -> float:
    """Tokens per second of transformers' model and loss, compiled, with fused AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if gpus() else "cpu"
    dtype = torch.bfloat16 if gpus() else torch.float32
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)

    def loss_of(ids: Any) -> Any:
        return network(input_ids=ids, labels=ids).loss

    if gpus():
        loss_of = torch.compile(loss_of)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        for rows in batches:
            (loss_of(torch.tensor(rows, dtype=torch.int64, device=device)) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpus():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sum(len(row) for rows in batches for row in rows) / min(seconds[1:])


def step(model: Path, toy: bool) -> dict[str, Any]:
    """The phases of each step of a run, and sampled tokens per second over vLLM's alone."""
    job = job_of(toy)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        words = ["train", "--env", "math_verify", "--model", str(model), "--name", "step", f"runs_dir={folder}"]
        words += [f"steps={job.steps}", "eval.every=0", "checkpoint.every=0", f"rollout.tasks_per_step={job.tasks}"]
        words += [f"rollout.group_size={job.group}", f"rollout.max_tokens={job.tokens}"]
        run_checked([ENVGYM, *words])
        wall = time.perf_counter() - began
        lines = [json.loads(line) for line in Path(folder, "step", "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"]]
    phases = {phase: [line[f"seconds/{phase}"] for line in lines] for phase in PHASES}
    sampled = [line["tokens/sampled"] / line["seconds/rollout"] for line in lines]
    bare = [sys.executable, str(ROOT / "benchmarks" / "gpu_main_job.py"), "--bare", str(model)]
    alone = run_checked([*bare, "--tasks", str(job.tasks), "--max-tokens", str(job.tokens)])
    rate = float(alone.splitlines()[-1])
    return {"wall": wall, **phases, "sampled": sampled, "vllm_alone": rate, "sampling": median(sampled[1:]) / rate}


def trl(model: Path, toy: bool) -> dict[str, Any]:
    """Seconds of TRL's steps on the same job."""
    if not find_spec("trl") or not find_spec("datasets"):
        return {"problem": "TRL is not installed here"}
    job = job_of(toy)
    with tempfile.TemporaryDirectory() as folder:
        tasks, out = Path(folder, "tasks.jsonl"), Path(folder, "out.jsonl")
        problems = [(a, b) for a in range(10, 42) for b in range(10, 42)]
        rows = [{"prompt": PROMPT.format(a, b), "answer": str(a + b)} for a, b in problems]
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"steps": job.steps, "tasks_per_step": job.tasks, "group_size": job.group, "max_tokens": job.tokens}
        files = {"model": model, "tasks": tasks, "out": out, "lengths": None}
        run_checked(trl_command("grpo", sampler="vllm", lr=5e-5, seed=0, **settings, **files))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {phase: [line[f"seconds/{phase}"] for line in lines] for phase in PHASES}


PARTS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {"learn": learn, "step": step, "trl": trl}


def job_of(toy: bool) -> Job:
    return Job(tasks=2, group=2, tokens=8, steps=3) if toy else Job()


def run_checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip()[-600:])
    return done.stdout


# -- showing it -------------------------------------------------------------------------------------------


def markdown(result: dict[str, Any]) -> str:
    rows = []
    problems = [f"{part}: {figures['problem']}" for part, figures in result.items() if "problem" in figures]
    for shape, figures in result.get("learn", {}).items():
        if shape in GOALS:
            ours = f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['share']:.0%} of the products' rate"
            plain = f"{figures['plain']:,.0f}, {figures['plain_share']:.0%}"
            rows.append([f"learning, {shape} parameters", ours, plain, GOALS[shape]])
    ours, theirs = result.get("step", {}), result.get("trl", {})
    for phase in PHASES if "step" in ours else ():
        cells = [", ".join(f"{seconds:.2f}" for seconds in side.get(phase, [])) for side in (ours, theirs)]
        rows.append([f"SmolLM2, {phase}, s per step", cells[0], cells[1] and f"TRL: {cells[1]}", GOALS.get(phase, "")])
    if "sampling" in ours:
        rows.append(["SmolLM2, sampling over vLLM alone", f"{ours['sampling']:.2f}", "", GOALS["sampling"]])
    words = conditions_in_words(next(iter(result.values()))["conditions"])
    text = table(["", "envgym", "plain loop, compiled; TRL", "goal"], rows)
    return "\n\n".join([text, *problems, f"{next(iter(result.values()))['gpu']}. {words}"])


if __name__ == "__main__":
    main()
