import asyncio
import os
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from envgym.errors import CheckpointDamaged, EnvgymError, RunError
from envgym.learner import RoleSpec
from envgym.workers import checkpoint
from envgym.workers.config import WorkerSpec
from envgym.workers.micro_batches import micro_batches, padding_samples
from envgym.workers.model import ModelWorker
from tests.weight_files import export


def reference_logprobs(folder, rows):
    """log p(token t | tokens before it) in float64, one row at a time, straight from Hugging Face; 0 for those that
    neither count nor were sampled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    result = []
    for row in rows:
        ids = torch.tensor(row.token_ids)[None]
        with torch.no_grad():
            logprobs = (model(input_ids=ids).logits[0] / float(row.temperatures[0])).log_softmax(-1)
        all_logprobs = np.array([0.0] + [float(logprobs[t - 1, ids[0, t]]) for t in range(1, ids.shape[1])])
        result.append(np.where((row.loss_weights != 0) | np.isfinite(row.old_logprobs), all_logprobs, 0.0))
    return result


def weights_of(worker, tmp_path):
    export(worker, tmp_path / "weights")
    return load_file(tmp_path / "weights")


@pytest.mark.parametrize(("zero_stage", "trained"), [(0, False), (0, True), (2, True), (3, True), (3, False)])
def test_forward_gives_the_models_own_log_probabilities(make_worker, make_rows, tied_model, zero_stage, trained):
    rows = make_rows(9)
    rows[3].old_logprobs[4:] = -1.0  # sampled: scored even where it does not count
    rows[5].loss_weights[:] = 0.0
    worker = make_worker(zero_stage=zero_stage, trained=trained, tokens_per_microbatch=60)
    scores = worker.forward(rows)
    for score, expected in zip(scores, reference_logprobs(tied_model, rows), strict=True):
        assert score.dtype == np.float32
        np.testing.assert_allclose(score, expected, atol=2e-5)


def test_greedy_tokens_are_scored_at_temperature_one(make_worker, make_rows, tied_model):
    """Sampling at 0 takes the likeliest; dividing by it would leave no numbers."""
    rows = make_rows(3)
    for row in rows:
        row.temperatures[:] = 1.0
    expected = reference_logprobs(tied_model, rows)
    for row in rows:
        row.temperatures[1::2] = 0.0  # a greedy turn beside one that is not
    for score, right in zip(make_worker(trained=False).forward(rows), expected, strict=True):
        np.testing.assert_allclose(score, right, atol=2e-5)


def test_log_probabilities_and_gradients_are_the_same_in_chunks(
    make_worker, make_rows, normalizers, plain_gradient_descent, tmp_path, monkeypatch
):
    rows = make_rows(8)
    results = []
    for limit in (2**25, 97 * 7):
        monkeypatch.setattr("envgym.workers.head.MAX_LOGITS", limit)
        worker = make_worker(deepspeed=plain_gradient_descent)
        worker.accumulate([rows], normalizers(rows))
        worker.step(1.0)
        results.append(weights_of(worker, tmp_path))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_gradient_does_not_depend_on_micro_batches(
    make_worker, make_rows, normalizers, plain_gradient_descent, tied_model, untied_model, tmp_path, zero_stage, is_tied
):
    rows = make_rows(8)
    model = tied_model if is_tied else untied_model
    expected = take_step_by_hand(model, rows)
    cuts = [
        [rows],
        [[row] for row in rows],
        micro_batches(rows, 50, 1)[0],
        [rows[:5], padding_samples(rows[:2]), rows[5:]],
    ]
    for cut in cuts:
        worker = make_worker(model, zero_stage, deepspeed=plain_gradient_descent)
        metrics = worker.accumulate(cut, normalizers(rows))
        assert metrics["loss"][1] == pytest.approx(sum(normalizers(rows).values()))
        norm = worker.step(1.0)["grad_norm"]
        final = weights_of(worker, tmp_path)
        assert final.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(final[name], tensor, atol=2e-6, rtol=1e-5)
        initial = AutoModelForCausalLM.from_pretrained(model).state_dict()
        distance = torch.stack([(initial[name] - tensor).norm() for name, tensor in expected.items()]).norm()
        assert norm == pytest.approx(float(distance), rel=1e-4)


def take_step_by_hand(folder, rows):
    """The weights after one step of plain gradient descent at rate 1, in float64, without any code under test."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    totals = {}
    for row in rows:
        totals[row.objective] = totals.get(row.objective, 0.0) + float(row.loss_weights.sum())
    for row in rows:
        ids = torch.tensor(row.token_ids)[None]
        logprobs = (model(input_ids=ids).logits[0, :-1] / float(row.temperatures[0])).log_softmax(-1)
        target_logprobs = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        (
            -(target_logprobs * torch.tensor(row.loss_weights[1:], dtype=torch.float64)).sum() / totals[row.objective]
        ).backward()
    return {name: (p - p.grad).detach().float() for name, p in model.named_parameters()}


