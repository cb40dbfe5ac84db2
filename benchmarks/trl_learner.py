"""The learner's part of TRL's GRPOTrainer, on given token sequences: prints one JSON object of seconds and norms.

    benchmarks/.venv-trl/bin/python benchmarks/trl_learner.py --model FOLDER --rows FILE --steps 2 …

This is the peer's side of `learner_against_trl.py`. It runs in the peer's Python environment and imports nothing of
envgym. TRL gets the sequences by its interface for external completions (`rollout_func`), and handles them like its
own: the completions of an optimizer step are padded to the longest of them. The seconds are the step's, from
`on_step_begin` to `on_step_end`, without making and padding the completions.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    """Seconds of each step, without those of the completions, and the gradient norms that the trainer logs."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.norms: list[float] = []
        self.elsewhere = self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began, self.elsewhere = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began - self.elsewhere)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


class Watched(GRPOTrainer):
    """GRPOTrainer, unchanged except for the clock and the count of its tokens."""

    watch: Watch
    computed = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.watch.elsewhere += time.perf_counter() - began
        self.computed = made["prompt_ids"].numel() + made["completion_ids"].numel()
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON: group -> prompt, completions, rewards")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="rows that go through the model at once")
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()
    groups = json.loads(options.rows.read_text())
    group_size = len(next(iter(groups.values()))["completions"])
    n_rows = len(groups) * group_size

    def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen = dict.fromkeys(groups, 0)
        made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "recorded_reward": []}
        for name in prompts:
            made["prompt_ids"].append(groups[name]["prompt"])
            made["completion_ids"].append(groups[name]["completions"][seen[name]])
            made["recorded_reward"].append(groups[name]["rewards"][seen[name]])
            seen[name] += 1
        return made

    def reward(completions: list[Any], recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    watch = Watch()
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": name} for name in groups]),
        rollout_func=recorded,
        callbacks=[watch],
        args=GRPOConfig(
            output_dir=str(options.rows.with_suffix(".trainer")),
            use_cpu=True,
            bf16=False,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=n_rows // options.batch_size,
            steps_per_generation=n_rows // options.batch_size,
            num_iterations=1,
            gradient_checkpointing=False,
            num_generations=group_size,
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            max_completion_length=100_000,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1e9,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.watch = watch
    trainer.train()
    print(json.dumps({"seconds": watch.seconds, "norms": watch.norms, "computed": trainer.computed}))


if __name__ == "__main__":
    main()
