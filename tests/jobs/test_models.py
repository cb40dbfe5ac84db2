"""What `--model` may be."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import envgym as library
from envgym.config.recipes import recipe_model_folder
from envgym.config.resolve import resolve
from envgym.errors import ConfigError, EnvgymError, RunError
from envgym.jobs.models import fetch_model
from envgym.monitoring.display import Display
from envgym.run_folder import policy_of_run
from envgym.training.new_model import make_model


def a_run(folder, **settings):
    """A run's folder, as far as it says where its policy is."""
    folder.mkdir()
    (folder / "config.yaml").write_text(resolve({"env": "math_verify", **settings}).to_yaml())
    return folder


def finish(stage):
    (stage / "model").mkdir(parents=True)
    (stage / "model" / "config.json").write_text("{}")
    return stage / "model"


def test_a_run_stands_for_the_policy_it_left(tmp_path):
    run = a_run(tmp_path / "run")
    left = finish(run)
    assert policy_of_run(run) == left


def test_a_run_of_several_stages_stands_for_what_the_last_left(tmp_path):
    run = a_run(tmp_path / "run", recipe="sft_grpo")
    finish(run / "1-sft")
    with pytest.raises(ConfigError, match=r"has not ended.*--resume"):
        policy_of_run(run)
    left = finish(run / "2-grpo")
    assert policy_of_run(run) == left


def test_a_stage_of_a_learner_in_a_file_has_a_plain_folder_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from envgym.learners.sft import SFT\n\nclass Mine(SFT):\n    '''Another name.'''\n"
    )
    run = a_run(tmp_path / "run", recipe="sft_grpo", learner=f"{tmp_path}/mine.py:Mine")
    left = finish(run / "2-mine-2")
    assert policy_of_run(run) == left


def test_another_folder_is_left_alone(tmp_path):
    assert policy_of_run(tmp_path) == tmp_path


def test_a_cache_that_cannot_be_written_names_its_variable(recipe, tmp_path, monkeypatch):
    file = recipe()
    (tmp_path / "home").write_text("a file in its place")
    monkeypatch.delenv("ENVGYM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(RunError, match=r"home/\.cache/envgym/models cannot be written: .*ENVGYM_CACHE=FOLDER"):
        asyncio.run(make_model(file, Display()))


def test_the_starter_ships_with_the_package(tmp_path, monkeypatch):
    """Nothing is made or cached for it."""
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path))
    shipped = recipe_model_folder("starter")
    assert shipped.is_relative_to(Path(library.__file__).parent)
    config = resolve({"env": "math_verify"})
    assert asyncio.run(fetch_model("starter", config, Display(), make_model)) == str(shipped)
    assert list(tmp_path.iterdir()) == []
    assert sum(file.stat().st_size for file in shipped.iterdir()) < 2e6


# -- a recipe of the user's own that makes a model --------------------------------------------------------

SMALL = {
    "new_model": {"layers": 1, "hidden_size": 16, "heads": 2},
    "model_settings": {"steps": 7},
    "env": "math_verify", "agent": "replay", "learner": "sft", "steps": 1, "rollout": {"tasks_per_step": 4},
    "eval": {"every": 0}, "checkpoint": {"every": 0},
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`recipe(key=value)`: the file of a recipe that makes a small model, but for these keys."""
    monkeypatch.setenv("ENVGYM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "my own.yaml"

    def recipe(**keys):
        content = {key: value for key, value in {**SMALL, **keys}.items() if value is not None}
        file.write_text(yaml.safe_dump(content))
        return str(file)

    return recipe


def test_the_file_of_a_recipe_is_the_model_that_it_makes(recipe):
    file = recipe()
    made = recipe_model_folder(file)
    assert made != recipe_model_folder("starter")
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    for config in (resolve({"env": "math_verify", "model": file}), resolve(recipe=file)):
        assert (config.stages[0].model, config.stages[0].steps) == (file, 7)
        assert asyncio.run(fetch_model(file, config, Display(), make_model)) == str(made)
    assert recipe_model_folder(recipe(model_settings={"steps": 8})) == made
    assert recipe_model_folder(recipe(new_model={"layers": 2})) != made


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"new_model": {"layers": 1, "nonsense": 3}}, "my own.yaml: unknown key 'new_model.nonsense'"),
        ({"new_model": 3}, "my own.yaml: key 'new_model' holds nested keys"),
        ({"env": None}, "my own.yaml: which environment"),
        ({"stages": [{}, {}]}, "my own.yaml: a model is warmed up in one stage, not in 2"),
        ({"new_model": None}, "my own.yaml makes no model"),
    ],
)
def test_a_recipe_that_can_make_no_model_is_refused(recipe, keys, says):
    file = recipe(**keys)
    with pytest.raises(EnvgymError, match=says):
        asyncio.run(fetch_model(file, resolve({"env": "math_verify"}), Display(), make_model))


def test_the_size_of_a_new_model_is_no_setting_of_a_run(recipe, tmp_path):
    own = {"env": "math_verify", "new_model": {"layers": 7}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(own))
    for refused in (
        lambda: resolve(own, recipe="starter"),
        lambda: resolve(file=tmp_path / "run.yaml"),
        lambda: resolve({"env": "math_verify", "model_settings": {"steps": 1}}),
        lambda: resolve({"env": "math_verify"}, recipe=recipe(new_model=None)),
    ):
        with pytest.raises(ConfigError, match=r"belongs in the file of a recipe|it has none"):
            refused()


@pytest.mark.slow
def test_the_model_of_a_file_is_made_as_the_file_says(recipe):
    """By epochs: four of five tasks are for training, and in steps of three, once, are two steps."""
    tasks = Path(recipe()).with_name("tasks.jsonl")
    tasks.write_text("\n".join(json.dumps({"prompt": f"1 + {n}?", "answer": str(n + 1)}) for n in range(5)))
    file = recipe(steps=None, epochs=1, rollout={"tasks_per_step": 3}, data={"path": str(tasks)})
    command = [sys.executable, "-c", "import envgym.cli as c; c.main()", "model", file]
    printed = subprocess.run(command, env=dict(os.environ), check=True, capture_output=True, text=True).stdout
    made = Path(printed.splitlines()[-1])
    assert made == recipe_model_folder(file)
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 1
    assert len((made / "warm_up_metrics.jsonl").read_text().splitlines()) == 2
