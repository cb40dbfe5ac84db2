"""Losses and gradients of DPO, IPO, KTO, reward models and SFT equal TRL's to 1e-6 where both define the same thing;
IPO's difference is the one that `docs/reference/trl_parity.md` states. TRL's numbers are made by
`trl/make_offline_numbers.py`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from envgym.learner import Outputs, pad
from envgym.registry import load_component
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, Task, number_rows

NUMBERS = json.loads((Path(__file__).parent / "trl" / "offline.json").read_text())
BATCHES = {batch["seed"]: batch for batch in NUMBERS["batches"]}
OURS = {
    "dpo": ("dpo", {"beta": 0.2}),
    "dpo_nll": ("dpo", {"beta": 0.2, "nll_coef": 0.7}),
    "ipo": ("dpo", {"beta": 0.2, "loss": "ipo"}),
    "kto": ("kto", {"beta": 0.3, "desirable": 1.5, "undesirable": 0.5}),
    "reward": ("reward_model", {}),
    "reward_margin": ("reward_model", {"margin": True}),
    "sft": ("sft", {}),
}


def results(*cases):
    found = [result for result in NUMBERS["results"] if result["case"] in cases]
    return pytest.mark.parametrize("trl", found, ids=[f"{result['case']}-{result['batch']}" for result in found])


def make(trl):
    name, settings = OURS[trl["case"]]
    learner_class = load_component("learner", name)
    return learner_class(learner_class.Config(name=name, **settings))


def episode(batch, row, reward, metrics):
    segments = [Segment("prompt", [3]), Segment("action", [8 + row, *[2] * (batch["lengths"][row] - 1)])]
    made = Row(segments, Objective.CROSS_ENTROPY)
    return Episode(str(row), Task("t"), Outcome.finish(), [made], reward, metrics=metrics)


def groups_of(trl, batch):
    n_pairs = len(batch["lengths"]) // 2
    if trl["case"] in ("kto", "sft"):
        worth = enumerate(map(float, batch["labels"]))
        return [Group(str(row), Task("t"), [episode(batch, row, reward, {})]) for row, reward in worth]
    margins = [{"margin": margin} for margin in batch["margins"]]
    return [
        Group(str(p), Task("t"), [episode(batch, p, 1.0, margins[p]), episode(batch, n_pairs + p, 0.0, margins[p])])
        for p in range(n_pairs)
    ]


def row_of(sample):
    return int(sample.token_ids[1]) - 8


def numbers(sample, table):
    return np.array([np.nan, *table[row_of(sample)][: len(sample.token_ids) - 1]], np.float32)


def step(trl, *, averaged=False):
    """Our loss and its derivative by each of the table's numbers, in float64. `averaged`: of means over tokens."""
    batch, learner = BATCHES[trl["batch"]], make(trl)
    groups = number_rows(groups_of(trl, batch))
    matched = [episode.rows[0] for group in groups for episode in group.episodes]
    for row in learner.rows_to_score(groups):
        own = any(row is one for one in matched)
        row.arrays["reference"] = numbers(row, batch["reference" if own else "mismatched_reference"])
        if trl["case"] == "kto":
            row.arrays["actor"] = numbers(row, batch["current" if own else "mismatched"])
    rows = learner.prepare(groups)
    padded = pad(rows, torch.device("cpu"))
    padded.loss_weights, padded.arrays = padded.loss_weights.double(), {k: v.double() for k, v in padded.arrays.items()}
    length = padded.token_ids.shape[1]
    if "reward" in trl["case"]:
        said = torch.full((len(rows), length), float("nan"), dtype=torch.float64)
        for line, row in zip(said, rows, strict=True):
            line[len(row.token_ids) - 1] = batch["rewards"][row_of(row)]
    else:
        table = [
            [np.nan, *(trl.get("logprobs") or batch["current"])[row_of(row)][: len(row.token_ids) - 1]] for row in rows
        ]
        said = torch.tensor([[*line, *[np.nan] * (length - len(line))] for line in table], dtype=torch.float64)
    said.requires_grad_()
    scale = torch.tensor([len(row.token_ids) - 1.0 for row in rows])[:, None] if averaged else 1.0
    padded.arrays = {k: v / scale if k == "reference" else v for k, v in padded.arrays.items()}
    outputs = Outputs(values=said) if "reward" in trl["case"] else Outputs(said / scale)
    loss, _ = learner.loss("actor", outputs, padded, learner.loss_normalizers(rows))
    loss.backward()
    gradient = {}
    for line, row in zip(said.grad, rows, strict=True):
        answer = line[1 : len(row.token_ids)].tolist()
        gradient[row_of(row)] = answer[-1] if "reward" in trl["case"] else answer
    return loss.item(), [gradient[row] for row in range(len(rows))]


@results("dpo", "dpo_nll", "kto", "reward", "reward_margin")
def test_loss_and_gradient_are_trls(trl):
    loss, gradient = step(trl)
    assert loss == pytest.approx(trl["loss"], abs=1e-6)
    for own, theirs in zip(gradient, trl["gradient"], strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-6)


@results("sft")
def test_the_cross_entropy_is_trls(trl):
    assert step(trl)[0] == pytest.approx(trl["loss"], abs=1e-6)


@results("ipo")
def test_ipo_of_means_over_tokens_is_trls(trl):
    loss, gradient = step(trl, averaged=True)
    assert loss == pytest.approx(trl["loss"], abs=1e-6)
    for own, theirs in zip(gradient, trl["gradient"], strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-6)
