"""A run's checkpoint is a model: exactly the policy of that step, wherever --model is given."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.cli import main
from envgym.config.resolve import resolve, settings_of_model
from envgym.errors import ConfigError
from envgym.jobs.models import fetch_model
from envgym.monitoring.display import Display
from envgym.training.new_model import make_model

ENVGYM = Path(sys.executable).with_name("envgym")
TAUGHT = (
    "train", "--env", "math_verify", "agent=replay", "--learner", "sft", "learner.lr=1e-2", "rollout.tasks_per_step=4",
    "eval.every=0", "steps=2", "checkpoint.every=1", "checkpoint.keep=3", "rollout.max_tokens=33",
)  # fmt: skip


def program(folder, *words, status=0):
    done = subprocess.run(
        [ENVGYM, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout if status == 0 else done.stderr


def weights(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def same(one, other):
    assert one.keys() == other.keys()
    return all((one[name] == other[name]).all() for name in one)


def model_of(checkpoint, display=None):
    """The folder that --model CHECKPOINT stands for."""
    config = resolve({"env": "math_verify", "model": str(checkpoint)})
    return Path(asyncio.run(fetch_model(str(checkpoint), config, display or Display(), make_model)))


class Told(Display):
    def __init__(self):
        self.phases = []

    def phase(self, text):
        self.phases.append(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    """A run of three steps that keeps its newest two checkpoints and, by a metric that is best at first, the first."""
    folder = tmp_path_factory.mktemp("checkpoint_model")
    words = ("steps=3", "checkpoint.keep=2", "checkpoint.best=-step")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*TAUGHT, "--model", str(tiny_model), "--name", "taught", *words, "debug=true"]) == 0
    return folder / "runs" / "taught"


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run, to be spoiled."""
    shutil.copytree(run, tmp_path / "runs" / "taught", symlinks=True)
    return tmp_path / "runs" / "taught"


def test_the_last_checkpoint_is_the_policy_the_run_left_and_an_earlier_one_is_not(run):
    from transformers import AutoTokenizer

    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "best", "step_000001", "step_000002", "step_000003",
    ]  # fmt: skip
    (checkpoints / "step_000003" / f"model.{socket.gethostname()}.4194305.unfinished").mkdir()  # of one that was killed
    last = model_of(checkpoints / "step_000003")
    assert last == checkpoints / "step_000003" / "model"
    left = run / "model"
    assert same(weights(last), weights(left))
    assert {path.name for path in last.iterdir()} == {path.name for path in left.iterdir()}
    assert AutoTokenizer.from_pretrained(last).get_vocab() == AutoTokenizer.from_pretrained(left).get_vocab()
    assert not same(weights(model_of(checkpoints / "step_000002")), weights(left))
    assert not list(checkpoints.glob("*/*.unfinished"))


def test_it_is_made_once(run):
    checkpoint = run / "checkpoints" / "step_000003"
    model_of(checkpoint)
    again = Told()
    assert model_of(checkpoint, again) == checkpoint / "model"
    assert again.phases == []


