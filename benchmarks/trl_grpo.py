"""TRL's GRPOTrainer on the benchmark's job: writes one JSON line of phase times per step, named as in `metrics.jsonl`.

    benchmarks/.venv-trl/bin/python benchmarks/trl_grpo.py --sampler own|vllm --model FOLDER --tasks FILE --out FILE …

This is the peer's side of `against_trl.py`. It runs in the peer's Python environment (`trl_requirements.txt`) and
imports nothing of envgym. For each choice in TRL that does not change the training, it uses the faster option:

- the reward is a comparison of strings, in this process, rather than TRL's `accuracy_reward`, which runs math-verify
  over the completions one after the other;
- the correction of the mismatch between vLLM and trainer is off, which saves TRL a forward pass per step: in float32
  there is no mismatch to correct;
- vLLM computes in float32. TRL leaves the type to vLLM, which takes bfloat16: several times slower on a CPU.

With `--lengths FILE` the completions have the lengths in that file, in the order of the requests. vLLM gets a limit for
each. TRL's own generation computes all sequences of the step until the longest has ended, and truncates the others.

`rollout` is TRL's `_generate_and_score_completions` (prompts, sampling, rewards, advantages) without the weight push,
`sync` is the weight push, `learn` is the rest of the step. `step` runs from the trainer's `on_step_begin` to its
`on_step_end`: as in envgym, it does not include writing the step's metrics.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine inside this process: TRL's colocate mode
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import torch
import trl.generation.vllm_generation as vllm_generation
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def boxed_answer_is_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the last `\\boxed{…}` of a completion is exactly the reference answer, else 0."""
    boxes = [BOXED.findall(messages[-1]["content"]) for messages in completions]
    return [float(bool(found) and found[-1].strip() == right) for found, right in zip(boxes, answer, strict=True)]


def hash_of_the_text(completions: list[Any], **_: Any) -> list[float]:
    """A number from 0 to 1, different for each completion."""
    return [zlib.crc32(messages[-1]["content"].encode()) / 2**32 for messages in completions]


def mend_vllm_on_cpu() -> None:
    """Let TRL's colocate mode run on a CPU, in float32.

    TRL pushes weights with `model.load_weights`, which cannot work on a CPU, where vLLM has repacked the linear
    weights; `reload_weights` is vLLM's own way there. Tied embeddings are passed under both their names, or vLLM
    keeps the old head.
    """

    def sync_weights(self: Any) -> None:
        weights = [(name, p.detach()) for name, p in self.model.named_parameters(remove_duplicate=False)]
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.reload_weights(weights_iterator=weights)
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32")


def generate_up_to(
    generate: Callable[..., Any], lengths: list[int], prompts: list[Any], sampling_params: Any, **kwargs: Any
) -> Any:
    """vLLM's `generate` with a limit for each prompt."""
    limited = [sampling_params.clone() for _ in lengths]
    for params, length in zip(limited, lengths, strict=True):
        params.max_tokens = length
    return generate(prompts, sampling_params=limited, **kwargs)


class StepTimes(TrainerCallback):
    """Collects seconds and counts during a step and writes them as a line when the optimizer has stepped."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)
        self.values: defaultdict[str, float] = defaultdict(float)
        self.step_began = 0.0

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, with the seconds each call takes added to `name`."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            self.values[name] += time.perf_counter() - began
            return result

        return call

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = time.perf_counter() - self.step_began
        rollout_and_sync, sync = self.values["rollout_and_sync"], self.values["sync"]
        line = {
            "step": state.global_step,
            "seconds/step": step,
            "seconds/rollout": rollout_and_sync - sync,
            "seconds/learn": step - rollout_and_sync,
            "seconds/sync": sync,
            "tokens/prompt": self.values["prompt_tokens"],
            "tokens/sampled": self.values["sampled_tokens"],
            "reward/mean": self.values["reward"],
        }
        self.file.write(json.dumps(line) + "\n")
        self.values.clear()


class TimedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer, unchanged except for the clock around its two methods and the counts of their output. With
    `lengths`, each completion ends after the next length of the list.
    """

    def __init__(self, times: StepTimes, lengths: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(callbacks=[times], **kwargs)
        self.times = times
        self.lengths = lengths
        self._generate_and_score_completions = times.timed("rollout_and_sync", super()._generate_and_score_completions)
        if self.use_vllm:
            self.vllm_generation.sync_weights = times.timed("sync", self.vllm_generation.sync_weights)

    def _generate_single_turn(self, prompt_ids: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self.lengths is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        lengths, self.lengths = self.lengths[: len(prompt_ids)], self.lengths[len(prompt_ids) :]
        if self.use_vllm:
            llm = self.vllm_generation.llm
            with mock.patch.object(llm, "generate", functools.partial(generate_up_to, llm.generate, lengths)):
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generation_config.max_new_tokens = max(lengths)
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return [ids[:length] for ids, length in zip(completion_ids, lengths, strict=True)], logprobs

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.times.values["sampled_tokens"] = sum(map(len, completion_ids_list))
        self.times.values["reward"] = rewards.mean().item()
        return rewards

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        prompt_ids, *rest = super()._tokenize_prompts(prompts)
        self.times.values["prompt_tokens"] = sum(map(len, prompt_ids))
        return (prompt_ids, *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampler", choices=["own", "vllm"], required=True)
    parser.add_argument("--model", required=True, help="folder of the policy")
    parser.add_argument("--tasks", type=Path, required=True, help="JSONL of prompt and answer")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write, one line per step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tasks-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lengths", type=Path, help="JSON list: each answer's, in place of what the policy makes")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if options.sampler == "vllm" and not on_gpu:
        mend_vllm_on_cpu()
    # On a GPU the logits of the whole step do not fit.
    sequences = options.tasks_per_step * options.group_size
    per_batch = min(64, sequences) if on_gpu else sequences
    tasks = [json.loads(line) for line in options.tasks.read_text().splitlines()]
    trainer = TimedGRPOTrainer(
        StepTimes(options.out),
        json.loads(options.lengths.read_text()) if options.lengths else None,
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16 if on_gpu else torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=hash_of_the_text if options.lengths else boxed_answer_is_right,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": t["prompt"]}], "answer": t["answer"]} for t in tasks]
        ),
        args=GRPOConfig(
            output_dir=str(options.out.with_suffix(".trainer")),
            use_cpu=not on_gpu,
            bf16=on_gpu,
            seed=options.seed,
            # One rollout, one optimizer step over the whole of it.
            max_steps=options.steps,
            per_device_train_batch_size=per_batch,
            gradient_accumulation_steps=sequences // per_batch,
            steps_per_generation=sequences // per_batch,
            num_iterations=1,
            gradient_checkpointing=False,
            # The same objective and optimizer as envgym's.
            num_generations=options.group_size,
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            max_completion_length=options.max_tokens,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            # The sampler.
            use_vllm=options.sampler == "vllm",
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4 if on_gpu else 0.2,
            vllm_max_model_length=512,
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
