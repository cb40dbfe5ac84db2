"""Losses and gradients equal TRL's to 1e-6 in float64 where the two define the same thing; where they do not, the
difference is the one that `docs/reference/trl_parity.md` states. TRL's numbers were made by `trl/make_numbers.py`."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scored_rows import ScoredRow, scored

from envgym.learner import Outputs, pad
from envgym.registry import load_component
from envgym.types import Episode, Group, Outcome, Segment, StopReason, Task, Turn

NUMBERS = json.loads((Path(__file__).parent / "trl" / "numbers.json").read_text())
BATCHES = {batch["seed"]: batch for batch in NUMBERS["batches"]}
GROUP_SIZE = NUMBERS["group_size"]
PROMPT = [1, 1]

# TRL adds 1e-4 to a group's standard deviation.
GRPO = {"learner": "grpo", "advantage_eps": 1e-4}
DAPO = {**GRPO, "aggregation": "token", "clip_low": 0.2, "clip_high": 0.28}
DR_GRPO = {"learner": "dr_grpo", "constant_length": NUMBERS["longest_allowed"]}
GSPO = {**GRPO, "policy_loss": "gspo"}
# TRL names the largest ratio, envgym how far above 1 it is; TRL's has no lower bound.
CISPO = {**GRPO, "aggregation": "token", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.3}
RLOO = {"learner": "rloo", "aggregation": "constant", "constant_length": 1}
KL_IN_LOSS = {"kl": {"coef": 0.04, "estimator": "k3", "applied_to": "loss"}}

EQUAL = {
    "grpo": GRPO,
    "grpo_kl": {**GRPO, **KL_IN_LOSS},
    "grpo_truncated": {**GRPO, "shaping": {"overlong_filter": True}},
    "grpo_micro_batches": GRPO,
    "dapo": DAPO,
    "dapo_entropy": {**DAPO, "entropy_coef": 0.01},
    "dapo_dual_clip": {**DAPO, "dual_clip": 1.5},
    "dapo_truncated": {**DAPO, "shaping": {"overlong_filter": True}},
    "dapo_micro_batches": DAPO,
    "bnpo": DAPO,
    "dr_grpo": DR_GRPO,
    "dr_grpo_micro_batches": DR_GRPO,
    "gspo": {**GSPO, "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_wide": {**GSPO, "clip_low": 0.1, "clip_high": 0.15},
    "cispo": CISPO,
    "cispo_kl": {**CISPO, **KL_IN_LOSS},
    "tis": {**GRPO, "correction": {"kind": "tis", "low": 0.9, "high": 1.1}},
    "icepop": {**GRPO, "correction": {"kind": "icepop", "low": 0.9, "high": 1.1}},
}


def batches_of(*cases):
    """The numbers of TRL that are stored for these cases."""
    found = [result for result in NUMBERS["results"] if result["case"] in cases]
    return pytest.mark.parametrize("trl", found, ids=[f"{result['case']}-{result['batch']}" for result in found])


class Step:
    """One optimizer step of ours over the batch and with the faults of one of TRL's results.

    `advantages` are one number an episode; `loss` is a number; `gradient` and `entropy_gradient` hold a list for each
    episode, with a number for each token after the prompt. Episodes are known by their place in the batch.
    """

    def __init__(self, trl, settings, rewards=None):
        self.batch, self.faults = BATCHES[trl["batch"]], NUMBERS["cases"][trl["case"]]
        name = settings["learner"]
        learner_class = load_component("learner", name)
        # With two minibatches a rollout the old log-probabilities are those that the trainer computed before the first.
        own = {"name": name, "minibatches": 2, **{key: value for key, value in settings.items() if key != "learner"}}
        self.learner = learner_class(learner_class.Config(**own))
        groups = self._groups(self.batch["rewards"] if rewards is None else rewards)
        self.members = [int(episode.id) for group in groups for episode in group.episodes]
        self.rows = self.learner.prepare(scored(groups))
        pairs = zip(self.members, self.rows, strict=True)
        self.advantages = {
            member: sorted(set(row.arrays["advantages"][row.loss_weights > 0].tolist())) for member, row in pairs
        }

    def take(self, members=None, micro_batch=99):
        """Loss and gradients of a step over these episodes (all), in micro-batches of at most so many rows."""
        chosen = [pair for pair in zip(self.members, self.rows, strict=True) if members is None or pair[0] in members]
        normalizers = self.learner.loss_normalizers([row for _, row in chosen])
        self.loss, self.gradient, self.entropy_gradient = 0.0, {}, {}
        for start in range(0, len(chosen), micro_batch):
            numbers, rows = zip(*chosen[start : start + micro_batch], strict=True)
            logprobs, entropy = self._table("current", numbers), self._table("entropy", numbers)
            outputs = Outputs(logprobs=logprobs, entropy=entropy)
            loss, _ = self.learner.loss("actor", outputs, in_float64(pad(rows, torch.device("cpu"))), normalizers)
            loss.backward()
            self.loss += loss.item()
            self.gradient |= self._cut(logprobs, numbers)
            self.entropy_gradient |= self._cut(entropy, numbers)
        return self

    def _groups(self, rewards):
        batch, groups = self.batch, []
        old = batch["current" if self.faults.get("on_policy") else "old"]
        for first in range(0, len(rewards), GROUP_SIZE):
            episodes = []
            for i in range(first, first + GROUP_SIZE):
                if i in self.faults.get("failed", []):
                    continue  # what failed is not among its group's members
                segments = segments_of(batch["masks"][i], batch["sampled"][i])
                turns = [Turn(None, StopReason.STOP) for segment in segments if segment.role == "action"]
                turns[-1].reward = rewards[i]
                outputs = {"actor": old[i], "reference": batch["reference"][i]}
                row = ScoredRow(segments, turns=turns, outputs={k: [0.0] * len(PROMPT) + v for k, v in outputs.items()})
                cut = i in self.faults.get("truncated", [])
                outcome = Outcome.truncate("max_tokens") if cut else Outcome.finish()
                episodes.append(Episode(str(i), Task("t"), outcome, rows=[row], reward=rewards[i]))
            groups.append(Group("g", Task("t"), episodes))
        return groups

    def _table(self, name, numbers):
        lines = [torch.tensor([0.0] * len(PROMPT) + self.batch[name][i], dtype=torch.float64) for i in numbers]
        return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True).requires_grad_()

    def _cut(self, table, numbers):
        grad = torch.zeros_like(table) if table.grad is None else table.grad
        ends = [len(PROMPT) + len(self.batch["masks"][i]) for i in numbers]
        return {i: line[len(PROMPT) : end].tolist() for i, line, end in zip(numbers, grad, ends, strict=True)}


def segments_of(mask, sampled):
    """The prompt, then runs of action tokens (mask 1) and of feedback."""
    segments = [Segment("prompt", PROMPT)]
    start = 0
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            tokens = [7] * (end - start)
            said = {"role": "action", "logprobs": sampled[start:end]} if mask[start] else {"role": "feedback"}
            segments.append(Segment(token_ids=tokens, **said))
            start = end
    return segments


def in_float64(batch):
    return dataclasses.replace(
        batch,
        loss_weights=batch.loss_weights.double(),
        old_logprobs=batch.old_logprobs.double(),
        arrays={name: tensor.double() for name, tensor in batch.arrays.items()},
    )


def assert_lines(ours, stored, factor=1.0):
    """Each line of ours, times the factor, is the stored one to 1e-6."""
    for number, line in ours.items():
        np.testing.assert_allclose(np.multiply(line, factor), stored[number], rtol=0, atol=1e-6)


def assert_advantages(step, stored):
    for number, values in step.advantages.items():
        assert values == [] or values == pytest.approx([stored[number]], abs=1e-6)


def per_token(trl, name):
    """[B][T] float64 arrays of a table, where the policy's tokens are: the others are left out."""
    batch = BATCHES[trl["batch"]]
    return [np.array(line)[np.array(mask, bool)] for line, mask in zip(batch[name], batch["masks"], strict=True)]


