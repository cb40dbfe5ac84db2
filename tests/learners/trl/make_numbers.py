"""TRL's losses and gradients on random batches, stored in `numbers.json` for `tests/learners/test_against_trl.py`.

    .venv/bin/python tests/learners/trl/make_numbers.py

It runs on TRL alone and knows nothing of envgym. What is TRL's: the real `GRPOTrainer` and `RLOOTrainer`, whose
`_prepare_inputs` turns completions and rewards into advantages and micro-batches, and whose `compute_loss` is
differentiated. What is made up: the completions (there is nothing to generate) and the log-probabilities, which a table
gives in place of a language model. All in float64; the tables hold multiples of 1/1024 and the rewards multiples of
1/8, which float32 holds exactly.
"""

from __future__ import annotations

import json
import logging
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

OUT = Path(__file__).with_name("numbers.json")
GROUPS, MEMBERS, LONGEST = 3, 4, 9
ROWS = GROUPS * MEMBERS
PAD, EOS, WORD, FIRST = 0, 1, 2, 8  # a row is known by its first token, FIRST + its number
SEEDS = {"plain": (0, 1), "turns": (3, 4)}  # `turns`: tokens of an environment between those of the policy

GRPO = {"loss_type": "grpo", "epsilon": 0.2}
DAPO = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
RLOO = {"epsilon": 0.2, "beta": 0.0}
CASES: dict[str, dict[str, Any]] = {
    # The trainer's settings; and which completions got no reward (`failed`) or did not end (`truncated`), into how many
    # `parts` the batch is cut (micro-batches of one optimizer step, unless the settings say otherwise), whether the
    # policy is still the one that sampled (`on_policy`), and whether what the `sampler` said of its own tokens corrects
    # the loss.
    "grpo": {"settings": GRPO},
    "grpo_kl": {"settings": {**GRPO, "beta": 0.04, "use_bias_correction_kl": False}},
    "grpo_kl_times_ratio": {"settings": {**GRPO, "beta": 0.04, "use_bias_correction_kl": True}},
    "grpo_entropy": {"settings": {**GRPO, "entropy_coef": 0.01}},
    "grpo_failed": {"settings": GRPO, "failed": [2, 5]},
    "grpo_truncated": {"settings": {**GRPO, "mask_truncated_completions": True}, "truncated": [1, 6]},
    "grpo_micro_batches": {"settings": GRPO, "parts": 2},
    "dapo": {"settings": DAPO},
    "dapo_entropy": {"settings": {**DAPO, "entropy_coef": 0.01}},
    "dapo_dual_clip": {"settings": {**DAPO, "delta": 1.5}},
    "dapo_failed": {"settings": DAPO, "failed": [2, 5]},
    "dapo_truncated": {"settings": {**DAPO, "mask_truncated_completions": True}, "truncated": [1, 6]},
    "dapo_micro_batches": {"settings": DAPO, "parts": 2},
    "dapo_two_steps": {"settings": {**DAPO, "steps_per_generation": 2}, "parts": 2},
    "bnpo": {"settings": {**DAPO, "loss_type": "bnpo"}},
    "bnpo_micro_batches": {"settings": {**DAPO, "loss_type": "bnpo"}, "parts": 2},
    "dr_grpo": {"settings": {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"}},
    "dr_grpo_micro_batches": {
        "settings": {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"},
        "parts": 2,
    },
    # The paper's bounds (3e-4, 4e-4) clip nearly every one of these sequences, so there are wider ones too.
    "gspo": {"settings": {**GRPO, "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}},
    "gspo_wide": {"settings": {**GRPO, "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15}},
    "cispo": {"settings": CISPO},
    "cispo_kl": {"settings": {**CISPO, "beta": 0.04, "use_bias_correction_kl": False}},
    "tis": {"settings": {**GRPO, "vllm_importance_sampling_mode": "token_truncate",
                         "vllm_importance_sampling_clip_max": 1.1}, "sampler": True},
    "icepop": {"settings": {**GRPO, "vllm_importance_sampling_mode": "token_mask",
                            "vllm_importance_sampling_clip_min": 0.9,
                            "vllm_importance_sampling_clip_max": 1.1}, "sampler": True},
    "rloo": {"trainer": "rloo", "settings": RLOO},
    "rloo_on_policy": {"trainer": "rloo", "settings": RLOO, "on_policy": True},
    "rloo_kl": {"trainer": "rloo", "settings": {**RLOO, "beta": 0.05}, "on_policy": True},
    "rloo_failed": {"trainer": "rloo", "settings": RLOO, "failed": [2, 5], "on_policy": True},
}  # fmt: skip


class Table(torch.nn.Module):
    """Gives each row's log-probabilities and entropies out of a table, where a language model would compute them."""

    is_gradient_checkpointing = False

    def __init__(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        super().__init__()
        self.logprobs, self.entropy = logprobs, entropy

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        prompt = input_ids.shape[1] - self.logprobs.shape[1]
        rows = input_ids[:, prompt] - FIRST
        before = torch.zeros(len(rows), prompt)
        return SimpleNamespace(
            log_probs=torch.cat([before, self.logprobs[rows]], dim=1),
            entropy=torch.cat([before, self.entropy[rows]], dim=1),
        )


def make_batch(kind: str, seed: int) -> dict[str, Any]:
    """Completions of different lengths with log-probabilities of the policy trained, of the policy that sampled as the
    trainer and as the sampler compute them, and of the reference. The last group's rewards are all equal."""
    rng = np.random.default_rng(seed)

    def on_grid(values: np.ndarray) -> list[list[float]]:
        return (np.minimum(np.round(values * 1024), -1) / 1024).tolist()

    shape = (ROWS, LONGEST)
    old = -rng.exponential(1.2, shape) - 0.05
    lengths = rng.integers(2, LONGEST + 1, ROWS)
    lengths[rng.integers(ROWS)] = LONGEST  # the tables are as long as the longest completion
    masks = [[1] * int(n) for n in lengths]
    if kind == "turns":
        for mask in masks:
            if len(mask) >= 5:
                first = int(rng.integers(1, len(mask) - 3))
                mask[first : first + 2] = [0, 0]
    rewards = rng.integers(-8, 9, ROWS) / 8
    rewards[-MEMBERS:] = 0.5
    return {
        "kind": kind,
        "seed": seed,
        "masks": masks,
        "rewards": rewards.tolist(),
        "current": on_grid(old + rng.normal(0, 0.3, shape)),
        "old": on_grid(old),
        "sampled": on_grid(old + rng.normal(0, 0.1, shape)),
        "reference": on_grid(old + rng.normal(0, 0.3, shape)),
        "entropy": (rng.integers(1, 2048, shape) / 1024).tolist(),
    }


def token_ids(mask: list[int], row: int, truncated: bool) -> list[int]:
    return [FIRST + row, *[WORD] * (len(mask) - 2), WORD if truncated else EOS]


def measure(name: str, case: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """TRL's losses of the batch's parts, and the derivative of their sum by each log-probability and entropy."""
    failed, truncated = set(case.get("failed", [])), set(case.get("truncated", []))
    completions = [token_ids(mask, row, row in truncated) for row, mask in enumerate(batch["masks"])]
    n_parts = case.get("parts", 1)
    settings = case["settings"]
    accumulated = 1 if "steps_per_generation" in settings else n_parts

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        lines = zip(batch["sampled"], batch["masks"], strict=True)
        logprobs = [line[: len(mask)] for line, mask in lines]
        return {
            "prompt_ids": [[WORD]] * len(prompts),
            "completion_ids": completions,
            "logprobs": logprobs,
            **({"env_mask": batch["masks"]} if batch["kind"] == "turns" else {}),
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        rows = [ids[0] - FIRST for ids in completion_ids]
        return [None if row in failed else batch["rewards"][row] for row in rows]

    class Generated(RLOOTrainer):
        """It has no rollout function: its completions come by the method that would generate them."""

        def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> list[list[int]]:
            return completions

    is_rloo = case.get("trainer") == "rloo"
    with tempfile.TemporaryDirectory() as folder:
        args = (RLOOConfig if is_rloo else GRPOConfig)(
            output_dir=folder,
            per_device_train_batch_size=ROWS // n_parts,
            gradient_accumulation_steps=accumulated,
            num_generations=MEMBERS,
            max_completion_length=LONGEST + 3,
            num_iterations=2,  # of which the first is taken; so the old log-probabilities are computed
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            seed=batch["seed"],
            **settings,
        )
        config = Qwen3Config(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=1, num_key_value_heads=1, head_dim=8)  # fmt: skip
        common = {
            "model": Qwen3ForCausalLM(config),
            "reward_funcs": reward,
            "args": args,
            "train_dataset": Dataset.from_dict({"prompt": ["word"] * GROUPS}),
            "processing_class": make_tokenizer(),
        }
        # With a coefficient the trainer would read its reference model from a hub; here that is a table as well.
        beta, args.beta = args.beta, 0.0
        trainer = Generated(**common) if is_rloo else GRPOTrainer(rollout_func=rollout, **common)
        args.beta = trainer.beta = beta

    entropy = torch.tensor(batch["entropy"], requires_grad=True)
    old = batch["current" if case.get("on_policy") else "old"]
    trainer.model = Table(torch.tensor(old), entropy)
    trainer.ref_model = Table(torch.tensor(batch["reference"]), entropy)
    trainer.use_vllm = bool(case.get("sampler"))  # whether the sampler's own log-probabilities correct the loss
    trainer._last_loaded_step = 0  # the sampler has the weights of step 0: nothing to send
    trainer.current_gradient_accumulation_steps = accumulated

    current = torch.tensor(batch["current"], requires_grad=True)
    policy, parts, losses, advantages = Table(current, entropy), [], [], [0.0] * ROWS
    for trainer._step in range(n_parts):
        inputs = trainer._prepare_inputs([{"prompt": "word"}] * ROWS)
        rows = (inputs["completion_ids"][:, 0] - FIRST).tolist()
        for row, advantage in zip(rows, inputs["advantages"].tolist(), strict=True):
            advantages[row] = advantage
        loss = trainer.compute_loss(policy, inputs)
        assert loss.dtype == torch.float64, loss.dtype
        loss.backward()
        parts.append(sorted(rows))
        losses.append(loss.item())
    return {
        "case": name,
        "batch": batch["seed"],
        "parts": parts,
        "losses": losses,
        "advantages": advantages,
        "gradient": cut(current.grad, batch["masks"]),
        **({"entropy_gradient": cut(entropy.grad, batch["masks"])} if "entropy_coef" in settings else {}),
    }


def cut(table: torch.Tensor, masks: list[list[int]]) -> list[list[float]]:
    """The rows of a table at their own lengths. Beyond them it must be zero."""
    for line, mask in zip(table, masks, strict=True):
        assert not line[len(mask) :].any()
    return [line[: len(mask)].tolist() for line, mask in zip(table, masks, strict=True)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": EOS, "word": WORD}, unk_token="word"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="word")


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    batches = [make_batch(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds]
    results = [
        measure(name, case, batch)
        for name, case in CASES.items()
        for batch in batches
        # RLOOTrainer does not tell an environment's tokens from the policy's.
        if batch["kind"] == "plain" or case.get("trainer") != "rloo"
    ]
    for batch in batches:
        for name in ("current", "old", "sampled", "reference", "entropy"):
            lines = zip(batch[name], batch["masks"], strict=True)
            batch[name] = [line[: len(mask)] for line, mask in lines]
    made_with = {name: version(name) for name in ("trl", "torch", "transformers")}
    numbers = {
        "made_with": {"python": platform.python_version(), **made_with},
        "longest_allowed": LONGEST + 3,
        "group_size": MEMBERS,
        "cases": CASES,
        "batches": batches,
        "results": results,
    }
    OUT.write_text(compact(numbers))
    print(f"{len(results)} results in {OUT}")


def compact(numbers: dict[str, Any]) -> str:
    """JSON with one batch, case or result a line, so that a change shows as the lines that changed."""
    parts = []
    for key, value in numbers.items():
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
