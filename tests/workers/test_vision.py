"""A vision-language model in a worker, on texts: rows, prefixes, packing, training, adapters, and what is refused."""

import re
from itertools import pairwise

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, AutoProcessor

from envgym.errors import ConfigError
from envgym.models.vision import save_tokenizer, vision_pattern
from envgym.render import load_tokenizer
from envgym.types import Objective, Row, Segment, int_array
from envgym.workers.config import ImageConfig
from envgym.workers.merge import merge_adapter
from envgym.workers.micro_batches import micro_batches
from tests.vision_models import KINDS
from tests.weight_files import export

PREFIX = list(range(3, 23))
"""Tokens of images are among them: to a text they are tokens as others."""


def rows():
    """Rows of three lengths that begin alike, all of them actions."""
    endings = ([30, 31, 32], [30, 41, 42, 43, 44, 45, 46, 47], [51])
    return [Row([Segment("action", int_array([*PREFIX, *ending]))]) for ending in endings]


def learning_rows():
    """Rows to learn from."""
    return [
        Row.from_arrays(
            np.array(row.token_ids), np.minimum(np.arange(len(row.token_ids)), 1), np.full(len(row.token_ids), np.nan),
            Objective.CROSS_ENTROPY, microbatch_key=number,
        )
        for number, row in enumerate(rows())
    ]  # fmt: skip


def learn(worker, normalizers, samples=None, *, with_images=False):
    samples = samples or learning_rows()
    worker.accumulate(micro_batches(samples, 1000, 1)[0], normalizers(samples), with_images=with_images)
    worker.step(1e-2)