# -- where both define the same thing ---------------------------------------------------------------------


@batches_of(*EQUAL)
def test_the_same(trl):
    ours = Step(trl, EQUAL[trl["case"]]).take(micro_batch=5 if len(trl["parts"]) > 1 else 99)
    assert_advantages(ours, trl["advantages"])
    assert ours.loss == pytest.approx(sum(trl["losses"]), abs=1e-6)
    assert_lines(ours.gradient, trl["gradient"])
    if "entropy_gradient" in trl:
        assert_lines(ours.entropy_gradient, trl["entropy_gradient"])


def test_the_batches_reach_what_they_check():
    """Every kind of loss has tokens on both sides of its bounds, gradients that are not zero, and equal rewards."""
    for batch in BATCHES.values():
        ratios = np.exp(
            np.concatenate([np.subtract(a, b) for a, b in zip(batch["current"], batch["old"], strict=True)])
        )
        gaps = np.exp(np.concatenate([np.subtract(a, b) for a, b in zip(batch["old"], batch["sampled"], strict=True)]))
        assert ratios.min() < 0.8 and ratios.max() > 1.5  # noqa: PT018
        assert gaps.min() < 0.9 and gaps.max() > 1.1  # noqa: PT018
        assert len({len(mask) for mask in batch["masks"]}) > 4
        assert any(0 in mask for mask in batch["masks"]) == (batch["kind"] == "turns")
        assert len(set(batch["rewards"][-GROUP_SIZE:])) == 1 < len(set(batch["rewards"][:GROUP_SIZE]))
    for result in NUMBERS["results"]:
        counted = [abs(number) for line in result["gradient"] for number in line]
        assert sum(number > 1e-3 for number in counted) > 5, result["case"]


