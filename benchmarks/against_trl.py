"""Seconds per step of `envgym train` with GRPO, by phase, compared with TRL's GRPOTrainer on the same jobs.

    .venv/bin/python benchmarks/against_trl.py [--job starter|30m|both] [--repeats 3]

Two jobs: `starter` is the main job (sums for `math_verify`, completions of a few tokens) with the starter policy; `30m`
is a random policy of some 34 million parameters with completions of the lengths in `lengths_env.py`: log-normal, up to
256 tokens, the same on all sides. That policy never ends its turn by itself.

Three sides run the same job, one after the other, and the whole round is repeated: envgym, TRL with its own generation,
TRL with vLLM inside it (`trl_side.py`). All get the same policy, file of tasks, group size, token limits, threads and
optimizer, and make one optimizer step per rollout.

The result of a run is the median of its steps after the first few. A ratio (TRL's seconds over envgym's) compares runs
of the same round, so that both had similar conditions. The median, minimum and maximum over the rounds are stored; a
row is `won` if every round is above 1, `lost` if every one is below, otherwise `even`. The stored results of a job that
is not run stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from eval_throughput import make_model
from record import RESULTS, ROOT, conditions, conditions_in_words, fill_docs, store, table
from sides import ENVGYM, PACKAGES, end_on_sigterm, run_to_end, trl_command

NAME = "against_trl"
PROMPT = "What is {} + {}?\nPut the final answer in \\boxed{{}}."  # the main job's, as the starter policy knows it

PEERS = {"trl_own": "TRL, its own generation", "trl_vllm": "TRL, vLLM inside"}
PHASES = ("step", "rollout", "learn", "sync")
ROWS = {**{phase: phase for phase in PHASES}, "wall": "whole run with start-up"}
WORK = ("tokens/sampled", "reward/mean")  # what shows that the sides did the same amount of work
MEDIAN_LENGTH, SIGMA = 60, 0.8  # of the answers where they are drawn


@dataclass(frozen=True)
class Job:
    """The job of all sides, and the target ratios by peer and phase."""

    title: str
    tasks_per_step: int
    group_size: int
    max_tokens: int
    steps: int
    warmup: int
    lr: float
    goals: dict[tuple[str, str], float]
    lengths_drawn: bool = False
    """Whether lengths of completions are drawn log-normally, in place of the policy's."""

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.tasks_per_step * self.group_size


JOBS = {
    "starter": Job(
        title="The starter policy, answers of at most 16 tokens",
        tasks_per_step=64,
        group_size=8,
        max_tokens=16,
        steps=20,
        warmup=3,
        lr=3e-4,
        goals={("trl_own", "step"): 0.97, ("trl_vllm", "step"): 1.2, ("trl_vllm", "wall"): 1.0},
    ),
    "30m": Job(
        title="A policy of 34 million parameters, answers of log-normal length up to 256 tokens",
        tasks_per_step=4,
        group_size=8,
        max_tokens=256,
        steps=6,
        warmup=2,
        lr=1e-6,
        goals={("trl_own", "step"): 2.1, ("trl_vllm", "step"): 1.4},
        lengths_drawn=True,
    ),
}


@dataclass(frozen=True)
class Given:
    """The input of a job's sides: the policy's folder, the tasks' file, the lengths' file, and common settings."""

    model: Path
    tasks: Path
    lengths: Path
    seed: int
    threads: int


def write_tasks(path: Path, count: int, seed: int) -> None:
    """Sums of two two-digit numbers, all different, as JSONL of `prompt` and `answer`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chosen = random.Random(seed).sample(pairs, count)
    path.write_text(
        "".join(json.dumps({"prompt": PROMPT.format(a, b), "answer": str(a + b)}) + "\n" for a, b in chosen)
    )


def write_lengths(path: Path, job: Job, seed: int) -> None:
    """The token limit of each completion of a run, in the order of the requests, as a JSON list."""
    draw = random.Random(seed)
    drawn = (draw.lognormvariate(math.log(MEDIAN_LENGTH), SIGMA) for _ in range(job.steps * job.completions))
    path.write_text(json.dumps([min(max(round(length), 1), job.max_tokens) for length in drawn]))


def make_endless_model(folder: Path) -> None:
    """The random policy of `eval_throughput.py`, changed so that it never samples a special token.

    One dimension of the residual stream is set to a constant that no block writes to, and a head of its own, not tied
    to the embedding, reads nothing from it but what makes those tokens impossible.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(folder)
    special = AutoTokenizer.from_pretrained(folder).all_special_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.data
    model.lm_head.weight = torch.nn.Parameter(embedding.clone())
    model.config.tie_word_embeddings = False
    head = model.lm_head.weight.data
    embedding[:, 0] = 1.0
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data[0] = 0.0
        block.mlp.down_proj.weight.data[0] = 0.0
    head[:, 0] = 0.0
    head[special] = 0.0
    head[special, 0] = -1e4
    model.save_pretrained(folder)


