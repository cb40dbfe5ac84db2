"""Resuming with other settings, beginning from another run's checkpoint, and removing files of past steps."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from envgym.cli import main
from envgym.config.resolve import resolve
from envgym.errors import ConfigError, RunError
from envgym.monitoring.display import Display
from envgym.run_folder import RunFolder
from envgym.training import run
from envgym.training.resume import check_changes, claimed_folder, derived_config, resume_config

SETTINGS = (
    "rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.max_tokens=8", "eval.tasks=2", "eval.greedy=false",
    "eval.every=0", "engine.kind=transformers", "learner.kl.coef=0", "debug=true",
)  # fmt: skip


def train(*words):
    assert main(["train", *words]) == 0


def records(name):
    return RunFolder(Path(name)).read_metrics()


def optimizer_steps(checkpoint):
    """The number of steps that AdamW's moments have seen."""
    return {int(state["step"]) for state in saved_optimizer(checkpoint)["state"].values()}


def saved_optimizer(checkpoint):
    return torch.load(checkpoint / "actor/deepspeed/mp_rank_00_model_states.pt", weights_only=False)["optimizer"]


def test_a_run_resumes_with_other_settings_and_another_begins_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train("--env", "math_verify", "--name", "a", *SETTINGS, "steps=2", "checkpoint.every=1", "keep.rollouts=1")
    train("--resume", "a", "steps=3", "learner.lr=1e-5", "rollout.max_tokens=9", "report_to=tensorboard")
    assert "learner.lr=1e-05 (was 0.0006)" in capsys.readouterr().out
    assert [record["lr"] for record in records("runs/a") if record["step"]] == [6e-4, 6e-4, 1e-5]
    [change] = [json.loads(line) for line in (tmp_path / "runs/a/changes.jsonl").read_text().splitlines()]
    assert change["step"] == 2
    assert change["changes"] == {
        "steps": [2, 3], "learner.lr": [6e-4, 1e-5], "rollout.max_tokens": [8, 9], "report_to": [[], ["tensorboard"]],
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "runs/a/rollouts").iterdir()) == ["step_000003.parquet"]

    train(
        "--from", "a", "--name", "b", "learner.lr=0", "steps=1", "learner.weight_decay=0.25", "learner.betas=[0.5, 0.6]"
    )
    *_, record = records("runs/b")
    assert (record["step"], record["lr"]) == (1, 0)
    first, second = (RunFolder(Path("runs", name)) for name in "ab")
    assert (first.model / "model.safetensors").read_bytes() == (second.model / "model.safetensors").read_bytes()
    assert optimizer_steps(first.last_checkpoint()) == {3}
    assert optimizer_steps(second.last_checkpoint()) == {4}
    [group] = saved_optimizer(second.last_checkpoint())["param_groups"]
    assert (group["weight_decay"], tuple(group["betas"])) == (0.25, (0.5, 0.6))


@pytest.mark.parametrize(
    "key", ["learner.lr", "eval.every", "checkpoint.keep", "keep.rollouts", "epochs", "report_to", "rollout.max_tokens",
     "rollout.processes"],
)  # fmt: skip
def test_settings_that_may_change(key):
    check_changes([key])


@pytest.mark.parametrize(
    "key", ["learner.gamma", "rollout.group_size", "model", "env.digits", "seed", "--env", "lora.rank"]
)
def test_settings_that_may_not(key):
    with pytest.raises(ConfigError, match=f"leave out {key}.*--from"):
        check_changes([key])


def saved_run(folder, **settings):
    """The folder of a run that has a configuration and nothing else."""
    config = resolve({"env": "math_verify", "name": folder.name, "runs_dir": str(folder.parent), **settings})
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def test_changes_are_of_the_last_stage(tmp_path):
    saved_run(tmp_path / "run", recipe="sft_grpo")
    first, last = resume_config("run", str(tmp_path), {"learner": {"lr": 0.5}, "eval": {"every": 3}}).stages
    assert (first.learner.settings["lr"], first.eval.every) == (1e-3, 100)
    assert (last.learner.settings["lr"], last.eval.every) == (0.5, 3)


def test_the_number_of_processes_is_of_all_stages(tmp_path):
    saved_run(tmp_path / "run", recipe="sft_grpo")
    stages = resume_config("run", str(tmp_path), {"rollout": {"processes": 3, "max_tokens": 9}}).stages
    assert [stage.rollout.processes for stage in stages] == [3, 3]
    assert [stage.rollout.max_tokens == 9 for stage in stages] == [False, True]