@batches_of("rloo_on_policy")
def test_rloo_on_policy_is_the_sum_over_tokens(trl):
    """TRL takes a sequence for one action, so that a token's gradient does not depend on the sequence's length."""
    ours = Step(trl, RLOO).take()
    assert_advantages(ours, trl["advantages"])
    assert_lines(ours.gradient, trl["gradient"])


# -- where they differ ------------------------------------------------------------------------------------


@batches_of("rloo")
def test_rloo_off_policy_has_the_same_advantages_but_a_ratio_for_each_token(trl):
    ours = Step(trl, RLOO).take()
    assert_advantages(ours, trl["advantages"])
    current, old = per_token(trl, "current"), per_token(trl, "old")
    for i, advantage in enumerate(trl["advantages"]):
        whole = np.exp(current[i].sum() - old[i].sum())  # TRL's ratio: of the probabilities of the whole sequence
        clipped = min(whole * advantage, np.clip(whole, 0.8, 1.2) * advantage) != whole * advantage
        expected = 0.0 if clipped else -whole * advantage / len(current)
        assert trl["gradient"][i] == pytest.approx([expected] * len(current[i]), abs=1e-6)
        ratio = np.exp(current[i] - old[i])
        bounded = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage) != ratio * advantage
        expected = np.where(bounded, 0.0, -ratio * advantage / len(current))
        assert ours.gradient[i] == pytest.approx(expected, abs=1e-6)


@batches_of("rloo_kl")
def test_rloo_pays_for_its_kl_before_the_baseline_in_trl(trl):
    """TRL takes the KL of a whole sequence off its reward and then compares. So do we when the reward is that."""
    current, reference = per_token(trl, "current"), per_token(trl, "reference")
    rewards = [
        reward - 0.05 * (current[i] - reference[i]).sum() for i, reward in enumerate(BATCHES[trl["batch"]]["rewards"])
    ]
    ours = Step(trl, RLOO, rewards=rewards).take()
    assert_advantages(ours, trl["advantages"])
    assert_lines(ours.gradient, trl["gradient"])


@batches_of("rloo_kl")
def test_our_kl_is_paid_by_the_tokens_that_caused_it(trl):
    """Each token pays for its own KL and that of the tokens after it, and the baseline is of the rewards alone."""
    ours = Step(trl, {**RLOO, "kl": {"coef": 0.05, "estimator": "k1", "applied_to": "reward"}})
    without = Step(trl, RLOO)
    current, reference = per_token(trl, "current"), per_token(trl, "reference")
    for i, row in enumerate(ours.rows):
        [advantage] = without.advantages[i]
        to_go = np.cumsum((current[i] - reference[i])[::-1])[::-1]
        assert row.arrays["advantages"][row.loss_weights > 0] == pytest.approx(advantage - 0.05 * to_go, abs=1e-6)