def test_the_best_checkpoint_outlives_newer_ones_and_is_linked_to(run):
    best = run / "checkpoints" / "best"
    assert os.readlink(best) == "step_000001"
    assert json.loads((run / "summary.json").read_text())["best"] == {"metric": "step", "value": 1, "step": 1}


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_the_newest_whole_one_and_knows_the_best(copied):
    """The last one is cut short, as by a failing disk: the older best one is not where the run goes on."""
    [file] = copied.glob("checkpoints/step_000003/actor/deepspeed/*model_states.pt")
    file.write_bytes(file.read_bytes()[:1000])
    (copied / "summary.json").unlink()
    (copied / "checkpoints" / "best").unlink()
    printed = program(copied.parents[1], "train", "--resume", "taught")
    said = r"checkpoint \S+step_000003 is damaged: \S+model_states.pt cannot be read \(.*\); resuming from step_000002"
    assert re.search(said, printed)
    assert "step 3/3" in printed
    assert json.loads((copied / "summary.json").read_text())["best"] == {"metric": "step", "value": 1, "step": 1}
    assert os.readlink(copied / "checkpoints" / "best") == "step_000001"
    records = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_resumes_from_the_checkpoint_before_one_that_lacks_a_file(copied):
    (copied / "checkpoints/step_000003/actor/rank-0.pt").unlink()
    (copied / "summary.json").unlink()
    printed = program(copied.parents[1], "train", "--resume", "taught")
    said = (
        r"step_000003 is damaged: \S+rank-0.pt cannot be read \(it is missing or truncated\); resuming from step_000002"
    )
    assert re.search(said, printed)
    assert json.loads((copied / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_a_disk_that_is_full_ends_a_run_in_one_line_with_what_it_kept(copied):
    """Here no file may be larger than the second checkpoint's were: the third, beside them, is of no lesser size."""
    shutil.rmtree(copied / "checkpoints" / "step_000003")
    (copied / "summary.json").unlink()
    limit = max(path.stat().st_size for path in copied.glob("checkpoints/step_000002/actor/deepspeed/*")) - 1
    command = ["prlimit", f"--fsize={limit}", ENVGYM, "train", "--resume", "taught"]
    done = subprocess.run(command, cwd=copied.parents[1], capture_output=True, text=True, timeout=240, check=False)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2, line
    assert re.search(r"step_000002 is saved; resume with: envgym train --resume \S+taught$", line)
    assert re.search(r"_states.pt cannot be written", line)
    assert not (copied / "checkpoints" / "unfinished").exists()
    assert json.loads((copied / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_of_another_run_as_that_one_rendered_and_sampled(run, tmp_path):
    checkpoint = run / "checkpoints" / "best"
    program(tmp_path, *TAUGHT, "--model", checkpoint, "--name", "on", "steps=1", "learner.lr=0")
    assert same(weights(tmp_path / "runs" / "on" / "model"), weights(run / "checkpoints" / "step_000001" / "model"))
    assert settings_of_model(str(checkpoint)) == settings_of_model(str(run))
    assert settings_of_model(str(checkpoint))["rollout"] == {"max_tokens": 33}


def test_settings_are_those_of_the_checkpoints_stage(tmp_path):
    config = resolve({"env": "math_verify"}, recipe="sft_grpo")
    for stage, tokens in zip(config.stages, (7, 8), strict=True):
        stage.rollout.max_tokens = tokens
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    for name, tokens in (("1-sft", 7), ("2-grpo", 8)):
        assert settings_of_model(tmp_path / name / "checkpoints" / "step_000001")["rollout"] == {"max_tokens": tokens}


# -- what cannot be read ----------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_exist_names_those_that_do(run):
    with pytest.raises(
        ConfigError, match=r"step_000009 does not exist\. There is best, step_000001, step_000002, step_"
    ):
        model_of(run / "checkpoints" / "step_000009")


@pytest.mark.parametrize("lost", ["controller.json", "actor/rank-0.pt"])
def test_a_checkpoint_that_lost_a_part_is_refused_at_once(copied, lost):
    checkpoint = copied / "checkpoints" / "step_000003"
    shutil.rmtree(checkpoint / "model", ignore_errors=True)
    (checkpoint / lost).unlink()
    with pytest.raises(ConfigError, match="step_000003 is incomplete: choose another one"):
        model_of(checkpoint)


def test_weights_that_cannot_be_read_are_said_in_one_line_and_leave_nothing(copied):
    checkpoint = copied / "checkpoints" / "step_000003"
    shutil.rmtree(checkpoint / "model", ignore_errors=True)
    [file] = checkpoint.glob("actor/deepspeed/*model_states.pt")
    file.write_bytes(file.read_bytes()[:1000])
    words = (*TAUGHT, "--model", checkpoint, "--name", "on")
    [line] = program(copied.parents[1], *words, status=2).splitlines()
    assert "step_000003 cannot be read: " in line
    assert "model_states.pt cannot be read (it is cut short or garbage)" in line
    assert {path.name for path in checkpoint.iterdir()} == {"actor", "controller.json", "files.json"}


def test_a_checkpoint_of_other_ranks_than_its_config_says_is_refused(copied):
    checkpoint = copied / "checkpoints" / "step_000003"
    shutil.rmtree(checkpoint / "model", ignore_errors=True)
    (checkpoint / "actor" / "rank-1.pt").touch()
    with pytest.raises(ConfigError, match="written by 2 ranks, and its run's config has 1"):
        model_of(checkpoint)


def test_a_checkpoint_whose_base_is_gone_is_refused(copied):
    checkpoint = copied / "checkpoints" / "step_000003"
    shutil.rmtree(checkpoint / "model", ignore_errors=True)
    config = copied / "config.yaml"
    model = resolve(file=config).stages[0].model
    config.write_text(config.read_text().replace(model, str(copied / "gone")))
    with pytest.raises(ConfigError, match=r"without the model that its run started from: model folder .*gone does not"):
        model_of(checkpoint)


def test_a_later_stage_needs_what_the_one_before_left(copied, tmp_path):
    config = resolve({"env": "math_verify"}, recipe="sft_grpo")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    checkpoint = tmp_path / "2-grpo" / "checkpoints" / "step_000003"
    shutil.copytree(copied / "checkpoints" / "step_000003", checkpoint)
    shutil.rmtree(checkpoint / "model", ignore_errors=True)
    with pytest.raises(ConfigError, match=r"model that its run started from: stage:sft has left no model in .*1-sft"):
        model_of(checkpoint)


def test_a_checkpoint_outside_of_its_run_is_refused(copied, tmp_path):
    shutil.move(copied / "checkpoints" / "step_000003", tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "model", ignore_errors=True)
    with pytest.raises(ConfigError, match="alone is not in a run folder"):
        model_of(tmp_path / "alone")


# -- other ways to train ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_is_merged_into_its_base(tmp_path, tiny_model):
    program(tmp_path, *TAUGHT, "--model", tiny_model, "--name", "lora", "lora.rank=4", "learner.ema_decay=0.5")
    run = tmp_path / "runs" / "lora"
    assert same(weights(model_of(run / "checkpoints" / "step_000002")), weights(run / "model"))
    assert not same(weights(model_of(run / "checkpoints" / "step_000001")), weights(run / "model"))


@pytest.mark.slow
def test_partitioned_parameters_of_several_ranks_become_one_model(tmp_path, tiny_model):
    ranks = ("workers.ranks=2", "workers.zero_stage=3")
    program(tmp_path, *TAUGHT, "--model", tiny_model, "--name", "zero", *ranks)
    run = tmp_path / "runs" / "zero"
    last = run / "checkpoints" / "step_000002"
    assert same(weights(model_of(last)), weights(run / "model"))
    assert not same(weights(model_of(run / "checkpoints" / "step_000001")), weights(run / "model"))
    shutil.rmtree(last / "model")
    next(last.glob("actor/deepspeed/*zero_pp_rank_1*optim_states.pt")).unlink()
    with pytest.raises(ConfigError, match="step_000002 cannot be read"):
        model_of(last)
