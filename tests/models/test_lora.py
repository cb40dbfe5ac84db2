"""LoRA through the whole program: vLLM samples with the adapter that DeepSpeed trains; what a run leaves is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.errors import ConfigError, MissingDependency
from tests.programs import LETTERS, program


def train(folder: Path, model: Path, *words: Any) -> Path:
    (folder / "letters.py").write_text(LETTERS)
    program(
        folder, "train", "--env", "letters.py", "--model", model, "--name", "first", "lora.rank=4", "learner.lr=1e-2",
        "rollout.tasks_per_step=4", "rollout.group_size=4", "rollout.max_tokens=12", "eval.every=0", *words,
    )  # fmt: skip
    return folder / "runs" / "first"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    """Three steps of GRPO, held to the reference by a KL term."""
    folder = tmp_path_factory.mktemp("lora")
    return train(folder, tiny_model, "learner.kl.coef=0.1", "steps=3", "checkpoint.every=1", "deterministic=true")


def test_sampler_and_trainer_are_the_same_policy(run):
    records = metrics(run)
    assert [record["step"] for record in records if record["step"]] == [1, 2, 3]
    for record in records:
        assert record["sync/max_abs"] < 1e-4
        assert record.get("mismatch/max", 0.0) < 1e-4
    assert {path.name for path in (run / "logs").iterdir()} == {"engine.log", "actor-0.log"}  # no second model


def test_the_reference_is_the_policy_before_it_learned(run):
    first, *kl_of_later_steps = (record["policy/kl"] for record in metrics(run) if record["step"])
    assert first == 0.0
    assert all(kl > 1e-4 for kl in kl_of_later_steps)


def test_the_merged_model_is_the_adapters(run, tiny_model):
    ids = torch.arange(3, 100)[None]

    def logprobs(model):
        with torch.no_grad():
            return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    base_logprobs = logprobs(base)
    adapter_logprobs = logprobs(peft.PeftModel.from_pretrained(base, run / "adapter"))
    torch.testing.assert_close(
        logprobs(AutoModelForCausalLM.from_pretrained(run / "model")), adapter_logprobs, atol=1e-5, rtol=0
    )
    assert (adapter_logprobs - base_logprobs).abs().max() > 0.1


def test_the_command_merges_the_same(run, tmp_path):
    assert main(["model", "merge", str(run / "adapter"), str(tmp_path / "merged")]) == 0
    left, merged = load_file(run / "model/model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert left.keys() == merged.keys()
    assert all(torch.equal(left[name], merged[name]) for name in left)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(run, tmp_path):
    copy = tmp_path / "runs" / "first"
    shutil.copytree(run, copy)
    shutil.copy(run.parents[1] / "letters.py", tmp_path)
    shutil.rmtree(copy / "checkpoints" / "step_000003")
    shutil.rmtree(copy / "adapter")
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps({**summary, "status": "stopped"}))
    program(tmp_path, "train", "--resume", "first")
    straight, resumed = (load_file(path / "adapter/adapter_model.safetensors") for path in (run, copy))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


@pytest.mark.slow
def test_a_critic_may_have_an_adapter_too(tmp_path, tiny_model):
    run = train(tmp_path, tiny_model, "--recipe", "ppo", "steps=2", "roles.critic.save=true")
    assert max(record.get("mismatch/max", 0.0) for record in metrics(run)) < 1e-4
    program(tmp_path, "model", "merge", run / "critic_adapter", "critic")
    ids = torch.arange(3, 100)[None]
    left, merged = (
        AutoModelForSequenceClassification.from_pretrained(path) for path in (run / "critic", tmp_path / "critic")
    )
    with torch.no_grad():
        assert torch.equal(left(ids).logits, merged(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_4_bit_weights_in_reinforcement_learning(tmp_path, tiny_model, engine):
    """The engine is given the numbers that the trainer computes with, and so they are the same policy."""
    run = train(tmp_path, tiny_model, "lora.quantize=4bit", "steps=3", "learner.kl.coef=0.1", f"engine.kind={engine}")
    for record in metrics(run):
        assert record["sync/max_abs"] < 1e-4
        assert record.get("mismatch/max", 0.0) < 1e-4
    program(tmp_path, "model", "merge", run / "adapter", "merged")
    left, merged = load_file(run / "model/model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    for name, tensor in left.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)
    words = ["--config", "runs/first/config.yaml", "--model", "runs/first", "eval.tasks=4", "eval.greedy=false"]
    assert "4 tasks, 4 episodes" in program(tmp_path, "eval", *words)


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora.quantize": "4bit"}, "lora.quantize of the actor has no effect without an adapter: set lora.rank"),
        ({"lora.rank": 4, "lora.dropout": 0.1}, "would train another policy than the one that is sampled"),
        ({"lora.rank": 4, "lora.targets": "all"}, "lora.targets"),
        ({"lora.rank": 4, "lora.quantise": "4bit"}, "quantise.*Did you mean 'lora.quantize'"),
        (
            {"lora.rank": 4, "learner.kl.coef": 0.1, "roles.reference.workers.zero_stage": 3},
            "roles.reference: with lora the reference is the policy's own model without its adapter",
        ),
        ({"lora.rank": 4, "learner.kl.coef": 0.1, "roles.reference.lora.rank": 2}, "the reference is not trained"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_one_line(settings, message):
    from envgym.config.words import merge, parse_overrides

    words = parse_overrides([f"{key}={value}" for key, value in settings.items()])
    with pytest.raises(ConfigError, match=message):
        resolve(merge({"env": "math_verify"}, words))


def test_a_role_may_train_in_full():
    settings = {"env": "math_verify", "lora": {"rank": 4}, "roles": {"critic": {"lora": {"rank": 0}}}}
    stage = resolve(settings, recipe="ppo").stages[0]
    learner_class, learner_config = stage.learner_config()
    roles = learner_class(learner_config).roles
    assert {role: stage.lora_of(role, spec).rank for role, spec in roles.items() if spec.trained} == {
        "actor": 4,
        "critic": 0,
    }


def test_an_adapter_is_no_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert main(["train", "--env", "math_verify", "--model", "adapter", "--name", "first"]) == 2
    message = "adapter is an adapter without its base: merge it first (envgym model merge adapter OUT)"
    assert message in capsys.readouterr().err


def test_a_missing_package_is_told_before_anything_is_loaded(tmp_path, tiny_model, monkeypatch):
    import envgym

    monkeypatch.setattr("envgym.workers.lora.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"lora.rank needs the package 'peft', .*: .* -m pip install 'peft"):
        envgym.train(
            {"env": "math_verify", "model": str(tiny_model), "runs_dir": str(tmp_path), "lora.rank": 4}, quiet=True
        )
