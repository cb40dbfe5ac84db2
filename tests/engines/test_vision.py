"""A vision-language model that the whole program trains on texts: vLLM samples, DeepSpeed learns, the result is one."""

import asyncio
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from envgym.config.resolve import resolve
from envgym.jobs.models import fetch_model
from envgym.monitoring.display import Display
from envgym.training.new_model import make_model
from tests.programs import LETTERS, program


@pytest.fixture(scope="module")
def run(tmp_path_factory, vision_model):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("vision")
    (folder / "letters.py").write_text(LETTERS)
    program(
        folder, "train", "--env", "letters.py", "--model", vision_model("llava"), "--name", "first", "steps=3",
        "rollout.tasks_per_step=4", "rollout.group_size=4", "rollout.max_tokens=48", "eval.every=0",
        "learner.lr=1e-3", "learner.weight_decay=0.1", "checkpoint.every=3",
        "engine.args={language_model_only: true}",
    )  # fmt: skip
    return folder / "runs" / "first"


def test_sampler_and_trainer_are_one_policy_before_and_after_syncs(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "mismatch/mean_abs" in record]
    assert len(steps) == 3
    assert max(record["mismatch/mean_abs"] for record in steps) < 1e-6
    assert max(record["mismatch/max"] for record in steps) < 1e-4
    assert max(record["sync/max_abs"] for record in records if "sync/max_abs" in record) < 1e-4


def test_the_result_and_the_checkpoint_are_vision_language_models(run, vision_model):
    first = load_file(vision_model("llava") / "model.safetensors")
    checkpoint = asyncio.run(
        fetch_model(str(run / "checkpoints/step_000003"), resolve({"env": "math_verify"}), Display(), make_model)
    )
    for folder in (run / "model", checkpoint):
        model, processor = (kind.from_pretrained(folder) for kind in (AutoModelForImageTextToText, AutoProcessor))
        names = type(model).__name__, type(processor).__name__
        assert names == ("LlavaForConditionalGeneration", "LlavaProcessor")
        weights = load_file(f"{folder}/model.safetensors")
        assert weights.keys() == first.keys()
        changed = {name for name in first if not torch.equal(first[name], weights[name])}
        assert changed == {name for name in first if re.match("language_model", name)}
