"""Ranks of which some have no image take the step that one process takes, with the vision tower trained and frozen."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from envgym.errors import ConfigError
from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.lora import LoraConfig
from envgym.workers.model import ModelWorker
from tests.vision_models import make_vision_model
from tests.weight_files import export_group
from tests.workers.conftest import PLAIN_GRADIENT_DESCENT
from tests.workers.test_images import TEXT, Vision, picture

TOWER = r"vision_tower|visual|vision_model"


@pytest.fixture(scope="module")
def make_vision(tmp_path_factory):
    """make_vision(kind) -> a `Vision`, and rows of which one has images."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            make_vision_model(kind, folder / "model", TEXT)
            vision = Vision(kind, folder)
            texts = [vision.row(text, key=key) for key, text in enumerate([*TEXT[:2], "It is blue.", "What?"], 1)]
            pictured = vision.row("What colour?", picture(1), TEXT[1], picture(2, (56, 90)), "\n It is red.", key=0)
            made[kind] = vision, [pictured, *texts]
        return made[kind]

    return make


@pytest.fixture
def take_step(make_vision, learner, normalizers, run_group, tmp_path):
    """take_step(kind, ranks, …) -> scores, the weights after a step of plain gradient descent, and its metrics."""

    def run(kind, ranks=1, *, trained=True, freeze=(), lora=None, **settings):
        vision, rows = make_vision(kind)
        config = WorkersConfig(
            ranks=ranks, dtype="float32", deepspeed=PLAIN_GRADIENT_DESCENT if trained else {},
            **{"tokens_per_microbatch": 60, **settings},
        )  # fmt: skip
        spec = WorkerSpec(
            "actor", str(vision.folder / "model"), RoleSpec(trained=trained), {**learner, "freeze": list(freeze)},
            config, LoraConfig(**lora or {}), images=vision.config,
        )  # fmt: skip

        async def body(group):
            scores = await group.forward(rows)
            if not trained:
                return scores
            if lora:
                for line, score in zip(await group.without_adapter("reference").forward(rows), scores, strict=True):
                    np.testing.assert_allclose(line, score, atol=1e-6, rtol=0)
            await group.accumulate(rows[1:], normalizers(rows[1:]))  # a step of texts alone, before and after it
            await group.step(0.0)
            metrics = await group.accumulate(rows, normalizers(rows)) | await group.step(1.0)
            outputs = {
                row.microbatch_key: lines[0]
                for row, lines in await group.accumulated_outputs()
                if row.loss_weights.any()
            }
            await export_group(group, tmp_path / "weights")
            await group.accumulate(rows[1:], normalizers(rows[1:]))
            await group.step(0.0)
            return scores, metrics, load_file(tmp_path / "weights"), [outputs[row.microbatch_key] for row in rows]

        return run_group(InlineRuntime() if ranks == 1 else LocalRuntime(tmp_path / "logs"), spec, body)

    return run


CASES = [(kind, stage, freeze) for kind in ("llava", "qwen2_5_vl") for stage in (0, 2, 3) for freeze in ((), (TOWER,))]
FAST = {("llava", 3, ()), ("qwen2_5_vl", 2, (TOWER,))}


@pytest.mark.parametrize(
    ("kind", "stage", "freeze"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_ranks_with_and_without_images_move_the_weights_as_one_process_does(
    take_step, make_vision, kind, stage, freeze
):
    vision, rows = make_vision(kind)
    expected = take_step(kind, freeze=freeze)
    initial = dict(vision.model.named_parameters())
    assert expected[2].keys() == initial.keys()
    moved = [name for name, tensor in expected[2].items() if not torch.equal(tensor, initial[name])]
    assert any("language" in name or "embed_tokens" in name for name in moved)
    assert any("vision" in name or "visual" in name for name in moved) == (not freeze)
    result = take_step(kind, ranks=2, freeze=freeze, zero_stage=stage)
    for scores in (result[0], result[3]):
        for line, other, row in zip(scores, expected[0], rows, strict=True):
            np.testing.assert_allclose(line, other, atol=1e-5, rtol=0)
            np.testing.assert_allclose(line, vision.reference(row), atol=1e-5, rtol=0)
    assert result[1]["loss"] == pytest.approx(expected[1]["loss"], rel=1e-5)
    assert result[1]["grad_norm"] == pytest.approx(expected[1]["grad_norm"], rel=1e-5)
    assert result[2].keys() == expected[2].keys()
    for name, tensor in expected[2].items():
        torch.testing.assert_close(result[2][name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_a_frozen_model_that_ranks_split_scores_rows_of_which_one_has_images(take_step, make_vision, kind):
    vision, rows = make_vision(kind)
    for line, row in zip(take_step(kind, ranks=2, trained=False, zero_stage=3), rows, strict=True):
        np.testing.assert_allclose(line, vision.reference(row), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_activations_are_recomputed_and_rows_packed_with_images_too(take_step, kind):
    expected = take_step(kind)
    for settings in ({"gradient_checkpointing": True}, {"packing": True}, {"tokens_per_microbatch": 10_000}):
        result = take_step(kind, **settings)
        assert result[1]["grad_norm"] == pytest.approx(expected[1]["grad_norm"], rel=1e-4)
        for name, tensor in expected[2].items():
            torch.testing.assert_close(result[2][name], tensor, atol=1e-5, rtol=1e-4)


def test_an_adapter_leaves_the_vision_tower_and_learns_from_images(take_step, make_vision):
    vision, rows = make_vision("llava")
    scores, metrics, weights, _ = take_step("llava", lora={"rank": 4})
    for line, row in zip(scores, rows, strict=True):
        np.testing.assert_allclose(line, vision.reference(row), atol=1e-5, rtol=0)
    assert metrics["grad_norm"] > 0
    for name, parameter in vision.model.named_parameters():
        if "vision" in name or "projector" in name:
            assert torch.equal(weights[name], parameter)


def test_a_worker_of_texts_alone_refuses_a_row_with_an_image_in_one_line(make_vision, normalizers, learner):
    vision, rows = make_vision("llava")
    worker = ModelWorker(WorkerSpec("actor", str(vision.folder / "model"), RoleSpec(trained=True), learner))
    worker.load()
    try:
        with pytest.raises(ConfigError, match=r"^a row has an image, and the actor was started for texts alone$"):
            worker.forward(rows, with_images=True)
        towers = [p.requires_grad for name, p in worker.network.named_parameters() if "vision" in name]
        assert towers
        assert not any(towers)
    finally:
        worker.close()
