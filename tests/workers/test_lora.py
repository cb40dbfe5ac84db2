"""Adapters in the worker: only they learn, as peft and plain arithmetic say; the base stays, and can be had back."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from envgym.errors import ConfigError, MissingDependency
from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.lora import LoraConfig
from tests.weight_files import export

LORA = {"rank": 4, "alpha": 6}


@pytest.fixture
def make_worker(make_worker, untied_model):
    return lambda **settings: make_worker(**{"model": untied_model, "lora": LORA, **settings})


def adapter_of(worker, folder: Path):
    worker.export_adapter(str(folder))
    return load_file(folder / "adapter_model.safetensors")


def logprobs(model, rows):
    result = []
    for row in rows:
        ids = torch.tensor(row.token_ids)[None]
        logits = model(input_ids=ids).logits[0, :-1] / float(row.temperatures[0])
        result.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return result


def steps_by_hand(base, folder, rows, n_steps):
    """The adapter after steps of plain gradient descent at rate 1, in float64, by peft alone."""
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), folder, is_trainable=True
    ).double()
    totals = {}
    for row in rows:
        totals[row.objective] = totals.get(row.objective, 0.0) + float(row.loss_weights.sum())
    for _ in range(n_steps):
        for row, logprob in zip(rows, logprobs(model, rows), strict=True):
            (
                -(logprob * torch.tensor(row.loss_weights[1:], dtype=torch.float64)).sum() / totals[row.objective]
            ).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= parameter.grad
                parameter.grad = None
    return {name: tensor.float() for name, tensor in peft.get_peft_model_state_dict(model).items()}


@pytest.mark.parametrize(
    "zero_stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_only_the_adapter_learns(
    make_worker, make_rows, normalizers, plain_gradient_descent, untied_model, tmp_path, zero_stage
):
    rows = make_rows(6)
    worker = make_worker(zero_stage=zero_stage, deepspeed=plain_gradient_descent)
    initial = adapter_of(worker, tmp_path / "before")
    for _ in range(2):  # the first moves B alone, which begins at zero
        worker.accumulate([rows[:4], rows[4:]], normalizers(rows))
        worker.step(1.0)
    final = adapter_of(worker, tmp_path / "after")
    expected = steps_by_hand(untied_model, tmp_path / "before", rows, 2)
    assert final.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensor - initial[name]).abs().max() > 1e-3
        torch.testing.assert_close(final[name], tensor, atol=1e-5, rtol=1e-4)
    assert worker.info().n_trained == sum(tensor.numel() for tensor in final.values())
    export(worker, tmp_path / "base.safetensors")
    saved_base = load_file(tmp_path / "base.safetensors")
    base = load_file(Path(untied_model) / "model.safetensors")
    assert saved_base.keys() == base.keys()
    assert all(torch.equal(saved_base[name], base[name]) for name in base)


@pytest.mark.parametrize(
    "workers",
    [
        {},
        pytest.param({"ranks": 2, "zero_stage": 2}, marks=pytest.mark.slow),
        {"ranks": 2, "zero_stage": 3},
        pytest.param({"ranks": 2, "sequence_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_ranks_leave_is_the_policy(
    make_rows, normalizers, plain_gradient_descent, learner, tied_model, tmp_path, workers, run_group
):
    """Real processes: the merged model, the adapter's folder and the workers say the same; without it they say what the
    base says, to the bit."""
    rows = make_rows(7)

    async def body(group):
        reference = group.without_adapter("reference")
        initial = await group.forward(rows), await reference.forward(rows)
        for _ in range(3):
            await group.accumulate(rows, normalizers(rows))
            await group.step(0.3)
        await group.on_all(lambda rank: rank.save(str(tmp_path / "model")))
        await group.on_all(lambda rank: rank.export_adapter(str(tmp_path / "adapter")))
        final = await reference.forward(rows)
        await group.accumulate(rows, normalizers(rows))
        await group.step(0.0)  # what learns does so after a pass without the adapter
        return initial, final, await group.forward(rows)

    settings = WorkersConfig(**workers, dtype="float32", deepspeed=plain_gradient_descent)

    spec = WorkerSpec("actor", tied_model, RoleSpec(trained=True), learner, settings, LoraConfig(**LORA))
    (start, base), final, learned = run_group(LocalRuntime(tmp_path / "logs"), spec, body)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    with torch.no_grad():
        merged_says, peft_says = logprobs(merged, rows), logprobs(with_adapter, rows)
    for index in range(len(rows)):
        assert np.array_equal(start[index], base[index])
        assert np.array_equal(final[index], base[index])
        assert np.abs(learned[index] - base[index]).max() > 0.1
        counts = rows[index].loss_weights[1:] != 0  # nothing is asked of the others
        np.testing.assert_allclose(learned[index][1:][counts], merged_says[index][counts], atol=1e-5)
        np.testing.assert_allclose(learned[index][1:][counts], peft_says[index][counts], atol=1e-5)
    assert not any("lora" in name or "base_layer" in name for name in load_file(tmp_path / "model/model.safetensors"))


@pytest.mark.parametrize(
    "zero_stage", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_learning_goes_on_from_a_small_checkpoint(
    make_worker, make_rows, normalizers, tied_model, tmp_path, zero_stage
):
    rows = make_rows(4)

    def learn(worker):
        worker.accumulate([rows], normalizers(rows))
        worker.step(1e-2)

    worker = make_worker(zero_stage=zero_stage, model=tied_model)
    learn(worker)
    worker.save_state(str(tmp_path / "state"))
    learn(worker)
    expected = adapter_of(worker, tmp_path / "straight")
    second_worker = make_worker(zero_stage=zero_stage, model=tied_model)
    second_worker.load_state(str(tmp_path / "state"))
    learn(second_worker)
    got = adapter_of(second_worker, tmp_path / "resumed")
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    [states] = (tmp_path / "state/deepspeed").glob("*model_states.pt")
    saved_state = torch.load(states, weights_only=False)["module"]
    assert all("lora_" in name for name in saved_state)


def test_a_critics_head_learns_in_full(make_worker, make_rows, normalizers, untied_model, tmp_path):
    rows = make_rows(4)
    worker = make_worker(role="critic", head="scalar")
    for _ in range(3):
        worker.accumulate([rows], normalizers(rows))
        worker.step(1e-2)
    values = worker.forward(rows)
    worker.save(str(tmp_path / "model"))
    worker.export_adapter(str(tmp_path / "adapter"))
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(untied_model, dtype=torch.float32, num_labels=1)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for row, value in zip(rows, values, strict=True):
        ids = torch.tensor(row.token_ids)[None]
        with torch.no_grad():
            for model in (merged, with_adapter):  # which give the last token's value
                np.testing.assert_allclose(model(input_ids=ids).logits[0, 0], value[-1], atol=1e-5)
    head = load_file(tmp_path / "adapter/adapter_model.safetensors")["base_model.model.score.weight"]
    assert worker.info().n_trained > head.numel() > 0


def test_named_layers_alone_get_an_adapter(make_worker, tmp_path):
    worker = make_worker(lora={"rank": 2, "targets": ["q_proj", "v_proj"]})
    names = {name.split(".")[-3] for name in adapter_of(worker, tmp_path)}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_4_bit_weights_are_what_is_learned_on_and_merged_into(make_worker, make_rows, normalizers, tmp_path, dtype):
    """The base is computed with in one way in every pass, and what is saved is the policy that learned."""
    rows = make_rows(6)
    worker = make_worker(lora={**LORA, "quantize": "4bit"}, dtype=dtype)
    plain = make_worker(lora=LORA, dtype=dtype)
    base_scores, full_scores = worker.forward_base(rows), plain.forward_base(rows)
    assert max(np.abs(a - b).max() for a, b in zip(base_scores, full_scores, strict=True)) > 0.05  # there were 4 bits
    losses = []
    for _ in range(12):
        total = worker.accumulate([rows], normalizers(rows))["loss"]
        losses.append(total[0] / total[1])
        worker.step(2e-2)
    assert losses[-1] < 0.8 * losses[0]
    scores = worker.forward(rows)
    assert all(np.array_equal(a, b) for a, b in zip(worker.forward_base(rows), base_scores, strict=True))
    worker.save(str(tmp_path / "model"))
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    with torch.no_grad():
        says = logprobs(merged, rows)
    bound = 1e-5 if dtype == "float32" else 0.2  # merging rounds to the number format
    for row, score, message in zip(rows, scores, says, strict=True):
        counts = row.loss_weights[1:] != 0  # nothing is asked of the others
        np.testing.assert_allclose(score[1:][counts], message.float()[counts], atol=bound)
    worker.save_state(str(tmp_path / "state"))
    second_worker = make_worker(lora={**LORA, "quantize": "4bit"}, dtype=dtype)
    second_worker.load_state(str(tmp_path / "state"))
    assert all(np.array_equal(a, b) for a, b in zip(second_worker.forward(rows), scores, strict=True))


# -- mistakes ---------------------------------------------------------------------------------------------


@pytest.fixture
def mixture_of_experts(tmp_path):
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    return str(tmp_path / "experts")


def test_attention_of_a_mixture_of_experts_gets_an_adapter_and_experts_do_not(
    make_worker, make_rows, normalizers, mixture_of_experts, tmp_path
):
    with pytest.raises(ConfigError, match="the experts and routers of this model cannot have an adapter"):
        make_worker(model=mixture_of_experts)
    rows = make_rows(4)
    worker = make_worker(model=mixture_of_experts, lora={"rank": 2, "targets": ["q_proj", "o_proj"]})
    before = worker.forward(rows)
    for _ in range(2):
        worker.accumulate([rows], normalizers(rows))
        worker.step(1.0)
    scores = worker.forward(rows)
    assert max(np.abs(a - b)[1:].max() for a, b in zip(before, scores, strict=True)) > 1e-3
    worker.save(str(tmp_path / "model"))
    with torch.no_grad():
        merged = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), rows)
    for row, score, expected in zip(rows, scores, merged, strict=True):
        counts = row.loss_weights[1:] != 0
        np.testing.assert_allclose(score[1:][counts], expected[counts], atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["qproj"], r"lora.targets=\['qproj'\]: Target modules {'qproj'} not found in the base model"),
        (["lm_head"], "lora.targets: the embedding and the head cannot have an adapter"),
    ],
)
def test_targets_that_cannot_be(make_worker, targets, message):
    with pytest.raises(ConfigError, match=message):
        make_worker(lora={"rank": 2, "targets": targets})


@pytest.mark.parametrize(
    ("settings", "workers", "message"),
    [
        ({"quantize": "4bit"}, {}, "lora.quantize of the actor has no effect without an adapter: set lora.rank"),
        ({"alpha": 3}, {}, "lora.alpha of the actor has no effect without an adapter: set lora.rank"),
        ({"rank": 4, "dropout": 0.1}, {}, "lora.dropout=0.1 would train another policy than the one that is sampled"),
        ({"rank": 4}, {"tensor_parallel": 2, "ranks": 2}, "the adapter of the actor needs whole layers"),
        ({"rank": 4, "quantize": "4bit"}, {"zero_stage": 3}, "lora.quantize=4bit needs workers.zero_stage 0, 1 or 2"),
    ],
)
def test_settings_that_contradict_each_other(settings, workers, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings).check("actor", WorkersConfig(**workers), is_sampled=True)


def test_dropout_is_for_recorded_data():
    LoraConfig(rank=4, dropout=0.1).check("actor", WorkersConfig(), is_sampled=False)


@pytest.mark.parametrize(
    ("package", "settings"), [("peft", {"rank": 4}), ("bitsandbytes", {"rank": 4, "quantize": "4bit"})]
)
def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch, package, settings):
    monkeypatch.setattr("envgym.workers.lora.find_spec", lambda name: None if name == package else object())
    LoraConfig().check_installed()
    with pytest.raises(MissingDependency, match=rf"'{package}', which is not installed: .* -m pip install '{package}"):
        LoraConfig(**settings).check_installed()
