"""Optimizer steps of TRL's SFTTrainer or DPOTrainer on given token sequences: prints their seconds and norms as JSON.

    benchmarks/.venv-trl/bin/python benchmarks/trl_offline.py --method sft --model FOLDER --rows FILE --steps 2 …

This is the peer's side of `offline_against_trl.py`. It runs in the peer's Python environment and imports nothing of
envgym. The input is token ids already; batches are padded to their longest sequence, as the trainers do by default.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class Watch(TrainerCallback):
    """Seconds of each step, and the gradient norms that the trainer logs."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.norms: list[float] = []
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


class DPO(DPOTrainer):
    """DPOTrainer, unchanged except that its input is token ids."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=("sft", "dpo"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON: prompts, and of each one answer or two")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="prompts that go through the model at once")
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text())
    if options.method == "dpo":
        given = [{"prompt_ids": row["prompt"], "chosen_ids": row["answers"][0], "rejected_ids": row["answers"][1]}
                 for row in rows]  # fmt: skip
    else:
        given = [
            {"input_ids": row["prompt"] + row["answers"][0], "labels": [-100] * len(row["prompt"]) + row["answers"][0]}
            for row in rows
        ]
    settings = {
        "output_dir": str(options.rows.with_suffix(".trainer")),
        "use_cpu": True,
        "bf16": False,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": len(rows) // options.batch_size,
        "gradient_checkpointing": False,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_length": None,
    }
    watch = Watch()
    common = {
        "model": AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(options.model),
        "train_dataset": Dataset.from_list(given),
        "callbacks": [watch],
    }
    if options.method == "dpo":
        reference = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        trainer: Any = DPO(ref_model=reference, args=DPOConfig(**settings), **common)
    else:
        prepared = {"skip_prepare_dataset": True}
        trainer = SFTTrainer(args=SFTConfig(**settings, dataset_kwargs=prepared), **common)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": watch.seconds, "norms": watch.norms, "peak": peak, "above": peak - loaded}))


if __name__ == "__main__":
    main()
