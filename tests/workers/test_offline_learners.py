"""Learners for recorded data in real workers: how rows are cut, packed and spread over ranks changes nothing."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime
from envgym.registry import load_component
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, StopReason, Task, Turn, number_rows
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.group import WorkerGroup
from envgym.workers.model import ModelWorker
from envgym.workers.network import add_noise
from tests.weight_files import export_group

from .conftest import PLAIN_GRADIENT_DESCENT, VOCABULARY

LEARNERS = {
    "sft": {}, "dpo": {"nll_coef": 0.5}, "kto": {}, "reward_model": {"margin": True}, "process_reward_model": {},
    "distill": {"top_k": 5},
}  # fmt: skip
CUTS = {
    "one micro-batch": {"tokens_per_microbatch": 10_000},
    "many": {"tokens_per_microbatch": 50},
    "padded": {"tokens_per_microbatch": 90, "packing": False},
    "packed": {"tokens_per_microbatch": 90, "packing": True},
    "separate": {"tokens_per_microbatch": 90, "share_prefixes": False},
}


def recorded(name, pairs=7):
    """Groups of a chosen and a rejected answer in two turns each, of different lengths."""
    rng = np.random.default_rng(3)

    def turn(reward):
        tokens = rng.integers(0, VOCABULARY, rng.integers(2, 9)).tolist()
        return Segment("action", tokens), Turn(reward, StopReason.STOP)

    groups = []
    for number in range(pairs):
        prompt = Segment("prompt", rng.integers(0, VOCABULARY, rng.integers(2, 12)).tolist())
        task = Task(str(number), fields={"margin": 0.1 * number})
        episodes = []
        for member, reward in enumerate((1.0, 0.0)):
            (first, paid), (second, paid_too) = turn(1.0 - reward), turn(reward)
            row = Row([prompt, first, second], Objective.CROSS_ENTROPY, turns=[paid, paid_too])
            margin = {"margin": 0.1 * number}
            episodes.append(Episode(f"{number}-{member}", task, Outcome.finish(), [row], reward, metrics=margin))
        groups.append(Group(str(number), task, episodes))
    return groups


def learned(name, tmp_path, model, *, ranks=1, **settings):
    """Metrics and weights after one step of plain gradient descent on recorded groups, on real workers."""
    learner_class = load_component("learner", name)
    config = learner_class.Config(name=name, lr=1.0, max_grad_norm=1e9, **LEARNERS[name])
    learner = learner_class(config)

    async def main():
        runtime = InlineRuntime() if ranks == 1 else LocalRuntime(tmp_path / "logs")
        workers = {}
        try:
            for role, spec in learner.roles.items():
                workers_config = WorkersConfig(
                    ranks=ranks, dtype="float32", deepspeed=PLAIN_GRADIENT_DESCENT, **settings
                )
                worker_spec = WorkerSpec(role, model, spec, config.model_dump(), workers_config)
                workers[role] = await WorkerGroup.start(runtime, worker_spec)
            groups = number_rows(recorded(name))
            samples = learner.rows_to_score(groups)
            for role, spec in learner.roles.items():
                if spec.scored:
                    for sample, scores in zip(samples, await workers[role].forward(samples), strict=True):
                        # No answer is as likely as the policy has it: which of two such is likelier is rounding's.
                        sample.arrays[role] = (
                            scores if spec.top_k else scores - np.float32(0.05) * np.sin(sample.token_ids)
                        )
            rows = learner.prepare(groups)
            metrics = await workers["actor"].accumulate(rows, learner.loss_normalizers(rows))
            metrics |= await workers["actor"].step(1.0)
            await export_group(workers["actor"], tmp_path / "weights")
            return metrics, load_file(tmp_path / "weights")
        finally:
            for group in workers.values():
                await group.close()
            await runtime.close()

    return asyncio.run(main())


def assert_same(first, second):
    (metrics, weights), (other_metrics, other_weights) = first, second
    for name in metrics.keys() - {"memory/max", "tokens/shared_share"}:
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
    for name, tensor in weights.items():
        torch.testing.assert_close(other_weights[name], tensor, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LEARNERS)
def test_micro_batches_and_packing_change_nothing(name, tmp_path, tied_model):
    results = [learned(name, tmp_path, tied_model, **settings) for settings in CUTS.values()]
    assert results[0][0]["loss"] > 0
    assert results[0][0]["grad_norm"] > 0
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_two_ranks_learn_what_one_learns(name, tmp_path, tied_model):
    first = learned(name, tmp_path, tied_model, tokens_per_microbatch=60)
    assert_same(first, learned(name, tmp_path, tied_model, tokens_per_microbatch=60, ranks=2, zero_stage=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequence_parallel", "tensor_parallel"])
@pytest.mark.parametrize("name", ["dpo", "reward_model", "distill"])
def test_split_over_ranks_they_learn_the_same(name, kind, tmp_path, tied_model):
    first = learned(name, tmp_path, tied_model, tokens_per_microbatch=60)
    assert_same(first, learned(name, tmp_path, tied_model, tokens_per_microbatch=60, ranks=2, **{kind: 2}))


def test_neftunes_noise_is_there_while_learning_and_of_its_size():
    embeddings = torch.nn.Embedding(VOCABULARY, 16)
    add_noise(SimpleNamespace(get_input_embeddings=lambda: embeddings), 5.0)
    ids = torch.arange(80).reshape(4, 20)
    noise = (embeddings(ids) - embeddings.weight[ids]).detach()
    assert 0.95 * 5 / math.sqrt(20 * 16) < noise.abs().max() <= 5 / math.sqrt(20 * 16) + 1e-6
    assert abs(float(noise.mean())) < 0.02
    embeddings.eval()
    assert torch.equal(embeddings(ids), embeddings.weight[ids])


def test_a_run_with_neftune_learns_from_noisy_rows_and_scores_clean_ones(tmp_path, tied_model, monkeypatch):
    plain = learned("sft", tmp_path, tied_model, tokens_per_microbatch=60)
    monkeypatch.setitem(LEARNERS, "sft", {"neftune_alpha": 50.0})
    noisy = learned("sft", tmp_path, tied_model, tokens_per_microbatch=60)
    assert noisy[0]["loss"] != pytest.approx(plain[0]["loss"], rel=1e-3)

    def score_with(alpha):
        config = {"name": "sft", "lr": 1.0, "neftune_alpha": alpha}
        settings = WorkersConfig(dtype="float32", tokens_per_microbatch=60)
        worker = ModelWorker(WorkerSpec("actor", tied_model, RoleSpec(trained=True), config, settings))
        worker.load()
        try:
            return worker.forward([row for group in recorded("sft") for row in group.episodes[0].rows])
        finally:
            worker.close()

    for clean, noisy_scores in zip(score_with(0.0), score_with(50.0), strict=True):
        np.testing.assert_array_equal(clean, noisy_scores)
