"""Time that a waiting environment adds to a step of `envgym train`, compared with TRL's GRPOTrainer.

    .venv/bin/python benchmarks/env_latency.py [--steps 10] [--repeats 2]

Eight rollouts per step make three tool calls each that take half a second, with the tool as an `async def` and as a
plain `def`. The same is run with calls that take no time; the added time is the difference of the medians of both runs'
steps. Rollouts that do not wait for each other's tools add 1.5 s, rollouts that do add up to eight times that.

Both sides run whole steps, learner included, with vLLM as the engine (TRL's in its process, fixed as
`trl_side.py` says), the same policy and TRL's own chat template of Qwen3, which TRL needs to parse calls. TRL needs a
policy that really calls tools, and steps are comparable only with the same calls every time: `calling_policy.py` makes
one that calls the tool in each turn, without end. Both sides stop it by their own limit on calls, after the fourth
turn, whose call is not run. TRL gets the environment as its `environment_factory`, with the tool as a method; with its
`rollout_func`, the benchmark would have to write the rollouts itself.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import trl
from calling_policy import make_calling_policy
from record import ROOT, conditions, conditions_in_words, publish, table
from sides import ENVGYM, PACKAGES, end_on_sigterm, run_to_end, trl_command

ROLLOUTS = 8
CALLS = 3
SECONDS = 0.5
LEARNING_RATE = 1e-8  # the policy is to stay as it is
CONTEXT = 1024
KINDS = {"async def": False, "def": True}  # the tool, and whether it blocks
SIDES = {"envgym": "envgym", "trl": "TRL"}


def command(side: str, *, blocking: bool, seconds: float, steps: int, model: Path, folder: Path) -> list[str]:
    """A side's command; it writes one JSON line per step to `bench/metrics.jsonl`."""
    if side == "envgym":
        settings = {
            "runs_dir": folder,
            "env.seconds": seconds,
            "env.blocking": blocking,
            "env.max_calls": CALLS,
            "steps": steps,
            "rollout.tasks_per_step": 1,
            "rollout.group_size": ROLLOUTS,
            "rollout.max_tokens": 32,
            "learner.lr": LEARNING_RATE,
            "eval.every": 0,
            "checkpoint.every": 0,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        file = ROOT / "benchmarks" / "waiting_env.py"
        start = [ENVGYM, "train", "--env", str(file), "--learner", "grpo", "--model", str(model)]
        return [*start, "--name", "bench", *words]
    (folder / "bench").mkdir()
    return trl_command(
        "waiting", model=model, out=folder / "bench" / "metrics.jsonl", seconds=seconds, calls=CALLS,
        blocking=blocking, rollouts=ROLLOUTS, steps=steps, context=CONTEXT, lr=LEARNING_RATE,
    )  # fmt: skip


def step_seconds(
    side: str, *, blocking: bool, seconds: float, options: argparse.Namespace, model: Path, folder: Path
) -> list[float]:
    """Run one side to its end and return the seconds of each step after the first few."""
    folder.mkdir(parents=True)
    start = command(side, blocking=blocking, seconds=seconds, steps=options.steps, model=model, folder=folder)
    run_to_end(side, start, folder, options.threads)
    steps = [json.loads(line) for line in (folder / "bench" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "seconds/step" in step]
    # TRL's side checks this itself.
    assert all(step.get("env/tool_calls", CALLS) == CALLS for step in steps), "the tool was not called as often"
    return [step["seconds/step"] for step in steps[options.warmup :]]


def measure(kind: str, options: argparse.Namespace, model: Path, folder: Path) -> dict[str, dict[str, float]]:
    """For each side the median step with calls that take no time and with calls that wait, and the difference."""
    result = {}
    for side in SIDES:
        plain, waiting = (
            median(
                step_seconds(
                    side,
                    blocking=KINDS[kind],
                    seconds=seconds,
                    options=options,
                    model=model,
                    folder=folder / f"{side}-{seconds}",
                )
            )
            for seconds in (0.0, SECONDS)
        )
        result[side] = {"plain": plain, "waiting": waiting, "added": waiting - plain}
        print(f"{kind}, {side}: a step of {plain:.2f} s becomes one of {waiting:.2f} s", flush=True)
    return result


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs: the rows and the conditions."""
    rows = []
    for kind, turns in result["turns"].items():
        ratios = [turn["envgym"]["added"] / turn["trl"]["added"] for turn in turns]
        for side, label in SIDES.items():
            seconds = (f"{median(turn[side][what] for turn in turns):.2f}" for what in ("plain", "waiting", "added"))
            ratio = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if side == "envgym" else "1"
            rows.append([f"{label}, `{kind}`", *seconds, ratio])
    rows.append(["no rollout waits for another", "", "", f"{CALLS * SECONDS:.2f}", ""])
    job = result["job"]
    header = ["side, tool", "step, s", "step with waiting, s", "added, s", "added / TRL's (min to max)"]
    return "\n\n".join(
        [
            table(header, rows),
            f"{job['repeats']} turns of {job['steps']} steps, the first {job['warmup']} dropped; OMP_NUM_THREADS "
            f"{job['threads']}. {conditions_in_words(result['conditions'])}",
        ]
    )


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a run that are dropped")
    parser.add_argument("--repeats", type=int, default=2, help="turns of all sides")
    parser.add_argument("--threads", type=int, default=cores, help="OMP_NUM_THREADS of every side")
    options = parser.parse_args()
    if options.steps <= options.warmup or options.repeats < 1:
        parser.error("--steps must be more than --warmup, and --repeats at least 1")

    end_on_sigterm()
    where = conditions(PACKAGES)
    turns: dict[str, list[dict[str, dict[str, float]]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="env-latency-") as temporary:
        model = Path(temporary) / "policy"
        template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
        make_calling_policy(model, "wait", template.read_text(), CONTEXT)
        for turn in range(options.repeats):
            for kind in KINDS:
                turns[kind].append(measure(kind, options, model, Path(temporary) / f"{turn}-{kind}"))

    job = {"rollouts": ROLLOUTS, "calls": CALLS, "seconds": SECONDS, "learning_rate": LEARNING_RATE, **vars(options)}
    result: dict[str, Any] = {"conditions": where, "job": job, "turns": turns}
    publish("env_latency", result, markdown(result))


if __name__ == "__main__":
    main()
