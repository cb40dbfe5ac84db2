"""Runs without a bug, over all recipes and learners, at seeds and environments that no threshold was set by.

`python -m tests.alarms.clean_runs` runs those that are not yet in `tests/results/clean_runs.json`, one after the other,
and stores each as it ends: the alarms that it raised, of laws and others apart. So it can be stopped at any moment.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.alarms.bugs import ALARMS, ROOT, run

STORED = ROOT / "tests" / "results" / "clean_runs.json"
STEPS = 20
LAWS = set().union(*ALARMS.values())
"""The alarms that name a bug."""
PLUS_MINUS = ("--env", "math_verify", "env.operations=[+,-]")
TIMES = ("--env", "math_verify", 'env.operations=["+","-","*"]', "env.digits=1")
ONE_DIGIT = ("--env", "math_verify", "env.digits=1")
TOOLS = ("--env", "tool_use")
REVERSE = ("--env", str(ROOT / "examples" / "reverse.py"))
GUESS = ("--env", f"{ROOT / 'examples' / 'guess.py'}:Guess")
LETTERS = ("--env", "reasoning_gym", "env.dataset=letter_counting")
SHORT = ("learner.shaping.overlong_length=96", "learner.shaping.overlong_buffer=16")


def rows(kind: str, folder: Path) -> str:
    """A file of data of a form, written there."""

    def message(role: str, text: object) -> dict[str, str]:
        return {"role": role, "content": str(text)}

    def row(n: int) -> dict[str, Any]:
        question, answer, near = f"What is {n} + 7?", f"\\boxed{{{n + 7}}}", f"\\boxed{{{n + 7 + n % 2}}}"
        first, second = [message("user", question), message("assistant", n + 7)], message("user", "And one more?")
        forms: dict[str, dict[str, Any]] = {
            "pairs": {"prompt": question, "chosen": answer, "rejected": f"{n + 7}"},
            "labelled": {"prompt": question, "completion": near, "label": n % 2 == 0},
            "steps": {"prompt": question, "completions": [f"{n} + 7", near], "labels": [True, n % 2 == 0]},
            "text": {"text": f"Seven and {n} make {n + 7}. The sum of {n} and {n} is {2 * n}."},
            "chats": {"messages": [*first, second, message("assistant", n + 8)]},
        }
        return forms[kind]

    path = folder / f"{kind}.jsonl"
    path.write_text("".join(f"{json.dumps(row(n))}\n" for n in range(400)))
    return str(path)


def runs(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The name and the words of every run."""
    algorithms: dict[str, tuple[str, ...]] = {
        "ppo": (), "reinforce++": (), "reinforce++_baseline": (), "rloo": (), "grpo": (),
        "dr_grpo": ("learner.constant_length=16",), "dapo": (*SHORT, "learner.lr=1e-4"), "prorl": (),
        "gspo": ("learner.clip_low=0.03", "learner.clip_high=0.04"), "cispo": (*SHORT, "learner.lr=1e-4"),
    }  # fmt: skip
    few = ("learner.minibatches=2",)
    for recipe, words in algorithms.items():
        more = few if recipe in ("dapo", "prorl", "gspo", "cispo", "ppo") else ()
        for name, env in (("plus_minus", PLUS_MINUS), ("one_digit", ONE_DIGIT), ("guess", GUESS)):
            yield f"{recipe}_{name}", ("--recipe", recipe, *env, *words, *more)
    for learner in ("grpo", "rloo"):
        yield f"{learner}_tools", ("--learner", learner, *TOOLS)
    yield "asynchronous", (*PLUS_MINUS, "rollout.max_staleness=2")
    yield "asynchronous_guess", (*GUESS, "rollout.max_staleness=1")
    yield "times", TIMES
    yield "credit_by_turn", (*GUESS, "learner.credit=turn")
    yield "hot", (*PLUS_MINUS, "rollout.temperature=1.2")
    yield "cold", (*PLUS_MINUS, "rollout.temperature=0.8")
    yield "bfloat16", (*PLUS_MINUS, "engine.dtype=bfloat16", "workers.dtype=bfloat16")
    yield "lora", (*PLUS_MINUS, "lora.rank=8", "learner.lr=5e-3")
    yield "filtered", (*PLUS_MINUS, "rollout.filter.zero_variance=true")
    yield "micro_batches", (*PLUS_MINUS, "workers.tokens_per_microbatch=128", "learner.aggregation=token")
    yield "processes", (*PLUS_MINUS, "debug=false", "rollout.processes=2", "engine.kind=vllm")
    yield "rejection_sampling", ("--recipe", "rejection_sampling", *PLUS_MINUS, "learner.minibatches=2")
    yield "best_of_n", ("--recipe", "best_of_n", *PLUS_MINUS, "learner.minibatches=2")
    yield "iterative_dpo", ("--recipe", "iterative_dpo", *PLUS_MINUS, "learner.minibatches=2", "learner.lr=1e-5")
    yield "distill_on_policy", ("--recipe", "distill_on_policy", *PLUS_MINUS, "roles.reference.model=starter")
    yield "sft", ("--recipe", "sft", *PLUS_MINUS)
    yield "sft_chats", ("--recipe", "sft", f"data.path={rows('chats', folder)}")
    yield "distill", ("--recipe", "distill", *PLUS_MINUS, "roles.teacher.model=starter")
    yield "pretrain", ("--recipe", "pretrain", f"data.path={rows('text', folder)}")
    for recipe in ("dpo", "ipo", "cdpo", "rm"):
        yield recipe, ("--recipe", recipe, f"data.path={rows('pairs', folder)}", "learner.lr=1e-4")
    yield "kto", ("--recipe", "kto", f"data.path={rows('labelled', folder)}", "learner.lr=1e-4")
    yield "prm", ("--recipe", "prm", f"data.path={rows('steps', folder)}", "learner.lr=1e-4")
    stages = [f"stages.{name}.data.path={rows('pairs', folder)}" for name in ("sft", "rm", "ppo")]
    yield "rlhf", ("--recipe", "rlhf", *stages, "learner.lr=1e-4", "rollout.max_tokens=16")
    yield "sft_grpo", ("--recipe", "sft_grpo", *GUESS)


def main(names: list[str]) -> None:
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {"steps": STEPS, "runs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, (name, words) in enumerate(runs(folder)):
            if name in stored["runs"] or (names and name not in names):
                continue
            seed, start = 4000 + number, time.monotonic()
            result = run(words, folder, steps=STEPS, seed=seed)
            raised = [[step, alarm, text] for step, alarm, text in result.alarms]
            stored["runs"][name] = {
                "words": [word.replace(str(folder), "DATA").replace(str(ROOT), "") for word in words],
                "seed": seed,
                "steps": result.steps,
                "seconds": round(time.monotonic() - start),
                "laws": [alarm for alarm in raised if alarm[1].rpartition("/")[2] in LAWS],
                "alerts": [alarm[:2] for alarm in raised if alarm[1].rpartition("/")[2] not in LAWS],
                "error": result.error,
            }
            STORED.write_text(json.dumps(stored, indent=1) + "\n")
            print(f"## {name}: {json.dumps(stored['runs'][name])[:400]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