def test_dummies_alone_change_nothing(make_worker, make_rows, plain_gradient_descent, tmp_path):
    rows = make_rows(3)
    worker = make_worker(zero_stage=2, deepspeed=plain_gradient_descent)
    initial = weights_of(worker, tmp_path)
    assert worker.accumulate([padding_samples(rows)], {}).keys() == {"memory/max"}
    assert worker.step(1.0)["grad_norm"] == 0.0
    for name, tensor in weights_of(worker, tmp_path).items():
        torch.testing.assert_close(tensor, initial[name], atol=0, rtol=0)


def test_gradients_are_clipped_and_the_norm_before_it_is_returned(
    make_worker, make_rows, normalizers, plain_gradient_descent, tmp_path
):
    rows = make_rows(4)
    for zero_stage in (0, 2):
        worker = make_worker(zero_stage=zero_stage, deepspeed={**plain_gradient_descent, "gradient_clipping": 0.01})
        initial = weights_of(worker, tmp_path)
        worker.accumulate([rows], normalizers(rows))
        norm = worker.step(1.0)["grad_norm"]
        final = weights_of(worker, tmp_path)
        distance = torch.stack([(initial[name] - final[name]).norm() for name in initial]).norm()
        assert norm > 0.1
        assert float(distance) == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_is_the_one_given_to_step(make_worker, make_rows, normalizers, tmp_path):
    rows = make_rows(4)
    worker = make_worker()
    initial = weights_of(worker, tmp_path)
    worker.accumulate([rows], normalizers(rows))
    worker.step(0.0)
    for name, tensor in weights_of(worker, tmp_path).items():
        torch.testing.assert_close(tensor, initial[name], atol=0, rtol=0)


