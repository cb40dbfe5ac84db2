"""TRL's losses and gradients of preferences, labels and demonstrations, stored in `offline.json` for
`tests/learners/test_offline_against_trl.py`.

    .venv/bin/python tests/learners/trl/make_offline_numbers.py

It runs on TRL alone and knows nothing of envgym. What is TRL's: the loss functions of the real `DPOTrainer`,
`KTOTrainer`, `RewardTrainer` and `SFTTrainer`. What is made up: answers, and the log-probabilities and rewards that a
table gives in place of a model (SFT has a small model, whose log-probabilities are stored). All in float64; the tables
hold multiples of 1/1024, which float32 holds exactly.
"""

from __future__ import annotations

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
from make_numbers import compact, make_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)  # fmt: skip

OUT = Path(__file__).with_name("offline.json")
PAIRS, LONGEST = 4, 9
ROWS = 2 * PAIRS  # the chosen answers, then the rejected ones
ASK, MISMATCHED, WORD, FIRST = (
    3,
    4,
    2,
    8,
)  # the prompt's only token; a row is known by its first token, FIRST + its number
SEEDS = (0, 1)
DPO = {"beta": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"trainer": "dpo", "settings": DPO},
    "dpo_nll": {"trainer": "dpo", "settings": {**DPO, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}},
    "ipo": {"trainer": "dpo", "settings": {**DPO, "loss_type": "ipo"}},
    "kto": {"trainer": "kto", "settings": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}},
    "reward": {"trainer": "reward", "settings": {}},
    "reward_margin": {"trainer": "reward", "settings": {}, "margin": True},
    "sft": {"trainer": "sft", "settings": {}},
}


class Table(torch.nn.Module):
    """Gives each row's log-probabilities out of a table, where a language model would compute them."""

    is_gradient_checkpointing = False

    def __init__(self, matched: torch.Tensor, mismatched: torch.Tensor) -> None:
        super().__init__()
        self.matched, self.mismatched = matched, mismatched

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        rows = input_ids[:, 1] - FIRST
        table = self.mismatched if input_ids[0, 0] == MISMATCHED else self.matched
        counts = labels[:, 1:] != -100
        log_probs = torch.where(counts, table[rows][:, : counts.shape[1]], 0.0)
        nothing = torch.zeros(counts.shape)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


class Rewards(torch.nn.Module):
    """Gives each row's reward out of a table."""

    is_gradient_checkpointing = False

    def __init__(self, rewards: torch.Tensor) -> None:
        super().__init__()
        self.rewards = rewards

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.rewards[input_ids[:, 1] - FIRST][:, None])


def make_batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def on_grid(values: np.ndarray) -> list[list[float]]:
        return (np.minimum(np.round(values * 1024), -1) / 1024).tolist()

    shape = (ROWS, LONGEST)
    reference, mismatched = (-rng.exponential(1.2, shape) - 0.05 for _ in range(2))
    lengths = rng.integers(1, LONGEST + 1, ROWS)
    lengths[rng.integers(ROWS)] = LONGEST
    return {
        "seed": seed,
        "lengths": lengths.tolist(),
        "current": on_grid(reference + rng.normal(0, 0.3, shape)),
        "reference": on_grid(reference),
        "mismatched": on_grid(mismatched + rng.normal(0.1, 0.2, shape)),
        "mismatched_reference": on_grid(mismatched),
        "rewards": (rng.integers(-2048, 2049, ROWS) / 1024).tolist(),
        "margins": (rng.integers(0, 1025, PAIRS) / 1024).tolist(),
        "labels": [True, False, False, True, True, False, True, False],
    }


def sequences(batch: dict[str, Any], prompt: int, order: list[int]) -> dict[str, torch.Tensor]:
    """Token ids, masks of what is there and of answers, padded on the right: a prompt and the answer of each row."""
    ids = torch.zeros(len(order), LONGEST + 1, dtype=torch.int64)
    for line, row in zip(ids, order, strict=True):
        line[: batch["lengths"][row] + 1] = torch.tensor([prompt, FIRST + row, *[WORD] * (batch["lengths"][row] - 1)])
    there = (ids != 0).long()
    answers = there.clone()
    answers[:, 0] = 0
    return {"input_ids": ids, "attention_mask": there, "completion_mask": answers}


def measure(name: str, case: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """TRL's loss, and its derivative by each number of the table."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    kind = case["trainer"]
    model = Qwen3ForSequenceClassification(config) if kind == "reward" else Qwen3ForCausalLM(config)
    trainers = {
        "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "reward": (RewardTrainer, RewardConfig),
        "sft": (SFTTrainer, SFTConfig),
    }  # fmt: skip
    rows = {"prompt": ["word"] * 2, "chosen": ["word word"] * 2, "rejected": ["word"] * 2}
    if kind == "kto":
        rows = {"prompt": ["word"] * 2, "completion": ["word"] * 2, "label": [True, False]}
    if kind == "sft":
        rows = {"prompt": ["word"] * 2, "completion": ["word"] * 2}
    with tempfile.TemporaryDirectory() as folder:
        trainer_class, config_class = trainers[kind]
        settings = {"per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
                    "report_to": [], **case["settings"]}  # fmt: skip
        more = {"ref_model": Qwen3ForCausalLM(config)} if kind in ("dpo", "kto") else {}
        if kind == "kto":
            settings["train_sampling_strategy"] = "sequential"
        args = config_class(output_dir=folder, **settings)
        dataset, tokenizer = Dataset.from_dict(rows), make_tokenizer()
        trainer = trainer_class(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, **more)
    everything = list(range(ROWS))
    inputs = sequences(batch, ASK, everything)
    result = {"case": name, "batch": batch["seed"]}
    if kind == "sft":
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
        loss = trainer.compute_loss(trainer.model, dict(given))
        logits = trainer.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        logs = logits[:, :-1].log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
        return result | {"loss": loss.item(), "logprobs": cut(logs.detach(), batch)}
    if kind == "reward":
        table = torch.tensor(batch["rewards"], requires_grad=True)
        given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        given |= {"margin": torch.tensor(batch["margins"])} if case.get("margin") else {}
        loss = trainer.compute_loss(Rewards(table), given)
        loss.backward()
        return result | {"loss": loss.item(), "gradient": table.grad.tolist()}
    current = torch.tensor(batch["current"], requires_grad=True)
    trainer.ref_model = Table(torch.tensor(batch["reference"]), torch.tensor(batch["mismatched_reference"]))
    if kind == "kto":
        before = [everything[-1], *everything[:-1]]
        inputs |= {f"KL_{key}": value for key, value in sequences(batch, MISMATCHED, before).items()}
        inputs["label"] = torch.tensor(batch["labels"])
    loss = trainer.compute_loss(Table(current, torch.tensor(batch["mismatched"])), inputs)
    assert loss.dtype == torch.float64, loss.dtype
    loss.backward()
    return result | {"loss": loss.item(), "gradient": cut(current.grad, batch)}


def cut(table: torch.Tensor, batch: dict[str, Any]) -> list[list[float]]:
    return [line[:length].tolist() for line, length in zip(table, batch["lengths"], strict=True)]


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    batches = [make_batch(seed) for seed in SEEDS]
    results = [measure(name, case, batch) for name, case in CASES.items() for batch in batches]
    made_with = {name: version(name) for name in ("trl", "torch", "transformers")}
    numbers = {
        "made_with": {"python": platform.python_version(), **made_with},
        "cases": CASES,
        "batches": batches,
        "results": results,
    }
    OUT.write_text(compact(numbers))
    print(f"{len(results)} results in {OUT}")


if __name__ == "__main__":
    main()
