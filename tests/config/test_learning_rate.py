"""The default learning rate by the model's size: the one place of its table, and what wins over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envgym.config.learning_rate import default_rate, rate_in_words, size_of
from envgym.config.resolve import resolve

SMALL, MIDDLE, LARGE = 0.135, 0.5, 7.0


def model_of(tmp_path: Path, billions: float) -> str:
    """A model folder whose weight file has the header of that many numbers, and no numbers."""
    folder = tmp_path / f"model-{billions}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors = {name: {"dtype": "BF16", "shape": [1000, int(billions * 5e5)], "data_offsets": [0, 0]} for name in "ab"}
    header = json.dumps({**tensors, "__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)


def rate(model: str, recipe: str | None = None, **settings: object) -> float:
    stages = resolve({"env": "math_verify", "model": model, **settings}, recipe=recipe).stages
    return stages[0].learner.settings["lr"]


@pytest.mark.parametrize(("billions", "full", "lora"), [(SMALL, 5e-5, 1e-3), (MIDDLE, 5e-6, 5e-5), (LARGE, 1e-6, 1e-5)])
def test_the_default_is_that_of_the_size_and_of_what_is_trained(tmp_path, billions, full, lora):
    model = model_of(tmp_path, billions)
    assert size_of(model) == pytest.approx(billions)
    assert (rate(model), rate(model, lora={"rank": 16}), rate(model, lora={"rank": 0})) == (full, lora, full)


@pytest.mark.parametrize(
    ("recipe", "billions", "full", "lora"),
    [
        ("sft", SMALL, 5e-5, 1e-3),
        ("sft", MIDDLE, 2e-5, 2e-4),
        ("sft", LARGE, 5e-6, 2e-4),
        ("dpo", SMALL, 2e-6, 2e-5),
        ("dpo", MIDDLE, 1e-6, 1e-5),
        ("dpo", LARGE, 5e-7, 5e-6),
        ("kto", MIDDLE, 1e-6, 1e-5),
    ],
)
def test_demonstrations_and_preferences_have_rates_of_their_own(tmp_path, recipe, billions, full, lora):
    model, data = model_of(tmp_path, billions), {"env": "recorded", "data": {"path": "org/rows"}}

    def chosen(**settings: object) -> float:
        return resolve({**data, "model": model, **settings}, recipe=recipe).stages[0].learner.settings["lr"]

    assert (chosen(), chosen(lora={"rank": 16})) == (full, lora)
    assert chosen(learner={"lr": 3e-7}) == 3e-7
    assert resolve({**data, "model": "some/model"}, recipe=recipe).stages[0].learner.settings["lr"] in (5e-6, 5e-7)


def test_another_learner_does_not_get_the_rates_of_a_recipe(tmp_path):
    """DPO at a rate for demonstrations would be ten times too fast; relatives of the default recipe share its rates."""
    model = model_of(tmp_path, SMALL)
    settings = {"env": "recorded", "model": model, "learner": "dpo", "data": {"path": "org/rows"}}
    assert resolve(settings, recipe="sft").stages[0].learner.settings["lr"] == 5e-6
    assert rate(model, learner="rloo") == 5e-5


def test_a_recipe_within_a_stage(tmp_path):
    """The key that names a recipe's rates is none of a stage's settings."""
    file = tmp_path / "run.yaml"
    file.write_text("stages: [{recipe: sft, env: recorded, data: {path: org/rows}}]\n")
    stage = resolve({"model": model_of(tmp_path, SMALL)}, file=file).stages[0]
    assert stage.learner.settings["lr"] == 5e-6
    assert stage.rollout.min_steps_per_epoch == 10


def test_what_is_said_of_the_learner_wins(tmp_path):
    model = model_of(tmp_path, SMALL)
    assert rate(model, learner={"lr": 3e-6}) == 3e-6
    assert rate(model, lora={"rank": 16}, learner={"lr": 0}) == 0
    file = tmp_path / "run.yaml"
    file.write_text("lora: {rank: 16}\n")
    assert resolve({"env": "math_verify", "model": model}, file=file).stages[0].learner.settings["lr"] == 1e-3
    file.write_text("learner: {lr: 0.5}\n")
    assert resolve({"env": "math_verify", "model": model}, file=file).stages[0].learner.settings["lr"] == 0.5


def test_recipes_keep_their_rates(tmp_path):
    model = model_of(tmp_path, SMALL)
    assert (rate(model, "dapo"), rate(model, "gspo"), rate(model, "ppo")) == (1e-6, 1e-6, 5e-7)
    assert rate("starter") == 6e-4


def test_a_saved_run_keeps_its_rate(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text(resolve({"env": "math_verify", "model": model_of(tmp_path, LARGE)}).to_yaml())
    changed = resolve({"model": model_of(tmp_path, SMALL)}, file=saved)
    assert changed.stages[0].learner.settings["lr"] == 1e-6


def test_models_without_a_size_have_the_recipes_rate(tmp_path):
    assert rate("some/model") == 1e-6  # of the hub: not read before it is fetched
    assert size_of(model_of(tmp_path, 0.001)) == 0.0  # a toy
    (broken := Path(model_of(tmp_path, SMALL)) / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no")
    assert size_of(broken.parent) == 0.0
    assert rate(str(broken.parent)) == 1e-6


def test_the_start_says_which_rate_it_is():
    assert rate_in_words(5e-5, SMALL, lora=False) == (
        "learner.lr=5e-05: the default for 0.14 billion parameters, all weights"
    )
    small = rate_in_words(1e-6, SMALL, lora=True)
    assert small == "learner.lr=1e-06 is small for 0.14 billion parameters, LoRA: the default is 0.001"
    assert [rate_in_words(lr, SMALL, lora=False) for lr in (0.0, 4e-5, 1e-4)] == [None] * 3
    assert rate_in_words(1e-6, 0.0, lora=False) is None
    assert rate_in_words(2e-5, MIDDLE, lora=False, kind="imitation").startswith(
        "learner.lr=2e-05: the default for 0.5 b"
    )
    assert default_rate(1000.0, lora=True) == 1e-5
