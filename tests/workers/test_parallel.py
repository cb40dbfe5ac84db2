"""Ranks that share layers (AutoTP) or rows (sequence parallelism) do what one rank does. Real processes, on gloo."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from envgym.workers.config import WorkersConfig
from envgym.workers.group import WorkerGroup
from envgym.workers.inline import InlineRuntime
from envgym.workers.local import LocalRuntime


@pytest.fixture
def with_group(tmp_path, learner):
    """with_group(body, model, …) -> what the coroutine `body(group)` returns, run on a started group."""

    def run(body, model, *, ranks=1, role="actor", trained=True, head="lm", **settings):
        settings = WorkersConfig(ranks=ranks, dtype="float32", **{"tokens_per_microbatch": 60, **settings})

        async def main():
            runtime = InlineRuntime() if ranks == 1 else LocalRuntime(tmp_path / "logs")
            try:
                group = await WorkerGroup.start(
                    runtime, role=role, model=model, settings=settings, trained=trained, head=head, **learner
                )
                try:
                    return await body(group)
                finally:
                    await group.close()
            finally:
                await runtime.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def one_step(make_rows, denominators, tmp_path):
    """A body: score, take a step, score again, write the weights. Rows have other lengths than any size divides."""
    rows = make_rows(7, longest=21)
    for row in rows:
        row.old_logprobs[2:] = -3.0

    async def body(group, lr=1.0):
        before = await group.forward(rows)
        metrics = await group.learn(rows, denominators(rows), lr)
        after = await group.forward(rows[:3])
        await group.export(str(tmp_path / "weights"))
        return before, after, metrics, load_file(tmp_path / "weights"), group.info["n_parameters"]

    return body


def assert_equal(result, expected, *, atol=1e-5):
    for scores, others in zip(result[:2], expected[:2], strict=True):
        for score, other in zip(scores, others, strict=True):
            np.testing.assert_allclose(score, other, atol=1e-5, rtol=1e-5)
    assert result[2].keys() == expected[2].keys() >= {"loss", "grad_norm"}
    for name in expected[2].keys() - {"memory/max"}:
        assert result[2][name] == pytest.approx(expected[2][name], rel=1e-4), name
    assert result[3].keys() == expected[3].keys()
    for name, tensor in expected[3].items():
        torch.testing.assert_close(result[3][name], tensor, atol=atol, rtol=1e-5)
    assert result[4] == expected[4]


@pytest.mark.parametrize("how", ["tensor_parallel", "sequence_parallel"])
@pytest.mark.parametrize(("zero_stage", "tied"), [(0, True), (2, False), (3, True)])
def test_two_ranks_do_what_one_does(
    with_group, one_step, plain_gradient_descent, tied_model, untied_model, how, zero_stage, tied
):
    model = tied_model if tied else untied_model
    expected = with_group(one_step, model, deepspeed=plain_gradient_descent)
    result = with_group(one_step, model, ranks=2, zero_stage=zero_stage, deepspeed=plain_gradient_descent, **{how: 2})
    assert_equal(result, expected)
