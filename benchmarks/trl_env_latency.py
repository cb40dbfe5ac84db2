"""TRL's GRPOTrainer with an environment that waits: writes one JSON line of phase times per step.

    benchmarks/.venv-trl/bin/python benchmarks/trl_env_latency.py --model FOLDER --out FILE --seconds 0.5 …

This is the peer's side of `env_latency.py`. Like `trl_grpo.py`, whose clock and fix it uses, it imports nothing of
envgym. The environment is given as TRL's `environment_factory`, the tool as one of its methods.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl_grpo import StepTimes, TimedGRPOTrainer, mend_vllm_on_cpu


def environment(seconds: float, calls: int, blocking: bool) -> type:
    """A class of environments whose tool takes `seconds`, and which must be called `calls` times in each episode."""

    class Waits:
        def reset(self, **row: Any) -> str | None:
            self._calls = 0
            return None

        def get_reward(self) -> float:
            assert self._calls == calls, f"the tool was called {self._calls} times"
            return random.random()

    class Blocks(Waits):
        def wait(self) -> str:
            """Wait for a while."""
            self._calls += 1
            time.sleep(seconds)
            return "Done."

    class GivesWay(Waits):
        async def wait(self) -> str:
            """Wait for a while."""
            self._calls += 1
            await asyncio.sleep(seconds)
            return "Done."

    return Blocks if blocking else GivesWay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the policy")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write, one line per step")
    parser.add_argument("--seconds", type=float, required=True, help="that a call of the tool takes")
    parser.add_argument("--calls", type=int, required=True, help="of the tool in an episode")
    parser.add_argument("--blocking", type=int, choices=[0, 1], required=True, help="1: a plain `def`, 0: `async def`")
    parser.add_argument("--rollouts", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()

    mend_vllm_on_cpu()
    trainer = TimedGRPOTrainer(
        StepTimes(options.out),
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=[],
        environment_factory=environment(options.seconds, options.calls, bool(options.blocking)),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}]}] * options.steps),
        args=GRPOConfig(
            output_dir=str(options.out.with_suffix(".trainer")),
            use_cpu=True,
            bf16=False,
            max_tool_calling_iterations=options.calls,
            # One rollout, one optimizer step over the whole of it.
            max_steps=options.steps,
            per_device_train_batch_size=options.rollouts,
            num_generations=options.rollouts,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_iterations=1,
            gradient_checkpointing=False,
            # The same objective and optimizer as envgym's.
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            max_completion_length=options.max_tokens,  # of a whole episode, results of tools included
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            # The sampler.
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=options.context,
            vllm_importance_sampling_correction=False,
            # Nothing beside the job.
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