def command(side: str, job: Job, given: Given, folder: Path) -> tuple[list[str], Path]:
    """A side's command, and the file to which it writes one JSON line per step."""
    if side == "envgym":
        # The tasks hold math_verify's instruction already, for all sides.
        of_the_env = {"env.lengths": given.lengths} if job.lengths_drawn else {"env.instruction": "''"}
        settings = {
            "runs_dir": folder,
            "data.path": given.tasks,
            **of_the_env,
            "seed": given.seed,
            "steps": job.steps,
            "rollout.tasks_per_step": job.tasks_per_step,
            "rollout.group_size": job.group_size,
            "rollout.max_tokens": job.max_tokens,
            "rollout.temperature": 1.0,
            "learner.lr": job.lr,
            "learner.betas": "[0.9,0.95]",
            "learner.weight_decay": 0.0,
            "learner.max_grad_norm": 1.0,
            "eval.every": 0,
            "checkpoint.every": 0,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        env = ROOT / "benchmarks" / "lengths_env.py" if job.lengths_drawn else "math_verify"
        start = [ENVGYM, "train", "--env", str(env), "--learner", "grpo", "--model", str(given.model)]
        return [*start, "--name", "bench", *words], folder / "bench" / "metrics.jsonl"
    out = folder / "metrics.jsonl"
    start = trl_command(
        "grpo", sampler=side.removeprefix("trl_"), model=given.model, tasks=given.tasks, out=out, steps=job.steps,
        tasks_per_step=job.tasks_per_step, group_size=job.group_size, max_tokens=job.max_tokens, lr=job.lr,
        seed=given.seed, lengths=given.lengths if job.lengths_drawn else None,
    )  # fmt: skip
    return start, out


def run(side: str, job: Job, given: Given, folder: Path) -> dict[str, float]:
    """Run one side to its end and return the medians of its measured steps, and its wall-clock seconds.

    The medians are of `PHASES` and of all other phases that the side counts by itself.
    """
    folder.mkdir(parents=True)
    start, metrics = command(side, job, given, folder)
    wall = run_to_end(side, start, folder, given.threads)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [step for step in steps if "seconds/step" in step][job.warmup :]
    own = sorted({field for step in measured for field in step if field.startswith("seconds/")})
    fields = dict.fromkeys([*(f"seconds/{phase}" for phase in PHASES), *own, *WORK])
    return {field: median(step.get(field, 0.0) for step in measured) for field in fields} | {"seconds/wall": wall}


def measure(job: Job, given: Given, folder: Path, repeats: int) -> list[dict[str, dict[str, float]]]:
    """The results of `run` for each side, by round.

    Raises:
        SystemExit: the sides got the same lengths, but their numbers of sampled tokens differ by more than a twentieth.
    """
    turns: list[dict[str, dict[str, float]]] = []
    for turn in range(repeats):
        turns.append({})
        for side in ["envgym", *PEERS]:
            turns[-1][side] = run(side, job, given, folder / f"{turn}-{side}")
            print(f"{job.title}: turn {turn} {side}: {turns[-1][side]['seconds/step']:.3f} s per step", flush=True)
        # The number of answers is the same, so their mean length is then too.
        tokens = {side: found["tokens/sampled"] for side, found in turns[-1].items()}
        if job.lengths_drawn and max(tokens.values()) > 1.05 * min(tokens.values()):
            raise SystemExit(f"the sides did different work, in tokens sampled per step: {tokens}")
    return turns


def compare(turns: list[dict[str, dict[str, float]]], peer: str, phase: str, goal: float | None) -> dict[str, Any]:
    """One row: both sides' seconds, TRL's over envgym's with its spread over the turns, and who was faster."""
    field = f"seconds/{phase}"
    ratios = [turn[peer][field] / turn["envgym"][field] for turn in turns]
    return {
        "envgym_seconds": median(turn["envgym"][field] for turn in turns),
        "trl_seconds": median(turn[peer][field] for turn in turns),
        "ratio": median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "outcome": "won" if min(ratios) > 1 else "lost" if max(ratios) < 1 else "even",
        "goal": goal,
    }


def markdown(results: dict[str, Any]) -> str:
    """The stored results as the text of the docs."""
    return "\n\n".join(job_markdown(results[name]) for name in JOBS if name in results)


def job_markdown(result: dict[str, Any]) -> str:
    """One job's text: the rows, the work done, the conditions."""
    rows = [
        [
            f"{label}: {ROWS[phase]}",
            f"{row['envgym_seconds']:.3f}",
            f"{row['trl_seconds']:.3f}",
            "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_spread"]),
            "" if row["goal"] is None else f"{row['goal']:g}",
            row["outcome"],
        ]
        for peer, label in PEERS.items()
        for phase, row in result["comparison"][peer].items()
    ]
    job, turns = result["job"], result["turns"]
    work = []
    for side, label in {"envgym": "envgym", **PEERS}.items():
        tokens, reward = (median(turn[side][field] for turn in turns) for field in WORK)
        work.append([label, f"{tokens:,.0f}", f"{tokens / job['completions']:.1f}", f"{reward:.2f}"])
    header = ["against, phase", "envgym, s", "TRL, s", "TRL / envgym (min to max)", "goal", "envgym"]
    return "\n\n".join(
        [
            f"**{job['title']}** ({job['tasks_per_step']} tasks with {job['group_size']} completions per step):",
            table(header, rows),
            "What each side did in those steps (medians):",
            table(["side", "tokens sampled per step", "mean length", "mean reward"], work),
            "The matrix products of a step alone, in bare torch: rollout {rollout:.3f} s, learn {learn:.3f} s.".format(
                **result["bounds"]
            ),
            f"{job['repeats']} turns of {job['steps']} steps, the first {job['warmup']} dropped; OMP_NUM_THREADS "
            f"{job['threads']}. {conditions_in_words(result['conditions'])}",
        ]
    )