def tower_names(worker):
    pattern = vision_pattern(worker.network.model)
    return {name for name, _ in worker.network.model.named_parameters() if re.fullmatch(pattern, name)}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_scored_the_same_alone_together_and_packed(make_worker, vision_model, kind):
    model = AutoModelForImageTextToText.from_pretrained(vision_model(kind)).eval()
    expected = []
    for row in rows():
        ids = torch.tensor([row.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy())
    for settings in ({}, {"share_prefixes": False}, {"share_prefixes": False, "packing": True}):
        worker = make_worker(str(vision_model(kind)), trained=False, **settings)
        assert worker.info().not_shared == ("workers.share_prefixes=false" if settings else "")
        assert worker.info().packed == ("packing" in settings)
        for line, reference in zip(worker.forward(rows()), expected, strict=True):
            np.testing.assert_allclose(line[1:], reference, atol=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_to_engines_by_the_names_of_the_checkpoint(make_worker, vision_model, tmp_path, kind):
    """Those of the tower too, of which vLLM knows some by no other name."""
    worker = make_worker(str(vision_model(kind)), trained=False)
    worker.begin_export(2**40, str(tmp_path / "weights"), True)
    sent, saved = load_file(worker.next_bucket().path), load_file(vision_model(kind) / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in sent.items())


@pytest.mark.parametrize(("optimizer", "zero_stage"), [("adamw", 0), ("adamw", 2), ("adamw", 3), ("muon", 2)])
def test_a_tower_decays_in_steps_with_images_alone(
    make_worker, vision_model, normalizers, tmp_path, optimizer, zero_stage
):
    """From texts its gradient is 0: nothing would restore what decays."""
    learn_settings = {"weight_decay": 0.5, "optimizer": optimizer}
    samples = [row.copy_with(token_ids=np.maximum(row.token_ids, PREFIX[-1])) for row in learning_rows()]
    images = ImageConfig(str(tmp_path / "images"))
    worker = make_worker(str(vision_model("llava")), zero_stage, learn=learn_settings, images=images)
    export(worker, tmp_path / "before")
    weights = [load_file(tmp_path / "before")]
    for number, with_images in enumerate((False, False, True, False)):
        learn(worker, normalizers, samples, with_images=with_images)
        export(worker, tmp_path / str(number))
        weights.append(load_file(tmp_path / str(number)))
    changes = [{name for name in old if not torch.equal(old[name], new[name])} for old, new in pairwise(weights)]
    tower, language_model = tower_names(worker), weights[0].keys() - tower_names(worker)
    decayed = {name for name in tower if weights[0][name].any()}
    assert decayed
    assert changes == [language_model, language_model, language_model | decayed, language_model]


def test_a_state_of_a_trained_tower_goes_on_at_another_stage(make_worker, vision_model, normalizers, tmp_path):
    """The optimizer has the language model's parameters first, the model the tower's."""
    samples = [row.copy_with(token_ids=np.maximum(row.token_ids, PREFIX[-1])) for row in learning_rows()]
    images = ImageConfig(str(tmp_path / "images"))
    weights = {}
    for zero_stage in (0, 2):
        worker = make_worker(str(vision_model("llava")), zero_stage, images=images)
        if zero_stage == 0:
            learn(worker, normalizers, samples, with_images=True)
            worker.save_state(str(tmp_path / "state"))
        else:
            worker.load_state(str(tmp_path / "state"))
        learn(worker, normalizers, samples, with_images=True)
        export(worker, tmp_path / "weights")
        weights[zero_stage] = load_file(tmp_path / "weights")
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[2][name], tensor, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("kind", "zero_stage"), [("qwen3_vl", 0), ("gemma3", 2), ("llava", 3)])
def test_texts_leave_the_tower_as_it_is(make_worker, vision_model, normalizers, tmp_path, kind, zero_stage):
    """Also with weight decay, which would shrink what has no gradient."""
    folder = vision_model(kind)
    worker = make_worker(str(folder), zero_stage, learn={"weight_decay": 0.5})
    export(worker, tmp_path / "before")
    learn(worker, normalizers)
    export(worker, tmp_path / "after")
    before, after = load_file(tmp_path / "before"), load_file(tmp_path / "after")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == before.keys() - tower_names(worker)
    assert worker.info().n_trained == sum(before[name].numel() for name in changed)

    worker.save(str(tmp_path / "model"))
    save_tokenizer(load_tokenizer(str(folder)), tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert type(loaded) is type(worker.network.model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in loaded.named_parameters())
    names = load_file(tmp_path / "model/model.safetensors").keys()
    assert names == load_file(folder / "model.safetensors").keys()  # those that vLLM knows
    assert type(AutoProcessor.from_pretrained(tmp_path / "model")) is type(AutoProcessor.from_pretrained(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=str)
def test_an_adapter_is_of_the_language_model_alone(make_worker, vision_model, normalizers, tmp_path, kind, targets):
    worker = make_worker(str(vision_model(kind)), lora={"rank": 2, "targets": targets})
    layers = {name.partition(".lora_")[0] for name, _ in worker.network.model.named_parameters() if ".lora_" in name}
    assert not layers & {re.sub(r"\.(weight|base_layer.*)$", "", name) for name in tower_names(worker)}
    assert len(layers) == 2 * (7 if targets == "all-linear" else 2)
    if kind != "llava":
        return
    learn(worker, normalizers)
    worker.export_adapter(str(tmp_path / "adapter"))
    load_tokenizer(str(vision_model(kind))).save_pretrained(tmp_path / "adapter")  # as peft's users often do
    notes = []
    merge_adapter(str(tmp_path / "adapter"), str(tmp_path / "merged"), note=notes.append)
    assert not notes
    [row, *_] = rows()
    [expected, *_] = worker.forward(rows())
    for folder, has_adapter in ((tmp_path / "merged", False), (vision_model(kind), True)):
        model = AutoModelForImageTextToText.from_pretrained(folder)
        if has_adapter:
            model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
        ids = torch.tensor([row.token_ids.tolist()])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(logprobs.gather(1, ids[0, 1:, None])[:, 0], expected[1:], atol=1e-5)
    assert type(AutoProcessor.from_pretrained(tmp_path / "merged")).__name__ == "LlavaProcessor"


def test_a_critic_of_a_family_that_has_them_is_one(make_worker, vision_model, tmp_path):
    worker = make_worker(str(vision_model("gemma3")), role="critic", head="scalar")
    worker.save(str(tmp_path / "before"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "before").eval()
    for values, row in zip(worker.forward(rows()), rows(), strict=True):
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([row.token_ids.tolist()]), use_cache=False).last_hidden_state
            expected = model.score(states)[0, :, 0].numpy()
        np.testing.assert_allclose(values, expected, atol=1e-5)
    assert not worker.info().not_shared


# -- what is refused --------------------------------------------------------------------------------------


def test_frozen_but_for_the_tower_nothing_is_left(make_worker, vision_model):
    with pytest.raises(ConfigError, match=r"learner\.freeze=\['language_model', 'lm_head'\] leaves nothing to train"):
        make_worker(str(vision_model("llava")), learn={"freeze": ["language_model", "lm_head"]})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gemma3"])
def test_a_critic_of_one_is_refused(make_worker, vision_model, kind):
    with pytest.raises(ConfigError, match=r"no critic or reward model of the vision-language model \w+: name a lang"):
        make_worker(str(vision_model(kind)), role="critic", head="scalar")


@pytest.mark.parametrize("settings", [{"sequence_parallel": 2}, {"tensor_parallel": 2}], ids=str)
def test_ranks_do_not_share_its_rows(make_worker, vision_model, settings, monkeypatch):
    monkeypatch.setattr("envgym.workers.zero.join_process_group", lambda *_: None)
    with pytest.raises(ConfigError, match=r"^\S+ is a vision-language model, whose rows ranks cannot share: set "):
        make_worker(str(vision_model("qwen2_vl")), ranks=2, **settings)
