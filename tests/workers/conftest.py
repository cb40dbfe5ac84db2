import asyncio
from pathlib import Path

import numpy as np
import pytest

VOCABULARY = 97

LEARNER = {"name": f"{Path(__file__).parent / 'token_mean.py'}:TokenMean", "max_grad_norm": 1e9, "lr": 1e-3}

PLAIN_GRADIENT_DESCENT = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
"""DeepSpeed JSON with which one step moves the weights by exactly the gradient (AdamW's first step is a sign)."""


@pytest.fixture(scope="session")
def learner():
    return LEARNER


@pytest.fixture(scope="session")
def plain_gradient_descent():
    return PLAIN_GRADIENT_DESCENT


def _model_folder(folder, *, is_tied):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,  # so that log-probabilities are far from uniform
        tie_word_embeddings=is_tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory):
    return _model_folder(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory):
    return _model_folder(tmp_path_factory.mktemp("untied"), is_tied=False)


@pytest.fixture(scope="session")
def make_rows():
    """make_rows(n, seed) -> n rows of different lengths, each its own unit, with two objectives."""
    from envgym.types import Objective, Row

    def make(n, seed=0, shortest=5, longest=20):
        rng = np.random.default_rng(seed)
        rows = []
        for index in range(n):
            length = int(rng.integers(shortest, longest + 1))
            weights = (rng.random(length) < 0.6).astype(np.float32)
            weights[0], weights[-1] = 0.0, 1.0
            rows.append(
                Row.from_arrays(
                    token_ids=rng.integers(0, VOCABULARY, length),
                    loss_weights=weights,
                    old_logprobs=np.full(length, np.nan, np.float32),
                    objective=Objective.CROSS_ENTROPY if index % 3 else Objective.POLICY_GRADIENT,
                    temperatures=np.full(length, rng.choice([0.7, 1.0, 1.3]), np.float32),
                    microbatch_key=index,
                )
            )
        return rows

    return make


@pytest.fixture(scope="session")
def normalizers():
    """The default ones of a learner: the weight of each objective."""

    def sum_weights(rows):
        return {
            o: float(sum(r.loss_weights.sum() for r in rows if r.objective == o)) for o in {r.objective for r in rows}
        }

    return sum_weights


@pytest.fixture
def make_worker(tied_model, learner):
    """make_worker(model, zero_stage, learn={…}, lora={…}, …) -> a loaded worker, which is closed after the test."""
    from envgym.learner import RoleSpec
    from envgym.workers.config import WorkersConfig, WorkerSpec
    from envgym.workers.lora import LoraConfig
    from envgym.workers.model import ModelWorker

    workers = []

    def make(
        model=tied_model, zero_stage=0, role="actor", trained=True, head="lm", learn=None, lora=None, images=None,
        **settings,
    ):  # fmt: skip
        config = WorkersConfig(zero_stage=zero_stage, **{"dtype": "float32", **settings})
        role_spec, adapter = RoleSpec(trained=trained, head=head), LoraConfig(**(lora or {}))
        learner_settings = {**learner, **(learn or {})}
        worker = ModelWorker(WorkerSpec(role, model, role_spec, learner_settings, config, adapter, images=images))
        workers.append(worker)
        worker.load()
        return worker

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture(scope="session")
def run_group():
    """run_group(runtime, spec, body) -> what the coroutine `body(group)` returns, run on a started group."""
    from envgym.workers.group import WorkerGroup

    def run(runtime, spec, body):
        async def main():
            try:
                group = await WorkerGroup.start(runtime, spec)
                try:
                    return await body(group)
                finally:
                    await group.close()
            finally:
                await runtime.close()

        return asyncio.run(main())

    return run
