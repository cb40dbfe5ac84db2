"""Fused layers in place of a model's own: where they are used, that they are tried, and that they can be undone.

Liger's kernels run on GPUs alone. A package that stands in for it patches a model as it does, by plain functions.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from envgym.learner import RoleSpec
from envgym.workers import fused_layers, trials
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.fused_layers import can_fuse, fuse
from envgym.workers.model import ModelWorker
from envgym.workers.network import TokenNetwork
from tests.workers.test_network import answers, batch, make_model
from tests.workers.test_prefixes import CPU

GPU = torch.device("cuda")


class Liger:
    """What stands in for the package: `factor` 1 computes what the model does; `calls` are the names it was given."""

    def __init__(self):
        self.factor, self.calls, self.n_norms = 1.0, [], 0

    def normalise(self, norm, states):
        self.n_norms += 1
        return self.factor * type(norm).forward(norm, states)

    def apply(self, model, **options):
        self.calls.append((model.config.model_type, options))
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.offset = 0.0
                module.forward = MethodType(self.normalise, module)
        rotate = modeling_qwen3.apply_rotary_pos_emb
        modeling_qwen3.apply_rotary_pos_emb = lambda *args, **kwargs: rotate(*args, **kwargs)
        modeling_qwen3.Qwen3RMSNorm = torch.nn.RMSNorm


@pytest.fixture
def liger(monkeypatch):
    stand_in = Liger()
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch", "triton"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module = sys.modules["liger_kernel.transformers.monkey_patch"]
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    module._apply_liger_kernel_to_instance = stand_in.apply
    for name in ("apply_rotary_pos_emb", "Qwen3RMSNorm"):
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))
    return stand_in


def test_layers_are_fused_on_a_gpu_for_the_families_that_the_package_knows(liger, monkeypatch):
    assert can_fuse(make_model("qwen3"), GPU)
    assert not can_fuse(make_model("qwen3"), CPU)
    assert not can_fuse(make_model("llama"), GPU)
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: None)
    assert not can_fuse(make_model("qwen3"), GPU)


def test_a_model_that_answers_as_before_is_fused_without_the_packages_losses(liger, monkeypatch):
    monkeypatch.setattr(trials, "can_fuse", lambda model, device: True)
    expected = answers(TokenNetwork(make_model("qwen3"), "lm", entropy=True), batch(), packed=False)
    network = TokenNetwork(make_model("qwen3"), "lm", entropy=True)
    assert trials.try_fused_layers(network, network, CPU) == ""
    assert liger.calls == [("qwen3", {"cross_entropy": False, "fused_linear_cross_entropy": False})]
    liger.n_norms = 0
    torch.testing.assert_close(answers(network, batch(), packed=False), expected)
    assert liger.n_norms == 4 * network.model.config.num_hidden_layers + 1  # two of a layer, two of its heads
    assert make_model("qwen3").model.norm.__class__.__name__ == "Qwen3RMSNorm"  # later models are made as ever


@pytest.mark.parametrize(("factor", "reason"), [(1.1, "answers otherwise"), (None, r"fails \(TypeError: .*\)")])
def test_a_model_that_would_answer_otherwise_stays_as_it_is(factor, reason, liger, monkeypatch):
    monkeypatch.setattr(trials, "can_fuse", lambda model, device: True)
    network = TokenNetwork(make_model("qwen3"), "lm", entropy=True)
    before = [dict(vars(module)) for module in network.model.modules()], dict(vars(modeling_qwen3))
    liger.factor = factor
    said = trials.try_fused_layers(network, network, CPU)
    assert re.fullmatch(f"layers are not fused, since with liger-kernel the model {reason}", said)
    after = [dict(vars(module)) for module in network.model.modules()], dict(vars(modeling_qwen3))
    assert [vars_.keys() for vars_ in before[0]] == [vars_.keys() for vars_ in after[0]]
    assert before[1] == after[1]
    liger.n_norms = 0
    answers(network, batch(), packed=False)
    assert liger.n_norms == 0


@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_a_worker_tries_it_and_says_what_it_does_without(kernels, liger, monkeypatch, tied_model, learner):
    monkeypatch.setattr(trials, "can_fuse", lambda model, device: True)
    liger.factor = 1.5
    settings = WorkersConfig(kernels=kernels, dtype="float32")
    worker = ModelWorker(WorkerSpec("actor", tied_model, RoleSpec(trained=True), learner, settings))
    notes = worker.load().notes
    worker.close()
    assert [note.partition(",")[0] for note in notes] == (["layers are not fused"] if kernels == "auto" else [])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_the_package_itself_patches_layers_and_no_loss_and_is_undone(architecture):
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model = make_model(architecture)
    assert architecture in MODEL_TYPE_TO_APPLY_LIGER_FN
    expected = answers(TokenNetwork(make_model(architecture), "lm"), batch(), packed=False)
    undo = fuse(model)
    layer = model.model.layers[0]
    assert all("liger" in m.forward.__module__ for m in (layer.mlp, layer.input_layernorm, model.model.norm))
    assert "liger" in sys.modules[type(model).__module__].apply_rotary_pos_emb.__module__
    assert "forward" not in vars(model)
    undo()
    torch.testing.assert_close(answers(TokenNetwork(model, "lm"), batch(), packed=False), expected)