@pytest.mark.parametrize(
    "zero_stage",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_in_bfloat16_many_micro_batches_add_up(make_worker, make_rows, normalizers, plain_gradient_descent, zero_stage):
    rows = make_rows(1)
    worker = make_worker(zero_stage=zero_stage, dtype="bfloat16", deepspeed=plain_gradient_descent)
    norms = []
    for repeats in (1, 512):  # a sum kept in bfloat16 stops growing at 256 equal parts
        worker.accumulate([rows] * repeats, normalizers(rows))
        norms.append(worker.step(0.0)["grad_norm"])
    assert norms[1] == pytest.approx(512 * norms[0], rel=1e-3)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_in_bfloat16_the_first_step_of_adam_is_as_long_as_the_learning_rate(
    make_worker, make_rows, normalizers, tmp_path, zero_stage
):
    rows = make_rows(8)
    worker = make_worker(zero_stage=zero_stage, dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    initial = weights_of(worker, tmp_path)[name]
    worker.accumulate([rows], normalizers(rows))
    worker.step(2**-4)
    distance = (weights_of(worker, tmp_path)[name].float() - initial.float()).abs()
    assert float(distance.median()) == pytest.approx(2**-4, rel=0.02)


def test_mismatch_compares_sampled_tokens_of_current_rows(make_worker, make_rows, normalizers):
    rows = make_rows(4)
    for row in rows:
        row.loss_weights[1:] = 1.0
    worker = make_worker()
    for row, score in zip(rows, worker.forward(rows), strict=True):
        row.old_logprobs[3:] = score[3:]
    rows[0].old_logprobs[-1] += 0.25
    rows[1].old_logprobs[:] = -99.0
    rows[1].is_on_policy = False
    metrics = worker.accumulate([rows], normalizers(rows))
    compared = sum(len(row.token_ids) - 3 for row in rows if row.is_on_policy)
    assert metrics["mismatch/max"] == pytest.approx((0.25, 1.0), abs=1e-5)
    assert metrics["mismatch/mean_abs"] == pytest.approx((0.25, compared), abs=1e-4)
    assert metrics["mismatch/k3"] == pytest.approx((np.exp(-0.25) - 1 + 0.25, compared), abs=1e-4)


def test_a_scalar_head_learns_values(make_worker, make_rows, normalizers):
    rows = make_rows(8)
    worker = make_worker(role="critic", head="scalar", zero_stage=2)
    values = worker.forward(rows)
    assert [len(value) for value in values] == [len(row.token_ids) for row in rows]
    for _ in range(5):
        worker.accumulate([rows[:4], rows[4:]], normalizers(rows))
        worker.step(3e-3)
    final = worker.forward(rows)
    squares = [sum((v**2 * row.loss_weights).sum() for v, row in zip(vs, rows, strict=True)) for vs in (values, final)]
    assert squares[1] < 0.8 * squares[0]


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("is_tied", [True, False])
def test_save_writes_a_folder_that_hugging_face_loads(
    make_worker, make_rows, normalizers, tied_model, untied_model, tmp_path, zero_stage, is_tied
):
    rows = make_rows(4)
    worker = make_worker(tied_model if is_tied else untied_model, zero_stage)
    worker.accumulate([rows], normalizers(rows))
    worker.step(1e-3)
    worker.save(str(tmp_path / "model"))
    exported = weights_of(worker, tmp_path)
    assert ("lm_head.weight" in exported) == (not is_tied)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.tie_word_embeddings == is_tied
    for name, tensor in loaded.named_parameters():
        torch.testing.assert_close(tensor.detach(), exported[name], atol=0, rtol=0)
    for score, expected in zip(worker.forward(rows), reference_logprobs(tmp_path / "model", rows), strict=True):
        np.testing.assert_allclose(score, expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_loaded_state_goes_on_bit_for_bit(make_worker, make_rows, normalizers, tmp_path, zero_stage, dtype):
    def steps(worker, seeds):
        for seed in seeds:
            rows = make_rows(6, seed)
            worker.accumulate(micro_batches(rows, 50, 1)[0], normalizers(rows))
            worker.step(1e-2)

    worker_a = make_worker(zero_stage=zero_stage, dtype=dtype)
    steps(worker_a, (0, 1))
    worker_a.save_state(str(tmp_path / "state"))
    torch.manual_seed(5)  # a generator that has moved on is put back too
    worker_b = make_worker(zero_stage=zero_stage, dtype=dtype)
    worker_b.load_state(str(tmp_path / "state"))
    steps(worker_a, (2, 3))
    steps(worker_b, (2, 3))
    expected = weights_of(worker_a, tmp_path)
    for name, tensor in weights_of(worker_b, tmp_path).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_state_of_other_ranks_is_refused_in_one_line(make_worker, tmp_path):
    worker = make_worker()
    with pytest.raises(RunError, match="holds no state"):
        worker.load_state(str(tmp_path))
    worker.save_state(str(tmp_path))
    state = torch.load(tmp_path / "rank-0.pt", weights_only=False)
    torch.save({**state, "world_size": 2, "tensor_parallel": 2}, tmp_path / "rank-0.pt")
    with pytest.raises(RunError, match=r"of 2 ranks and ZeRO stage 0, .* set workers\.tensor_parallel=2"):
        worker.load_state(str(tmp_path))


def test_a_checkpoint_is_of_the_moment_it_was_begun_though_it_is_written_later(
    make_worker, make_rows, normalizers, tmp_path, monkeypatch
):
    """Steps are taken while the disk is busy, and what is written does not know of them."""
    disk, write = threading.Event(), checkpoint.write

    def when_the_disk_is_free(path, state):
        assert disk.wait(60)
        write(path, state)

    def step(worker, seed):
        rows = make_rows(6, seed)
        worker.accumulate(micro_batches(rows, 50, 1)[0], normalizers(rows))
        worker.step(1e-2)

    worker_a = make_worker(zero_stage=2)
    step(worker_a, 0)
    saved = weights_of(worker_a, tmp_path)
    monkeypatch.setattr(checkpoint, "write", when_the_disk_is_free)
    worker_a.save_state(str(tmp_path / "state"), blocking=False)
    step(worker_a, 1)
    assert not list((tmp_path / "state").glob("*.pt"))
    disk.set()
    asyncio.run(worker_a.finish_save())
    final = weights_of(worker_a, tmp_path)
    worker_b = make_worker(zero_stage=2)
    worker_b.load_state(str(tmp_path / "state"))
    loaded = weights_of(worker_b, tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    step(worker_b, 1)
    restored = weights_of(worker_b, tmp_path)
    assert all(torch.equal(restored[name], tensor) for name, tensor in final.items())


def test_a_disk_that_is_full_is_told_of_when_the_save_ends(make_worker, tmp_path, monkeypatch):
    def raise_disk_full(state, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", raise_disk_full)
    worker = make_worker()
    worker.save_state(str(tmp_path / "state"), blocking=False)
    with pytest.raises(RunError, match="No space left"):
        asyncio.run(worker.finish_save())
    with pytest.raises(RunError, match="No space left"):
        worker.save_state(str(tmp_path / "state"))


def test_code_in_a_state_is_refused_wherever_it_is(make_worker, tmp_path):
    """In what a rank writes itself as well as in what DeepSpeed writes."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    worker = make_worker()
    worker.save_state(str(tmp_path))
    [deepspeeds] = (tmp_path / "deepspeed").glob("*model_states.pt")
    for file in (tmp_path / "rank-0.pt", deepspeeds):
        content = file.read_bytes()
        torch.save({**torch.load(file, weights_only=False), "more": Trap()}, file)
        with pytest.raises(CheckpointDamaged, match="which would be code to run"):
            worker.load_state(str(tmp_path))
        file.write_bytes(content)
    worker.load_state(str(tmp_path))
    assert not (tmp_path / "trapped").exists()


def test_gradient_checkpointing_gives_the_same_gradient(
    make_worker, make_rows, normalizers, plain_gradient_descent, tmp_path
):
    rows = make_rows(4)
    results = []
    for checkpointing in (False, True):
        worker = make_worker(deepspeed=plain_gradient_descent, gradient_checkpointing=checkpointing)
        worker.accumulate([rows], normalizers(rows))
        worker.step(1.0)
        results.append(weights_of(worker, tmp_path))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, atol=1e-6, rtol=1e-5)


def test_a_loss_that_is_not_finite_is_an_error(make_worker, make_rows, normalizers):
    rows = make_rows(2)
    rows[0].loss_weights[1] = np.inf
    with pytest.raises(RunError, match="loss of actor is not finite"):
        make_worker().accumulate([rows], normalizers(rows))


@pytest.mark.parametrize("case", ["missing", "no config", "broken"])
def test_a_model_that_does_not_load_is_one_line(tmp_path, case):
    folder = tmp_path / "model"
    expected = {"missing": "does not exist", "no config": "has no config.json", "broken": "does not load"}[case]
    if case != "missing":
        folder.mkdir()
    if case == "broken":
        (folder / "config.json").write_text('{"model_type": "no such architecture"}')
    with pytest.raises(EnvgymError, match=expected) as caught:
        ModelWorker(WorkerSpec("reference", str(folder), RoleSpec())).load()
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
