"""TRL's side of the benchmarks against it: runs the job that its one argument describes as JSON.

`against_trl.py` and `gpu_speed.py` start the job `grpo`, `env_latency.py` the job `waiting`, `learner_against_trl.py`
the job `learn`. Nothing of envgym is imported. For each choice in TRL that does not change the training, the faster
option is used:

- the reward is a comparison of strings, in this process, rather than TRL's `accuracy_reward`, which runs math-verify
  over the completions one after the other;
- the correction of the mismatch between vLLM and trainer is off, which saves TRL a forward pass per step: in float32
  there is no mismatch to correct;
- vLLM computes in float32. TRL leaves the type to vLLM, which takes bfloat16: several times slower on a CPU.

With `lengths` the completions have the lengths in that file, in the order of the requests. vLLM gets a limit for each.
TRL's own generation computes all sequences of the step until the longest has ended, and truncates the others.

`rollout` is TRL's `_generate_and_score_completions` (prompts, sampling, rewards, advantages) without the weight push,
`sync` is the weight push, `learn` is the rest of the step. `step` runs from the trainer's `on_step_begin` to its
`on_step_end`: as in envgym, it does not include writing the step's metrics.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import resource
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine inside this process: TRL's colocate mode
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl.generation.vllm_generation as vllm_generation
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
ON_GPU = torch.cuda.is_available()


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
    """A record of each step, named as in `metrics.jsonl`, and the gradient norms that the trainer logs."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.norms: list[float] = []
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
        record = {
            "step": state.global_step,
            "seconds/step": step,
            "seconds/rollout": rollout_and_sync - sync,
            "seconds/learn": step - rollout_and_sync,
            "seconds/sync": sync,
            "tokens/prompt": self.values["prompt_tokens"],
            "tokens/sampled": self.values["sampled_tokens"],
            "reward/mean": self.values["reward"],
        }
        self.steps.append(record)
        self.values.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


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


class DPOOnTokens(DPOTrainer):
    """DPOTrainer, unchanged except that its input is token ids."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


# -- settings ---------------------------------------------------------------------------------------------


def settings(job: Any, per_batch: int, batches: int, **own: Any) -> dict[str, Any]:
    """Settings of all trainers: one optimizer step over `batches` batches of a step."""
    return {
        "output_dir": str(Path(job.out).with_suffix(".trainer")),
        "use_cpu": not ON_GPU,
        "bf16": ON_GPU,
        "max_steps": job.steps,
        "per_device_train_batch_size": per_batch,
        "gradient_accumulation_steps": batches,
        "gradient_checkpointing": False,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **own,
    }


def grpo_config(job: Any, per_batch: int, batches: int, **own: Any) -> GRPOConfig:
    """Settings of GRPO: one rollout per optimizer step, the same objective as envgym's."""
    common = settings(job, per_batch, batches, steps_per_generation=batches, num_iterations=1)
    return GRPOConfig(**common, loss_type="grpo", beta=0.0, temperature=1.0, **own)


def vllm_settings(max_model_length: int) -> dict[str, Any]:
    """Settings of vLLM inside the trainer's process."""
    if not ON_GPU:
        mend_vllm_on_cpu()
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4 if ON_GPU else 0.2,
        "vllm_max_model_length": max_model_length,
        "vllm_importance_sampling_correction": False,
    }


