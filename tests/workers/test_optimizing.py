"""How weights move, on real DeepSpeed: offload, frozen names, the moving average, Muon, float16."""

import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig, Qwen3MoeForCausalLM

from envgym.errors import ConfigError, RunError
from envgym.workers.micro_batches import micro_batches
from envgym.workers.optimizer import mark_for_muon
from tests.vision_models import KINDS, vision_config
from tests.weight_files import export

MATRIX = "model.layers.0.mlp.up_proj.weight"  # 64 x 32
EMBEDDINGS = "model.embed_tokens.weight"
NORM = "model.norm.weight"


@pytest.fixture
def weights_of(tmp_path):
    """weights_of(worker) -> name to tensor."""

    def read(worker):
        export(worker, tmp_path / "weights")
        return load_file(tmp_path / "weights")

    return read


@pytest.fixture
def learn(make_rows, normalizers):
    """learn(worker, steps=…, lr=…, seed=…) -> what every step logged, its loss among it."""

    def steps(worker, steps=3, lr=1e-2, seed=0):
        logged = []
        for step in range(steps):
            rows = make_rows(6, seed + step)
            totals = worker.accumulate(micro_batches(rows, 60, 1)[0], normalizers(rows))
            numerator, denominator = totals["loss"]
            logged.append({"loss": numerator / denominator, **worker.step(lr)})
        return logged

    return steps


# -- offload ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1, "offload_optimizer": True},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True},
        {"zero_stage": 3, "offload_parameters": True},
        {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ],
    ids=str,
)
def test_offload_changes_nothing_but_where_numbers_are(make_worker, weights_of, learn, settings, dtype):
    expected, offloaded = make_worker(zero_stage=2, dtype=dtype), make_worker(**settings, dtype=dtype)
    for worker_a, worker_b in zip(learn(expected), learn(offloaded), strict=True):
        assert worker_b == pytest.approx(worker_a, rel=1e-5 if dtype == "float32" else 1e-2)
    if dtype == "float32":  # bfloat16 sums gradients in another order
        expected = weights_of(expected)
        for name, tensor in weights_of(offloaded).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def test_a_model_that_only_scores_says_the_same_from_the_cpus_memory(make_worker, make_rows):
    rows = make_rows(5)
    expected = make_worker(trained=False, role="reference").forward(rows)
    offloaded = make_worker(trained=False, role="reference", offload_parameters=True)  # ZeRO 3 by itself
    assert all(hasattr(parameter, "ds_id") for parameter in offloaded.network.parameters())
    for scores, worker_b in zip(expected, offloaded.forward(rows), strict=True):
        np.testing.assert_allclose(worker_b, scores, atol=1e-6)


