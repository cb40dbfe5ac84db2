"""Turns on a shared GPU, where every move is one: what a model holds gets fresh memory, as it does between a GPU and
its host, and is not written where nobody reads."""

import contextlib

import numpy as np
import pytest
import torch

from envgym.errors import RunError
from envgym.workers import learning
from envgym.workers.config import WorkersConfig
from envgym.workers.micro_batches import micro_batches

HELD = [
    {"zero_stage": stage, "dtype": dtype, **options}
    for stage in range(4)
    for dtype in ("float32", "bfloat16")
    for options in ({}, {"lora": {"rank": 4}}, {"offload_optimizer": True})
    if stage or "offload_optimizer" not in options
]
FAST = [
    {"zero_stage": 0, "dtype": "bfloat16"},
    {"zero_stage": 2, "dtype": "bfloat16", "offload_optimizer": True},
    {"zero_stage": 3, "dtype": "bfloat16", "lora": {"rank": 4}},
]


@pytest.fixture
def moving(monkeypatch):
    """Within `moving()` every `Tensor.to` gives fresh memory; yields the addresses that were moved from."""

    @contextlib.contextmanager
    def moving():
        moved_ids = set()
        original = torch.Tensor.to

        def record_to(tensor, *args, **kwargs):
            moved_ids.add(tensor.data_ptr())
            return original(tensor, *args, **kwargs).clone()

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", record_to)
            yield moved_ids

    return moving


@pytest.fixture
def learn(make_rows, normalizers):
    def step(worker, seed):
        rows = make_rows(6, seed)
        totals = worker.accumulate(micro_batches(rows, 60, 1)[0], normalizers(rows))
        return totals["loss"][0] / totals["loss"][1], worker.step(1e-2)["grad_norm"]

    return step


def numbers(worker):
    return {name: tensor.float().clone() for name, tensor in worker._parameters(worker.dtype)}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(held_settings, marks=[] if held_settings in FAST else pytest.mark.slow) for held_settings in HELD],
    ids=str,
)
def test_a_model_learns_after_a_turn_what_it_would_have_learned_without(make_worker, learn, moving, settings):
    expected, turning = (make_worker(**settings, learn={"ema_decay": 0.5}) for _ in range(2))
    for seed in range(3):
        initial = numbers(turning)
        assert learn(turning, seed) == learn(expected, seed)
        final = numbers(expected)
        for name, tensor in numbers(turning).items():
            assert torch.equal(tensor, final[name]), name
        assert any(not torch.equal(tensor, initial[name]) for name, tensor in final.items())
        with moving():
            turning.offload(True)
        for name, tensor in numbers(turning).items():
            assert torch.equal(tensor, final[name]), name
        with moving():
            turning.offload(False)
            turning.onload()
    assert turning.average.state().keys() == expected.average.state().keys()
    for name, part in expected.average.state().items():
        assert torch.equal(turning.average.state()[name], part)


def frozen(worker):
    """The addresses of what a worker's frozen parameters are kept in."""
    return {
        getattr(parameter, "ds_tensor", parameter).data_ptr()
        for parameter in worker.network.parameters()
        if not parameter.requires_grad or not worker.trained
    }


@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_optimizer_that_is_on_the_host_for_good_never_moves(make_worker, learn, moving, zero_stage):
    worker = make_worker(zero_stage=zero_stage, dtype="bfloat16", offload_optimizer=True)
    learn(worker, 0)
    inner = worker.engine.optimizer.optimizer
    flat_tensors = [flat for group in inner.param_groups for flat in group["params"]]
    flat_tensors += [
        value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert len(flat_tensors) > 2
    with moving() as moved_ids:
        worker.offload(False)
        worker.onload()
    assert moved_ids
    assert not moved_ids & {tensor.data_ptr() for tensor in flat_tensors}


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_the_frozen_base_of_an_adapter_goes_and_comes(make_worker, moving, zero_stage):
    worker = make_worker(zero_stage=zero_stage, lora={"rank": 4})
    for move in (lambda: worker.offload(False), worker.onload):
        frozen_ids = frozen(worker)
        with moving() as moved_ids:
            move()
        assert len(frozen_ids) > 10
        assert frozen_ids <= moved_ids


def test_a_model_that_only_scores_goes_though_it_is_split_unless_it_is_on_the_host_for_good(
    make_worker, make_rows, moving
):
    for settings, goes in (({"zero_stage": 3}, True), ({"offload_parameters": True}, False)):
        worker = make_worker(trained=False, **settings)
        expected, frozen_ids = worker.forward(make_rows(3)), frozen(worker)
        with moving() as moved_ids:
            worker.offload(False)
            worker.onload()
        assert (frozen_ids <= moved_ids) == goes
        assert bool(frozen_ids & moved_ids) == goes
        for scores, initial in zip(worker.forward(make_rows(3)), expected, strict=True):
            np.testing.assert_array_equal(scores, initial)


def test_a_state_of_deepspeeds_own_optimizer_for_bfloat16_goes_on(make_worker, learn, tmp_path, monkeypatch):
    """As runs wrote it when stages 0 and 1 still ran as 1."""
    with monkeypatch.context() as patch:
        patch.setattr(WorkersConfig, "effective_zero_stage", lambda settings, dtype, *, trained: 1)
        initial = make_worker(dtype="bfloat16")
        assert type(initial.engine.optimizer).__name__ == "BF16_Optimizer"
        learn(initial, 0)
        initial.save_state(str(tmp_path))
    final = make_worker(dtype="bfloat16")
    final.load_state(str(tmp_path))
    for name, tensor in numbers(initial).items():
        assert torch.equal(numbers(final)[name], tensor), name
    assert learn(final, 1) == pytest.approx(learn(initial, 1), rel=1e-2)
    for name, tensor in numbers(initial).items():
        torch.testing.assert_close(numbers(final)[name], tensor, atol=2e-3, rtol=1e-2)


LINKS = {
    1: "_update_model_bit16_weights",
    2: "_update_model_bit16_weights",
    3: "_reassign_or_swap_out_partitioned_parameters",
}
"""ZeRO's stage -> DeepSpeed's method that gives the model what the optimizer has updated."""


@pytest.mark.parametrize("zero_stage", LINKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_that_the_optimizer_no_longer_updates_end_the_run(make_worker, learn, zero_stage, dtype):
    """As after a move of the parameters out of the buffers that DeepSpeed writes to."""
    worker = make_worker(zero_stage=zero_stage, dtype=dtype)
    learn(worker, 0)
    setattr(worker.engine.optimizer, LINKS[worker.engine.zero_optimization_stage()], lambda *args: None)
    for parameter in worker.network.parameters():
        held = getattr(parameter, "ds_tensor", parameter)
        held.data = held.data.clone()
    with pytest.raises(RunError, match=r"the weights of \S+ are not those of the optimizer"):
        learn(worker, 1)


@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-12])
@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
def test_small_steps_and_adapters_are_no_fault(make_worker, make_rows, normalizers, lr, lora):
    worker = make_worker(zero_stage=2, dtype="bfloat16", lora=lora)
    for seed in range(3):
        rows = make_rows(6, seed)
        worker.accumulate(micro_batches(rows, 60, 1)[0], normalizers(rows))
        worker.step(lr)


def test_a_parameter_of_many_weights_is_sampled_within_it():
    """Indices in float32 would leave one of 2**25."""
    learning.check_weights("embedding", torch.nn.Parameter(torch.zeros(2**25)))