def load(model: str) -> dict[str, Any]:
    """The arguments of a trainer that hold the policy and its tokenizer."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    return {
        "model": AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }


# -- jobs -------------------------------------------------------------------------------------------------


def grpo(job: Any) -> None:
    """Whole steps on a file of tasks (JSONL of `prompt` and `answer`); writes a line per step to `out`."""
    sequences = job.tasks_per_step * job.group_size
    per_batch = min(64, sequences) if ON_GPU else sequences  # on a GPU the logits of the whole step do not fit
    tasks = [json.loads(line) for line in Path(job.tasks).read_text().splitlines()]
    sampler = vllm_settings(512) if job.sampler == "vllm" else {}
    trainer = TimedGRPOTrainer(
        StepTimes(),
        json.loads(Path(job.lengths).read_text()) if job.lengths else None,
        reward_funcs=hash_of_the_text if job.lengths else boxed_answer_is_right,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": t["prompt"]}], "answer": t["answer"]} for t in tasks]
        ),
        args=grpo_config(
            job, per_batch, sequences // per_batch, num_generations=job.group_size,
            max_completion_length=job.max_tokens, max_grad_norm=1.0, seed=job.seed, **sampler,
        ),
        **load(job.model),
    )  # fmt: skip
    trainer.train()
    write_steps(trainer.times, job.out)


def waiting(job: Any) -> None:
    """Whole steps with an environment, given as TRL's `environment_factory`, whose tool takes `seconds`."""

    class Waits:
        def reset(self, **row: Any) -> str | None:
            self._calls = 0
            return None

        def get_reward(self) -> float:
            assert self._calls == job.calls, f"the tool was called {self._calls} times"
            return random.random()

    class Blocks(Waits):
        def wait(self) -> str:
            """Wait for a while."""
            self._calls += 1
            time.sleep(job.seconds)
            return "Done."

    class GivesWay(Waits):
        async def wait(self) -> str:
            """Wait for a while."""
            self._calls += 1
            await asyncio.sleep(job.seconds)
            return "Done."

    trainer = TimedGRPOTrainer(
        StepTimes(),
        reward_funcs=[],
        environment_factory=Blocks if job.blocking else GivesWay,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}]}] * job.steps),
        args=grpo_config(
            job, job.rollouts, 1, num_generations=job.rollouts, max_tool_calling_iterations=job.calls,
            max_completion_length=job.context // 2,  # of a whole episode, results of tools included
            **vllm_settings(job.context),
        ),
        **load(job.model),
    )  # fmt: skip
    trainer.train()
    write_steps(trainer.times, job.out)


def write_steps(times: StepTimes, out: str) -> None:
    Path(out).write_text("".join(json.dumps(step) + "\n" for step in times.steps))


def learn(job: Any) -> None:
    """Optimizer steps on given token sequences; writes their seconds, gradient norms and peak memory (KiB) to `out`."""
    rows, times = json.loads(Path(job.rows).read_text()), StepTimes()
    answers = len(rows[0]["answers"])
    if job.method == "grpo":
        trainer: Any = grpo_on_rows(job, rows, times)
    else:
        batches = len(rows) // job.batch_size
        common = settings(job, job.batch_size, batches, max_grad_norm=1e9, max_length=None)
        if job.method == "sft":
            given = [
                {
                    "input_ids": row["prompt"] + row["answers"][0],
                    "labels": [-100] * len(row["prompt"]) + row["answers"][0],
                }
                for row in rows
            ]
            config = SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})
            trainer = SFTTrainer(
                args=config, train_dataset=Dataset.from_list(given), callbacks=[times], **load(job.model)
            )
        else:
            assert answers == 2
            names = ("chosen_ids", "rejected_ids")
            given = [{"prompt_ids": row["prompt"], **dict(zip(names, row["answers"], strict=True))} for row in rows]
            trainer = DPOOnTokens(
                ref_model=load(job.model)["model"], args=DPOConfig(**common), train_dataset=Dataset.from_list(given),
                callbacks=[times], **load(job.model),
            )  # fmt: skip
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = [step["seconds/learn"] for step in times.steps]
    result = {"seconds": seconds, "norms": times.norms, "peak": peak, "above": peak - loaded}
    Path(job.out).write_text(json.dumps(result))


def grpo_on_rows(job: Any, rows: list[dict[str, Any]], times: StepTimes) -> TimedGRPOTrainer:
    """A trainer that gets the sequences by TRL's interface for external completions and handles them like its own: the
    completions of an optimizer step are padded to the longest of them."""
    group_size = len(rows[0]["answers"])
    batches = len(rows) * group_size // job.batch_size

    def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen = dict.fromkeys(prompts, 0)
        made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "recorded_reward": []}
        for name in prompts:
            row = rows[int(name)]
            made["prompt_ids"].append(row["prompt"])
            made["completion_ids"].append(row["answers"][seen[name]])
            made["recorded_reward"].append(row["rewards"][seen[name]])
            seen[name] += 1
        return made

    def reward(completions: list[Any], recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    return TimedGRPOTrainer(
        times,
        reward_funcs=reward,
        rollout_func=recorded,
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(rows))]),
        args=grpo_config(
            job, job.batch_size, batches, num_generations=group_size, max_completion_length=100_000, max_grad_norm=1e9
        ),
        **load(job.model),
    )


if __name__ == "__main__":
    job = SimpleNamespace(**json.loads(sys.argv[1]))
    {"grpo": grpo, "waiting": waiting, "learn": learn}[job.job](job)