# -- freezing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_frozen_parameters_stay_and_have_no_optimizer_state(
    make_worker, weights_of, learn, tmp_path, zero_stage, optimizer
):
    freeze = ["embed_tokens", r"layers\.0\."]
    worker = make_worker(learn={"freeze": freeze, "optimizer": optimizer}, zero_stage=zero_stage)
    initial = weights_of(worker)
    learn(worker)
    final = weights_of(worker)
    assert final.keys() == initial.keys()
    change = {name for name in initial if not torch.equal(initial[name], final[name])}
    assert change == {name for name in initial if name.startswith("model.layers.1.") or name == NORM}
    optimizer = worker.engine.optimizer
    state = getattr(optimizer, "optimizer", optimizer).state.values()  # ZeRO's are around another
    momentum = [part.get("exp_avg", part.get("momentum_buffer")) for part in state]
    assert sum(tensor.numel() for tensor in momentum) == sum(initial[name].numel() for name in change)
    worker.save(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert torch.equal(loaded[EMBEDDINGS], initial[EMBEDDINGS])
    assert torch.equal(loaded[NORM], final[NORM])


def test_a_tied_head_is_frozen_with_the_embeddings_it_is(make_worker, weights_of, learn):
    worker = make_worker(learn={"freeze": ["^lm_head"]})
    initial = weights_of(worker)
    learn(worker)
    assert torch.equal(weights_of(worker)[EMBEDDINGS], initial[EMBEDDINGS])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embed_tokens", "visual"], r"learner\.freeze: 'visual' matches no parameter's name \(such as model"),
        (["."], "leaves nothing to train"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused_in_one_line(make_worker, patterns, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_worker(learn={"freeze": patterns})
    assert "\n" not in str(caught.value)


# -- moving average ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 2, "offload_optimizer": True}], ids=str
)
def test_the_moving_average_is_that_of_the_weights_after_each_step(make_worker, weights_of, learn, tmp_path, settings):
    decay = 0.8
    worker = make_worker(learn={"ema_decay": decay, "freeze": ["embed_tokens"]}, **settings)
    expected = {name: tensor.double() for name, tensor in weights_of(worker).items()}
    for seed in range(4):
        learn(worker, steps=1, seed=seed)
        for name, tensor in weights_of(worker).items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor.double()
    worker.save_average(str(tmp_path / "average"))
    averaged = AutoModelForCausalLM.from_pretrained(tmp_path / "average")
    averaged = {name: tensor.detach() for name, tensor in averaged.named_parameters()}
    current = weights_of(worker)
    assert averaged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(averaged[name].double(), tensor, atol=1e-6, rtol=1e-6)
    assert float((averaged[MATRIX] - current[MATRIX]).abs().max()) > 1e-3
    assert torch.equal(averaged[EMBEDDINGS], current[EMBEDDINGS])


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_in_bfloat16_the_average_follows_the_float32_weights(make_worker, weights_of, learn, zero_stage):
    worker = make_worker(learn={"ema_decay": 0.5}, zero_stage=zero_stage, dtype="bfloat16")
    initial = weights_of(worker)[NORM].float()
    learn(worker, steps=2, lr=2**-12)  # a 32nd of the distance to the next bfloat16 number above 1
    assert torch.equal(weights_of(worker)[NORM].float(), initial)
    change = (worker.average.full_tensor(NORM, worker.device).cpu() - initial).abs()
    # Each step of Adam moves a weight by about lr: 1/2 (1/2 lr) + 1/2 (2 lr), where both have one direction.
    assert float(change.max()) == pytest.approx(1.25 * 2**-12, rel=0.05)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_average_goes_on_bit_for_bit(make_worker, learn, tmp_path, zero_stage):
    worker_a = make_worker(learn={"ema_decay": 0.9}, zero_stage=zero_stage)
    learn(worker_a, steps=2)
    worker_a.save_state(str(tmp_path / "state"))
    worker_b = make_worker(learn={"ema_decay": 0.9}, zero_stage=zero_stage)
    worker_b.load_state(str(tmp_path / "state"))
    for worker in (worker_a, worker_b):
        learn(worker, steps=2, seed=7)
    for name, _ in worker_a.network.model.named_parameters():
        assert torch.equal(
            *(worker.average.full_tensor(name, worker.device).cpu() for worker in (worker_a, worker_b))
        ), name


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_average_of_an_adapter_is_saved_merged(make_worker, learn, tied_model, tmp_path, zero_stage):
    worker = make_worker(learn={"ema_decay": 0.9}, lora={"rank": 4}, zero_stage=zero_stage)
    learn(worker, steps=3)
    worker.save(str(tmp_path / "model"))
    worker.save_average(str(tmp_path / "average"))
    folders = (tied_model, tmp_path / "average", tmp_path / "model")
    base, averaged, current = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert averaged.keys() == current.keys() == base.keys()
    assert torch.equal(averaged[EMBEDDINGS], base[EMBEDDINGS])
    assert 0 < float((averaged[MATRIX] - base[MATRIX]).norm()) < float((current[MATRIX] - base[MATRIX]).norm())


def test_a_state_without_an_average_is_refused_where_one_is_kept(make_worker, tmp_path):
    make_worker().save_state(str(tmp_path))
    with pytest.raises(RunError, match=r"learner\.ema_decay=0"):
        make_worker(learn={"ema_decay": 0.9}).load_state(str(tmp_path))


def test_only_the_policy_has_an_average(make_worker):
    assert make_worker(role="critic", head="scalar", learn={"ema_decay": 0.9}).average is None


# -- Muon -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "offload_optimizer": True}], ids=str
)
def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw(make_worker, weights_of, learn, settings):
    worker = make_worker(learn={"optimizer": "muon", "lr": 1e-3, "muon_lr": 1e-2, "max_grad_norm": 1e-3}, **settings)
    initial = weights_of(worker)
    logged = learn(worker, steps=1, lr=1e-3)
    assert "grad_norm" not in logged[0]  # DeepSpeed's would be that of the orthogonalised updates
    steps = {name: (tensor - initial[name]).double() for name, tensor in weights_of(worker).items()}
    for name, step in steps.items():
        if "proj" in name:
            # Five Newton-Schulz iterations leave singular values around 1, not at 1; K. Jordan gives 0.7 to 1.2. Tall
            # matrices are scaled by the square root of their aspect ratio.
            longest = 1e-2 * math.sqrt(max(1, step.shape[0] / step.shape[1]))
            singular = torch.linalg.svdvals(step)
            assert 0.4 * longest < float(singular.median()) < 1.3 * longest, name
            assert float(singular.max()) < 1.3 * longest, name
    assert float(steps[EMBEDDINGS].abs().median()) == pytest.approx(1e-3, rel=1e-2)  # Adam's first step is a sign
    assert float(steps[NORM].abs().median()) == pytest.approx(1e-3, rel=1e-2)


def test_muon_lowers_the_loss_and_goes_on_bit_for_bit(make_worker, make_rows, normalizers, weights_of, tmp_path):
    rows = make_rows(8)

    def steps(worker, n):
        losses = []
        for _ in range(n):
            losses.append(worker.accumulate([rows[:4], rows[4:]], normalizers(rows))["loss"][0])
            worker.step(1e-2)
        return losses

    settings = {"learn": {"optimizer": "muon", "lr": 1e-2}, "zero_stage": 2}
    worker_a, worker_b = make_worker(**settings), make_worker(**settings)
    losses = steps(worker_a, 6)
    assert losses[-1] < 0.7 * losses[0]
    worker_a.save_state(str(tmp_path / "state"))
    worker_b.load_state(str(tmp_path / "state"))
    steps(worker_a, 2)
    steps(worker_b, 2)
    expected = weights_of(worker_a)
    for name, tensor in weights_of(worker_b).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_scalar_head_is_no_hidden_matrix(make_worker):
    worker = make_worker(role="critic", head="scalar", learn={"optimizer": "muon"})
    marked = {name for name, parameter in worker.network.model.named_parameters() if parameter.use_muon}
    assert marked == {name for name, _ in worker.network.model.named_parameters() if "_proj" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_of_a_vision_tower_are_orthogonalised(kind):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(kind))
    mark_for_muon(model)
    marked = {name for name, parameter in model.named_parameters() if parameter.use_muon}
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    assert marked == {name for name in matrices if not re.search(r"embed_tokens|lm_head|position_emb|pos_embed", name)}
    assert any("layers" in name for name in marked)
    assert any("vis" in name for name in marked)


@pytest.mark.parametrize(("zero_stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "bfloat16")])
def test_muon_orthogonalises_each_expert_by_itself(make_worker, weights_of, learn, tmp_path, zero_stage, dtype):
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=4,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "zero_stage": zero_stage, "dtype": dtype}
    worker = make_worker(learn={"optimizer": "muon"}, **settings)
    name = "model.layers.0.mlp.experts.down_proj"
    initial = weights_of(worker)[name].float()
    learn(worker, steps=1, lr=0.1)
    steps = weights_of(worker)[name].float() - initial
    assert steps.shape == (4, 32, 16)
    for step in steps:
        assert 0.4 < float(torch.linalg.svdvals(step).median()) / (0.1 * math.sqrt(2)) < 1.3


# -- float16 ----------------------------------------------------------------------------------------------


@pytest.fixture
def float16_on_a_cpu(monkeypatch):
    """DeepSpeed takes float16 on CPUs with instructions for it only; the numbers come out without them, too."""
    import deepspeed  # noqa: F401
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_step_that_overflows_in_float16_is_skipped_and_counted(
    make_worker, weights_of, learn, float16_on_a_cpu, zero_stage
):
    raw = {"fp16": {"initial_scale_power": 20, "hysteresis": 1}}  # 2^20 is more than float16 can hold
    worker = make_worker(zero_stage=zero_stage, dtype="float16", deepspeed=raw, learn={"ema_decay": 0.5})
    initial = weights_of(worker)
    scales = []
    for _ in range(20):
        [step] = learn(worker, steps=1)
        scales.append(step["loss_scale"])
        if not step["overflow"]:
            break
        assert step["overflow"] == 1.0
        assert "grad_norm" not in step
        assert torch.equal(weights_of(worker)[MATRIX], initial[MATRIX])
        assert torch.equal(worker.average.full_tensor(MATRIX, worker.device).cpu(), initial[MATRIX].float())
    assert scales == [2.0 ** (20 - k) for k in range(len(scales))]
    assert len(scales) > 1
    assert step["grad_norm"] > 0
    change = (weights_of(worker)[MATRIX].float() - initial[MATRIX].float()).abs()
    assert float(change.median()) == pytest.approx(1e-2, rel=0.05)


def test_in_float16_the_norm_is_the_gradients_own(make_worker, learn, float16_on_a_cpu):
    [expected], [step] = learn(make_worker(), steps=1), learn(make_worker(dtype="float16", zero_stage=2), steps=1)
    assert step["overflow"] == 0.0
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)


def test_a_loss_scale_that_cannot_get_smaller_is_one_line(make_worker, learn, float16_on_a_cpu):
    raw = {"fp16": {"initial_scale_power": 20, "hysteresis": 1, "min_loss_scale": 2**19}}
    worker = make_worker(zero_stage=2, dtype="float16", deepspeed=raw)
    with pytest.raises(RunError, match="overflows at the smallest loss scale"):
        learn(worker, steps=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dtype": "float16"}, "float16 does not work on this CPU"), ({"compile": True, "zero_stage": 2}, "needs a GPU")],
)
def test_what_this_machine_cannot_do_is_refused_in_one_line(make_worker, monkeypatch, settings, message):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: None)
    with pytest.raises(ConfigError, match=message) as caught:
        make_worker(**settings)
    assert "\n" not in str(caught.value)


class _MixedAdditions(TorchDispatchMode):
    """Counts the numbers that are added to float32 from bfloat16, without a converted copy of them."""

    def __init__(self):
        super().__init__()
        self.n_added = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) == "aten.add_.Tensor" and (args[0].dtype, args[1].dtype) == (torch.float32, torch.bfloat16):
            self.n_added += args[1].numel()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("budget", [10_000, 60])
def test_each_micro_batchs_gradient_is_added_once_and_not_converted_before(budget, make_worker, make_rows, normalizers):
    worker, rows = make_worker(dtype="bfloat16"), make_rows(12)
    [batches] = micro_batches(rows, budget, 1)
    assert (len(batches) == 1) == (budget == 10_000)
    backward, counter = worker.engine.backward, _MixedAdditions()

    def counted(*args, **kwargs):
        with counter:
            return backward(*args, **kwargs)

    worker.engine.backward = counted
    worker.accumulate(batches, normalizers(rows))
    n_parameters = worker.info().n_parameters
    assert n_parameters <= counter.n_added / len(batches) < 2 * n_parameters  # the output layer may add its own