def short_markdown(results: dict[str, Any]) -> str:
    """The whole steps of all jobs, for README: one table, lost rows included."""
    rows = [
        [
            result["job"]["title"].partition(",")[0],
            label,
            "{:.2f} ({:.2f} to {:.2f})".format(step["ratio"], *step["ratio_spread"]),
            step["outcome"],
        ]
        for result in (results[name] for name in JOBS if name in results)
        for peer, label in PEERS.items()
        for step in [result["comparison"][peer]["step"]]
    ]
    return table(["policy", "against", "TRL's seconds / envgym's (min to max)", "envgym"], rows)


def starter_policy() -> Path:
    """The folder of the starter policy."""
    told = subprocess.run([ENVGYM, "model", "starter"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(told.stdout.splitlines()[-1])


def measure_job(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All turns of one job, as they are stored."""
    chosen = {key: getattr(options, key) for key in ("steps", "warmup", "lr") if getattr(options, key) is not None}
    job = replace(JOBS[name], **chosen)
    where = conditions(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="against-trl-") as temporary:
        folder = Path(temporary)
        model = folder / "model" if job.lengths_drawn else options.model or starter_policy()
        given = Given(model, folder / "tasks.jsonl", folder / "lengths.json", options.seed, options.threads)
        write_tasks(given.tasks, job.tasks_per_step * job.steps, options.seed)
        if job.lengths_drawn:
            make_endless_model(model)
            write_lengths(given.lengths, job, options.seed)
        turns = measure(job, given, folder, options.repeats)
        config = json.loads((model / "config.json").read_text())
        bounds = bounds_of(job, given, median(turn["envgym"]["tokens/sampled"] for turn in turns))
    settings = {key: value for key, value in vars(job).items() if key != "goals"}
    return {
        "conditions": where,
        "job": settings
        | {"completions": job.completions}
        | ({"median_length": MEDIAN_LENGTH, "sigma": SIGMA} if job.lengths_drawn else {})
        | {key: getattr(options, key) for key in ("repeats", "seed", "threads")}
        | {"model": config},
        "comparison": {
            peer: {phase: compare(turns, peer, phase, job.goals.get((peer, phase))) for phase in ROWS} for peer in PEERS
        },
        "bounds": bounds,
        "turns": turns,
    }


def bounds_of(job: Job, given: Given, sampled: float) -> dict[str, float]:
    """Seconds of a step's matrix products in bare torch, by phase; `sampled` tokens per step."""
    import torch
    from products import seconds_of_products
    from transformers import AutoTokenizer

    torch.set_num_threads(given.threads)
    if job.lengths_drawn:
        answers = json.loads(given.lengths.read_text())[-job.completions :]
    else:
        answers = [round(sampled / job.completions)] * job.completions
    question = json.loads(given.tasks.read_text().splitlines()[0])["prompt"]
    prompt = AutoTokenizer.from_pretrained(given.model).apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return seconds_of_products(given.model, job.tasks_per_step, len(prompt), answers)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=[*JOBS, "both"], default="both")
    parser.add_argument("--model", type=Path, help="folder of the starter job's policy; unset: the starter policy")
    parser.add_argument("--steps", type=int, help="of a run; unset: the job's")
    parser.add_argument("--warmup", type=int, help="first steps of a run that are dropped; unset: the job's")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all sides")
    parser.add_argument("--lr", type=float, help="unset: the job's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=cores, help="OMP_NUM_THREADS of every side")
    options = parser.parse_args()
    options.model = options.model and options.model.resolve()
    names = list(JOBS) if options.job == "both" else [options.job]
    for job in (JOBS[name] for name in names):
        if (options.steps or job.steps) <= (job.warmup if options.warmup is None else options.warmup):
            parser.error("--steps must be more than --warmup")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")

    end_on_sigterm()
    stored = RESULTS / f"{NAME}.json"
    results = json.loads(stored.read_text()) if stored.exists() else {}
    for name in names:
        results[name] = measure_job(name, options)
        store(NAME, {name: results[name] for name in JOBS if name in results})
        text = markdown(results)
        fill_docs(NAME, text)
        fill_docs(f"{NAME}_short", short_markdown(results), ROOT / "README.md")
    print(f"\n{text}\n\nstored in {stored}")


if __name__ == "__main__":
    main()