@pytest.mark.parametrize("name", ["episodes.parquet.unfinished", "1-sample/episodes.parquet"])
def test_a_run_with_sampled_episodes_is_kept_after_an_error(tmp_path, name):
    config = resolve({"env": "math_verify", "name": "new", "runs_dir": str(tmp_path)})
    episodes = tmp_path / "new" / name

    def fail():
        with claimed_folder(config, resume=False):
            episodes.parent.mkdir(exist_ok=True)
            episodes.touch()
            raise RunError("the disk is full")

    with pytest.raises(RunError):
        fail()
    assert episodes.exists()


def test_nothing_to_begin_from(tmp_path):
    saved_run(tmp_path / "run")
    for name, says in {"run": "no checkpoint to begin from", "none": "no run 'none'"}.items():
        with pytest.raises(RunError, match=says):
            derived_config(name, str(tmp_path))


@pytest.mark.parametrize(
    ("amount", "left"), [(2, [3, 4]), ("250B", [3, 4]), ("1B", [4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])]
)
def test_files_of_past_steps(tmp_path, amount, left):
    folder = RunFolder(tmp_path)
    folder.create()
    for step in range(1, 5):
        folder.learned_file(step).write_bytes(bytes(100))
    folder.remove_old_files({"learned": amount})
    assert sorted(int(path.stem[5:]) for path in folder.learned.iterdir()) == left


def test_a_size_that_is_none(tmp_path, capsys):
    assert main(["train", "--env", "math_verify", "keep.rollouts=many"]) == 2
    assert "keep.rollouts': must be a number of steps or a size such as 20GB, not 'many'" in capsys.readouterr().err


def test_a_size_has_a_unit(capsys):
    assert main(["train", "--env", "math_verify", "keep.rollouts='5'"]) == 2
    assert "must be a number of steps or a size such as 20GB" in capsys.readouterr().err


def test_stages_cannot_be_set_of_a_run_that_begins_from_another(tmp_path):
    saved_run(tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "controller.json").write_text("{}")
    assert derived_config("run", str(tmp_path), {"steps": 7}).stages[0].steps == 7
    with pytest.raises(ConfigError, match="leave out stages"):
        derived_config("run", str(tmp_path), {"stages": {"grpo": {"steps": 7}}})


def test_a_run_of_another_version_is_refused_in_a_line_that_says_so(tmp_path):
    saved_run(tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    file.write_text(file.read_text().replace("kind: train", "do: train"))
    problem = rf"config.yaml is not of this version of envgym \({version('envgym')}\), .*: unknown key 'stages.0.do'"
    for use in (resume_config, derived_config):
        with pytest.raises(ConfigError, match=problem):
            use("run", str(tmp_path))


def test_a_change_of_a_setting_that_the_old_file_lacks_is_recorded(tmp_path):
    saved_run(tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    settings = yaml.safe_load(file.read_text())
    del settings["stages"][0]["keep"], settings["stages"][0]["eval"]["temperature"]
    file.write_text(yaml.safe_dump(settings))
    config = resume_config(
        "run", str(tmp_path), {"keep": {"rollouts": 5}, "roles": {"actor": {"workers": {"ranks": 2}}}}
    )
    with claimed_folder(config, resume=True):
        pass
    [line] = (tmp_path / "run/changes.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"] == {
        "keep.rollouts": [None, 5], "roles.actor.save": [None, False], "roles.actor.workers.ranks": [None, 2],
    }  # fmt: skip


def test_a_completed_run_of_one_epoch_goes_on_to_three(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": 2}\n')
    saved_run(tmp_path / "run", model="x", data={"path": str(tmp_path / "rows.jsonl")}, epochs=1)
    folder, trained = RunFolder(tmp_path / "run"), []
    folder.write_summary({"status": "completed", "steps": 10, "epochs": 1.0})
    monkeypatch.setattr(run, "_run_training", lambda *args: trained.append(args) or {"status": "completed"})
    for epochs, count in ((1, 0), (3, 1)):
        config = resume_config("run", str(tmp_path), {"epochs": epochs})
        run.train(config, resume=True, display=Display())
        assert len(trained) == count