@batches_of("grpo_failed", "dapo_failed", "rloo_failed")
def test_a_completion_without_a_reward_counts_in_trls_mean_and_not_in_ours(trl):
    settings = {"grpo_failed": GRPO, "dapo_failed": DAPO, "rloo_failed": RLOO}[trl["case"]]
    ours = Step(trl, settings).take()
    assert_advantages(ours, trl["advantages"])
    sizes = [sum(mask) if settings is DAPO else 1 for mask in BATCHES[trl["batch"]]["masks"]]
    share = sum(sizes[i] for i in ours.members) / sum(sizes)
    assert share < 1
    assert_lines(ours.gradient, trl["gradient"], share)
    if settings is not RLOO:
        assert ours.loss * share == pytest.approx(sum(trl["losses"]), abs=1e-6)


@batches_of("bnpo_micro_batches")
def test_bnpo_is_a_mean_over_each_micro_batch_by_itself(trl):
    step = Step(trl, DAPO)
    losses = []
    for part in trl["parts"]:
        step.take(part)
        losses.append(step.loss / len(trl["parts"]))
        assert_lines(step.gradient, trl["gradient"], 1 / len(trl["parts"]))
    assert losses == pytest.approx(trl["losses"], abs=1e-6)
    assert step.take().loss != pytest.approx(sum(trl["losses"]), abs=1e-4)


@batches_of("dapo_two_steps")
def test_dapo_divides_each_step_by_the_rollouts_mean_number_of_tokens(trl):
    step = Step(trl, DAPO)
    tokens = [sum(sum(BATCHES[trl["batch"]]["masks"][i]) for i in part) for part in trl["parts"]]
    assert tokens[0] != tokens[1]
    for part, n, loss in zip(trl["parts"], tokens, trl["losses"], strict=True):
        factor = n / np.mean(tokens)
        assert step.take(part).loss * factor == pytest.approx(loss, abs=1e-6)
        assert_lines(step.gradient, trl["gradient"], factor)


@batches_of("grpo_entropy")
def test_the_entropy_bonus_is_a_mean_over_tokens_in_trl_however_the_rest_is_aggregated(trl):
    """In ours it is aggregated as the policy's loss is."""
    ours = Step(trl, {**GRPO, "entropy_coef": 0.01}).take()
    without = Step(trl, GRPO).take()
    entropy = per_token(trl, "entropy")
    assert without.loss - 0.01 * np.concatenate(entropy).mean() == pytest.approx(sum(trl["losses"]), abs=1e-6)
    assert without.loss - 0.01 * np.mean([line.mean() for line in entropy]) == pytest.approx(ours.loss, abs=1e-6)
    assert_lines(ours.gradient, trl["gradient"])


@batches_of("grpo_kl_times_ratio")
def test_trl_weighs_the_kl_with_the_ratio_by_default(trl):
    """With old log-probabilities taken for constants, the gradient of r k3 is r (log r_ref), r_ref = pi / pi_ref."""
    ours = Step(trl, GRPO).take()
    current, old, reference = (per_token(trl, name) for name in ("current", "old", "reference"))
    weighted, masks = [], BATCHES[trl["batch"]]["masks"]
    for i, line in enumerate(current):
        ratio, log_ratio = np.exp(line - old[i]), line - reference[i]
        weighted.append((ratio * (np.exp(-log_ratio) - 1 + log_ratio)).mean())
        expected = np.array(ours.gradient[i])
        expected[np.array(masks[i], bool)] += 0.04 * ratio * log_ratio / len(line) / len(current)
        assert trl["gradient"][i] == pytest.approx(expected, abs=1e-6)
    assert ours.loss + 0.04 * np.mean(weighted) == pytest.approx(sum(trl["losses"]), abs=1e-6)
